"""What `optimize` did with a model, module by module, and why not."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from xopt import _C
from xopt.config import Config
from xopt.modules.block import PROGRAMS, Programs
from xopt.modules.root import left_to_cpu_of, tuning_of
from xopt.tuning import Tuned

if TYPE_CHECKING:
    from rich.table import Table

ATTRIBUTE = "_xopt_report"
_SHORT_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Entry:
    path: str
    """The module's name in the model; "" for the model itself."""
    kind: str
    """The module's class."""
    optimized: bool
    detail: str
    """What was done, or why it was left alone."""
    weights: int
    """Elements of its own parameters."""
    is_conv: bool = False
    """Whether it is a convolution, of whatever class."""


@dataclass(frozen=True)
class Fusion:
    """What a block of the model has come to. Blocks are recorded when they are first called."""

    path: str
    kind: str
    fused: tuple[str, ...]
    """The fused steps of its program; empty where it runs its own forward."""
    problem: str | None
    """Why it runs its own forward: the last reason, where it has been called at all."""


@dataclass(frozen=True)
class Report:
    """print() shows it grouped; `entries`, `fusions` and `to_json` hold every module."""

    level: str
    dtype: str
    entries: tuple[Entry, ...]
    config: Config
    notes: tuple[str, ...] = ()
    fusions: tuple[Fusion, ...] = ()
    defaults: tuple[str, ...] = ()
    """The instances that run what is not tuned: "gemm[bf16] amx"."""
    left_to_cpu: tuple[str, ...] = ()
    """With backend "sycl": kernels that the device lacks, and the CPU has run so far: "recurrent_gates f32"."""
    tuned: tuple[Tuned, ...] = ()
    """The calls that were tuned, or looked at and left to the heuristics (`xopt.tune`)."""
    multiply_adds: tuple[tuple[str, int], ...] = ()
    """Of the call that `xopt.report` was given: how many each operator does ("xopt.linear", "aten.bmm")."""

    @property
    def optimized_linear_share(self) -> float:
        """Of the weights of all linear and recurrent layers, each of which takes part in one multiply-add a row, those
        on xopt's kernels. Products that have no weight (attention) and convolutions are not counted."""
        others = [entry for entry in self.entries if not entry.is_conv]
        return _packed_share([each for each in others if _multiplies(each) or each.detail.startswith("packed")])

    @property
    def optimized_conv_share(self) -> float:
        """The same of the weights of all convolutions, each of which takes part in a multiply-add for each position of
        its output."""
        return _packed_share([entry for entry in self.entries if entry.is_conv])

    @property
    def multiply_add_share(self) -> float | None:
        """The share of that call's multiply-adds that runs on xopt's kernels; None without a call that has any."""
        total = sum(count for _, count in self.multiply_adds)
        ours = sum(count for op, count in self.multiply_adds if op.startswith("xopt."))
        return ours / total if total else None

    def to_json(self) -> str:
        names = ("optimized_linear_share", "optimized_conv_share", "multiply_add_share")
        shares = {name: getattr(self, name) for name in names}
        content = dataclasses.asdict(self) | shares
        return json.dumps(content, indent=2)

    def table(self) -> Table:
        from rich.table import Table

        table = Table("", "class", "modules", "weights", "what", title=f"xopt: level {self.level}, {self.dtype}")
        groups: dict[tuple[bool, str, str], list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault((entry.optimized, entry.kind, entry.detail), []).append(entry)
        for (optimized, kind, detail), entries in sorted(groups.items(), key=lambda group: not group[0][0]):
            weights = sum(entry.weights for entry in entries)
            what = detail if len(entries) > 1 or not entries[0].path else f"{detail} ({entries[0].path})"
            table.add_row("optimized" if optimized else "left", kind, str(len(entries)), f"{weights:,}", what)
        return table

    def fusion_table(self) -> Table:
        from rich.table import Table

        table = Table("block", "number", "fused", title="fused at the first call")
        groups: dict[tuple[str, tuple[str, ...], str], int] = {}
        for fusion in self.fusions:
            key = fusion.kind, fusion.fused, fusion.problem or ""
            groups[key] = groups.get(key, 0) + 1
        for (kind, fused, problem), count in groups.items():
            table.add_row(kind, str(count), ", ".join(fused) or f"its own forward: {problem}")
        return table

    def tuned_table(self) -> Table:
        from rich.table import Table

        table = Table("kernel", "size", "threads", "instance", "times as fast", title="tuned")
        for each in self.tuned:
            if not each.is_default:
                name = f"{each.kernel}[{each.dtype}]"
                table.add_row(name, each.size, str(each.threads), each.instance, f"{each.gain:.2f}")
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, width=120, markup=False)
        console.print(self.table())
        for kind, share in (
            ("linear layers", self.optimized_linear_share),
            ("convolutions", self.optimized_conv_share),
        ):
            if share or kind == "linear layers":
                console.print(f"{share:.1%} of the {kind}' weights run on xopt's kernels.")
        if self.multiply_add_share is not None:
            console.print(f"{self.multiply_add_share:.1%} of the call's multiply-adds run on xopt's kernels.")
            others = [f"{op} {count:,}" for op, count in self.multiply_adds if not op.startswith("xopt.")]
            if others:
                console.print(f"Torch's: {', '.join(others)}.")
        if self.fusions:
            console.print(self.fusion_table())
        elif any(entry.optimized for entry in self.entries):
            console.print("Blocks are fused when they are first called, or by optimize(..., sample_input=...).")
        if self.defaults:
            console.print(f"Instances: {', '.join(self.defaults)}.")
        if self.left_to_cpu:
            console.print(f"On the CPU, since SYCL devices have no such kernel: {', '.join(self.left_to_cpu)}.")
        if self.tuned:
            left = sum(each.is_default for each in self.tuned)
            console.print(f"Of {len(self.tuned)} shapes that were tuned, {left} were left to the heuristics.")
            if left < len(self.tuned):
                console.print(self.tuned_table())
        for note in self.notes:
            console.print(note)
        return text.getvalue()


def _multiplies(entry: Entry) -> bool:
    return re.search(r"Linear|LSTM|GRU|RNN", entry.kind) is not None


def _packed_share(entries: list[Entry]) -> float:
    total = sum(entry.weights for entry in entries)
    packed = sum(entry.weights for entry in entries if entry.detail.startswith("packed"))
    return packed / total if total else 0.0


def report(model: nn.Module, sample_input: Any = None) -> Report:
    """The report of the `optimize` call that made this model, with what its blocks have come to since.

    sample_input: a tensor, a tuple of arguments or a dict of keyword arguments, with which the model is called twice;
        the report then says which share of the call's multiply-adds runs on xopt's kernels.
    """
    found: Report | None = model.__dict__.get(ATTRIBUTE)
    if found is None:
        raise ValueError(f"report: model: expected what xopt.optimize returned, got a {type(model).__name__} without")
    multiply_adds = () if sample_input is None else tuple(_multiply_adds(model, sample_input))
    tuning = tuning_of(model)
    return dataclasses.replace(
        found,
        multiply_adds=multiply_adds,
        fusions=tuple(_fusions(model)),
        defaults=tuple(_default_instances(found.entries)) if _runs_on_cpu(model, found.config) else (),
        left_to_cpu=left_to_cpu_of(model),
        tuned=tuning.used if tuning is not None else (),
    )


def call_arguments(function: str, sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of a tensor, a tuple of arguments or a dict of keyword arguments. `function`: who was given it, for the error."""
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), {}
    if isinstance(sample_input, (tuple, list)):
        return tuple(sample_input), {}
    if isinstance(sample_input, Mapping):
        return (), dict(sample_input)
    kind = type(sample_input).__name__
    raise TypeError(f"{function}: sample_input: expected a tensor, a tuple or a dict of arguments, got {kind}")


def _multiply_adds(model: nn.Module, sample_input: Any) -> Iterator[tuple[str, int]]:
    args, kwargs = call_arguments("report", sample_input)
    with torch.no_grad():
        model(*args, **kwargs)  # what is computed while blocks are recorded does not count
        with FlopCounterMode(display=False) as counter:
            model(*args, **kwargs)
    for op, flop in counter.get_flop_counts().get("Global", {}).items():
        yield str(op), flop // 2


def _runs_on_cpu(model: nn.Module, config: Config) -> bool:
    return config.backend == "cpu" and all(parameter.device.type == "cpu" for parameter in model.parameters())


def _default_instances(entries: tuple[Entry, ...]) -> Iterator[str]:
    """Of the kernels that work on the packed weights."""
    packed = {(entry.is_conv, entry.detail.removeprefix("packed as ")) for entry in entries if entry.optimized}
    for is_conv, dtype in sorted(packed):
        short = _SHORT_DTYPES.get(dtype.partition(",")[0].partition(" ")[0])
        if short is not None:
            kernel = "conv" if is_conv else "gemm"
            yield f"{kernel}[{short}] {_C.find_kernel(kernel, short)}"


def is_optimized(model: nn.Module) -> bool:
    """Whether xopt.optimize returned it, and `report` tells of it."""
    return isinstance(model.__dict__.get(ATTRIBUTE), Report)


def _fusions(model: nn.Module) -> Iterator[Fusion]:
    """Of blocks that were called. Those inside a fused one are part of it: what kept one of them from a program of its
    own, in calls before there was one for all, is nobody's concern any more."""
    whole: str | None = None
    for path, module in model.named_modules():
        programs = module.__dict__.get(PROGRAMS)
        if not isinstance(programs, Programs) or not programs.was_tried:
            continue
        is_inside = whole is not None and path.startswith(whole)
        if programs.problem is None and not is_inside:
            whole = path and f"{path}."
        if programs.fused or not is_inside:
            yield Fusion(path, type(module).__name__, tuple(programs.fused), programs.problem)
