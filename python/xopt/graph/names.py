"""Global names of a function's copy, some of which stand for other functions there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SubstitutedNames(dict[str, Any]):
    """Python looks every name up by `__getitem__`: what is there when it is asked for, or the substitute, where that is
    the function that it stands for."""

    def __init__(self, own: dict[str, Any], substitutes: dict[str, tuple[Any, Callable[..., Any]]]) -> None:
        super().__init__()
        self.own = own
        """Of the function that was copied."""
        self._substitutes = substitutes

    def __getitem__(self, name: str) -> Any:
        given = self.own[name]
        source, substitute = self._substitutes.get(name, (None, None))
        return given if substitute is None or source is not given else substitute


def own_names(names: dict[str, Any]) -> dict[str, Any]:
    """Where the globals of a function are held, be it a copy or not."""
    return names.own if isinstance(names, SubstitutedNames) else names
