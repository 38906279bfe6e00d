"""A profile's timeline in the format of Chrome's trace viewer, which Perfetto reads too."""

from __future__ import annotations

import dataclasses
from typing import Any

from xopt.profiling.result import Profile


def trace_of(profile: Profile) -> dict[str, Any]:
    """One step after the other, each thread on a line of its own."""
    starts = [0.0]
    for seconds in profile.step_seconds:
        starts.append(starts[-1] + seconds * 1e6)
    by_name = {kernel.name: kernel for kernel in profile.kernels}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"xopt profile: {profile.title}"}}
    ]
    threads = list(dict.fromkeys(row[3] for row in profile.timeline))
    for place, thread in enumerate(threads):
        arguments = {"name": f"thread {thread}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": place + 1, "args": arguments})
    for step, seconds in enumerate(profile.step_seconds):
        name, start = f"step {step + 1}", starts[step]
        events.append({"ph": "X", "name": name, "cat": "step", "pid": 0, "tid": 0, "ts": start, "dur": seconds * 1e6})
    for step, start, duration, thread, name, category in profile.timeline:
        event: dict[str, Any] = {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": threads.index(thread) + 1}
        event |= {"ts": round(starts[step] + start, 3), "dur": duration}
        kernel = by_name.get(name)
        if kernel is not None and kernel.operator:
            event["args"] = {"flop": kernel.flop, "bytes": kernel.bytes, "module": kernel.module, "bound": kernel.bound}
        events.append(event)
    # The profile itself, so that a trace can be replayed and compared too.
    content = dataclasses.asdict(profile) | {"timeline": []}
    return {"traceEvents": events, "displayTimeUnit": "ms", "xopt": content}
