"""xopt::rotary against the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tests import cases
from tests.cases import DTYPES
from tests.families import Family, expect_values
from tests.reference import U32, Estimate
from tests.test_linear import OTHER_LAYOUTS

Tensor = torch.Tensor


@dataclass(frozen=True)
class RotaryCase:
    seed: int = 0
    batch: int = 1
    heads: int = 1
    key_heads: int = 1
    positions: int = 1
    depth: int = 2
    dtype: str = "f32"
    angles: str = "f32"
    heads_inside: bool = False  # [batch, positions, heads, depth] in memory, as products of a linear layer lie
    one_batch_of_angles: bool = False
    layout: str = "contiguous"
    angle_layout: str = "contiguous"
    kept: int = 0  # columns that are not rotated
    interleaved: bool = False


def sample(rng: random.Random) -> RotaryCase:
    half = rng.choice(cases.EDGES)
    return RotaryCase(
        seed=rng.randrange(2**31),
        batch=rng.randint(0, 3),
        heads=rng.randint(0, 5),
        key_heads=rng.randint(0, 3),
        positions=rng.choice((0, 1, 2, 17, 64)),
        depth=2 * half,
        dtype=rng.choice(cases.FLOATS),
        angles=rng.choice(cases.FLOATS),
        heads_inside=rng.random() < 0.5,
        one_batch_of_angles=rng.random() < 0.5,
        layout=cases.pick(rng, OTHER_LAYOUTS),
        angle_layout=cases.pick(rng, OTHER_LAYOUTS),
        kept=rng.choice((0, 2 * rng.randint(0, half))),
        interleaved=rng.random() < 0.5,
    )


def check(case: RotaryCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)

    def heads(count: int) -> Tensor:
        shape = (case.batch, count, case.positions, case.depth)
        x = cases.tensor("normal", shape, DTYPES[case.dtype], generator, case.layout)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if case.heads_inside else x

    query, key = heads(case.heads), heads(case.key_heads)
    batch = 1 if case.one_batch_of_angles else case.batch
    rotated = case.depth - case.kept
    shape = (batch, case.positions, rotated)
    cos, sin = (cases.tensor("normal", shape, DTYPES[case.angles], generator, case.angle_layout) for _ in range(2))
    outs = torch.ops.xopt.rotary(query, key, cos, sin, interleaved=case.interleaved)
    for name, x, out in zip(("query", "key"), (query, key), outs, strict=True):
        if not out.is_contiguous():
            raise AssertionError(f"the rotated {name} has strides {out.stride()}")
        if not torch.equal(out[..., rotated:], x[..., rotated:]):
            raise AssertionError(f"columns of the {name} that are not rotated were changed")
        estimate = turned(x[..., :rotated].double(), cos.double()[:, None], sin.double()[:, None], case.interleaved)
        expected = (*x.shape[:-1], rotated)
        expect_values(f"the rotated {name}", out[..., :rotated].contiguous(), estimate, expected, x.dtype, False)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Estimate:
    if interleaved:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    else:
        first, second = x.chunk(2, -1) if x.shape[-1] > 0 else (x, x)
        other = torch.cat((-second, first), -1)
    left, right = x * cos, other * sin
    nothing = torch.zeros_like(left, dtype=torch.bool)
    return Estimate(left + right, 4 * U32 * (left.abs() + right.abs()), nothing, nothing)


FAMILY = Family("rotary", RotaryCase, sample, check)


def test_cases(case_batch: list[RotaryCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("interleaved", [False, True])
def test_tails(interleaved: bool) -> None:
    FAMILY.run_all(
        RotaryCase(
            seed=half,
            heads=2,
            positions=3,
            depth=2 * half + kept,
            dtype=dtype,
            angles=dtype,
            heads_inside=kept > 0,
            kept=kept,
            interleaved=interleaved,
        )
        for dtype in cases.FLOATS
        for half in cases.EDGES
        for kept in (0, 2, 34)
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_both_halves_of_the_angles_are_used(interleaved: bool) -> None:
    """They need not be the same, and infinities of one coordinate stay with its pair."""
    x, cos, sin = torch.ones(1, 1, 1, 8), torch.arange(8.0)[None, None], 10 * torch.arange(8.0)[None, None]
    out, _ = torch.ops.xopt.rotary(x, x, cos, sin, interleaved=interleaved)
    signs = torch.tensor([-1.0, 1.0]).repeat(4) if interleaved else torch.tensor([-1.0, 1.0]).repeat_interleave(4)
    assert torch.equal(out[0, 0], cos[0] + signs * sin[0])
    x[..., 2] = torch.inf
    out, _ = torch.ops.xopt.rotary(x, x, cos + 1, sin + 1, interleaved=interleaved)
    assert (~out.isfinite()).flatten().nonzero().flatten().tolist() == ([2, 3] if interleaved else [2, 6])


def test_columns_beyond_the_rotated_are_copied_bit_by_bit() -> None:
    for dtype, integer in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        info = torch.iinfo(integer)
        bits = torch.randint(info.min, info.max, (2, 3, 5, 38), dtype=integer)
        angles = torch.ones(1, 5, 4)
        for out in torch.ops.xopt.rotary(bits.view(dtype), bits.view(dtype), angles, angles):
            assert torch.equal(out.view(integer)[..., 4:], bits[..., 4:])


def test_threads_do_not_change_results(torch_threads: None) -> None:
    query, key, angles = torch.randn(2, 12, 64, 64), torch.randn(2, 3, 64, 64), torch.randn(2, 64, 64)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(torch.cat(torch.ops.xopt.rotary(query, key, angles, angles), 1))
    assert all(torch.equal(result, results[0]) for result in results)
