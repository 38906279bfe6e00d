"""Marks in the profiler's record that say which module is running: hooks on all modules, while a profile is taken.

They are torch's global hooks, which stand on no module: an optimized model sees none and goes on to run fused.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as hooks

PREFIX = "xopt.module|"
STEP = "xopt.step"


# A context manager that puts an event of a name into torch's profile; the public one takes ten times as long.
mark: Any = getattr(torch._C._profiler, "_RecordFunctionFast", torch.profiler.record_function)


class ModuleMarks:
    """From `install` to `remove`. `root` is the model whose modules have paths without a prefix; another module that
    is called from outside all modules is a root of its own, named after its class."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._open = threading.local()
        self._handles: list[Any] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        if root is not None:
            self._add_root(root, "")

    def install(self) -> None:
        """Unless they are."""
        self._handles = self._handles or [
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
        found = [(name.removeprefix(PREFIX), reference()) for reference, name in self._names.values()]
        return [(path, module) for path, module in found if module is not None]

    def _add_root(self, root: nn.Module, name: str) -> None:
        self._roots.append(weakref.ref(root))
        for path, module in root.named_modules():
            full = ".".join(part for part in (name, path) if part)
            self._names[id(module)] = weakref.ref(module), PREFIX + full

    def _name(self, module: nn.Module) -> str:
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:
            self._add_root(module, type(module).__name__)
            known = self._names[id(module)]
        return known[1]

    # The hooks run for every module of every step, so they do no more than they have to.

    def _enter(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            return
        opened = mark(self._name(module))
        opened.__enter__()
        try:
            self._open.stack.append(opened)
        except AttributeError:
            self._open.stack = [opened]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_compiling():
            return
        stack = getattr(self._open, "stack", None)
        if stack:
            stack.pop().__exit__(None, None, None)
