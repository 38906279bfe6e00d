"""Marks in the profiler's record that say which module is running: hooks on all modules, while a profile is taken.

They are torch's global hooks, which stand on no module: an optimized model sees none and goes on to run fused.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

PREFIX = "xopt.module|"
STEP = "xopt.step"


def mark(name: str) -> Any:
    """A context manager that puts an event of this name into torch's profile."""
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return fast(name) if fast is not None else torch.profiler.record_function(name)


class ModuleMarks:
    """From `install` to `remove`. `root` is the model whose modules have paths without a prefix; another module that
    is called from outside all modules is a root of its own, named after its class."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._open = threading.local()
        self._handles: list[Any] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        if root is not None:
            self._add_root(root, "")

    def install(self) -> None:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def roots(self) -> list[nn.Module]:
        return [root for root in (reference() for reference in self._roots) if root is not None]

    def title(self) -> str:
        """The classes of the roots."""
        return ", ".join(dict.fromkeys(type(root).__name__ for root in self.roots()))

    def modules(self) -> list[tuple[str, nn.Module]]:
        found = [(path, reference()) for reference, path in self._paths.values()]
        return [(path, module) for path, module in found if module is not None]

    def _add_root(self, root: nn.Module, name: str) -> None:
        self._roots.append(weakref.ref(root))
        for path, module in root.named_modules():
            full = ".".join(part for part in (name, path) if part)
            self._paths[id(module)] = weakref.ref(module), full

    def _path(self, module: nn.Module) -> str:
        known = self._paths.get(id(module))
        if known is None or known[0]() is not module:
            self._add_root(module, type(module).__name__)
            known = self._paths[id(module)]
        return known[1]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        opened = mark(PREFIX + self._path(module))
        opened.__enter__()
        self._stack().append(opened)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._stack()
        if stack:
            stack.pop().__exit__(None, None, None)

    def _stack(self) -> list[Any]:
        stack: list[Any] | None = getattr(self._open, "stack", None)
        if stack is None:
            stack = self._open.stack = []
        return stack
