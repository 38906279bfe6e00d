"""`--auto-optimize`: the models of an unchanged script are optimized at their first inference forward.

A model that infers has been told so by eval(), so that is where it is seen; nothing is added to what modules do when
they are called. It gets a forward of its own that is called once: this optimizes the model and takes itself away, so
that later forwards are exactly those of a model that the script has optimized. Only a process that the launcher has
started for the purpose does any of this (see `run_optimized`).
"""

from __future__ import annotations

import fnmatch
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import xopt


class Watch:
    """A context, in which models that are told to infer are optimized when they first do."""

    current: Watch | None = None

    def __init__(self, dtype: torch.dtype | None, leave: Sequence[str], say: Callable[[str], None]) -> None:
        """`leave`: patterns of names of classes that are left alone."""
        self._dtype = dtype
        self._leave = tuple(leave)
        self._say = say
        self._said: set[str] = set()
        self._lock = threading.RLock()
        self._original = nn.Module.train

    def __enter__(self) -> Watch:
        original, inside = self._original, threading.local()

        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            if getattr(inside, "depth", 0):  # a module's train calls that of each child
                return original(module, mode)
            inside.depth = 1
            try:
                result = original(module, mode)
            finally:
                inside.depth = 0
            _disarm(module)
            if not mode:
                self._arm(module)
            return result

        nn.Module.train = train  # type: ignore[assignment,method-assign]
        Watch.current = self
        return self

    def __exit__(self, *_: object) -> None:
        nn.Module.train = self._original  # type: ignore[method-assign]
        Watch.current = None

    def _arm(self, module: nn.Module) -> None:
        name = type(module).__name__
        if next(module.parameters(), None) is None or xopt.is_optimized(module):
            return
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._leave):
            self.say(f"{name} is left alone, as asked for")
        elif "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            self.say(f"{name} is left alone: its forward is not that of its class")
        else:
            module.__dict__["forward"] = FirstForward(module)

    def optimize(self, module: nn.Module) -> None:
        name = type(module).__name__
        with self._lock:
            if not isinstance(module.__dict__.get("forward"), FirstForward):
                return  # another thread was faster
            # Other threads that call the model meanwhile wait until it is whole again.
            barrier = module.register_forward_pre_hook(lambda *_: self._wait())
            _disarm(module)
            try:
                xopt.optimize(module, dtype=self._dtype, inplace=True)
            except Exception as error:  # the script would have run without us
                self.say(f"{name} could not be optimized: {type(error).__name__}: {error}")
                return
            finally:
                barrier.remove()
        report = xopt.report(module)
        entries = report.entries
        done = sum(entry.optimized for entry in entries)
        if not done:
            self.say(f"{name} is left as it is: none of its {len(entries)} layers can be optimized")
            return
        dtype = "its own dtype" if self._dtype is None else report.dtype
        self.say(f"{name} is optimized to {dtype}: {done} of its {len(entries)} layers, and the blocks around them")

    def _wait(self) -> None:
        with self._lock:
            pass

    def say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._say(message)


class FirstForward:
    """Stands in a module's `forward` attribute until it is called for inference. Holds its module by a weak
    reference, as every forward does that stands there."""

    stands_for_the_class = True
    """`optimize` takes it away: it is no forward that somebody wrote for this model."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        # Libraries look at the arguments that a model's forward takes.
        self.__signature__ = inspect.signature(type(module).forward.__get__(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "a forward outlived its module"
        watch = Watch.current
        if watch is None or not self._infers(module, watch):
            return type(module).forward(module, *args, **kwargs)
        watch.optimize(module)
        return module.forward(*args, **kwargs)

    def _infers(self, module: nn.Module, watch: Watch) -> bool:
        # What is being compiled or traced is not to be exchanged meanwhile.
        traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if torch.compiler.is_compiling() or traced or module.training:
            return False
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
            watch.say(
                f"{type(module).__name__} is left as it is while gradients are wanted: "
                "inference runs under torch.inference_mode() or torch.no_grad()"
            )
            return False
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstForward:
        module = self._module()
        assert module is not None, "a forward outlived its module"
        return FirstForward(memo.get(id(module), module))

    def __reduce__(self) -> Any:
        return FirstForward, (self._module(),)


def _disarm(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part.__dict__.get("forward"), FirstForward):
            del part.__dict__["forward"]
