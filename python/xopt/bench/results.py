"""What was measured, and the arithmetic on it: ratios between contenders, shares of the roofs, the summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from xopt.bench import conv_peers, peers
from xopt.bench.conv_shapes import MODEL_CONVS, ConvShape
from xopt.bench.rotation import Rotation
from xopt.bench.shapes import Shape
from xopt.bench.turns import Timing
from xopt.roofs import Roofs

FEW_ROWS = 4  # bound by how fast weights are read
MANY_ROWS = 1024  # bound by how fast products are made
INT8_GAIN_ROWS = 512
EPILOGUE_K = 768


@dataclass(frozen=True)
class Case:
    """One shape in one dtype, all contenders."""

    dtype: str
    shape: Shape | ConvShape
    bytes: int  # that have to move at least: weight, input, output
    rotation: Rotation
    timings: dict[str, Timing] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # contender -> why it has no time

    def seconds(self, contender: str) -> float:
        return self.timings[contender].minimum


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as the other a contender is."""

    minimum: float  # of the fastest times
    median: float  # over the rounds, of the two times of a round


def ratio(case: Case, contender: str, other: str) -> Ratio | None:
    """`other`'s time over `contender`'s: above 1, `contender` is the faster."""
    if contender not in case.timings or other not in case.timings:
        return None
    ours, theirs = case.timings[contender], case.timings[other]
    rounds = [slow / fast for slow, fast in zip(theirs.samples, ours.samples, strict=True)]
    return Ratio(theirs.minimum / ours.minimum, statistics.median(rounds))


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


@dataclass(frozen=True)
class Finding:
    """One line of the summary."""

    dtype: str
    what: str
    value: float
    unit: str  # "x": a ratio; "%": a share
    shapes: int  # how many it was taken over
    shape: str = ""  # where, if it is that of one shape
    target: float | None = None
    at_most: bool = False  # the target is an upper bound

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass(frozen=True)
class _Point:
    value: float
    median: float
    shape: Shape | ConvShape


_Measure = Callable[[Case], Ratio | float | None]


def _points(cases: Iterable[Case], measure: _Measure) -> list[_Point]:
    points = []
    for case in cases:
        value = measure(case)
        if isinstance(value, Ratio):
            points.append(_Point(value.minimum, value.median, case.shape))
        elif value is not None:
            points.append(_Point(value, value, case.shape))
    return points


def _ratio_findings(
    dtype: str, points: Sequence[_Point], label: str, target: float | None, worst_target: float | None = None
) -> list[Finding]:
    if not points:
        return []
    mean = geometric_mean(point.value for point in points)
    rounds = geometric_mean(point.median for point in points)
    worst = min(points, key=lambda point: point.value)
    return [
        Finding(dtype, f"{label}, geometric mean", mean, "x", len(points), target=target),
        Finding(dtype, f"{label}, geometric mean by rounds", rounds, "x", len(points)),
        Finding(dtype, f"{label}, worst shape", worst.value, "x", len(points), str(worst.shape), worst_target),
    ]


def _share_findings(dtype: str, points: Sequence[_Point], label: str, target: float | None) -> list[Finding]:
    if not points:
        return []
    lowest = min(points, key=lambda point: point.value)
    middle = statistics.median(point.value for point in points)
    return [
        Finding(dtype, f"{label}, median", middle, "%", len(points)),
        Finding(dtype, f"{label}, lowest", lowest.value, "%", len(points), str(lowest.shape), target),
    ]


def _best_peer_ratio(case: Case) -> Ratio | None:
    """Against whichever of the prepacked peers is the faster."""
    found = [ratio(case, peers.OURS, peer) for peer in (peers.ONEDNN, peers.MKL)]
    return min((one for one in found if one is not None), key=lambda one: one.minimum, default=None)


def epilogue_cost(case: Case, fused: str) -> float | None:
    """What the epilogue adds, as a share of the bare product's time."""
    bare_over_fused = ratio(case, fused, peers.OURS)
    return None if bare_over_fused is None else 1 / bare_over_fused.minimum - 1


def _epilogue_findings(dtype: str, cases: Sequence[Case]) -> list[Finding]:
    findings = []
    for fused in peers.FUSED:
        points = _points((case for case in cases if case.shape.k >= EPILOGUE_K), partial(epilogue_cost, fused=fused))
        if not points:
            continue
        label = f"cost of {fused.removeprefix(peers.OURS + ' + ')}, K >= {EPILOGUE_K}"
        mean = geometric_mean(1 + point.value for point in points) - 1
        worst = max(points, key=lambda point: point.value)
        findings += [
            Finding(dtype, f"{label}, geometric mean", mean, "%", len(points), target=0.10, at_most=True),
            Finding(dtype, f"{label}, worst shape", worst.value, "%", len(points), str(worst.shape), 0.10, True),
        ]
    return findings


def _findings_of(dtype: str, cases: Sequence[Case], roofs: Roofs) -> list[Finding]:
    timed = [case for case in cases if peers.OURS in case.timings]

    def against(peer: str) -> list[_Point]:
        return _points(timed, lambda case: ratio(case, peers.OURS, peer))

    onednn_target, onednn_worst = {"bf16": (1.3, 0.95), "int8": (1.2, None)}.get(dtype, (None, None))
    findings = _ratio_findings(dtype, against(peers.ONEDNN), "speed over oneDNN prepacked", onednn_target, onednn_worst)
    if dtype == "f32":
        findings += _ratio_findings(dtype, against(peers.MKL), "speed over MKL prepacked", None)
        best = _points(timed, _best_peer_ratio)
        findings += _ratio_findings(dtype, best, "speed over the faster of oneDNN and MKL", 1.0)
    findings += _ratio_findings(dtype, against(peers.EAGER), "speed over F.linear", None)

    many = [case for case in timed if case.shape.m >= MANY_ROWS]
    few = [case for case in timed if case.shape.m <= FEW_ROWS and case.rotation.source == "memory"]
    peak_shares = _points(many, lambda case: roofs.peak_share(dtype, case.shape.flop, case.seconds(peers.OURS)))
    read_shares = _points(few, lambda case: roofs.read_share(case.bytes, case.seconds(peers.OURS)))
    is_bf16 = dtype == "bf16"
    findings += _share_findings(dtype, peak_shares, f"share of the peak, M >= {MANY_ROWS}", 0.60 if is_bf16 else None)
    findings += _share_findings(
        dtype, read_shares, f"share of the read bandwidth, M <= {FEW_ROWS}", 0.85 if is_bf16 else None
    )
    if dtype == "int8":
        large = [case for case in timed if case.shape.m >= INT8_GAIN_ROWS]
        gains = _points(large, lambda case: ratio(case, peers.OURS, peers.OURS_BF16))
        findings += _ratio_findings(dtype, gains, f"speed over our bf16, M >= {INT8_GAIN_ROWS}", 1.6)
    return findings + _epilogue_findings(dtype, cases)


def _conv_findings(dtype: str, cases: Sequence[Case], roofs: Roofs) -> list[Finding]:
    def against(peer: str, ours: str, some: Sequence[Case] = cases) -> list[_Point]:
        return _points(some, lambda case: ratio(case, ours, peer))

    target = 1.15 if dtype == "bf16" else None
    label = f"convolutions, speed over {peers.ONEDNN}"
    findings = _ratio_findings(dtype, against(peers.ONEDNN, peers.OURS), label, target)
    for model in MODEL_CONVS:
        of_model = [case for case in cases if isinstance(case.shape, ConvShape) and case.shape.model == model]
        points = against(peers.ONEDNN, peers.OURS, of_model)
        if points:
            mean = geometric_mean(point.value for point in points)
            findings.append(Finding(dtype, f"{label}, {model}, geometric mean", mean, "x", len(points)))
    over_eager = against(conv_peers.EAGER, peers.OURS)
    findings += _ratio_findings(dtype, over_eager, f"convolutions, speed over {conv_peers.EAGER}", None)
    timed = [case for case in cases if peers.OURS in case.timings]
    shares = _points(timed, lambda case: roofs.peak_share(dtype, case.shape.flop, case.seconds(peers.OURS)))
    findings += _share_findings(dtype, shares, "convolutions, share of the peak", None)
    apart = against(conv_peers.OURS_APART, conv_peers.OURS_END)
    findings += _ratio_findings(dtype, apart, "fused residual end, speed over conv, add, relu apart", None)
    onednn = against(conv_peers.ONEDNN_END, conv_peers.OURS_END)
    return findings + _ratio_findings(dtype, onednn, "fused residual end, speed over oneDNN's", None)


def summarize(cases: Sequence[Case], roofs: Roofs) -> list[Finding]:
    findings = []
    for dtype in dict.fromkeys(case.dtype for case in cases):
        of_dtype = [case for case in cases if case.dtype == dtype]
        findings += _findings_of(dtype, [case for case in of_dtype if isinstance(case.shape, Shape)], roofs)
        findings += _conv_findings(dtype, [case for case in of_dtype if isinstance(case.shape, ConvShape)], roofs)
    return findings


def failures(cases: Sequence[Case]) -> dict[tuple[str, str, str], list[str]]:
    """(dtype, contender, why) -> the shapes at which it has no time. Shapes are left out of `why`, to be grouped."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for case in cases:
        for contender, reason in case.failures.items():
            grouped.setdefault((case.dtype, contender, reason), []).append(str(case.shape))
    return grouped
