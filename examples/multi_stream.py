"""One batch on several groups of cores at once, and activations whose memory is used again.

    python examples/multi_stream.py [--batch 8] [--streams N] [--size 224] [--rounds 5]

A convolutional model runs on all cores in one team of threads, then in streams: each has cores of its own and takes a
part of the batch. Both are measured with and without a memory pool, which keeps the memory of freed activations.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import time

import torch
from torch import nn

from xopt.runtime import CorePool, MultiStream, Task, memory_pool, pin


def convolutions() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


def measure(model: nn.Module, images: torch.Tensor, rounds: int) -> tuple[float, int]:
    """The least time of a forward in ms, and the least count of page faults."""
    times, faults = [], []
    for _ in range(rounds):
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        model(images)
        times.append(1e3 * (time.perf_counter() - started))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(times), min(faults)


def main() -> None:
    cores = CorePool()  # each physical core that this process may use
    parser = argparse.ArgumentParser(description="A batch in streams, each on cores of its own.")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--streams", type=int, default=min(2, len(cores)))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = convolutions()
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    streams = MultiStream(model, cores, streams=arguments.streams)
    print(streams.extra_repr())
    pool = memory_pool()
    print(pool)
    memory: dict[str, contextlib.AbstractContextManager[object]] = {"memory pool": pool}
    if pool.backend == "glibc":  # preloaded, it is on all the time
        memory = {"as it is": contextlib.nullcontext(), **memory}

    with torch.inference_mode(), pin(cores):
        same = torch.allclose(streams(images), model(images), atol=1e-4)
        for name, contender in {"one team": model, f"{arguments.streams} streams": streams}.items():
            for kind, context in memory.items():
                with context:
                    contender(images)
                    milliseconds, faults = measure(contender, images, arguments.rounds)
                print(f"{name:12} {kind:12} {milliseconds:8.1f} ms {faults:8} page faults")
        print("same result:", same)

        # A task runs anything on cores of its own, and hands out a future at once.
        first = Task(model, CorePool(cores=cores.cores[:1]))(images[:1])
        print("meanwhile ...", first.result().shape)


if __name__ == "__main__":
    main()
