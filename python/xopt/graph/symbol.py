"""Symbols, which stand for tensors, sizes and other objects while a forward is recorded.

A symbol turns what is done to it into calls of its recorder. What depends on a value, or on more of an object than
somebody has explained, ends the recording with `CannotRecord`.
"""

from __future__ import annotations

import functools
import keyword
import math
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node

from xopt.graph.native import native
from xopt.graph.signature import DICTS

if TYPE_CHECKING:
    from xopt.graph.record import Recorder


class _Active(threading.local):
    """The recording that runs in this thread."""

    recorder: Recorder | None = None


active = _Active()


class CannotRecord(Exception):
    """This forward is no fixed sequence of operations; the message says where. A recording remembers that, since a
    forward may catch it, and go a way that it does not go with tensors."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if active.recorder is not None:
            active.recorder.refuse(message)


# What may be read of an object that is no tensor, by class and attribute: given the object's symbol, what the recorded
# forward gets; of a method something that records its call. Integrations fill it.
opaque_reads: dict[tuple[type, str], Callable[[Any], Any]] = {}


class NamedResult(NamedTuple):
    """A class of containers that forwards answer in, made of named values."""

    items: Callable[[Any], dict[str, Any]]
    """Those that make another, of one."""
    maker: Callable[[Any, dict[str, Any]], Callable[..., Any]]
    """What makes one like this of named values, such as these: its class, or what comes to the same sooner."""


named_results: dict[type, NamedResult] = {}
"""By class, which may be a base. Integrations fill it."""

_CONSTANT_ATTRIBUTES = frozenset(
    {"dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_nested"}
)
_OWN = frozenset({"_recorder", "_node", "_example", "_part_of"})  # what a symbol itself has
_CONSTANT_METHODS = frozenset({"dim", "ndimension", "is_floating_point", "is_complex", "element_size"})


class Symbol:
    """Stands for a tensor, a size, or an object that only `opaque_reads` knows."""

    def __init__(self, recorder: Recorder, node: Node, example: Any) -> None:
        self._recorder = recorder
        self._node = node
        self._example = example
        self._part_of: tuple[Symbol, Any] | None = None
        recorder.symbols.append(weakref.ref(self))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The example's class to Python's isinstance, so that a forward takes the branch that it is to take. To torch's
        native code, which asks in the same way, the truth: it would take the symbol for a tensor's memory."""
        return type(self._example) if native.is_asked else Symbol

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = next(item._recorder for item in symbols_in((args, kwargs)))
        return recorder.call(func, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        example = self._example
        if not isinstance(example, torch.Tensor):
            for (kind, known), read in opaque_reads.items():
                if known == name and isinstance(example, kind):
                    return read(self)
            raise CannotRecord(f"it reads .{name} of a {type(example).__name__}")
        if name in _CONSTANT_ATTRIBUTES:
            return getattr(example, name)
        if name == "requires_grad":
            return False
        if name == "shape":
            return self.size()
        if name in _CONSTANT_METHODS:
            return getattr(example, name)
        if name in ("T", "mT"):
            return self.transpose(-2, -1) if name == "mT" or example.ndim == 2 else self._refuse(name)
        if name.startswith("_") or not callable(getattr(torch.Tensor, name, None)):
            return self._missing(name)
        return _Method(self, name)

    def _missing(self, name: str) -> Any:
        """An attribute that only a tensor itself could tell, or that it has not: forwards ask by hasattr. What comes
        from outside may have attributes that somebody has set."""
        if name == "_is_param":  # by which Python tells parameters of other classes
            return False
        is_dunder = name.startswith("__") and name.endswith("__")
        if self._node.op == "placeholder" and not is_dunder and self._recorder.expect_no_attribute(self, name):
            raise AttributeError(f"a recorded tensor has no attribute {name!r}")
        if hasattr(torch.Tensor, name) or (self._node.op in ("placeholder", "get_attr") and not is_dunder):
            self._refuse(name)
        raise AttributeError(f"a recorded tensor has no attribute {name!r}")

    def size(self, dim: int | None = None) -> Any:
        if dim is None:
            return SymbolicSize(self.size(each) for each in range(self._example.ndim))
        return self._recorder.record("call_method", "size", (self, dim), {}, self._example.size(dim))

    def numel(self) -> Any:
        return self._recorder.record("call_method", "numel", (self,), {}, self._example.numel())

    def _refuse(self, what: str) -> Any:
        raise CannotRecord(f"it depends on the value or the layout of a tensor or size ({what})")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_dynamo_"):  # a hint to torch's compiler, which does not run here
            return
        if name not in _OWN:
            raise CannotRecord(f"it sets .{name} of a {type(self._example).__name__}")
        object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return int(self.size(0)) if self._has_rows() else self._refuse("len")

    def __iter__(self) -> Any:
        return iter(self.unbind(0)) if self._has_rows() else self._refuse("iteration")

    def __contains__(self, element: Any) -> bool:
        is_value = isinstance(element, (bool, int, float, torch.Tensor))
        return bool((self == element).any()) if self._has_rows() and is_value else self._refuse("contains")

    def _has_rows(self) -> bool:
        return isinstance(self._example, torch.Tensor) and self._example.ndim > 0

    def __bool__(self) -> bool:
        if isinstance(self._example, torch.Tensor):
            return self._recorder.expect_truth(self)
        if _is_number(self):
            return bool(self._recorder.expect(operator.ne, self, 0))
        return self.__getattr__("__bool__")()  # type: ignore[no-any-return]

    def _number(self) -> Any:
        """A size as a plain number, which it then has to be in other calls too."""
        if not _is_number(self):
            self._refuse("a number")
        return self._recorder.expect(operator.eq, self, self._example) and self._example

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __index__(self) -> int:
        return operator.index(self._number())

    def __setitem__(self, key: Any, value: Any) -> None:
        self._recorder.changes.write_part(self, key, value)

    def __hash__(self) -> int:
        """A size is found where its number is. A cache has to compute anew what it is asked for by a symbol."""
        if not _is_number(self) or native.is_cache(sys._getframe(1)):
            return object.__hash__(self)
        return hash(self._number())

    def __repr__(self) -> str:
        return object.__repr__(self) if active.recorder is None else repr(self._number())

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, form: str) -> str:
        return format(self._number(), form)

    def __getitem__(self, key: Any) -> Any:
        self._recorder.changes.take_place(self, key)
        part = self._recorder.call(operator.getitem, self, key)
        if is_symbol(part):
            part._part_of = self, key
        return part


class SymbolicSize(tuple[Any, ...]):
    """The sizes of a tensor, which forwards may ask what they ask a torch.Size."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch.Size if native.is_asked else SymbolicSize

    def numel(self) -> Any:
        return functools.reduce(operator.mul, self, 1)

    def __getitem__(self, key: Any) -> Any:
        part = tuple.__getitem__(self, key)
        return SymbolicSize(part) if type(key) is slice else part

    def __add__(self, other: tuple[Any, ...]) -> Any:
        return SymbolicSize(tuple.__add__(self, other))


class SizeSymbol(Symbol):
    """Stands for a size or what is made of sizes. Torch's native code takes it for a symbolic one of its own, among
    numbers as well, and hands over to the recording whatever is called with one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int if native.is_asked else torch.SymInt


def is_symbol(value: Any) -> bool:
    """Whether it is one, whatever it claims to be."""
    return type(value) is Symbol or type(value) is SizeSymbol


def _is_number(symbol: Symbol) -> bool:
    return type(symbol._example) in (int, float)


_MIRRORED: dict[Any, Any] = {
    **{operator.eq: operator.eq, operator.ne: operator.ne, operator.lt: operator.gt},
    **{operator.le: operator.ge, operator.gt: operator.lt, operator.ge: operator.le},
}


def _add_operators() -> None:
    """The methods of `Symbol` that differ in name only."""

    def refusing(name: str) -> Any:
        return lambda self, *args, **kwargs: self._refuse(name)

    def unary(function: Any) -> Any:
        return lambda self: self._recorder.call(function, self)

    def binary(function: Any) -> Any:
        return lambda self, other: self._recorder.call(function, self, other)

    def reflected(function: Any) -> Any:
        return lambda self, other: self._recorder.call(function, other, self)

    def comparison(function: Any) -> Any:
        def compare(self: Symbol, other: Any) -> Any:
            if _is_number(self):
                if is_symbol(other) and isinstance(other._example, torch.Tensor):  # Python asks the size first
                    return self._recorder.call(_MIRRORED[function], other, self)
                return self._recorder.expect(function, self, other)
            if not isinstance(self._example, torch.Tensor):
                return self._refuse("a comparison")
            return self._recorder.call(function, self, other)

        return compare

    def in_place(function: Any) -> Any:
        def change(self: Symbol, other: Any) -> Any:
            recorder = self._recorder
            return (recorder.call if _is_number(self) else recorder.changes.in_place)(function, self, other)

        return change

    for name in ("item", "tolist", "numpy", "stride"):
        setattr(Symbol, name, refusing(name))
    for name in ("is_contiguous", "as_strided", "data_ptr", "storage", "untyped_storage", "backward"):
        setattr(Symbol, name, refusing(name))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Symbol, f"__{name}__", unary(getattr(operator, name)))
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
        setattr(Symbol, f"__{name.rstrip('_')}__", binary(getattr(operator, name)))
        setattr(Symbol, f"__r{name.rstrip('_')}__", reflected(getattr(operator, name)))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Symbol, f"__{name}__", comparison(getattr(operator, name)))
    for name in ("add", "sub", "mul"):
        setattr(Symbol, f"__i{name}__", in_place(getattr(operator, name)))


_add_operators()


class _Method:
    """A method of a symbol, about to be called."""

    def __init__(self, symbol: Symbol, name: str) -> None:
        self._symbol = symbol
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        symbol, name = self._symbol, self._name
        recorder = symbol._recorder
        if name == "copy_":
            return recorder.changes.copy_into(symbol, *args, **kwargs)
        if writes(name):
            return recorder.changes.in_place(without_writing(name), symbol, *args, **kwargs)
        try:
            example = recorder.evaluate(getattr(symbol._example, name), args, kwargs)
        except RuntimeError as problem:
            if name == "view":  # its source was a view of what an optimized convolution has left in another layout
                name = "reshape"
            elif name == "masked_fill" and len(args) == 2:  # the lowest of fp32, where autocast makes bf16
                args = (args[0], within(symbol._example.dtype, args[1]))
            else:
                recorder.refuse(str(problem))
                raise
            example = recorder.evaluate(getattr(symbol._example, name), args, kwargs)
        return recorder.record("call_method", name, (symbol, *args), kwargs, example)


def writes(name: str) -> bool:
    """Whether a function or method of this name changes its first argument in place, as torch names them. Python's own
    operators end so where they would be keywords (`operator.and_`)."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(operator, f"__{name[3:]}"))
    return name.endswith("_") and not keyword.iskeyword(name[:-1])


def may_write(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call of a function of torch's, or of a method, changes a tensor that it is given."""
    return writes(getattr(function, "__name__", "")) or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def without_writing(name: str) -> Any:
    """What gives as a new tensor what that function leaves in its first argument; None: torch has none."""
    return getattr(torch, name[:-1], None) or getattr(torch.nn.functional, name[:-1], None)


def within(dtype: torch.dtype, value: Any) -> Any:
    """The finite number of a dtype that is closest to this one, if it is a finite one."""
    if not isinstance(value, float) or not math.isfinite(value) or not dtype.is_floating_point:
        return value
    return max(torch.finfo(dtype).min, min(torch.finfo(dtype).max, value))


def symbols_in(value: Any) -> Iterator[Symbol]:
    """All symbols in a value and the containers that a forward is called with."""
    if is_symbol(value):
        yield value
    elif type(value) in (tuple, list, SymbolicSize):
        for item in value:
            yield from symbols_in(item)
    elif type(value) in DICTS:
        yield from symbols_in(list(value.values()))
    elif type(value) is slice:
        yield from symbols_in((value.start, value.stop, value.step))


def is_symbolic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(True for _ in symbols_in((args, kwargs)))


def has_symbolic_objects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there are symbols that stand for more than numbers, as sizes do."""
    return any(not _is_number(symbol) for symbol in symbols_in((args, kwargs)))


def recorder_of(*values: Any) -> Recorder:
    recorder: Recorder = next(symbols_in(values))._recorder
    return recorder
