"""xopt::causal_conv against the sum in float64: any sizes, layouts and states, and steps that follow each other."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from tests import cases
from tests.cases import DTYPES
from tests.families import Family
from tests.scans import Expected, expect_close, expect_same_with_any_threads
from tests.test_selective_scan import LAYOUTS, laid_out
from xopt.modules.causal_conv import convolve_with_torch

Tensor = torch.Tensor
ops = torch.ops.xopt
Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class CausalConvCase:
    seed: int = 0
    dtype: str = "f32"
    weight: str = "f32"
    state: str = ""
    more: int = 0
    """Steps in the state beyond those that the taps reach."""
    by_steps: bool = False
    """How the state lies in memory."""
    out: str = ""
    batch: int = 1
    steps: int = 1
    channels: int = 1
    taps: int = 4
    layout: str = "rows"
    bias: bool = False
    silu: bool = False


def sample(rng: random.Random) -> CausalConvCase:
    return CausalConvCase(
        seed=rng.randrange(1_000_000),
        dtype=rng.choice(cases.FLOATS),
        weight=rng.choice(cases.FLOATS),
        state=rng.choice(("", *cases.FLOATS)),
        more=rng.choice((0, 1, 1, 2, rng.randrange(40))),
        by_steps=rng.random() < 0.5,
        out=rng.choice(("", "", *cases.FLOATS)),
        batch=rng.choice((1, 1, 2, 3)),
        steps=rng.choice((0, 1, 1, 2, 15, 16, 17, rng.randrange(1, 50))),
        channels=rng.choice((1, 16, 17, 63, 64, 65, 128, rng.randrange(1, 200))),
        taps=rng.choice((1, 2, 3, 4, 4, 16, 17, rng.randrange(1, 40))),
        layout=rng.choice(LAYOUTS),
        bias=rng.random() < 0.5,
        silu=rng.random() < 0.5,
    )


def inputs(case: CausalConvCase) -> Given:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, dtype: str) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    input = laid_out(normal(case.batch, case.steps, case.channels, dtype=case.dtype), case.layout)
    weight, bias = normal(case.channels, case.taps, dtype=case.weight), normal(case.channels, dtype=case.weight)
    kept = case.taps - 1 + case.more
    state = normal(case.batch, case.channels, kept, dtype=case.state) if case.state else None
    if state is not None and case.by_steps:
        state = state.mT.contiguous().mT
    return input, weight, bias if case.bias else None, state


def check(case: CausalConvCase) -> None:
    given = inputs(case)
    input, weight, bias, state = given
    out, last = ops.causal_conv(*given, silu=case.silu, out_dtype=DTYPES[case.out] if case.out else None)
    dtype = case.out or case.dtype
    assert out.dtype == DTYPES[dtype]

    before = input.new_zeros(case.batch, case.channels, case.taps - 1) if state is None else state
    values = torch.cat([before.double(), input.double().transpose(1, 2)], -1)
    if state is not None:
        kept = values[..., values.shape[-1] - state.shape[-1] :]
        assert torch.equal(last, kept.to(state.dtype))
        assert last.stride() == state.stride() or 1 in last.shape
        values = values[..., case.more :]
    else:
        assert last.shape == (case.batch, case.channels, 0)
    taps = weight.double()[:, None]
    windows = values.unfold(-1, case.taps, 1) if case.steps else values.new_zeros(*values.shape[:2], 0, case.taps)
    expected, size = (windows * taps).sum(-1), (windows * taps).abs().sum(-1)
    if bias is not None:
        expected, size = expected + bias.double()[:, None], size + bias.double().abs()[:, None]
    if case.silu:
        expected, size = functional.silu(expected), 1.2 * size
    expect_close("the output", out, Expected(expected.transpose(1, 2), size.transpose(1, 2)), dtype)


FAMILY = Family("causal_conv", CausalConvCase, sample, check)


def test_cases(case_batch: list[CausalConvCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS)))
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_tails(dtype: str, layout: str) -> None:
    FAMILY.run_all(
        CausalConvCase(
            seed=steps,
            dtype=dtype,
            weight=dtype,
            state=state,
            more=more,
            by_steps=steps == 1,
            steps=steps,
            channels=channels,
            taps=taps,
            layout=layout,
            bias=True,
            silu=True,
        )
        for state, more in (("", 0), ("bf16", 0), ("f32", 3))
        for steps in (0, 1, 16, 35)
        for channels in (1, 31, 65)
        for taps in (1, 4, 19)
    )


@pytest.mark.sanitize
def test_zero_sizes() -> None:
    names = ("batch", "steps", "channels")
    FAMILY.run_all(
        CausalConvCase(state=state, **{**dict.fromkeys(names, 3), name: 0})  # type: ignore[arg-type]
        for name in names
        for state in ("", "f32")
    )


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_steps_that_follow_are_the_whole(dtype: str) -> None:
    """To the last bit: a state keeps what it was given."""
    input, weight, bias, _ = inputs(CausalConvCase(dtype=dtype, batch=2, steps=50, channels=40, bias=True))
    whole, _ = ops.causal_conv(input, weight, bias, silu=True)
    state = torch.zeros(2, 40, 4, dtype=DTYPES[dtype])
    parts = []
    for part in input.split([1, 1, 17, 3, 1, 16, 11], 1):
        out, state = ops.causal_conv(part, weight, bias, state, silu=True)
        parts.append(out)
    assert torch.equal(torch.cat(parts, 1), whole)


def test_threads_do_not_change_results(torch_threads: None) -> None:
    given = inputs(CausalConvCase(batch=2, steps=20, channels=300, state="f32", bias=True))
    expect_same_with_any_threads(lambda: ops.causal_conv(*given, silu=True))


@pytest.mark.parametrize("state", ["", "bf16"])
@pytest.mark.parametrize("steps", [1, 9])
def test_with_torch(state: str, steps: int) -> None:
    """What stands in for the operator where gradients are wanted."""
    given = inputs(CausalConvCase(batch=2, steps=steps, channels=20, state=state, more=1, bias=True))
    found, expected = convolve_with_torch(*given, silu=True), ops.causal_conv(*given, silu=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
