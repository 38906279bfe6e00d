"""Functions of torch that refuse tensors of two dtypes, in forwards that run as they are.

A source model has one dtype, and so have its parts' results. In an optimized one an embedding gives bf16, and what is
computed with a parameter that nothing could be fused with is fp32, as the parameter is. Most of torch's functions take
both; some end with an error, which the source model, in either dtype, does not know. These get tensors of one dtype:
what is written into another tensor that tensor's (images' features among the words of a prompt, with the places told by
a mask), all others the widest among them.
"""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import torch
from torch import Tensor

from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.substitute import are_plain, in_place_of


def _is_floating(value: Any) -> TypeGuard[Tensor]:
    is_known = isinstance(value, Tensor) and (are_plain(value) or type(value) is PackedParameter)
    return is_known and value.is_floating_point()


def _in_what_is_written(function: Any, place: int, name: str, *args: Any, **named: Any) -> Any:
    """A call of a function that writes its argument of this place and name into its first."""
    value = named.get(name, args[place] if len(args) > place else None)
    if not args or not (_is_floating(args[0]) and _is_floating(value)) or args[0].dtype == value.dtype:
        return NotImplemented
    value = value.to(args[0].dtype)
    if name in named:
        return function(*args, **named | {name: value})
    return function(*args[:place], value, *args[place + 1 :], **named)


def _in_the_widest(function: Any, *args: Any, **named: Any) -> Any:
    dtypes = {tensor.dtype for tensor in _floating([*args, *named.values()])}
    if len(dtypes) < 2:
        return NotImplemented
    widest = functools.reduce(torch.promote_types, dtypes)
    return function(*_cast(args, widest), **{name: _cast(value, widest) for name, value in named.items()})


def _floating(value: Any) -> list[Tensor]:
    if type(value) in (tuple, list):
        return [tensor for each in value for tensor in _floating(each)]
    return [value] if _is_floating(value) else []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_cast(each, dtype) for each in value)
    return value.to(dtype) if _is_floating(value) else value


def _writes(place: int, name: str, *functions: Any) -> None:
    for function in functions:
        in_place_of(function, switch=None)(functools.partial(_in_what_is_written, function, place, name))


def _widens(*functions: Any) -> None:
    for function in functions:
        in_place_of(function, switch=None)(functools.partial(_in_the_widest, function))


_writes(2, "value", Tensor.__setitem__)
_writes(2, "source", Tensor.masked_scatter, Tensor.masked_scatter_, torch.masked_scatter)
_writes(2, "values", Tensor.index_put, Tensor.index_put_, torch.index_put, torch.index_put_)
_writes(3, "source", Tensor.index_add, Tensor.index_add_, torch.index_add)
_writes(3, "source", Tensor.index_reduce, Tensor.index_reduce_, torch.index_reduce)
_writes(3, "src", Tensor.scatter, Tensor.scatter_, torch.scatter)
_writes(3, "src", Tensor.scatter_add, Tensor.scatter_add_, torch.scatter_add)
_writes(3, "src", Tensor.scatter_reduce, Tensor.scatter_reduce_, torch.scatter_reduce)
_writes(1, "end", Tensor.lerp_)
_widens(torch.lerp, Tensor.lerp)
_widens(torch.mv, Tensor.mv, torch.addmv, Tensor.addmv, torch.dot, Tensor.dot, torch.vdot, Tensor.vdot)
_widens(torch.inner, Tensor.inner, torch.tensordot, torch.linalg.multi_dot, torch.bilinear)
_widens(torch.cross, Tensor.cross, torch.linalg.cross)
_widens(torch.nn.functional.embedding_bag)
