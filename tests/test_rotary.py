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


def sample(rng: random.Random) -> RotaryCase:
    return RotaryCase(
        seed=rng.randrange(2**31),
        batch=rng.randint(0, 3),
        heads=rng.randint(0, 5),
        key_heads=rng.randint(0, 3),
        positions=rng.choice((0, 1, 2, 17, 64)),
        depth=2 * rng.choice(cases.EDGES),
        dtype=rng.choice(cases.FLOATS),
        angles=rng.choice(cases.FLOATS),
        heads_inside=rng.random() < 0.5,
        one_batch_of_angles=rng.random() < 0.5,
    )


def check(case: RotaryCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)

    def heads(count: int) -> Tensor:
        shape = (case.batch, count, case.positions, case.depth)
        x = cases.values("normal", shape, DTYPES[case.dtype], generator)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if case.heads_inside else x

    query, key = heads(case.heads), heads(case.key_heads)
    batch = 1 if case.one_batch_of_angles else case.batch
    shape = (batch, case.positions, case.depth)
    cos, sin = (cases.values("normal", shape, DTYPES[case.angles], generator) for _ in range(2))
    for name, x, out in zip(("query", "key"), (query, key), torch.ops.xopt.rotary(query, key, cos, sin), strict=True):
        if not out.is_contiguous():
            raise AssertionError(f"the rotated {name} has strides {out.stride()}")
        first, second = x.double().chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        left, right = x.double() * cos.double()[:, None], turned * sin.double()[:, None]
        error = 4 * U32 * (left.abs() + right.abs())
        nothing = torch.zeros_like(left, dtype=torch.bool)
        estimate = Estimate(left + right, error, nothing, nothing)
        expect_values(f"the rotated {name}", out, estimate, tuple(x.shape), DTYPES[case.dtype], False)


FAMILY = Family("rotary", RotaryCase, sample, check)


def test_cases(case_batch: list[RotaryCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_tails() -> None:
    FAMILY.run_all(
        RotaryCase(seed=half, heads=2, positions=3, depth=2 * half, dtype=dtype, angles=dtype, heads_inside=inside)
        for dtype in cases.FLOATS
        for half in cases.EDGES
        for inside in (False, True)
    )
