"""xopt::selective_scan against the recurrence in float64: any sizes, layouts, states, and what goes with a scan."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from tests import cases
from tests.cases import DTYPES
from tests.families import Family
from tests.scans import Expected, expect_close, expect_same_with_any_threads
from xopt.modules.selective_scan import scan_states_with_torch

Tensor = torch.Tensor
ops = torch.ops.xopt
LAYOUTS = ("rows", "rows", "columns", "parts", "apart")


@dataclass(frozen=True)
class SelectiveScanCase:
    seed: int = 0
    dtype: str = "f32"
    dt: str = "f32"
    numbers: str = "f32"  # of a, skip and the bias
    state: str = ""
    out: str = ""
    batch: int = 1
    steps: int = 1
    channels: int = 1
    states: int = 1
    layout: str = "rows"
    dt_layout: str = "rows"
    skip: bool = False
    gate: bool = False
    bias: bool = False
    softplus: bool = False
    forgets: float = 1.0


def sample(rng: random.Random) -> SelectiveScanCase:
    return SelectiveScanCase(
        seed=rng.randrange(1_000_000),
        dtype=rng.choice(cases.FLOATS),
        dt=rng.choice(cases.FLOATS),
        numbers=rng.choice(cases.FLOATS),
        state=rng.choice(("", *cases.FLOATS)),
        out=rng.choice(("", "", *cases.FLOATS)),
        batch=rng.choice((1, 1, 2, 3)),
        steps=rng.choice((1, 1, 2, 15, 16, 17, rng.randrange(1, 50))),
        channels=rng.choice((1, 16, 17, 63, 64, 65, 128, rng.randrange(1, 200))),
        states=rng.choice((1, 4, 15, 16, 16, 17, rng.randrange(1, 40))),
        layout=rng.choice(LAYOUTS),
        dt_layout=rng.choice(LAYOUTS),
        skip=rng.random() < 0.5,
        gate=rng.random() < 0.5,
        bias=rng.random() < 0.5,
        softplus=rng.random() < 0.5,
        forgets=rng.choice((0.0, 0.1, 1.0, 1.0, 30.0, 1000.0)),
    )


def laid_out(x: Tensor, layout: str) -> Tensor:
    """[batch, steps, columns]: as rows, with steps side by side, as parts of longer rows, or with nothing so."""
    batch, steps, columns = x.shape
    if layout == "columns":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "parts":
        return cases.poisoned((batch, steps, columns + 5), x.dtype)[..., 2:-3].copy_(x)
    if layout == "apart":
        return cases.poisoned((batch, steps, columns, 2), x.dtype)[..., 1].copy_(x)
    return x


class Given(NamedTuple):
    input: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor | None
    gate: Tensor | None
    dt_bias: Tensor | None
    state: Tensor | None


def inputs(case: SelectiveScanCase) -> Given:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, dtype: str) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    lead = (case.batch, case.steps)
    input, gate = (laid_out(normal(*lead, case.channels, dtype=case.dtype), case.layout) for _ in range(2))
    b, c = (laid_out(normal(*lead, case.states, dtype=case.dtype), case.layout) for _ in range(2))
    dt = normal(*lead, case.channels, dtype=case.dt)
    dt = laid_out(dt if case.softplus else dt.abs(), case.dt_layout)
    a = -case.forgets * normal(case.channels, case.states, dtype=case.numbers).abs()
    bias = normal(case.channels, dtype=case.numbers)
    return Given(
        input,
        dt,
        a,
        b,
        c,
        normal(case.channels, dtype=case.numbers) if case.skip else None,
        gate if case.gate else None,
        (bias if case.softplus else bias.abs()) if case.bias else None,
        normal(case.batch, case.channels, case.states, dtype=case.state) if case.state else None,
    )


def expected_of(case: SelectiveScanCase, given: Given) -> tuple[Expected, Expected]:
    input, dt, a, b, c, skip, gate, bias, state = (None if x is None else x.double() for x in given)
    assert input is not None and dt is not None and a is not None and b is not None and c is not None  # noqa: PT018
    dt = dt if bias is None else dt + bias
    dt = functional.softplus(dt) if case.softplus else dt
    now = input.new_zeros(case.batch, case.channels, case.states) if state is None else state
    out, most, size = torch.zeros_like(input), torch.zeros_like(input), now.abs()
    for step in range(case.steps):
        kept = torch.exp(dt[:, step, :, None] * a)
        written = dt[:, step, :, None] * input[:, step, :, None] * b[:, step, None]
        # What rounding an exponent does to a decay.
        wrong = kept * (dt[:, step, :, None] * a).abs().clamp(max=100)
        now, size = now * kept + written, size * kept + written.abs() + now.abs() * wrong / 10
        out[:, step] = (now * c[:, step, None]).sum(-1)
        most[:, step] = (size * c[:, step, None].abs()).sum(-1)
    if skip is not None:
        out, most = out + skip * input, most + (skip * input).abs()
    if gate is not None:
        factor = functional.silu(gate)
        out, most = out * factor, most * factor.abs()
    return Expected(out, most), Expected(now, size)


def check(case: SelectiveScanCase) -> None:
    given = inputs(case)
    dtype = case.out or case.dtype
    out, last = ops.selective_scan(*given, softplus=case.softplus, out_dtype=DTYPES[case.out] if case.out else None)
    assert (out.dtype, last.dtype) == (DTYPES[dtype], torch.float32)
    expected, expected_last = expected_of(case, given)
    expect_close("the output", out, expected, dtype)
    expect_close("the last state", last, expected_last, "f32")


FAMILY = Family("selective_scan", SelectiveScanCase, sample, check)


def test_cases(case_batch: list[SelectiveScanCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS)))
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_tails(dtype: str, layout: str) -> None:
    FAMILY.run_all(
        SelectiveScanCase(
            seed=steps,
            dtype=dtype,
            dt=dtype,
            state=state,
            steps=steps,
            channels=channels,
            states=states,
            layout=layout,
            dt_layout=layout,
            skip=True,
            gate=True,
            bias=True,
            softplus=True,
        )
        for state in ("", "bf16")
        for steps in (1, 16, 35)
        for channels in (1, 16, 31, 65)
        for states in (1, 4, 16, 19)
    )


@pytest.mark.sanitize
def test_zero_sizes() -> None:
    names = ("batch", "steps", "channels", "states")
    FAMILY.run_all(
        SelectiveScanCase(state="f32", skip=True, gate=True, **{**dict.fromkeys(names, 3), name: 0})  # type: ignore[arg-type]
        for name in names
    )


def test_softplus_and_gates_of_any_size() -> None:
    """As the step that writes: one state that keeps nothing, of which the output is that step."""
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -math.inf, 1e30])])
    rows = torch.ones(1, 1, len(x))
    lone = (-torch.full((len(x), 1), 1e30), torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    out, _ = ops.selective_scan(rows, x.view_as(rows), *lone, softplus=True)
    torch.testing.assert_close(out.flatten().double(), functional.softplus(x.double()), rtol=1e-6, atol=1e-37)
    x = x.clamp(-100, 100)
    gated, _ = ops.selective_scan(rows, rows, *lone, gate=x.view_as(rows))
    torch.testing.assert_close(gated.flatten(), functional.silu(x), rtol=1e-5, atol=1e-6)


def test_threads_do_not_change_results(torch_threads: None) -> None:
    case = SelectiveScanCase(batch=2, steps=20, channels=300, states=16, skip=True, gate=True, softplus=True)
    given = inputs(case)
    expect_same_with_any_threads(lambda: ops.selective_scan(*given, softplus=True))


def test_nan_stays_in_its_channel() -> None:
    given = inputs(SelectiveScanCase(steps=20, channels=40, states=16))
    given.input[0, 5, 3] = math.nan
    given.dt[0, 7, 20] = math.nan
    out, last = ops.selective_scan(*given)
    wrong = out.isnan()
    assert bool(wrong[0, 5:, 3].all())
    assert bool(wrong[0, 7:, 20].all())
    assert int(wrong.sum()) == 15 + 13
    assert int(last.isnan().sum()) == 2 * 16


def test_step_by_step_with_torch() -> None:
    """What stands in for the operator where gradients are wanted."""
    case = SelectiveScanCase(
        batch=2, steps=9, channels=20, states=5, state="f32", skip=True, gate=True, bias=True, softplus=True
    )
    given = inputs(case)
    found = scan_states_with_torch(*given, softplus=True)
    for one, other in zip(found, ops.selective_scan(*given, softplus=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
