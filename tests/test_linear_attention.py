"""xopt::linear_attention against the recurrence in float64: any sizes, full chunks and others, states, any layout."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests import cases
from tests.cases import DTYPES
from tests.families import Family
from tests.scans import Expected, expect_close, expect_same_with_any_threads
from xopt.modules.linear_attention import scan_with_torch

Tensor = torch.Tensor
ops = torch.ops.xopt
LAYOUTS = {"contiguous": 4, "merged": 3, "transposed": 2, "k_strided": 1, "expanded": 1}


@dataclass(frozen=True)
class LinearAttentionCase:
    seed: int = 0
    dtype: str = "f32"
    numbers: str = "f32"  # of decays and rates
    state: str = ""
    batch: int = 1
    steps: int = 1
    heads: int = 1
    group: int = 1
    depth: int = 1
    value_depth: int = 1
    layout: str = "contiguous"
    by_row: bool = False
    unit: bool = True
    scale: float = 0.0  # 0: the default
    forgets: float = 1.0  # how much a step may
    corrects: bool = True
    by_columns: bool = False  # how the state lies
    out: str = ""


def sample(rng: random.Random) -> LinearAttentionCase:
    return LinearAttentionCase(
        seed=rng.randrange(1_000_000),
        dtype=rng.choice(cases.FLOATS),
        numbers=rng.choice(cases.FLOATS),
        state=rng.choice(("", *cases.FLOATS)),
        batch=rng.choice((1, 1, 2, 3)),
        steps=rng.choice((1, 1, 2, 15, 16, 17, 33, rng.randrange(1, 80))),
        heads=rng.choice((1, 1, 2, 3)),
        group=rng.choice((1, 1, 2, 4)),
        depth=rng.choice((1, 8, 16, 17, 31, 64, rng.randrange(1, 140))),
        value_depth=rng.choice((1, 8, 16, 17, 33, 64, rng.randrange(1, 140))),
        layout=cases.pick(rng, LAYOUTS),
        by_row=rng.random() < 0.3,
        unit=rng.random() < 0.8,
        scale=rng.choice((0.0, 0.0, 1.0, -0.3)),
        forgets=rng.choice((0.0, 0.1, 1.0, 1.0, 40.0, 1000.0)),
        corrects=rng.random() < 0.6,
        by_columns=rng.random() < 0.4,
        out=rng.choice(("", "", *cases.FLOATS)),
    )


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "merged":  # as a part of a projection's result
        poisoned = cases.poisoned((*x.shape[:2], x[0, 0].numel() + 5), x.dtype)[..., 2:-3]
        return poisoned.view(x.shape).copy_(x)
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return cases.laid_out(x, layout)


def inputs(case: LinearAttentionCase) -> tuple[list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, dtype: str) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    heads, lead = case.heads * case.group, (case.batch, case.steps)
    size = 1.0 if case.unit else 0.7 / math.sqrt(case.depth)  # longer keys correct too much, and states grow
    rows = [normal(*lead, case.heads, case.depth, dtype=case.dtype) * size for _ in range(2)]
    value = normal(*lead, heads, case.value_depth, dtype=case.dtype)
    sizes = (case.value_depth, case.depth) if case.by_columns else (case.depth, case.value_depth)
    state = normal(case.batch, heads, *sizes, dtype=case.state) if case.state else None
    row = (case.depth,) if case.by_row else ()
    decay = -case.forgets * torch.rand((*lead, heads, *row), generator=generator).to(DTYPES[case.numbers])
    rate = torch.rand((*lead, heads), generator=generator).to(DTYPES[case.numbers])
    decay, rate = (
        x.transpose(1, 2).contiguous().transpose(1, 2) if case.layout == "transposed" else x for x in (decay, rate)
    )
    return [*(laid_out(x, case.layout) for x in (*rows, value)), decay, rate], state


def expected_of(case: LinearAttentionCase, tensors: list[Tensor], state: Tensor | None) -> tuple[Expected, Expected]:
    query, key, value, decay, rate = (x.double() for x in tensors)
    query, key = (x.repeat_interleave(case.group, 2) for x in (query, key))
    if case.unit:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query = query * (case.scale or max(1, case.depth) ** -0.5)
    decay = (decay if case.by_row else decay[..., None]).exp()[..., None]
    shape = (case.batch, value.shape[2], case.depth, case.value_depth)
    state = None if state is None else state.double()
    now = torch.zeros(shape).double() if state is None else state.mT if case.by_columns else state
    out, most, size = torch.zeros_like(value), torch.zeros_like(value), now.abs()
    for step in range(case.steps):
        now, size = now * decay[:, step], size * decay[:, step]
        read = torch.einsum("bhd,bhdv->bhv", key[:, step], now) if case.corrects else torch.zeros_like(value[:, step])
        factor = rate[:, step, :, None]
        now = now + key[:, step, :, :, None] * (factor * (value[:, step] - read))[:, :, None]
        size = size + (key[:, step, :, :, None] * (factor * (value[:, step].abs() + read.abs()))[:, :, None]).abs()
        out[:, step] = torch.einsum("bhd,bhdv->bhv", query[:, step], now)
        most[:, step] = torch.einsum("bhd,bhdv->bhv", query[:, step].abs(), size)
    now, size = (x.mT if case.by_columns else x for x in (now, size))
    return Expected(out, largest(most, (1, 3))), Expected(now, largest(size, (2, 3)))


def largest(x: Tensor, dims: tuple[int, int]) -> Tensor:
    return x.amax(dims, keepdim=True) if x.numel() else x.sum(dims, keepdim=True)


def call(case: LinearAttentionCase, tensors: list[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    out, last = ops.linear_attention(
        *tensors,
        state,
        scale=case.scale or None,
        unit_eps=1e-6 if case.unit else None,
        corrects=case.corrects,
        state_by_columns=case.by_columns,
        out_dtype=DTYPES[case.out] if case.out else None,
    )
    return out, last


def check(case: LinearAttentionCase) -> None:
    tensors, state = inputs(case)
    out, last = call(case, tensors, state)
    assert out.dtype == DTYPES[case.out or case.dtype]
    assert last.dtype == torch.float32
    expected, expected_last = expected_of(case, tensors, state)
    expect_close("the output", out, expected, case.out or case.dtype)
    expect_close("the last state", last, expected_last, "f32")


FAMILY = Family("linear_attention", LinearAttentionCase, sample, check)


def test_cases(case_batch: list[LinearAttentionCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_tails(dtype: str, by_row: bool) -> None:
    FAMILY.run_all(
        LinearAttentionCase(
            seed=steps,
            dtype=dtype,
            state=state,
            steps=steps,
            depth=depth,
            value_depth=columns,
            by_row=by_row,
            corrects=corrects,
            by_columns=not corrects,
        )
        for state in ("", "bf16")
        for steps in (1, 2, 16, 35)
        for depth in (1, 9, 16, 31, 65)
        for columns in (1, 16, 31, 65, 128)
        for corrects in (True, False)
    )


@pytest.mark.sanitize
def test_zero_sizes() -> None:
    names = ("batch", "steps", "heads", "depth", "value_depth")
    FAMILY.run_all(
        LinearAttentionCase(state="f32", by_row=by_row, **{**dict.fromkeys(names, 3), name: 0})  # type: ignore[arg-type]
        for name in names
        for by_row in (False, True)
    )


def test_threads_do_not_change_results(torch_threads: None) -> None:
    for heads, columns in ((1, 256), (3, 70), (5, 40)):
        case = LinearAttentionCase(steps=40, heads=heads, depth=33, value_depth=columns, state="f32")
        tensors, state = inputs(case)
        expect_same_with_any_threads(functools.partial(call, case, tensors, state))


def test_steps_one_by_one_are_those_at_once() -> None:
    case = LinearAttentionCase(steps=37, heads=2, group=2, depth=32, value_depth=48)
    tensors, state = inputs(case)
    out, last = call(case, tensors, None)
    for step in range(case.steps):
        one, state = call(case, [x[:, step : step + 1] for x in tensors], state)
        torch.testing.assert_close(one, out[:, step : step + 1], rtol=1e-4, atol=1e-5)
    assert state is not None
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_row", [False, True])
def test_what_is_not_finite(by_row: bool) -> None:
    case = LinearAttentionCase(steps=20, depth=16, value_depth=24, state="f32", by_row=by_row)
    tensors, state = inputs(case)
    everything = [x.clone() for x in tensors]
    everything[3][:, 10] = -math.inf  # forgets all that was before
    out, last = call(case, everything, state)
    after = [x[:, 10:] for x in everything]
    expected, expected_last = call(case, [x.clone() for x in after], torch.zeros_like(state))  # type: ignore[arg-type]
    torch.testing.assert_close(out[:, 10:], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, expected_last, rtol=1e-4, atol=1e-5)
    tensors[2][0, 5, 0, 3] = math.nan  # a value: of its column, from then on
    out, last = call(case, tensors, state)
    assert bool(out[0, 5:, 0, 3].isnan().all())
    assert not out[0, :5].isnan().any()
    assert not out[..., :3].isnan().any()
    assert not out[..., 4:].isnan().any()
    tensors[3][0, 5, 0] = math.nan
    assert bool(call(case, tensors, state)[0][0, 5:, 0].isnan().any(-1).all())


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_step_by_step_with_torch(by_row: bool, corrects: bool) -> None:
    """What stands in for the operator where gradients are wanted."""
    case = LinearAttentionCase(batch=2, steps=9, heads=2, group=2, depth=12, value_depth=7, state="f32", by_row=by_row)
    tensors, state = inputs(case)
    query, key, value, decay, rate = tensors
    options: dict[str, Any] = {"corrects": corrects, "state_by_columns": not corrects}
    state = state if corrects or state is None else state.mT.contiguous()
    found = scan_with_torch(query, key, value, decay, rate, state, unit_eps=1e-6, **options)
    for one, other in zip(found, ops.linear_attention(*tensors, state, unit_eps=1e-6, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
