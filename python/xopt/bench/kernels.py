"""Times products and convolutions of common models against torch's own, and against the machine's roofs.

All contenders take turns in this process. Weights rotate over enough copies that they do not stay in L2 (twice the
last-level cache, up to 512 MiB a contender). No contender is timed before its result is checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from xopt.bench import conv_peers, peers, report
from xopt.bench.conv_problem import check_conv, make_conv_problem, make_conv_weight
from xopt.bench.conv_shapes import DTYPES as CONV_DTYPES
from xopt.bench.conv_shapes import ConvShape, all_convs, parse_convs, quick_convs
from xopt.bench.errors import BenchError, UnavailableError, WrongResultError
from xopt.bench.peers import Contender, Packed
from xopt.bench.problem import check_result, in_bf16, make_problem, make_weight
from xopt.bench.results import INT8_GAIN_ROWS, Case
from xopt.bench.rotation import Caches, Rotation, known_caches, outputs_kept_mapped, plan_rotation
from xopt.bench.shapes import DTYPES, Shape, all_shapes, parse_dtypes, parse_shapes, quick_shapes
from xopt.bench.turns import Runner, make_runner, take_turns, timing_of
from xopt.roofs import higher_of, measure_roofs

FULL_SECONDS = 0.2
QUICK_SECONDS = 0.1
LEAST_ROUNDS = 3


AnyShape = Shape | ConvShape


@dataclass(frozen=True)
class Kind:
    """What is measured: the operands of a shape, how a result is checked, and who takes part."""

    make_weight: Callable[[str, Any], Any]
    make_problem: Callable[[Any, Any], Any]
    check: Callable[[Any, torch.Tensor, str], None]
    contenders: Callable[[str, Any], Sequence[Contender]]


PRODUCT = Kind(
    make_weight=lambda dtype, shape: make_weight(dtype, shape.n, shape.k),
    make_problem=make_problem,
    check=check_result,
    contenders=lambda dtype, shape: peers.contenders(dtype),
)
CONVOLUTION = Kind(make_conv_weight, make_conv_problem, check_conv, conv_peers.contenders)


@dataclass(frozen=True)
class Plan:
    shapes: Sequence[Shape]
    dtypes: Sequence[str]
    threads: int
    least_rounds: int
    seconds: float  # a contender and shape
    convs: Sequence[ConvShape] = ()

    def layers(self) -> Iterator[tuple[str, Kind, list[AnyShape]]]:
        """Shapes of one layer and dtype at a time."""
        for dtype in self.dtypes:
            for _, of_layer in groupby(self.shapes, key=lambda shape: shape.layer):
                yield dtype, PRODUCT, list(of_layer)
            if dtype in CONV_DTYPES:
                for shape in self.convs:
                    yield dtype, CONVOLUTION, [shape]


class PackedWeights:
    """Copies of one weight in the contenders' layouts, kept from one number of rows to the next where that is right."""

    def __init__(self, weight: Any, caches: Caches, threads: int) -> None:
        self.weight = weight
        self.rotation: Rotation = plan_rotation(weight.bytes, caches, threads)
        self._copies: dict[tuple[str, int], list[Packed]] = {}

    def get(self, contender: Contender, m: int, count: int) -> list[Packed]:
        key = (contender.layout, m if contender.packs_for_rows else 0)
        for stale in [other for other in self._copies if other[0] == key[0] and other != key]:
            del self._copies[stale]
        copies = self._copies.setdefault(key, [])
        copies.extend(contender.pack(self.weight, m) for _ in range(count - len(copies)))
        return copies


def _prepare(contender: Contender, name: str, kind: Kind, problem: Any, weights: PackedWeights) -> Runner:
    """A runner whose first and last weight gave the right result."""
    m = problem.shape.m
    call = contender.bind(problem)
    first = weights.get(contender, m, 1)
    start = time.perf_counter()
    result = call(first[0])
    seconds = time.perf_counter() - start
    kind.check(problem, result, contender.epilogue)
    del result
    copies = weights.get(contender, m, weights.rotation.copies)
    if seconds < 1.0:
        kind.check(problem, call(copies[-1]), contender.epilogue)
    runner = make_runner(name, call, copies)
    runner.settle(first_seconds=seconds)
    return runner


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, UnavailableError):
        return f"not available: {text}"
    if isinstance(error, WrongResultError):
        return f"wrong result: {text}"
    return f"failed: {type(error).__name__}: {text[:300]}"


@dataclass
class Layer:
    """The weights of one layer, for all numbers of rows."""

    weights: PackedWeights
    bf16: PackedWeights | None = None  # int8: the same layer of a bf16 model, made when it is first needed


def measure_case(
    shape: AnyShape, kind: Kind, layer: Layer, plan: Plan, contenders: Sequence[Contender], caches: Caches
) -> Case:
    weights = layer.weights
    problem = kind.make_problem(weights.weight, shape)
    case = Case(weights.weight.dtype, shape, problem.bytes, weights.rotation)
    entries: list[tuple[str, Contender, Any, PackedWeights]] = [
        (contender.name, contender, problem, weights) for contender in contenders
    ]
    ours = next((contender for contender in contenders if contender.name == peers.OURS), None)
    if ours is not None and case.dtype == "int8" and shape.m >= INT8_GAIN_ROWS:
        bf16_problem = in_bf16(problem, layer.bf16.weight if layer.bf16 else None)
        layer.bf16 = layer.bf16 or PackedWeights(bf16_problem.weight, caches, plan.threads)
        entries.append((peers.OURS_BF16, ours, bf16_problem, layer.bf16))
    runners = []
    with outputs_kept_mapped():
        for name, contender, of_contender, its_weights in entries:
            try:
                runners.append(_prepare(contender, name, kind, of_contender, its_weights))
            except (UnavailableError, WrongResultError, RuntimeError, ValueError, TypeError) as error:
                case.failures[name] = _reason(error)
        take_turns(runners, plan.least_rounds, plan.seconds)
    case.timings.update({runner.name: timing_of(runner) for runner in runners})
    return case


def measure(
    plan: Plan,
    contenders_of: Callable[[str, Any], Sequence[Contender]] | None = None,
    advance: Callable[[str], Any] = lambda description: None,
) -> list[Case]:
    """Measures all shapes; `advance` hears of each before it begins."""
    caches = known_caches()
    cases = []
    with torch.inference_mode():
        for dtype, kind, of_layer in plan.layers():
            layer = Layer(PackedWeights(kind.make_weight(dtype, of_layer[0]), caches, plan.threads))
            for shape in of_layer:
                advance(f"{dtype} {shape}")
                contenders = (contenders_of or kind.contenders)(dtype, shape)
                cases.append(measure_case(shape, kind, layer, plan, contenders, caches))
    return cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    products, convs = (", ".join(map(str, shapes)) for shapes in (quick_shapes(), quick_convs()))
    parser.add_argument("--quick", action="store_true", help=f"a few, a short while each: {products}; {convs}")
    parser.add_argument("--dtype", default=",".join(DTYPES), help="any of f32,bf16,int8 (default: all)")
    parser.add_argument("--only", choices=("products", "convs"), help="default: both, or what is listed")
    parser.add_argument("--shapes", help="products: a list of MxNxK, such as 128x3072x768,1x4096x4096")
    parser.add_argument("--convs", help="a list of CxHxW:NxKxK/stride, such as 64x56x56:256x1x1+; +: ends a block")
    parser.add_argument("--batch", type=int, default=1, help="images of each convolution (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads (default: as many as torch uses)")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help="rounds at least (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draws the roofline (needs matplotlib)")


def choose_shapes(options: argparse.Namespace) -> tuple[list[Shape], list[ConvShape]]:
    listed = options.shapes is not None or options.convs is not None
    shapes, convs = [], []
    if options.shapes is not None:
        shapes = parse_shapes(options.shapes)
    elif not listed and options.only != "convs":
        shapes = quick_shapes() if options.quick else all_shapes()
    if options.convs is not None:
        convs = parse_convs(options.convs, options.batch)
    elif not listed and options.only != "products":
        convs = quick_convs(options.batch) if options.quick else all_convs(options.batch)
    return shapes, convs


def make_plan(options: argparse.Namespace) -> Plan:
    for name in ("threads", "rounds", "batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise BenchError(f"--{name}: got {value}, expected at least 1")
    shapes, convs = choose_shapes(options)
    dtypes = parse_dtypes(options.dtype)
    if not shapes and not set(dtypes) & set(CONV_DTYPES):
        raise BenchError(f"--dtype: got '{options.dtype}'; convolutions are measured in {', '.join(CONV_DTYPES)}")
    return Plan(
        shapes=shapes,
        convs=convs,
        dtypes=dtypes,
        threads=options.threads or torch.get_num_threads(),
        least_rounds=options.rounds,
        seconds=QUICK_SECONDS if options.quick else FULL_SECONDS,
    )


def run(options: argparse.Namespace) -> None:
    plan = make_plan(options)
    report.check_destinations(options.json, options.plot)
    torch.set_num_threads(plan.threads)
    setting = report.Setting(os.getloadavg()[0], plan.least_rounds, plan.seconds, options.quick)
    cases: list[Case] = []
    steps = sum(len(of_layer) for _, _, of_layer in plan.layers()) + len(plan.dtypes) + 1
    with report.progress(steps) as advance:
        advance("roofs")
        roofs = measure_roofs(plan.threads)
        for dtype in plan.dtypes:
            cases += measure(dataclasses.replace(plan, dtypes=[dtype]), advance=advance)
            advance("roofs")
            roofs = higher_of(roofs, measure_roofs(plan.threads))
    report.publish(cases, roofs, setting, options.json, options.plot)
