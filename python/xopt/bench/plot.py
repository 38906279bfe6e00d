"""The roofline as a picture: one panel a dtype, one point a shape and contender, under the measured roofs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xopt.bench import peers
from xopt.bench.errors import BenchError
from xopt.bench.results import Case
from xopt.roofs import Roofs

# Colours that are told apart with any colour vision; ours is drawn last, so that it lies on top.
STYLES: dict[str, dict[str, Any]] = {
    peers.EAGER: {"marker": "s", "color": "#999999", "s": 20},
    peers.MKL: {"marker": "D", "color": "#009E73", "s": 20},
    peers.ONEDNN: {"marker": "^", "color": "#E69F00", "s": 26},
    peers.OURS: {"marker": "o", "color": "#0072B2", "s": 30},
}
TITLES = {"f32": "fp32", "bf16": "bf16", "int8": "int8 (u8 x s8)"}


def check_library() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which is not installed: pip install 'torch-xopt[bench]'")


def _draw_panel(axes: Any, dtype: str, cases: Sequence[Case], roofs: Roofs) -> None:
    intensities = [case.shape.flop / case.bytes for case in cases]
    left, right = min(intensities) / 2, max(intensities) * 2
    ridge = roofs.peak(dtype) / roofs.read
    xs = sorted({left, min(max(ridge, left), right), right})
    axes.plot(xs, [roofs.attainable(dtype, x) / 1e12 for x in xs], color="black", linewidth=1.6, label="measured roof")
    for name, style in STYLES.items():
        timed = [(x, case) for x, case in zip(intensities, cases, strict=True) if name in case.timings]
        if timed:
            ys = [case.shape.flop / case.seconds(name) / 1e12 for _, case in timed]
            axes.scatter([x for x, _ in timed], ys, label=name, alpha=0.85, linewidths=0, **style)
    roof = roofs.by_kind[dtype]
    unit = "TOP/s" if dtype == "int8" else "TFLOP/s"
    axes.text(
        0.97,
        0.03,
        f"{roof.instruction}: {roof.per_second / 1e12:.2f} {unit}\nmemory read: {roofs.read / 1e9:.1f} GB/s",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_title(TITLES.get(dtype, dtype))
    axes.set_xlabel("operations a byte (weight, input and output once each)")
    axes.grid(visible=True, which="both", linewidth=0.3, alpha=0.6)
    axes.legend(loc="upper left", fontsize=8, framealpha=0.9)


def draw(cases: Sequence[Case], roofs: Roofs, file: Path) -> None:
    check_library()
    # Not pyplot: it would choose a display for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(case.dtype for case in cases))
    figure = Figure(figsize=(6.0 * len(dtypes), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(dtypes), squeeze=False, sharey=True)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        _draw_panel(axes, dtype, [case for case in cases if case.dtype == dtype], roofs)
    panels[0].set_ylabel("tera-operations a second")
    figure.suptitle(f"GEMM on {roofs.threads} threads against the measured roofs")
    figure.savefig(file, format="png", dpi=130)
