"""Views of a packed parameter: plain memory, which its values were unpacked into. What is written there is packed."""

from __future__ import annotations

from typing import Any

import torch

from xopt.graph.signature import TENSORS
from xopt.graph.symbol import may_write

_Tensor = torch.Tensor


class PackedView(torch.Tensor):
    """One of some values, from which its source is packed anew once it is written to. It is for those who write: what
    is computed with it is a plain tensor."""

    _source: Any
    """A `PackedParameter`."""
    _whole: torch.Tensor
    """All of its values."""

    @classmethod
    def of(cls, source: Any, values: torch.Tensor, result: Any) -> Any:
        """What is a view of these values, in a function's result, as one that writes to their source."""
        if isinstance(result, (tuple, list)):
            items = [cls.of(source, values, item) for item in result]
            return type(result)(items) if type(result) in (tuple, list) else result
        if type(result) is not _Tensor or not torch._C._has_storage(result):
            return result
        if not torch._C._is_alias_of(result, values):  # type: ignore[attr-defined]
            return result
        view = result.as_subclass(cls)
        view._source, view._whole = source, values
        return view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        views = [*_views_in((*args, *kwargs.values()))]
        with torch._C.DisableTorchFunctionSubclass():
            before = [_version_of(view) for view in views]
            result = func(*args, **kwargs)
            written = {
                id(view._whole): view
                for view, version in zip(views, before, strict=True)
                if (may_write(func, kwargs) if version is None else view._version != version)
            }
            for view in written.values():
                view._source.assign(view._whole)
            for view in views:
                result = cls.of(view._source, view._whole, result)
        return result

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(_Tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __format__(self, format_spec: str) -> str:
        return format(self._plain(), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._plain().clone()
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


TENSORS.add(PackedView)


def _views_in(values: Any) -> Any:
    for value in values:
        if type(value) is PackedView:
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _views_in(value)


def _version_of(view: PackedView) -> int | None:
    """None: nobody counts what is written to a tensor of inference mode."""
    return None if view.is_inference() else view._version
