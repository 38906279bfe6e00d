"""Calls of operators as one, xopt::chain: text, fake and cost. csrc/ops/prepared.h has an example of the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from xopt.ops.costs import COSTS, Shape, Work, cost_of
from xopt.ops.fakes import Tensor, fake_of

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32)
}
_RETURN = "return "


class Given(NamedTuple):
    """One of a chain's tensors, by its place."""

    place: int


class Result(NamedTuple):
    """What a call of a chain returns, by the call's number."""

    number: int


def call_text(op: str, arguments: Sequence[Any]) -> str:
    """The line of a call. `arguments`: all that are in its schema, in that order."""
    return " ".join([op, *map(_token, arguments)])


def calls_text(calls: Sequence[str], returned: Sequence[Result]) -> str:
    return "\n".join([*calls, _RETURN + " ".join(map(_token, returned))])


def _token(argument: Any) -> str:
    if argument is None:
        return "-"
    if isinstance(argument, Given):
        return f"%{argument.place}"
    if isinstance(argument, Result):
        return f"${argument.number}"
    if isinstance(argument, bool):
        return "true" if argument else "false"
    if isinstance(argument, (tuple, list, torch.Size)):
        return f"[{','.join(map(str, argument))}]"
    if isinstance(argument, torch.dtype):
        return str(argument).removeprefix("torch.")
    return repr(argument) if isinstance(argument, float) else str(argument)


def _argument(token: str) -> Any:
    """What a token stands for: `call_text` the other way round."""
    if token == "-":
        return None
    if token[0] in "%$":
        return (Given if token[0] == "%" else Result)(int(token[1:]))
    if token in ("true", "false"):
        return token == "true"
    if token[0] == "[":
        return [int(item) for item in token[1:-1].split(",") if item]
    if token in _DTYPES:
        return _DTYPES[token]
    for number in (int, float):
        try:
            return number(token)
        except ValueError:
            pass
    return token


def _calls_of(text: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """The calls of a text: the operator and its arguments."""
    for line in text.split("\n")[:-1]:
        op, *tokens = line.split(" ")
        args, kwargs = [], {}
        schema = getattr(torch.ops.xopt, op).default._schema
        for argument, token in zip(schema.arguments, tokens, strict=True):
            if argument.kwarg_only:
                kwargs[argument.name] = _argument(token)
            else:
                args.append(_argument(token))
        yield op, args, kwargs


def _returned_by(text: str) -> list[Result]:
    last = text.rpartition("\n")[2]
    return [_argument(token) for token in last.removeprefix(_RETURN).split(" ")]


def _filled(argument: Any, tensors: Sequence[Any], results: Sequence[Any]) -> Any:
    if isinstance(argument, Given):
        return tensors[argument.place]
    return results[argument.number] if isinstance(argument, Result) else argument


@fake_of("chain")
def _chain(tensors: Sequence[Tensor], calls: str) -> list[Tensor]:
    results: list[Tensor] = []
    for op, args, kwargs in _calls_of(calls):
        filled = [_filled(each, tensors, results) for each in args]
        named = {name: _filled(each, tensors, results) for name, each in kwargs.items()}
        results.append(getattr(torch.ops.xopt, op).default(*filled, **named))
    return [results[each.number] for each in _returned_by(calls)]


@cost_of("chain", category="conv", kernel="conv")
def _chain_work(tensors: Sequence[Shape], calls: str) -> Work:
    """What its calls cost together. What their results look like, their fakes tell."""
    results: list[Tensor] = []
    works: list[Work] = []

    def shape_of(argument: Any) -> Any:
        if isinstance(argument, Result):
            return results[argument.number].shape
        return tensors[argument.place] if isinstance(argument, Given) else argument

    for op, args, kwargs in _calls_of(calls):
        called = getattr(torch.ops.xopt, op).default
        names = [argument.name for argument in called._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        works.append(COSTS[op].work(**{name: shape_of(each) for name, each in named.items()}))
        results.append(called(**{name: _like(name, each, tensors, results) for name, each in named.items()}))
    return Work("; ".join(work.size for work in works), sum(work.flop for work in works))


def _like(name: str, argument: Any, shapes: Sequence[Shape], results: Sequence[Tensor]) -> Any:
    """A tensor of this shape that has no values; its dtype makes no difference to what a call costs."""
    if isinstance(argument, Given):
        dtype = torch.uint8 if name == "packed" else torch.float32
        return torch.empty(shapes[argument.place], dtype=dtype, device="meta")
    return _filled(argument, (), results)
