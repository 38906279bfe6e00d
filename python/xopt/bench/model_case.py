"""What a case of the model bench is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Inputs = dict[str, Any]
BEST = "the best peer"
READ_SHARE = 0.85  # of the measured read bandwidth, when decoding in bf16


@dataclass(frozen=True)
class ModelCase:
    name: str
    build: Callable[[bool], Any]
    """The model in fp32; True: a tiny one, to try the bench itself."""
    inputs: Callable[[Any], Inputs]
    decodes: bool = False
    """One token more, on a cache of those before: bound by how fast weights are read."""
    targets: dict[tuple[str, str], float] = field(default_factory=dict)
    """By dtype and peer: how many times as fast xopt has to be. BEST stands for the fastest of the peers."""
    library: str = "transformers"
    only_by_name: bool = False
    """Not among the cases of a run that names none."""


def sizes_if(tiny: bool, **sizes: Any) -> Any:
    """The arguments of a configuration: none, which are a library's defaults, or those of a tiny model."""
    return sizes if tiny else {}
