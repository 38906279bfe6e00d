"""The operators `torch.ops.xopt.*`: loading of the native op library, and fakes for torch.compile and torch.export.

Schemas, checks and kernels stand in csrc/ops. Each file here holds the fakes and the costs of the csrc/ops file
of its name and is found by itself; `fakes.py` and `costs.py` are what they share.

The ops have no gradient: an autograd registration would cost each call several microseconds, also under `no_grad`.
Called under grad mode with a tensor that requires a gradient, they raise an error rather than cut it off the graph.
"""

import importlib
import pkgutil
from pathlib import Path

import torch

from xopt import _C
from xopt.ops import costs

__all__ = ["costs"]

torch.ops.load_library(Path(_C.__file__).with_name("libxopt_ops.so"))  # type: ignore[no-untyped-call]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
