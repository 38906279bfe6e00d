"""A model keeps its very class also where it holds packed parameters itself. What such a module's class does otherwise
stands in the model's attributes (`root.py` has its forward): how it is written to a state dict, filled and moved.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from xopt.modules.base import derive

_MIXIN = "_xopt_kept_class"  # in a model's __dict__: what its class would be derived from as well
_METHODS = ("_apply", "_save_to_state_dict", "_load_from_state_dict")  # as nn.Module calls them, by the instance


def keep_class(model: nn.Module, mixin: type) -> None:
    """Gives a model that `derive` has given another class its own again."""
    model.__class__ = type(model).__bases__[-1]
    model.__dict__[_MIXIN] = mixin
    for name in _METHODS:
        model.__dict__[name] = _Method(model, name)


def as_derived(module: nn.Module) -> nn.Module:
    """A module as it would be without `keep_class`: an instance of the derived class with the same attributes, for
    calls that nothing is left of afterwards. Others as they are."""
    mixin = module.__dict__.get(_MIXIN)
    if mixin is None:
        return module
    kind: Any = derive(mixin, type(module))
    other: nn.Module = kind.__new__(kind)
    object.__setattr__(other, "__dict__", module.__dict__)
    return other


class _Method:
    """Of the derived class. It holds its module weakly: one that referred to itself would keep its memory until the
    garbage collector comes round."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._owner()
        derived = as_derived(module)
        result = getattr(type(derived), self._name)(derived, *args, **kwargs)
        return module if result is derived else result

    def _owner(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a method outlived its module"
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Method:
        module = self._owner()
        return _Method(memo.get(id(module), module), self._name)

    def __reduce__(self) -> Any:
        return _Method, (self._owner(), self._name)
