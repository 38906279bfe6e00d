"""Any module that is made of others: runs what it computes as a program of fused steps, where its forward allows.

At the first call of each kind (`graph/signature.py`) the forward is recorded and the patterns are tried on the record.
Where that fails, or nothing is found to fuse, the forward runs as it always did, and the blocks inside get their try.
A program is left, too, while gradients are wanted or somebody has put a hook on a module inside.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from xopt.config import Config
from xopt.graph.autocast import is_inside
from xopt.graph.changes import TooManySteps
from xopt.graph.hooks import are_awake, have_sleeping_hooks, hooked
from xopt.graph.program import EPOCH, Program
from xopt.graph.record import ChangesItself, Recorder, active, record
from xopt.graph.signature import is_tensor, signature
from xopt.graph.steps import OtherSizes
from xopt.graph.symbol import CannotRecord, has_symbolic_objects, is_symbol, is_symbolic
from xopt.modules import channels_last
from xopt.modules.base import Replacement, derive, has_kernels
from xopt.modules.called import Own, with_substitutes
from xopt.modules.chain_graph import chain_steps
from xopt.modules.direct import is_direct
from xopt.modules.flow import Flow
from xopt.modules.gradients import is_transformed
from xopt.modules.kept_class import as_derived
from xopt.modules.layout import Layout, image_dims
from xopt.modules.pattern import Pattern, fused_steps, remove_unused
from xopt.modules.substitute import Watch, run_plainly, run_substituted

_log = logging.getLogger("xopt")

PROGRAMS = "_xopt_programs"
_TORCHS_OWN = (
    nn.Sequential,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
_MOST_MODULES = 2048  # as one program, which is made anew for each change inside
_MOST_SIGNATURES = 16
_MOST_VARIANTS = 4  # of one signature, for sizes that take different branches
_MOST_FAILURES = 16
_MOST_CALLS_UNTIL_SETTLED = 2  # a forward may leave something behind, which its next call finds and leaves as it is
_NUMBERS = (bool, int, float)

Forward = Callable[..., Any]


class _CannotFuse(Exception):
    """An error of our own, of which the forward knows nothing."""


class Programs:
    """A block's programs by the kind of call. Copies of the module start with none."""

    def __init__(self, config: Config, flow: Flow | None = None, dims: frozenset[int] = frozenset()) -> None:
        self.config = config
        self.flow = flow
        """Of a model that was optimized to another dtype."""
        self.layout = Layout(dims) if dims else None
        """Of a part of a model with convolutions, for those who enter it themselves."""
        self.fused: list[str] = []
        """What the programs fuse, in words."""
        self.problem: str | None = None
        """Why the last recording did not end in a program."""
        self.has_direct = False
        """Whether there is a program that looks at nothing that is set up for a whole model (direct.py)."""
        self._by_signature: dict[Any, list[Program]] = {}
        self._complete: set[Any] = set()
        self._too_long: dict[Any, int] = {}
        """By the kind of call: how many elements the smallest had that went step by step along a dimension."""
        self._watches: dict[Any, Watch] = {}
        """By the kind of call: what substituting functions was to a forward without a program."""
        self._failures = 0
        self._changes = 0
        self._unsettled = False
        self._lock = threading.Lock()

    def find(self, module: nn.Module, forward: Forward, key: Any, args: Any, kwargs: Any) -> list[Program]:
        """The programs for calls of a kind: several where the forward branches on sizes."""
        try:
            return self._by_signature[key]
        except KeyError:
            pass
        if is_symbolic(args, kwargs) or len(self._by_signature) >= _MOST_SIGNATURES:
            return []
        self.add(module, forward, key, args, kwargs)
        return self.known(key)

    def known(self, key: Any) -> list[Program]:
        """The same of those that are there."""
        return self._by_signature.get(key, [])

    def add(self, module: nn.Module, forward: Forward, key: Any, args: Any, kwargs: Any) -> Program | None:
        """One more program, for the sizes of this call; None: there can be none."""
        with self._lock:
            if key in self._too_long and _elements_of(args, kwargs) >= self._too_long[key]:
                return None
            known = self._by_signature.setdefault(key, [])
            if key in self._complete or is_symbolic(args, kwargs):
                return None
            program = self._make(module, forward, key, args, kwargs)
            if program is not None:
                self._by_signature[key] = [program, *known]
                self.has_direct |= program.is_direct
            if program is None and self._unsettled:
                if not known:
                    del self._by_signature[key]  # another call may make one
            elif program is None or len(known) + 1 >= _MOST_VARIANTS:
                self._complete.add(key)
            return program

    def run_as_it_is(self, module: nn.Module, forward: Forward, key: Any, args: Any, kwargs: Any) -> Any:
        """A forward without a program, in which single functions are substituted."""
        watch = self._watches.get(key, Watch.needed)
        if watch is Watch.idle:
            return forward(module, *args, **kwargs)
        if watch is Watch.costly:
            return run_plainly(forward, (module, *args), kwargs)
        result, watch = run_substituted(self.config, forward, (module, *args), kwargs)
        if key in self._watches or len(self._watches) < _MOST_SIGNATURES:
            self._watches[key] = watch
        return result

    def run_after(self, problem: Exception, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """A forward whose program has failed: for sizes that cannot be, of which it may know, or raises in its own
        words. If it does neither, what went wrong is not hidden."""
        result = forward(module, *args, **kwargs)
        failed = f"its program failed where its own forward did not: {type(problem).__name__}: {problem}"
        if failed != self.problem:
            self.problem = failed
            _log.warning("%s: %s", type(module).__name__, failed)
        return result

    @property
    def was_tried(self) -> bool:
        return self.problem is not None or bool(self.fused)

    def drop(self, module: nn.Module, key: Any) -> None:
        """Forgets a program that no longer fits its module, so that the next call makes another; but not for ever,
        and not for hooks, which come and go."""
        if any(hooked(part) for part in module.modules() if part is not module):
            return
        with self._lock:
            self._failures += 1
            self._by_signature.pop(key, None)
            self._complete.discard(key)
            if self._failures >= _MOST_FAILURES:
                self._by_signature[key] = []
                self._complete.add(key)

    def _make(self, module: nn.Module, forward: Forward, key: Any, args: Any, kwargs: Any) -> Program | None:
        self._unsettled = False
        try:
            inside = [part for part in module.modules() if part is not module]
            if any(map(hooked, inside)):
                raise CannotRecord("there is a hook inside")
            if are_awake() and have_sleeping_hooks(inside):
                self._unsettled = True
                raise CannotRecord("there is a hook inside, which is awake")
            if not all(has_kernels(value.device) for value in signature(args, kwargs)[1] if is_tensor(value)):
                raise CannotRecord("its inputs are on a device that there are no kernels for")
            recorder = record(as_derived(module), forward, args, kwargs)
            fused, program = self._fuse(module, recorder)
        except ChangesItself as problem:
            self.problem = str(problem)
            self._changes += 1
            self._unsettled = self._changes <= _MOST_CALLS_UNTIL_SETTLED
        except TooManySteps as problem:
            self.problem = str(problem)
            self._too_long[key] = _elements_of(args, kwargs)
            self._unsettled = True
        except CannotRecord as problem:
            self.problem = str(problem)
        except _CannotFuse as problem:
            self.problem = str(problem)
            _log.warning("%s: %s", type(module).__name__, problem)
        except Exception as problem:  # whatever a forward does when it meets a symbol: it is not for us to judge
            self.problem = f"{type(problem).__name__}: {problem}"
        else:
            self.fused = fused or self.fused
            self.problem = None if fused else "there is nothing to fuse"
            _log.info("%s: fused %s", type(module).__name__, ", ".join(fused) or "nothing")
            return program
        _log.info("%s runs its own forward: %s", type(module).__name__, self.problem)
        return None

    def _fuse(self, module: nn.Module, recorder: Recorder) -> tuple[list[str], Program | None]:
        """What a recording fuses, and its program. Unlike recording, this meets nothing but what is ours."""
        try:
            fused = apply_patterns(recorder, self.config)
            chain_steps(recorder.graph, channels_last.is_inside())
            return fused, Program(module, recorder, is_direct(recorder.graph)) if fused else None
        except CannotRecord:
            raise
        except Exception as problem:
            raise _CannotFuse(f"what was recorded could not be fused: {type(problem).__name__}: {problem}") from problem

    def __deepcopy__(self, memo: dict[int, Any]) -> Programs:
        return Programs(self.config, self.flow, self._dims())

    def __reduce__(self) -> Any:
        return Programs, (self.config, self.flow, self._dims())

    def _dims(self) -> frozenset[int]:
        return frozenset() if self.layout is None else self.layout.given


def _elements_of(args: Any, kwargs: Any) -> int:
    return sum(value.numel() for value in signature(args, kwargs)[1] if is_tensor(value))


def apply_patterns(recorder: Recorder, config: Config) -> list[str]:
    """Tries all of them; what came of it, in words."""
    for pattern in sorted(Pattern.__subclasses__(), key=lambda pattern: (pattern.stage, pattern.__name__)):
        if pattern.switch is None or getattr(config, pattern.switch):
            pattern.rewrite(recorder.graph)
            remove_unused(recorder.graph)
    return fused_steps(recorder.graph)


def run(
    module: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: torch.dtype | None = None,
) -> Any:
    """`forward(module, *args, **kwargs)`, as a program where there can be one. `results`: what dtype the forward turns
    its results into, if it does, which tells it from another of this module."""
    programs: Programs | None = module.__dict__.get(PROGRAMS)
    if programs is None or module.training or _is_compiled():
        return forward(module, *args, **kwargs)
    if (_global_forward_hooks or _global_forward_pre_hooks) and _globally_hooked():
        return forward(module, *args, **kwargs)
    if active.recorder is not None and not has_symbolic_objects(args, kwargs):
        return active.recorder.call_with_weights(module, forward, args, kwargs)
    if is_transformed():
        return forward(module, *args, **kwargs)
    if programs.layout is not None and not channels_last.is_entered():

        def inside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(module, forward, args, kwargs, results)

        return programs.layout.call(inside, module, args, kwargs)
    key, values = signature(args, kwargs)
    if programs.flow is not None and key[0] is key[1] is None and not is_inside():
        return programs.flow.enter(run, module, forward, args, kwargs)
    key = (results, channels_last.is_inside(), key)
    found = programs.find(module, forward, key, args, kwargs)
    if torch.is_grad_enabled() and _wants_gradient(module, values):
        return forward(module, *args, **kwargs)
    if not found or not all(program.may_run() for program in found):
        return programs.run_as_it_is(module, forward, key, args, kwargs)
    for program in found:
        try:
            result = program(module, values)
        except OtherSizes:
            continue
        except Exception as problem:
            if program.has_effects:
                raise
            return programs.run_after(problem, module, forward, args, kwargs)
        if result is not NotImplemented:
            return result
        programs.drop(module, key)
        return forward(module, *args, **kwargs)
    else:
        programs.add(module, forward, key, args, kwargs)  # for the next call of these sizes
    return forward(module, *args, **kwargs)


def _globally_hooked() -> bool:
    """Whether somebody's hook is called for all modules. Torch's own and the profiler's only look on, and are to see
    what happens without them."""
    hooks = (*_global_forward_hooks.values(), *_global_forward_pre_hooks.values())
    return any(not (getattr(hook, "__module__", None) or "").startswith(("torch.", "xopt.")) for hook in hooks)


def _wants_gradient(module: nn.Module, values: list[Any]) -> bool:
    tensors = [*(value for value in values if is_tensor(value)), *module.parameters()]
    return any(tensor.requires_grad for tensor in tensors)


class Block(nn.Module):
    """The mixin of a derived class; see `derive`."""

    @classmethod
    def _xopt_attributes(cls, source: type[nn.Module]) -> dict[str, Any]:
        source_forward = source.forward
        own = _own_of(source_forward)

        @functools.wraps(source_forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run(self, _chosen(self, source_forward, own), args, kwargs)

        return {"forward": forward}

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dict__.get(name)
        is_number = type(known) is type(value) or (type(known) is int and is_symbol(value) and isinstance(value, int))
        if is_number and type(known) in _NUMBERS and known == value:
            return  # a forward that sets what it finds (Swin's size of windows) has changed nothing
        super().__setattr__(name, value)
        self.__dict__[EPOCH] = self.__dict__.get(EPOCH, 0) + 1

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__[EPOCH] = self.__dict__.get(EPOCH, 0) + 1


_own_of = functools.cache(with_substitutes)


def _chosen(module: nn.Module, forward: Forward, own: Own | None) -> Forward:
    """The forward, or its copy that finds substitutes."""
    programs: Programs | None = None if own is None else module.__dict__.get(PROGRAMS)
    if own is None or programs is None or _is_compiled():
        return forward
    return own.forward if all(getattr(programs.config, switch) for switch in own.switches) else forward


def source_forward(module: nn.Module) -> Forward:
    """The forward of the class that a module had before it became a block."""
    forward: Forward = type(module).forward
    if isinstance(module, Block):
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward if _is_compiled() else _chosen(module, forward, _own_of(forward))


def _is_compiled() -> bool:
    return torch.compiler.is_compiling() or torch._C._is_tracing()


class TensorBlock(Block):
    """A block with parameters or buffers of its own: while it is recorded, it reads them as symbols. Torch's own
    parser takes no symbol for a size where it has a tensor before it (`self.cls_token.expand(batch, -1, -1)`)."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if torch.compiler.is_compiling() or active.recorder is None or not isinstance(value, torch.Tensor):
            return value
        return active.recorder.symbol_of(value)


def make_block(module: nn.Module, config: Config) -> bool:
    """Turns a module into a block, in place, if it is one that has something inside; whether it did."""
    if not can_be_block(module):
        return False
    try:
        has_tensors = bool(module._parameters or module._buffers)
        module.__class__ = derive(TensorBlock if has_tensors else Block, type(module))
    except TypeError:  # a class whose instances have another layout
        return False
    module.__dict__[PROGRAMS] = Programs(config)
    return True


def set_flow(model: nn.Module, flow: Flow | None) -> None:
    """What blocks need to know that somebody enters by a method which is not the model's forward."""
    has_images = bool(image_dims(model))
    for part in model.modules():
        programs: Programs | None = part.__dict__.get(PROGRAMS)
        if programs is None:
            continue
        programs.flow = flow
        dims = image_dims(part) if has_images and part is not model else frozenset()
        programs.layout = Layout(dims) if dims else None


def can_be_block(module: nn.Module) -> bool:
    kind = type(module)
    if issubclass(kind, (Replacement, Block, torch.jit.ScriptModule)) or "forward" in module.__dict__:
        return False
    if kind.__module__.startswith("torch.") and kind not in _TORCHS_OWN:
        return False
    if not module._modules and not module._parameters:
        return False
    return kind.forward is not nn.Module.forward and is_small(module)


def is_small(module: nn.Module) -> bool:
    return sum(1 for _ in itertools.islice(module.modules(), _MOST_MODULES + 1)) <= _MOST_MODULES
