"""The forward of a whole optimized model: under autocast and with its images' channels last inside, and outside with
the dtypes and layouts of its source.

Autocast is what lets the optimized dtype flow between layers, those that xopt has no kernel for included. A script
that has autocast on already keeps its own, and gets what autocast gives. A small model is a block as well.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xopt import sycl
from xopt.config import Config
from xopt.graph.autocast import autocast
from xopt.modules.block import PROGRAMS, Block, Forward, Programs, can_be_block, is_small, run, source_forward
from xopt.modules.direct import Direct
from xopt.modules.flow import Flow, device_type
from xopt.modules.kept_class import keep_class
from xopt.modules.layout import Layout, image_dims
from xopt.modules.own_product import OwnProducts
from xopt.tuning import ModelTuning

_is_tracing = torch._C._is_tracing


class RootForward:
    """Stands in a module's `forward` attribute, so that the module keeps its very class.

    Its module is held by a weak reference: a model that referred to itself would keep its memory until the garbage
    collector comes round. `own`: the forward that somebody had given the instance before, which is what runs inside.
    """

    def __init__(
        self,
        module: nn.Module,
        flow: Flow | None,
        dims: frozenset[int] = frozenset(),
        tuning: ModelTuning | None = None,
        backend: str = "cpu",
        own: Callable[..., Any] | None = None,
    ) -> None:
        self._own = own
        self._module = weakref.ref(module)
        self.tuning = tuning
        self._layout = Layout(dims)
        self._flow = flow
        self._direct = Direct(self._layout, flow)
        self._backend = backend
        self.left_to_cpu: set[str] = set()
        # Libraries look at the arguments that a model's forward takes.
        self.__signature__ = inspect.signature(own or type(module).forward.__get__(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "a forward outlived its module"
        if self._backend == "sycl":
            with sycl.device("cpu"):
                before = sycl.calls_left_to_cpu()
                result = self._call(module, args, kwargs)
            after = sycl.calls_left_to_cpu()
            self.left_to_cpu |= {name for name, count in after.items() if count > before.get(name, 0)}
            return result
        if self.tuning is not None and not torch.compiler.is_compiling():
            with self.tuning:
                return self._call(module, args, kwargs)
        return self._call(module, args, kwargs)

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        programs: Programs | None = module.__dict__.get(PROGRAMS)
        if programs is not None and programs.has_direct and not torch.compiler.is_compiling() and not _is_tracing():
            result = self._direct(module, programs, args, kwargs)
            if result is not NotImplemented:
                return result
        if self._flow is None:
            return self._layout.call(self._forward, module, args, kwargs)
        device = device_type(module, (*args, *kwargs.values()))
        if torch.is_autocast_enabled(device):
            return self._layout.call(self._forward, module, args, kwargs)
        with autocast(device, self._flow.inside):
            return self._layout.call(self._forward_restored, module, args, kwargs)

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(module, self._source_forward(module), args, kwargs)

    def _forward_restored(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With results of the source's dtype. A program has that recorded, so that what computes them writes it."""
        assert self._flow is not None, "there is a dtype to restore"
        forward = self._flow.restored(self._source_forward(module))
        return run(module, forward, args, kwargs, results=self._flow.source)

    def _source_forward(self, module: nn.Module) -> Forward:
        return source_forward(module) if self._own is None else self._call_own

    def _call_own(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert self._own is not None, "there is a forward to call"
        return self._own(*args, **kwargs)

    @property
    def __code__(self) -> Any:
        """torch.export says by it where a model's forward stands."""
        module = self._module()
        assert module is not None, "a forward outlived its module"
        return inspect.unwrap(self._own or type(module).forward).__code__

    def __deepcopy__(self, memo: dict[int, Any]) -> RootForward:
        module = self._module()
        assert module is not None, "a forward outlived its module"
        module = memo.get(id(module), module)
        tuning, own = copy.deepcopy(self.tuning, memo), copy.deepcopy(self._own, memo)
        return RootForward(module, self._flow, self._layout.given, tuning, self._backend, own)

    def __reduce__(self) -> Any:
        return RootForward, (
            self._module(),
            self._flow,
            self._layout.given,
            self.tuning,
            self._backend,
            self._own,
        )


def make_root(module: nn.Module, config: Config, flow: Flow | None) -> None:
    """Gives a model its forward, if it needs one: for a dtype of its own inside, for the layout of images, for another
    backend, or because it is a block."""
    if getattr(module.__dict__.get("forward"), "stands_for_the_class", False):  # as the launcher's does
        del module.__dict__["forward"]
    own = module.__dict__.get("forward")
    if isinstance(own, RootForward):
        return
    if isinstance(module, OwnProducts):
        keep_class(module, OwnProducts)
    small = can_be_block(module) or (isinstance(module, Block) and own is None and is_small(module))
    dims = image_dims(module)
    tuned = config.autotune != "off"
    runs = small or PROGRAMS in module.__dict__
    if flow is None and not runs and not dims and not tuned and config.backend == "cpu":
        return
    tuning = ModelTuning(config.autotune) if tuned else None
    module.__dict__["forward"] = RootForward(module, flow, dims, tuning, config.backend, own)
    if small:
        module.__dict__[PROGRAMS] = Programs(config)


def tuning_of(module: nn.Module) -> ModelTuning | None:
    forward = module.__dict__.get("forward")
    return forward.tuning if isinstance(forward, RootForward) else None


def left_to_cpu_of(module: nn.Module) -> tuple[str, ...]:
    """With backend "sycl": the kernels that its forwards found on the CPU only, "name dtype"."""
    forward = module.__dict__.get("forward")
    return tuple(sorted(forward.left_to_cpu)) if isinstance(forward, RootForward) else ()


def make_tuned(module: nn.Module, mode: str) -> ModelTuning:
    """Has the model's forward use what was tuned from now on."""
    forward = module.__dict__.get("forward")
    if forward is None:
        forward = module.__dict__["forward"] = RootForward(module, None)
    if not isinstance(forward, RootForward):
        raise ValueError(f"tune: model: expected a forward of its class, got {forward!r} that the instance was given")
    if forward.tuning is None:
        forward.tuning = ModelTuning(mode)
    forward.tuning.mode = mode
    return forward.tuning
