"""transformers' functions that stand for the kernels of other libraries, under names of each model's file: whether one
of a name is that library's, and computes what it is taken for. That is tried, once for each."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from xopt.graph.constants import values_in
from xopt.graph.symbol import Symbol, recorder_of
from xopt.modules.gradients import is_transformed, wants_gradient

Calls = Callable[[Callable[..., torch.Tensor]], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]
"""Arguments to try a function with; numbers between 0 and 1 are given by a function of their shape."""


def tried_by(calls: Calls) -> Callable[[Any, Callable[..., Any]], bool]:
    """Whether a function is transformers' own, and gives and leaves what its substitute does."""

    def agrees(function: Any, substitute: Callable[..., Any]) -> bool:
        source = inspect.unwrap(function)
        own = (getattr(source, "__module__", None) or "").startswith("transformers.models.")
        return own and _agree(source, substitute, calls)

    return agrees


def call_step(function: Callable[..., Any], tensors: tuple[Any, ...], **options: Any) -> Any:
    """Calls a step, or has it recorded where one of the tensors is a symbol."""
    symbol = next((each for each in tensors if type(each) is Symbol), None)
    return function(*tensors, **options) if symbol is None else recorder_of(symbol).call(function, *tensors, **options)


def fits(takes: Callable[..., bool], tensors: Sequence[Any], *others: Any) -> bool:
    """Whether a kernel takes what it would be given, or what stands for that while a forward is recorded, whose program
    is left where gradients are wanted. `others`: what else the result is made of."""
    examples = [each._example if type(each) is Symbol else each for each in tensors]
    if any(type(each) is Symbol for each in tensors):
        return takes(*examples)
    return takes(*examples) and not is_transformed() and not wants_gradient(*examples, *others)


def is_packed(kwargs: dict[str, Any]) -> bool:
    """Whether several sequences are in one, which the libraries' kernels keep apart."""
    return any(kwargs.get(name) is not None for name in ("cu_seqlens", "seq_idx"))


@functools.cache
def _agree(source: Callable[..., Any], substitute: Callable[..., Any], calls: Calls) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)

    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for args, kwargs in calls(random):
                given, ours = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
                expected, found = source(*given[0], **given[1]), substitute(_refuses, *ours[0], **ours[1])
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(_tensors_in(ours), _tensors_in(given), rtol=1e-4, atol=1e-5)
    except Exception:  # it takes other arguments, or computes another thing
        return False
    return True


def _tensors_in(given: Any) -> list[torch.Tensor]:
    """Which a function may have written to."""
    return [each for each in values_in(given) if isinstance(each, torch.Tensor)]


def _refuses(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the substitute left its call to the source")
