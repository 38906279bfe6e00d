"""A local rank of a distributed run, before it becomes the script: started by torchrun, it takes its cores."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from xopt.launch import binding
from xopt.launch.distributed import RANKS


def become(command: Sequence[str]) -> NoReturn:
    rank = int(os.environ["LOCAL_RANK"])
    share = json.loads(os.environ.pop(RANKS))[rank]
    # torchrun gives each rank a process group of its own, which a signal to torchrun's does not reach.
    binding.die_with(os.getppid())
    for denied in binding.bind(share["cpus"], share["memory"]["mode"], share["memory"]["nodes"]):
        if rank == 0:
            print(f"xopt-launch: denied: {denied}", file=sys.stderr, flush=True)
    os.environ.update(share["environment"])
    os.execvp(command[0], list(command))
