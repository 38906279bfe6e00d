"""`optimize`: the same model back, with its hot modules on xopt's kernels."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from xopt import config as settings
from xopt import machine
from xopt.config import Config
from xopt.modules.base import Context, dtype_name, takes_halves
from xopt.modules.block import make_block, set_flow
from xopt.modules.computed_weight import is_computed
from xopt.modules.flow import Flow
from xopt.modules.root import make_root
from xopt.plan.plan import Decision, make_plan
from xopt.report import ATTRIBUTE, Entry, Report, call_arguments

Model = TypeVar("Model", bound=nn.Module)

_log = logging.getLogger("xopt")
_LEVELS = ("O0", "O1")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RETURNED_TOGETHER = 16 << 20  # bytes of source weights, at most, that go back to the system at once

# Arguments of Intel Extension for PyTorch's optimize that ask for nothing that would have to be done here.
_ACCEPTED = (
    *("replace_dropout_with_identity", "concat_linear"),
    *("split_master_weight_for_bf16", "fuse_update_step", "auto_kernel_selection"),
)
# Those that are switches of Config.
_SWITCHES = {
    "weights_prepack": ("weights_prepack", "conv_prepack", "recurrent_prepack"),
    "optimize_lstm": ("recurrent_prepack",),
    "conv_bn_folding": ("conv_bn_folding",),
    "linear_bn_folding": ("linear_bn_folding",),
}
_REFUSED = {
    "optimizer": "training is not supported yet",
    "graph_mode": "xopt works in eager mode only; use torch.compile on the result",
}


def optimize(
    model: Model,
    dtype: torch.dtype | None = None,
    *,
    inplace: bool = False,
    level: str = "O1",
    config: Config | None = None,
    sample_input: Any = None,
    **options: Any,
) -> Model:
    """Returns `model` with its linear and recurrent layers and its convolutions packed for this CPU, its blocks fused
    and its embeddings in `dtype`.

    dtype: float32, bfloat16 or float16 for the weights of what is optimized; None keeps each weight's own.
    inplace: change `model` itself. Otherwise it is left as it is and a copy is returned, which shares with it what
        the optimization does not touch while it is made, so that the peak stays low.
    level: "O0" changes nothing and only writes the report; "O1" does everything that `config` allows.
    sample_input: a tensor, a tuple of arguments or a dict of keyword arguments to call the model with once, so that
        its blocks are fused now. Otherwise each is when it is first called.
    options: the keyword arguments of Intel Extension for PyTorch's `optimize`. `weights_prepack`, `optimize_lstm`,
        `conv_bn_folding` and `linear_bn_folding` are switches of `Config`; those that mean nothing here are logged,
        those that ask for what is not done are errors.

    The model keeps its class, names, hooks and keys. Its parameters no longer require gradients; gradients with
    respect to inputs are right. A model in training mode is returned as it is, and its report says so.
    """
    config = _read_options(options, config or Config())
    _check_arguments(model, dtype, level)
    sample = None if sample_input is None else call_arguments("optimize", sample_input)
    _integrations()
    with _mode_to_optimize_in(model, inplace):
        return _optimized(model, dtype, inplace, level, config, sample)


def _optimized(
    model: Model,
    dtype: torch.dtype | None,
    inplace: bool,
    level: str,
    config: Config,
    sample: tuple[tuple[Any, ...], dict[str, Any]] | None,
) -> Model:
    if not inplace:
        model = _copy(model, dtype, level, config)
    context = Context(dtype, config)
    source_dtype = _floating_dtype(model)
    decisions = make_plan(model, config, context)
    if model.training:
        return _finish(model, level, dtype, config, _left(decisions, "it is in training mode"), ("Call eval() first.",))
    if level == "O0":
        return _finish(model, level, dtype, config, _left(decisions, "level O0"))
    entries = _carry_out_all(decisions, context)
    optimized = any(entry.optimized for entry in entries)
    if optimized:
        for parameter in filter(_is_initialized, model.parameters()):
            parameter.requires_grad_(False)
    flows = optimized and config.autocast and dtype in (torch.bfloat16, torch.float16)
    flows = flows and all(map(takes_halves, model.modules()))
    inside = dtype if flows and source_dtype not in (dtype, None) else None
    _make_blocks(model, config, inside, source_dtype)
    note = f"Computes under autocast to {dtype_name(inside)}; takes and returns {dtype_name(source_dtype)}."
    _finish(model, level, dtype, config, entries, (note,) if inside is not None else ())
    if sample is not None:
        model(*sample[0], **sample[1])
    return model


@contextmanager
def _mode_to_optimize_in(model: nn.Module, inplace: bool) -> Iterator[None]:
    """Not inference mode, also where the caller is in it: nobody counts changes of tensors that are made there, so that
    what is computed from them has to be computed in each call. A model whose own tensors are such can be changed only
    there, though."""
    stays = inplace and any(
        tensor.is_inference() for tensor in filter(_is_initialized, (*model.parameters(), *model.buffers()))
    )
    with torch.inference_mode(stays and torch.is_inference_mode_enabled()), torch.no_grad():
        yield


def _integrations() -> list[Any]:
    """Those of libraries that are in use; importing one lets it bring replacements of its own."""
    used = [name for name in ("transformers", "diffusers") if name in sys.modules]
    return [importlib.import_module(f"xopt.integrations.{name}") for name in used]


def _make_blocks(
    model: nn.Module, config: Config, inside: torch.dtype | None, source_dtype: torch.dtype | None
) -> None:
    if config.fuse_attention:
        for integration in _integrations():
            integration.take_attention()
    for part in list(model.modules()):
        if part is not model:
            make_block(part, config)
    flow = None if inside is None or source_dtype is None else Flow(inside, source_dtype)
    make_root(model, config, flow)
    set_flow(model, flow)


def _read_options(options: dict[str, Any], config: Config) -> Config:
    for name, value in options.items():
        if name in _REFUSED:
            if value not in (None, False):
                raise NotImplementedError(f"optimize: {name}: {_REFUSED[name]}")
        elif name in _SWITCHES:
            changed = {switch: bool(value) for switch in _SWITCHES[name] if value is not None}
            config = Config(**{**vars(config), **changed})
        elif name in _ACCEPTED:
            if value is not None:
                _log.warning("optimize: %s has no effect in xopt", name)
        else:
            known = ", ".join(("model", "dtype", "inplace", "level", "config", *_SWITCHES, *_ACCEPTED))
            raise TypeError(f"optimize: unknown argument {name!r}; known arguments: {known}")
    return config


def _check_arguments(model: nn.Module, dtype: torch.dtype | None, level: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize: model: expected a torch.nn.Module, got {type(model).__name__}")
    if dtype is not None and dtype not in _DTYPES:
        names = ", ".join(dtype_name(known) for known in _DTYPES)
        raise ValueError(f"optimize: dtype: expected one of {names} or None, got {dtype}")
    if level not in _LEVELS:
        raise ValueError(f"optimize: level: expected one of {', '.join(_LEVELS)}, got {level!r}")


def _copy(model: Model, dtype: torch.dtype | None, level: str, config: Config) -> Model:
    """A deep copy, but for the weights that are about to be replaced anyway: those are shared until then."""
    memo: dict[int, Any] = {}
    if level != "O0" and not model.training:
        context = Context(dtype)
        for decision in make_plan(model, config, context):
            names = () if decision.replacement is None else decision.replacement.packed_names(decision.module)
            weights = (decision.module._parameters.get(name) for name in names)
            memo |= {id(weight): weight for weight in weights if weight is not None}
    for module in model.modules():
        memo |= _copies(module)
    return copy.deepcopy(model, memo)  # without gradients, or TorchScript's copies would be results of the originals


def _copies(module: nn.Module) -> dict[int, Any]:
    """Of what torch's own deepcopy refuses: some sparse layouts, and weights that a hook computes."""
    copies: dict[int, Any] = {}
    for parameter in module._parameters.values():
        if parameter is not None and parameter.layout != torch.strided:
            copies[id(parameter)] = nn.Parameter(parameter.clone(), parameter.requires_grad)
    for value in module.__dict__.values():
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            copies[id(value)] = value.detach().clone()
    return copies


def _floating_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that the model as a whole computes in: its first floating parameter's."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point), None)


def _carry_out_all(decisions: list[Decision], context: Context) -> tuple[Entry, ...]:
    """Source weights are freed one by one amid others, where malloc would keep their memory until the end. What it
    keeps and the layer that is packed are never more than the largest layer."""
    freed = [_own_bytes(decision.module) if decision.replacement is not None else 0 for decision in decisions]
    most = min(max(freed, default=0), _RETURNED_TOGETHER)
    entries, unreturned = [], 0
    for decision, size in zip(_with_progress(decisions), freed, strict=True):
        if unreturned > 0 and unreturned + size > most:
            machine.give_back_freed_memory()
            unreturned = 0
        entries.append(_carry_out(decision, context))
        unreturned += size
    machine.give_back_freed_memory()
    return tuple(entries)


def _carry_out(decision: Decision, context: Context) -> Entry:
    entry = _entry(decision, decision.reason)
    if decision.replacement is not None:
        detail = decision.replacement.replace(decision.module, context)
        entry = dataclasses.replace(entry, optimized=True, detail=detail)
    _log.info("%s (%s): %s", entry.path or "the model", entry.kind, entry.detail)
    return entry


def _entry(decision: Decision, reason: str) -> Entry:
    module = decision.module
    kind, is_conv = type(module).__name__, isinstance(module, _ConvNd)
    return Entry(decision.path, kind, False, reason, _own_weights(module), is_conv)


def _left(decisions: list[Decision], reason: str) -> tuple[Entry, ...]:
    return tuple(_entry(decision, reason) for decision in decisions)


def _own_weights(module: Any) -> int:
    return sum(weight.numel() for weight in _own(module))


def _own_bytes(module: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in _own(module))


def _own(module: Any) -> list[torch.Tensor]:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if is_computed(module):
        own.append(module.weight)
    return [weight for weight in own if _is_initialized(weight)]


def _is_initialized(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor)


def _finish(
    model: Model,
    level: str,
    dtype: torch.dtype | None,
    config: Config,
    entries: tuple[Entry, ...],
    notes: tuple[str, ...] = (),
) -> Model:
    name = "source dtype" if dtype is None else dtype_name(dtype)
    model.__dict__[ATTRIBUTE] = Report(level, name, entries, config, notes)
    return model


def _with_progress(decisions: list[Decision]) -> Iterable[Decision]:
    """A bar on a terminal for models that take long enough to make one wonder, and nothing elsewhere."""
    if len(decisions) < 50 or not sys.stderr.isatty():
        return decisions
    from rich.console import Console
    from rich.progress import track

    return track(decisions, "xopt: packing weights", console=Console(stderr=True), transient=True)


if settings.current.verbose and not _log.handlers:
    _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO)
