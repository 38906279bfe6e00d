"""How nested values are split over streams, and how what streams return is joined.

A hint is a dimension, None, a function (for joining only), or a structure of hints that follows the value: a sequence
for a list or tuple, a mapping for a dict, a dataclass or a model's output, in which keys may be left out. A dimension
or None above a structure holds for all that is in it; what no hint speaks of has the dimension 0.

    splitting   a dimension: every tensor is cut along it (one without dimensions is handed whole)
                None: handed whole to each stream, as are all values that are no tensors
    joining     a dimension: tensors are joined along it; values that are no tensors have to be equal
                None: that of the first stream;  a function: called with the list of the streams' values
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

Tensor = torch.Tensor
Hint: TypeAlias = int | Callable[[list[Any]], Any] | Sequence[Any] | Mapping[str, Any] | None

DEFAULT = 0


class Hints:
    """Hints for a call's arguments, given as the arguments are: `Hints(0, None, mask=1)`."""

    def __init__(self, *positional: Hint, **named: Hint) -> None:
        self.positional = positional
        self.named = named

    def __repr__(self) -> str:
        named = [f"{name}={hint!r}" for name, hint in self.named.items()]
        return f"Hints({', '.join([*map(repr, self.positional), *named])})"


Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


# ---- Structures -----------------------------------------------------------------------------------------------------


def _is_dimension(hint: object) -> bool:
    return isinstance(hint, int) and not isinstance(hint, bool)


def _children(value: Any) -> dict[Any, Any] | None:
    """What a structure holds, by index, key or field; None: it is no structure."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _like(value: Any, children: dict[Any, Any]) -> Any:
    """A structure of the value's type with other children."""
    kind = type(value)
    if isinstance(value, list | tuple):
        return kind(*children.values()) if hasattr(value, "_fields") else kind(list(children.values()))
    if dataclasses.is_dataclass(value):
        return kind(**children)
    return kind(children)


def _hints_below(hint: Hint, children: dict[Any, Any], value: Any, path: str) -> dict[Any, Hint]:
    """The hint of each child."""
    if hint is None or _is_dimension(hint):
        return dict.fromkeys(children, hint)
    if isinstance(hint, Mapping) and not isinstance(value, list | tuple):
        unknown = [key for key in hint if key not in children]
        if unknown:
            raise ValueError(f"{path}: a hint for {unknown}, but it has only {list(children)}")
        return {key: hint.get(key, DEFAULT) for key in children}
    if isinstance(hint, Sequence) and not isinstance(hint, str) and isinstance(value, list | tuple):
        if len(hint) != len(children):
            raise ValueError(f"{path}: {len(hint)} hints, but it has {len(children)} elements")
        return dict(enumerate(hint))
    raise TypeError(f"{path}: the hint {hint!r} does not fit a value of type {type(value).__name__}")


def _below(path: str, value: Any, key: Any) -> str:
    return f"{path}[{key!r}]" if isinstance(value, Mapping | list | tuple) else f"{path}.{key}"


# ---- Splitting ------------------------------------------------------------------------------------------------------


class _Cut:
    """One walk over the arguments: notes which tensors are to be cut, and cuts one part out of each."""

    def __init__(self, start: int = 0, size: int | None = None) -> None:
        self._start, self._size = start, size
        self.sizes: dict[str, int] = {}

    def of(self, value: Any, hint: Hint, path: str) -> Any:
        if hint is None:
            return value
        children = _children(value)
        if children is not None:
            hints = _hints_below(hint, children, value, path)
            parts = {key: self.of(child, hints[key], _below(path, value, key)) for key, child in children.items()}
            return value if all(parts[key] is child for key, child in children.items()) else _like(value, parts)
        if not _is_dimension(hint):
            raise TypeError(
                f"{path}: the hint {hint!r} does not fit a value of type {type(value).__name__}: "
                "expected a dimension, or None to hand it whole to each stream"
            )
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return self._of_tensor(value, hint, path)  # type: ignore[arg-type]

    def _of_tensor(self, tensor: Tensor, dim: int, path: str) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"{path}: split along dimension {dim}, but its shape is {list(tensor.shape)}")
        self.sizes[path] = tensor.shape[dim]
        return tensor if self._size is None else tensor.narrow(dim, self._start, self._size)

    def of_call(self, call: Call, hint: Hint | Hints) -> Call:
        args, kwargs = call
        if not isinstance(hint, Hints):
            if not (hint is None or _is_dimension(hint)):
                raise TypeError(f"split: expected a dimension, None or xopt.runtime.Hints(...), got {hint!r}")
            hint = Hints(*[hint] * len(args), **dict.fromkeys(kwargs, hint))
        if len(hint.positional) > len(args):
            raise ValueError(
                f"split: hints for {len(hint.positional)} positional arguments, but the call has {len(args)}"
            )
        hints = [*hint.positional, *[DEFAULT] * (len(args) - len(hint.positional))]
        return (
            tuple(self.of(arg, hints[place], f"argument {place}") for place, arg in enumerate(args)),
            {name: self.of(arg, hint.named.get(name, DEFAULT), name) for name, arg in kwargs.items()},
        )


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of the parts, at most one apart, the larger ones first; no part is empty unless all is."""
    parts = max(1, min(parts, total))
    size, more = divmod(total, parts)
    return [size + (part < more) for part in range(parts)]


def split_call(call: Call, hint: Hint | Hints, parts: int) -> list[Call]:
    """The arguments of each stream's call. There are fewer than `parts` where there are fewer rows."""
    whole = _Cut()
    whole.of_call(call, hint)
    sizes = set(whole.sizes.values())
    if not sizes:
        raise ValueError("split: no argument holds a tensor to split; the hints hand all of them whole to each stream")
    if len(sizes) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in whole.sizes.items())
        raise ValueError(
            f"split: tensors of different sizes along the dimensions they are split along ({listed}); "
            "give hints, None for what each stream is to have whole"
        )
    calls, start = [], 0
    for size in split_sizes(sizes.pop(), parts):
        calls.append(_Cut(start, size).of_call(call, hint))
        start += size
    return calls


# ---- Joining --------------------------------------------------------------------------------------------------------


def join(values: list[Any], hint: Hint, path: str = "output") -> Any:
    """One value of those that the streams returned."""
    if callable(hint):
        return hint(values)
    first = values[0]
    if hint is None:
        return first
    children = [_children(value) for value in values]
    if all(each is not None for each in children):
        return _join_structures(values, [each for each in children if each is not None], hint, path)
    if not _is_dimension(hint):
        raise TypeError(f"{path}: the hint {hint!r} does not fit a value of type {type(first).__name__}")
    if len(values) == 1:
        return first
    if all(isinstance(value, Tensor) for value in values):
        return _join_tensors(values, hint, path)  # type: ignore[arg-type]
    if all(_same(value, first) for value in values):
        return first
    kinds = sorted({type(value).__name__ for value in values})
    raise ValueError(
        f"{path}: the streams returned different values of type {' and '.join(kinds)}, which cannot be joined; give a "
        "hint: None for that of the first stream, or a function of the list of values (list itself keeps them all)"
    )


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    equal = type(value) is type(other) and not isinstance(value, Tensor) and value == other
    return isinstance(equal, bool) and equal


def _join_structures(values: list[Any], children: list[dict[Any, Any]], hint: Hint, path: str) -> Any:
    first = values[0]
    for value, held in zip(values, children, strict=True):
        if type(value) is not type(first) or held.keys() != children[0].keys():
            raise ValueError(
                f"{path}: the streams returned different structures: {type(first).__name__} with {list(children[0])} "
                f"and {type(value).__name__} with {list(held)}"
            )
    hints = _hints_below(hint, children[0], first, path)
    joined = {key: join([each[key] for each in children], hints[key], _below(path, first, key)) for key in children[0]}
    return _like(first, joined)


def _join_tensors(tensors: list[Tensor], dim: int, path: str) -> Tensor:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            f"{path}: tensors without dimensions cannot be joined along dimension {dim}; give a hint: None for that "
            "of the first stream, or a function of the list of tensors"
        )
    try:
        return torch.cat(tensors, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"{path}: cannot be joined along dimension {dim}: shapes {shapes} ({error})") from error
