"""transformers' hooks that collect hidden states and attentions: they stay on all layers once it was asked for any."""

from __future__ import annotations

from types import CodeType
from typing import Any

from xopt.graph.hooks import let_sleep


def _let_hooks_sleep() -> None:
    try:
        from transformers.utils.output_capturing import _active_collector, install_output_capuring_hook
    except ImportError:  # a release that collects otherwise: its hooks, if any, are somebody's like all others
        return
    collector: Any = _active_collector
    for code in install_output_capuring_hook.__code__.co_consts:
        if isinstance(code, CodeType) and code.co_name == "output_capturing_hook":
            let_sleep(code, lambda: collector.get() is not None)


_let_hooks_sleep()
