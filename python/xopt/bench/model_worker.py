"""A process of the model bench: one contender with one model.

It reads requests, a JSON object a line, and answers each. It ends when its input does, so that none outlives the bench.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import warnings
from typing import Any

import torch

from xopt.bench import model_cases, model_peers

SEED = 0


class Contender:
    def __init__(self, peer: str, case: str, dtype: str, tiny: bool) -> None:
        self._case = model_cases.CASES[case]
        torch.manual_seed(SEED)
        model = self._case.build(tiny).eval()
        self._inputs = self._case.inputs(model)
        # What one token's products read; of an embedding only a row is.
        read = [
            weight
            for module in model.modules()
            for weight in module.parameters(recurse=False)
            if not isinstance(module, torch.nn.Embedding)
        ]
        self._weight_bytes = sum(weight.numel() for weight in read) * getattr(torch, dtype).itemsize
        exact = model_peers.first_output(model(**self._fresh(model)))
        before = resident_bytes()
        start = time.perf_counter()
        self._call = model_peers.PEERS[peer](model, self._fresh(model), getattr(torch, dtype))
        given = self._fresh(model)  # a cache of the contender's dtype
        self._model = model if self._case.decodes else None  # makes the cache that each step starts from
        result = self._call(given)
        self._setup_seconds = time.perf_counter() - start
        self._error = float((result.double() - exact.double()).norm() / exact.double().norm())
        del model, exact, result, given
        gc.collect()
        self._resident = resident_bytes() - before

    def _fresh(self, model: Any) -> dict[str, Any]:
        """The inputs of one call. A step of decoding gets a cache of its own, since it writes to it."""
        if not self._case.decodes:
            return self._inputs
        words = self._inputs["input_ids"]
        cache = model(input_ids=words, use_cache=True).past_key_values
        return {"input_ids": words[:, -1:], "past_key_values": cache, "use_cache": True}

    def describe(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "setup_seconds": self._setup_seconds,
            "relative_error": self._error,
            "weight_bytes": self._weight_bytes,
            "steady_bytes_more": self._resident,
            "peak_bytes": peak,
        }

    def run(self, calls: int) -> list[float]:
        """Seconds of each call, after one that warms the caches that another process has had since."""
        seconds = []
        given = self._fresh(self._model)
        for _ in range(calls + 1):
            start = time.perf_counter()
            self._call(given)
            seconds.append(time.perf_counter() - start)
            if self._case.decodes:
                given["past_key_values"].crop(-1)
        return seconds[1:]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.simplefilter("ignore")
    contender: Contender | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            with torch.inference_mode(mode=request.get("inference_mode", True)):
                if request["do"] == "set up":
                    os.sched_setaffinity(0, request["cpus"])
                    torch.set_num_threads(len(request["cpus"]))
                    contender = Contender(request["peer"], request["case"], request["dtype"], request["tiny"])
                    answer: dict[str, Any] = contender.describe()
                else:
                    assert contender is not None
                    answer = {"seconds": contender.run(request["calls"])}
        except Exception as error:  # of whatever library: the bench names it and goes on
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            answer = {"error": f"{type(error).__name__}: {first_line}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
