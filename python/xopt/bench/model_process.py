"""The contenders' processes, from the side of the bench: starting them, asking them, ending them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any


class ContenderError(Exception):
    """A contender that cannot do what was asked for; the message is one line that says why."""


class Worker:
    """A process that answers requests; a context that ends it, and whatever it has started."""

    def __init__(self, peer: str, **environment: str) -> None:
        """`environment`: what its process has besides the bench's own."""
        self.peer = peer
        # Compilers begin with nothing in their caches, so that set-up times are those of a first time.
        self._folder = tempfile.TemporaryDirectory(prefix="xopt-bench-", ignore_cleanup_errors=True)
        self._complaints = pathlib.Path(self._folder.name, "stderr")
        with self._complaints.open("wb") as complaints:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "xopt.bench.model_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": self._folder.name, "HF_HUB_OFFLINE": "1", **environment},
                start_new_session=True,  # Ctrl-C is for the bench, which then ends them all
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            raise ContenderError(self._obituary())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer

    def _obituary(self) -> str:
        status = self._process.wait()
        cause = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        said = self._complaints.read_text(errors="replace").strip().splitlines()
        return f"its process {cause}" + (f": {said[-1].strip()[:200]}" if said else "")

    def close(self) -> None:
        # There is nothing in it worth a good end, and it may be amid minutes of compiling.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._folder.cleanup()


class Crew:
    """The workers of a run: one a contender. Used as a context, so that all end however the run does."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def get(self, peer: str) -> Worker:
        if peer in self._workers and not self._workers[peer].is_alive:
            self._workers.pop(peer).close()
        if peer not in self._workers:
            self._workers[peer] = Worker(peer)
        return self._workers[peer]

    def dismiss(self) -> None:
        while self._workers:
            self._workers.popitem()[1].close()
