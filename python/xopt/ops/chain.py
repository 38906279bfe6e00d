"""Calls of operators as one, xopt::chain: text, fake and cost. csrc/ops/prepared.h has an example of the text."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from xopt.ops.costs import COSTS, Shape, Work, cost_of
from xopt.ops.fakes import Tensor, fake_of
from xopt.ops.views import view_of

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32)
}
_RETURN = "return "


class Given(NamedTuple):
    """One of a chain's tensors, by its place."""

    place: int


class Part(NamedTuple):
    """Elements of one of a chain's tensors, which has one dimension, by its place."""

    place: int
    begin: int
    end: int


class Result(NamedTuple):
    """What a call of a chain returns, by the call's number; of two results the first or the second part."""

    number: int
    part: int = 0


class SizeOf(NamedTuple):
    """The size of a tensor or a result, where a list of integers has one: %0:2."""

    value: Given | Result
    dim: int


class Computed(NamedTuple):
    """What a sign makes of two numbers, sizes or such. As text the sign comes last: %0:2;8;//."""

    sign: str
    left: Number
    right: Number


Number = int | float | SizeOf | Computed
SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod},
    **{"/": operator.truediv, "**": operator.pow},  # whose results are no integers of a call
}


def number_of(number: Number, size: Callable[[Any, int], int]) -> Any:
    """By `size`, which tells a value's size along a dimension."""
    if isinstance(number, Computed):
        return SIGNS[number.sign](number_of(number.left, size), number_of(number.right, size))
    return size(number.value, number.dim) if isinstance(number, SizeOf) else number


def values_in(number: Number) -> Iterator[Any]:
    """Of which sizes are taken."""
    if isinstance(number, Computed):
        yield from values_in(number.left)
        yield from values_in(number.right)
    elif isinstance(number, SizeOf):
        yield number.value


def with_values(number: Number, change: Callable[[Any], Any]) -> Number:
    if isinstance(number, Computed):
        return Computed(number.sign, with_values(number.left, change), with_values(number.right, change))
    return SizeOf(change(number.value), number.dim) if isinstance(number, SizeOf) else number


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
    if isinstance(argument, Part):
        return f"%{argument.place}[{argument.begin}:{argument.end}]"
    if isinstance(argument, Result):
        return f"${argument.number}.{argument.part}" if argument.part else f"${argument.number}"
    if isinstance(argument, SizeOf):
        return f"{_token(argument.value)}:{argument.dim}"
    if isinstance(argument, Computed):
        return f"{_token(argument.left)};{_token(argument.right)};{argument.sign}"
    if isinstance(argument, bool):
        return "true" if argument else "false"
    if isinstance(argument, (tuple, list, torch.Size)):
        if argument and isinstance(argument[0], (Given, Result)):
            return f"({','.join(map(_token, argument))})"
        return f"[{','.join(map(_token, argument))}]"
    if isinstance(argument, torch.dtype):
        return str(argument).removeprefix("torch.")
    return repr(argument) if isinstance(argument, float) else str(argument)


def _argument(token: str) -> Any:
    """What a token stands for: `call_text` the other way round."""
    if token == "-":
        return None
    if token[0] == "%" and token[-1] == "]":
        given, begin, end = token[1:-1].replace("[", ":").split(":")
        return Part(int(given), int(begin), int(end))
    if ";" in token and token[0] != "[":
        return _computed(token.split(";"))
    if token[0] in "%$":
        value, _, dim = token.partition(":")
        place, _, part = value[1:].partition(".")
        found = Given(int(place)) if token[0] == "%" else Result(int(place), int(part or 0))
        return SizeOf(found, int(dim)) if dim else found
    if token in ("true", "false"):
        return token == "true"
    if token[0] in "[(":
        return [_argument(item) for item in token[1:-1].split(",") if item]
    if token in _DTYPES:
        return _DTYPES[token]
    for number in (int, float):
        try:
            return number(token)
        except ValueError:
            pass
    return token


def _computed(terms: list[str]) -> Computed:
    operands: list[Any] = []
    for term in terms:
        if term in SIGNS:
            right, left = operands.pop(), operands.pop()
            operands.append(Computed(term, left, right))
        else:
            operands.append(_argument(term))
    return operands[0]  # type: ignore[no-any-return]


def _calls_of(text: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """The calls of a text: the operator and its arguments."""
    for line in text.split("\n")[:-1]:
        op, *tokens = line.split(" ")
        args, kwargs = [], {}
        if view_of(op) is not None:
            yield op, [_argument(token) for token in tokens], {}
            continue
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
    if isinstance(argument, Part):
        return tensors[argument.place][argument.begin : argument.end]
    if isinstance(argument, (SizeOf, Computed)):
        return number_of(argument, lambda value, dim: int(_filled(value, tensors, results).size(dim)))
    if type(argument) is list:
        return [_filled(each, tensors, results) for each in argument]
    return results[argument.number][argument.part] if isinstance(argument, Result) else argument


def _called(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of a call."""
    function: Any = view_of(op) or getattr(torch.ops.xopt, op).default
    result = function(*args, **kwargs)
    return result if isinstance(result, tuple) else (result,)


@fake_of("chain")
def _chain(tensors: Sequence[Tensor], calls: str) -> list[Tensor]:
    results: list[tuple[Tensor, ...]] = []
    for op, args, kwargs in _calls_of(calls):
        filled = [_filled(each, tensors, results) for each in args]
        named = {name: _filled(each, tensors, results) for name, each in kwargs.items()}
        results.append(_called(op, filled, named))
    return [results[each.number][each.part] for each in _returned_by(calls)]


def _shape_of(argument: Any) -> Any:
    """That of a tensor, or of each in a list."""
    if type(argument) is list:
        return [_shape_of(each) for each in argument]
    return argument.shape if isinstance(argument, Tensor) else argument


@cost_of("chain", category="conv", kernel="conv")
def _chain_work(tensors: Sequence[Shape], calls: str) -> Work:
    """What its calls cost together. What their results look like, their fakes tell."""
    results: list[tuple[Tensor, ...]] = []
    works: list[Work] = []
    given = [torch.empty(shape, device="meta") for shape in tensors]  # dtypes make no difference to what a call costs

    def like(name: str, argument: Any) -> Any:
        value = _filled(argument, given, results)
        return value.to(torch.uint8) if name == "packed" else value

    for op, args, kwargs in _calls_of(calls):
        if view_of(op) is not None:
            results.append(_called(op, [like("", each) for each in args], kwargs))
            continue
        names = [argument.name for argument in getattr(torch.ops.xopt, op).default._schema.arguments]
        named = {name: like(name, each) for name, each in (*zip(names, args, strict=False), *kwargs.items())}
        works.append(COSTS[op].work(**{name: _shape_of(each) for name, each in named.items()}))
        results.append(_called(op, (), named))
    return Work("; ".join(work.size for work in works), sum(work.flop for work in works))
