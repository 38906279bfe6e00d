"""A process of the model bench: one contender, with one model after the other.

It reads requests, a JSON object a line, and answers each. It ends when its input or the bench does: none outlives it.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import pathlib
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import xopt
from xopt import _C, machine
from xopt.bench import model_cases, model_peers
from xopt.bench.errors import UnavailableError, WrongResultError
from xopt.roofs import READ_REPEATS

SEED = 0
WRONG = 0.25  # a relative error that no rounding explains
_PR_SET_PDEATHSIG = 1


class Contender:
    def __init__(self, peer: str, case: str, dtype: str, tiny: bool) -> None:
        model_peers.load(peer)
        self._case = model_cases.CASES[case]
        target = getattr(torch, dtype)
        before = resident_bytes()
        torch.manual_seed(SEED)
        model = self._case.build(tiny).eval()
        self._inputs = self._case.inputs(model)
        self._weigh(model, target)
        self._given = self._start(model)
        exact = model_peers.first_output(model(**self._fresh()))
        give_back_freed()
        forget_peak()

        start = time.perf_counter()
        prepared = model_peers.PEERS[peer](model, self._fresh(), target)
        self._setup_seconds = time.perf_counter() - start
        self._call, self._note = prepared.call, prepared.note
        self._given = self._start(model)  # a cache of the contender's dtype
        given = self._fresh()
        start = time.perf_counter()
        result = self._call(given)
        self._setup_seconds += time.perf_counter() - start

        self._peak = peak_bytes() - before
        self._error = relative_error(result, exact)
        del model, exact, result, given
        give_back_freed()
        self._resident = resident_bytes() - before
        self._peak = max(self._peak, self._resident)  # the kernel counts the two with different care

    def _weigh(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """The model's bytes in the dtype asked for, and those that the products of one token read."""
        self._weight_bytes = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
        read = {
            weight
            for module in model.modules()
            if not isinstance(module, torch.nn.Embedding)  # only a row of it is read, unless it is the head as well
            for weight in module.parameters(recurse=False)
        }
        self._read_bytes = sum(weight.numel() for weight in read) * dtype.itemsize

    def _start(self, model: Any) -> dict[str, Any]:
        """The inputs that all calls begin with."""
        if not self._case.decodes:
            return self._inputs
        words = self._inputs["input_ids"]
        cache = model(input_ids=words, use_cache=True).past_key_values
        return {"input_ids": words[:, -1:], "past_key_values": cache, "use_cache": True}

    def _fresh(self) -> dict[str, Any]:
        """The inputs of one call: a step of decoding adds to the cache that it is given."""
        return copy.deepcopy(self._given) if self._case.decodes else self._given

    def describe(self) -> dict[str, Any]:
        return {
            "setup_seconds": self._setup_seconds,
            "relative_error": self._error,
            "weight_bytes": self._weight_bytes,
            "read_bytes": self._read_bytes,
            "steady_bytes": self._resident,
            "peak_bytes": self._peak,
            "note": self._note,
        }

    def run(self, calls: int, warm_up: bool) -> dict[str, Any]:
        """Seconds, CPU seconds and page faults of each call, after one, if wanted, that warms the caches that other
        processes have had since."""
        seconds, cpu_seconds, faults = [], [], []
        for _ in range(calls + warm_up):
            given = self._fresh()
            before = resource.getrusage(resource.RUSAGE_SELF)
            start = time.perf_counter()
            self._call(given)
            seconds.append(time.perf_counter() - start)
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            faults.append(after.ru_minflt - before.ru_minflt)
        return {"seconds": seconds[warm_up:], "cpu_seconds": cpu_seconds[warm_up:], "page_faults": faults[warm_up:]}


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    if result.shape != exact.shape:
        raise WrongResultError(f"wrong result: shape {tuple(result.shape)}, expected {tuple(exact.shape)}")
    error = float((result.double() - exact.double()).norm() / exact.double().norm())
    if not error < WRONG:  # also where it is no number
        raise WrongResultError(f"wrong result: relative error {error:.2g} against eager fp32")
    return error


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back_freed() -> None:
    gc.collect()
    machine.give_back_freed_memory()


def forget_peak() -> None:
    """From here on the peak counts anew. Where the kernel does not allow it, that of the whole process stays."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Server:
    def __init__(self) -> None:
        self._contender: Contender | None = None

    def set_up(self, cpus: list[int], peer: str, case: str, dtype: str, tiny: bool) -> dict[str, Any]:
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))
        self._contender = None  # before the next is built: its memory would count
        self._contender = Contender(peer, case, dtype, tiny)
        return self._contender.describe()

    def run(self, calls: int, warm_up: bool) -> dict[str, Any]:
        assert self._contender is not None
        return self._contender.run(calls, warm_up)

    def keep(self) -> dict[str, Any]:
        """From now on the memory of large tensors is kept, by what the process has for that."""
        pool = xopt.runtime.memory_pool()
        pool.start()
        return {"backend": pool.backend}

    def read(self) -> dict[str, Any]:
        """The read bandwidth just now, with the threads that the contenders have."""
        seconds, moved_bytes, _ = _C.probe("read", torch.get_num_threads(), READ_REPEATS)
        return {"bytes_per_second": moved_bytes / seconds}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        actions: dict[str, Callable[..., dict[str, Any]]] = {"set up": self.set_up, "run": self.run, "read": self.read}
        actions["keep"] = self.keep
        action = actions[request.pop("do")]
        try:
            with torch.no_grad():
                return action(**request)
        except (UnavailableError, WrongResultError) as error:
            return {"error": str(error)}
        except Exception as error:  # of whatever library: the bench names it and goes on
            return {"error": f"{type(error).__name__}: {essence(str(error))}"}


def essence(message: str) -> str:
    """One line of an error of many: the first, and what torch and OpenVINO put below as the true reason."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line for line in lines[1:] if line.startswith("-- ")]
    return " ".join([*lines[:1], *reasons])[:300]


def end_with_parent() -> None:
    """Should the bench be killed, this process is, too; it may be amid minutes of compiling."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve() -> None:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.simplefilter("ignore")
    server = Server()
    for line in sys.stdin:
        answers.write(json.dumps(server.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
