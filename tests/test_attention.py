"""xopt::attention against the float64 reference: masks, bands, groups of heads, strides, and any number of threads."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_values, flushes_denormals

Tensor = torch.Tensor

LAYOUTS = {"contiguous": 40, "merged": 30, "offset": 8, "sliced": 8, "row_step": 8, "expanded": 8, "k_strided": 8}
SINK_DIMS = ("1h11", "1h11", "h11", "bhq1", "b1q1", "q1", "1")
MASK_DIMS = ("bhqk", "b11k", "11qk", "1hqk", "bh1k", "bhq1", "qk", "k", "1", "")
WORK_LIMIT = 1_500_000


@dataclass(frozen=True)
class AttentionCase:
    seed: int = 0
    dtype: str = "f32"
    batch: int = 1
    heads: int = 1
    group: int = 1
    queries: int = 1
    keys: int = 1
    depth: int = 1
    value_depth: int = 1
    values: str = "normal"
    layout: str = "contiguous"
    mask: str = ""
    mask_dims: str = "bhqk"
    mask_strided: bool = False
    scale: float = 0.0  # 0: the default
    causal: bool = False
    causal_offset: int = 0
    window: int = 0
    one_sees_all: bool = False
    sinks: str = ""
    sink_dims: str = "1h11"


def sample(rng: random.Random) -> AttentionCase:
    queries, keys, depth = cases.pick_sizes(rng)
    value_depth = depth if rng.random() < 0.5 else cases.pick_size(rng)
    batch, heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4, 5))
    while batch * heads * group * queries * keys * max(depth, value_depth, 1) > WORK_LIMIT and queries > 1:
        batch, heads, queries = max(1, batch - 1), max(1, heads - 1), queries // 2 + 1 if queries > 2 else 1
    causal = rng.random() < 0.4
    return AttentionCase(
        seed=rng.randrange(1_000_000),
        dtype=rng.choice(cases.FLOATS),
        batch=batch,
        heads=heads,
        group=group,
        queries=queries,
        keys=keys,
        depth=depth,
        value_depth=value_depth,
        values=rng.choice(("normal", "normal", "normal", "integers", "one_hot", "zeros", "mixed")),
        layout=cases.pick(rng, LAYOUTS),
        mask=rng.choice(("", "", "bool", "f32", "bf16", "f16")),
        mask_dims=rng.choice(MASK_DIMS),
        mask_strided=rng.random() < 0.2,
        scale=rng.choice((0.0, 0.0, 0.5, 1.0, -0.25)),
        causal=causal,
        causal_offset=rng.choice((0, keys - queries, 1, -3, 100, -300)) if causal else 0,
        window=rng.choice((0, 1, 7, 40, 300)) if causal else 0,
        one_sees_all=causal and rng.random() < 0.5,
        sinks=rng.choice(("", "", "f32", "bf16", "f16")),
        sink_dims=rng.choice(SINK_DIMS),
    )


def merged(tensors: list[Tensor]) -> list[Tensor]:
    """The same values as slices of one projection [batch, rows, all columns], amid poison."""
    batch, _, rows, _ = tensors[0].shape
    widths = [x.shape[1] * x.shape[3] for x in tensors]
    views = cases.poisoned((batch, rows, sum(widths) + 3), tensors[0].dtype)[..., 1:-2].split(widths, -1)
    return [
        view.view(batch, rows, x.shape[1], x.shape[3]).transpose(1, 2).copy_(x)
        for view, x in zip(views, tensors, strict=True)
    ]


def inputs(case: AttentionCase, generator: torch.Generator) -> list[Tensor]:
    shapes = (
        (case.batch, case.heads * case.group, case.queries, case.depth),
        (case.batch, case.heads, case.keys, case.depth),
        (case.batch, case.heads, case.keys, case.value_depth),
    )
    tensors = [cases.values(case.values, shape, DTYPES[case.dtype], generator) for shape in shapes]
    if case.layout == "merged":
        query, key, value = tensors
        return [*merged([query]), *merged([key, value])]
    return [cases.laid_out(x, case.layout) for x in tensors]


def sizes_of(case: AttentionCase, dims: str) -> list[int]:
    sizes = {"b": case.batch, "h": case.heads * case.group, "q": case.queries, "k": case.keys, "1": 1}
    return [sizes[dim] for dim in dims]


def sinks_of(case: AttentionCase, generator: torch.Generator) -> Tensor | None:
    """Most of them about as large as scores are, and some that are far from it."""
    if not case.sinks:
        return None
    plain = 3 * torch.randn(sizes_of(case, case.sink_dims), generator=generator)
    plain = torch.where(plain.abs() > 5, plain * 20, plain)
    sinks = plain.masked_fill((plain > 3) & (plain < 4), -math.inf).to(DTYPES[case.sinks])
    return torch.stack([sinks, sinks], -1)[..., 0] if case.mask_strided else sinks


def mask_of(case: AttentionCase, generator: torch.Generator) -> Tensor | None:
    if not case.mask:
        return None
    plain = torch.randn(sizes_of(case, case.mask_dims), generator=generator)
    chosen = plain < 0.5 if case.mask == "bool" else torch.where(plain > 1.2, -math.inf, 2 * plain)
    chosen = chosen.to(torch.bool if case.mask == "bool" else DTYPES[case.mask])
    return torch.stack([chosen, chosen], -1)[..., 0] if case.mask_strided else chosen


def bias_of(case: AttentionCase, mask: Tensor | None) -> Tensor:
    """All that is masked, as one additive mask in float64."""
    bias = torch.zeros(case.batch, case.heads * case.group, case.queries, case.keys, dtype=torch.float64)
    if mask is not None:
        bias = bias + (torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask).double()
    distance = torch.arange(case.keys) - torch.arange(case.queries)[:, None] - case.causal_offset
    hidden = (distance > 0) & (case.causal and not (case.one_sees_all and case.queries == 1))
    if case.window > 0:
        hidden |= distance <= -case.window
    return bias.masked_fill(hidden, -math.inf)


def call(
    case: AttentionCase, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    out = torch.ops.xopt.attention(
        query,
        key,
        value,
        mask,
        scale=case.scale or None,
        causal=case.causal,
        causal_offset=case.causal_offset,
        window=case.window,
        one_sees_all=case.one_sees_all,
        sinks=sinks,
    )
    return torch.as_tensor(out)


def check(case: AttentionCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    query, key, value = inputs(case, generator)
    mask, sinks = mask_of(case, generator), sinks_of(case, generator)
    out = call(case, query, key, value, mask, sinks)
    keys, values = (x.double().repeat_interleave(case.group, 1) for x in (key, value))
    dtype = DTYPES[case.dtype]
    flushes = flushes_denormals(dtype)
    scale = case.scale or 1 / math.sqrt(max(1, case.depth))
    # Where products are of bf16, so are the probabilities, and their sum is of what was rounded (exp2_words.h).
    rounding = 2 * 6.2e-3 if flushes else 0.0
    bias, sink = bias_of(case, mask), None if sinks is None else sinks.double()
    expected = reference.attention(query.double(), keys, values, bias, scale, rounding, sink)
    shape = (case.batch, case.queries, case.heads * case.group, case.value_depth)
    expect_values("the output", out, expected, shape, dtype, flushes)


FAMILY = Family("attention", AttentionCase, sample, check)


def test_cases(case_batch: list[AttentionCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_tails(dtype: str) -> None:
    FAMILY.run_all(
        AttentionCase(seed=queries, dtype=dtype, queries=queries, keys=keys, depth=depth, value_depth=value_depth)
        for queries in (1, 8, 9, 15, 33)
        for keys in (1, 2, 31, 33, 257)
        for depth in (1, 16, 17, 33)
        for value_depth in (1, 31, 32, 65)
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_sinks(dtype: str) -> None:
    FAMILY.run_all(
        AttentionCase(
            seed=queries + keys,
            dtype=dtype,
            batch=2,
            heads=2,
            group=group,
            queries=queries,
            keys=keys,
            depth=32,
            value_depth=40,
            mask=mask,
            causal=not mask,
            causal_offset=keys - queries,
            sinks=sinks,
            sink_dims=dims,
        )
        for sinks in cases.FLOATS
        for dims in ("1h11", "bhq1")
        for mask in ("", "bool", "f32")
        for group in (1, 4)
        for queries, keys in ((1, 1), (1, 700), (3, 40), (40, 40), (100, 530))
    )


@pytest.mark.parametrize("queries", [2, 40])
@pytest.mark.parametrize("name", cases.FLOATS)
def test_a_sink_takes_its_share_however_large_it_is(name: str, queries: int) -> None:
    query, key = (random_heads(1, 2, rows, 24, dtype=DTYPES[name]) for rows in (queries, 300))
    plain = torch.ops.xopt.attention(query, key, key)
    none = torch.full((1, 2, 1, 1), -math.inf)
    assert torch.equal(torch.ops.xopt.attention(query, key, key, sinks=none), plain)
    assert not torch.ops.xopt.attention(query, key, key, sinks=torch.full((1,), 1e30)).any()
    assert torch.ops.xopt.attention(query, key, key, sinks=torch.full((1,), math.nan)).isnan().all()
    hidden = torch.zeros(300, dtype=torch.bool)
    assert not torch.ops.xopt.attention(query, key, key, hidden, sinks=torch.zeros(1)).any()
    # As large as the sum of all others.
    scores = (query.double() @ key.double().mT / math.sqrt(24)).logsumexp(-1, keepdim=True)
    halved = torch.ops.xopt.attention(query, key, key, sinks=scores.float())
    torch.testing.assert_close(2 * halved.double(), plain.double(), rtol=1e-5 if name == "f32" else 2e-2, atol=1e-3)


def test_depth_of_several_blocks() -> None:
    FAMILY.run_all(
        AttentionCase(dtype=dtype, queries=queries, keys=70, depth=depth, value_depth=40)
        for dtype in cases.FLOATS
        for queries in (2, 40)
        for depth in (383, 385, 513, 1100)
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_bands(dtype: str) -> None:
    """Causality and windows whose edges fall within and between blocks of keys."""
    FAMILY.run_all(
        AttentionCase(
            dtype=dtype,
            group=group,
            queries=queries,
            keys=keys,
            depth=16,
            value_depth=16,
            layout="merged",
            causal=True,
            causal_offset=offset,
            window=window,
        )
        for group in (1, 3)
        for queries, keys in ((1, 700), (5, 600), (300, 300), (50, 530))
        for offset in (0, keys - queries, 255, 256, 384, -20, -1000, 10_000)
        for window in (0, 1, 100, 256, 10_000)
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("depth", [32, 64, 96, 416])
@pytest.mark.parametrize("rows", [16, 40, 48, 70])
def test_queries_where_they_are_and_copies_of_them_are_alike(rows: int, depth: int) -> None:
    """Tiles are read out of rows that begin with a line of the cache."""
    merged = random_heads(2 * rows * 3 * 2 * depth, dtype=torch.bfloat16)
    results = []
    for first in (0, 1, 32):
        memory = torch.empty(first + len(merged), dtype=torch.bfloat16)[first:].copy_(merged)
        query, key, value = memory.view(2, rows, 3, 2, depth).permute(2, 0, 3, 1, 4)
        results.append(torch.ops.xopt.attention(query, key, value))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double()).transpose(1, 2)
    torch.testing.assert_close(results[0].double(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_several_parts_of_a_head(dtype: str) -> None:
    FAMILY.run_all(
        AttentionCase(dtype=dtype, queries=2100, keys=40, depth=8, value_depth=8, group=group, causal=causal)
        for group, causal in ((1, False), (1, True), (2, True))
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_zero_sizes(dtype: str) -> None:
    names = ("batch", "heads", "queries", "keys", "depth", "value_depth")
    sizes = dict.fromkeys(names, 3)
    for queries in (3, 20):
        FAMILY.run_all(
            AttentionCase(dtype=dtype, **{**sizes, "queries": queries, name: 0})  # type: ignore[arg-type]
            for name in names
        )


def random_heads(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ROWS = (2, 40)  # on the way without packing, and with it


@pytest.mark.sanitize
@pytest.mark.parametrize("queries", ROWS)
@pytest.mark.parametrize("name", cases.FLOATS)
def test_rows_that_see_nothing_are_zero(name: str, queries: int) -> None:
    dtype = DTYPES[name]
    query, key = random_heads(1, 2, queries, 24, dtype=dtype), random_heads(1, 2, 600, 24, dtype=dtype)
    value = torch.full_like(key, math.nan)
    for mask in (torch.zeros(600, dtype=torch.bool), torch.full((queries, 1), -math.inf)):
        assert not torch.ops.xopt.attention(query, key, value, mask).any()
    assert not torch.ops.xopt.attention(query, key, value, causal=True, causal_offset=-queries).any()
    assert not torch.ops.xopt.attention(query, key, value, window=1, causal_offset=600).any()
    mask = torch.ones(queries, 600, dtype=torch.bool)
    mask[1] = False
    out = torch.ops.xopt.attention(query, key, key, mask)
    assert not out[:, 1].any()
    assert torch.equal(out[:, 0], torch.ops.xopt.attention(query, key, key)[:, 0])


@pytest.mark.parametrize("queries", ROWS)
def test_keys_seen_after_none(queries: int) -> None:
    """The maximum is -inf for a whole block of keys before the first one counts."""
    query, key = random_heads(1, 1, queries, 8), random_heads(1, 1, 900, 8)
    mask = torch.zeros(900, dtype=torch.bool)
    mask[700:] = True
    expected = F.scaled_dot_product_attention(query, key[:, :, 700:], key[:, :, 700:])
    out = torch.ops.xopt.attention(query, key, key, mask)
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.sanitize
@pytest.mark.parametrize("queries", ROWS)
@pytest.mark.parametrize("name", cases.FLOATS)
def test_nan_and_the_smallest_number_come_through(name: str, queries: int) -> None:
    dtype = DTYPES[name]
    query, key = random_heads(1, 1, queries, 8, dtype=dtype), random_heads(1, 1, 300, 8, dtype=dtype)
    query[0, 0, 1, 3] = math.nan
    out = torch.ops.xopt.attention(query, key, key)
    assert out[0, 1].isnan().all()
    assert not out[0, 0].isnan().any()
    mask = torch.zeros(queries, 300)
    mask[1, 299] = math.nan
    out = torch.ops.xopt.attention(query[:, :, :1].expand_as(query), key, key, mask)
    assert out[0, 1].isnan().all()
    assert not out[0, 0].isnan().any()
    # A mask of the smallest float hides keys, but where it hides all of them, none.
    mask = torch.full((300,), torch.finfo(torch.float32).min)
    average = torch.ops.xopt.attention(query[:, :, :1].expand_as(query), key, key, mask)
    assert torch.allclose(average[0, 0, 0].float(), key[0, 0].float().mean(0), atol=1e-5 if name == "f32" else 1e-2)


@pytest.mark.sanitize
@pytest.mark.parametrize("queries", ROWS)
@pytest.mark.parametrize("name", cases.FLOATS)
@pytest.mark.parametrize("size", [1, 100, 1e4])
def test_scores_of_any_size_do_not_overflow(name: str, queries: int, size: float) -> None:
    """Those with later keys are larger, by more than the first keys' largest may be reused for."""
    dtype = DTYPES[name]
    query = random_heads(1, 1, queries, 8, dtype=dtype) * size
    key, value = random_heads(1, 1, 300, 8, dtype=dtype), random_heads(1, 1, 300, 8, dtype=dtype, seed=1)
    key *= torch.linspace(0.1, 10, 300).view(300, 1)
    mask = torch.rand(queries, 300, generator=torch.Generator().manual_seed(2)) < 0.9
    for seen in (None, mask):
        out = torch.ops.xopt.attention(query, key, value, seen)
        expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), seen)
        assert torch.allclose(out.double(), expected.transpose(1, 2), atol=1e-3 if name == "f32" else 3e-2)


@pytest.mark.sanitize
@pytest.mark.parametrize("keys", [40, 64, 77, 300])
@pytest.mark.parametrize("name", cases.FLOATS)
@pytest.mark.parametrize("some", [False, True])
def test_scores_far_below_zero(name: str, keys: int, some: bool) -> None:
    """Beside a score of 0, as that of a key which only fills up a panel, their probabilities would be nothing."""
    dtype = DTYPES[name]
    query, key = random_heads(1, 2, 70, 8) + 6, random_heads(1, 2, keys, 8, seed=1) - 6
    if some:
        query[:, :, ::3] *= -1
    query, key, value = query.to(dtype), key.to(dtype), random_heads(1, 2, keys, 8, dtype=dtype, seed=2)
    out = torch.ops.xopt.attention(query, key, value)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    assert torch.allclose(out.double(), expected.transpose(1, 2), atol=1e-3 if name == "f32" else 3e-2)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_bitwise_equal_for_any_number_of_threads(dtype: str, torch_threads: None) -> None:
    for case in (
        AttentionCase(batch=1, heads=1, queries=300, keys=300, depth=32, value_depth=40, causal=True),
        AttentionCase(batch=1, heads=3, group=2, queries=130, keys=520, depth=20, value_depth=33, mask="f32"),
        AttentionCase(batch=2, heads=3, group=2, queries=2, keys=520, depth=20, value_depth=33, mask="bool"),
        AttentionCase(batch=1, heads=1, queries=1300, keys=70, depth=8, value_depth=8, causal=True, window=9),
    ):
        generator = torch.Generator().manual_seed(1)
        query, key, value = (x.to(DTYPES[dtype]) for x in inputs(case, generator))
        value[0, 0, 5, 3] = math.inf  # what is passed over, and what is multiplied by zero, is the same as well
        mask = mask_of(case, generator)
        results = {}
        for count in (1, 2, 3, 5, 8):
            torch.set_num_threads(count)
            results[count] = call(case, query, key, value, mask)
        for count, result in results.items():
            assert torch.equal(result.nan_to_num(-7.0), results[1].nan_to_num(-7.0)), f"{count} threads: {case}"


def test_slices_of_a_projection_are_read_in_place() -> None:
    projected = random_heads(2, 20, 3 * 4 * 16)
    query, key, value = (x.view(2, 20, 4, 16).transpose(1, 2) for x in projected.split(64, -1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = torch.ops.xopt.attention(query, key, value)
    assert "aten::copy_" not in {event.name for event in profile.events()}
    assert torch.equal(out, torch.ops.xopt.attention(query.contiguous(), key.contiguous(), value.contiguous()))


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["bool", "f32", "bf16"])
def test_a_mask_of_windows_is_that_of_each_image(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(6, 2, 9, 16, generator=generator) for _ in range(3))
    for shape in ((1, 3, 2, 9, 9), (1, 3, 1, 9, 9), (1, 2, 1, 1, 9), (1, 6, 2, 9, 9), (1, 1, 2, 9, 9)):
        plain = torch.randn(shape, generator=generator)
        mask = plain > 0 if kind == "bool" else plain.to(DTYPES[kind])
        repeated = mask.expand(6 // shape[1], *shape[1:]).flatten(0, 1)
        out = torch.ops.xopt.attention(query, key, value, mask)
        assert torch.equal(out, torch.ops.xopt.attention(query, key, value, repeated))
    for shape in ((1, 4, 1, 9, 9), (2, 3, 1, 9, 9), (1, 0, 1, 9, 9), (1, 3, 3, 9, 9)):
        with pytest.raises(RuntimeError, match=r"mask: expected \[1, windows, .* divides the batch of 6, got"):
            torch.ops.xopt.attention(query, key, value, torch.zeros(shape))
