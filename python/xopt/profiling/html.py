"""A profile as one page for a browser, from the parts in `page/`. It refers to nothing outside itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from xopt.profiling.result import Profile

_PARTS = Path(__file__).with_name("page")
MOST_PIECES = 8000


def page_of(profile: Profile) -> str:
    parts = {
        "/*STYLE*/": (_PARTS / "report.css").read_text(encoding="utf-8"),
        "/*SCRIPT*/": (_PARTS / "report.js").read_text(encoding="utf-8"),
        # Last, so that nothing in the data is taken for a place to fill; and no text in it can end the element.
        "/*DATA*/": json.dumps(_content(profile)).replace("<", "\\u003c"),
    }
    page = (_PARTS / "report.html").read_text(encoding="utf-8")
    for place, text in parts.items():
        page = page.replace(place, text, 1)
    return page


def _content(profile: Profile) -> dict[str, Any]:
    """The profile, with what follows from it, and of its timeline the step that is nearest to the middle one."""
    content = dataclasses.asdict(profile)
    order = sorted(range(len(profile.step_seconds)), key=profile.step_seconds.__getitem__)
    shown = order[len(order) // 2] if order else 0
    plain = sorted(profile.plain_step_seconds)
    content["shown_step"] = shown
    content["timeline"] = [row for row in profile.timeline if row[0] == shown][:MOST_PIECES]
    content["figures"] = {
        "wall_seconds": profile.wall_seconds,
        "plain_seconds": plain[len(plain) // 2] if plain else None,
        "busy_share": profile.busy_share,
        "thread_efficiency": profile.thread_efficiency,
        "flop": profile.flop,
    }
    for name, device in content["devices"].items():
        device["busy_share"] = profile.device_busy_share(name)
    of_devices = (kernel for device in content["devices"].values() for kernel in device["kernels"])
    for kernel in (*content["kernels"], *of_devices):
        del kernel["arguments"]
    return content
