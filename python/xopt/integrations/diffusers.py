"""What xopt knows of diffusers: what its models answer in. They call torch's attention, which is found where it is."""

from __future__ import annotations

from diffusers.utils.outputs import BaseOutput

from xopt.graph.symbol import named_results
from xopt.integrations.outputs import OUTPUT

named_results[BaseOutput] = OUTPUT


def take_attention() -> None:
    """There is nothing to take over."""
