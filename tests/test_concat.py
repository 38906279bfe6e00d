"""xopt::concat, bit for bit against torch, and models in which it is a link of a chain."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.families import Family, calls_of, expect_equal
from tests.test_chain_programs import watch_chains
from xopt.ops.fakes import COPIED

ops: Any = torch.ops.xopt
SIZES = (0, 1, 1, 2, 3, 5, 8, 33)
LAYOUTS = (
    "contiguous",
    "contiguous",
    "permuted",
    "channels_last",
    "channels_last",
    "some channels last",
    "slice",
    "expanded",
    "every other",
)


@dataclass(frozen=True)
class ConcatCase:
    seed: int = 0
    sizes: str = "2"
    dim: int = 0
    others: str = "1"  # sizes of the other parts along the dimension; empty: there are none
    dtype: str = "float32"
    layout: str = "contiguous"
    other_layout: str = "contiguous"


def sample(rng: random.Random) -> ConcatCase:
    dims = rng.choice((1, 2, 3, 4, 4, 5))
    return ConcatCase(
        seed=rng.randrange(1_000_000),
        sizes="x".join(str(rng.choice(SIZES)) for _ in range(dims)),
        dim=rng.randrange(-dims, dims),
        others="x".join(str(rng.choice((0, 1, 2, 9))) for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 7)))),
        dtype=str(rng.choice(COPIED)).removeprefix("torch."),
        layout=rng.choice(LAYOUTS),
        other_layout=rng.choice(LAYOUTS),
    )


def laid_out(tensor: Tensor, layout: str, rng: random.Random) -> Tensor:
    dims = tensor.dim()
    if layout == "permuted":
        order = rng.sample(range(dims), dims)
        return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(dims)])
    if "last" in layout and dims in (4, 5):
        some = layout == "some channels last"
        image = torch.cat((tensor, tensor), 1) if some else tensor
        image = image.contiguous(memory_format=torch.channels_last if dims == 4 else torch.channels_last_3d)
        return image[:, : tensor.shape[1]] if some else image
    if layout == "slice":
        return torch.nn.functional.pad(tensor, (2, 3))[..., 2:-3]
    if layout == "expanded":
        return tensor[:1].expand_as(tensor)
    return torch.stack((tensor, tensor), -1)[..., 0] if layout == "every other" else tensor


def check(case: ConcatCase) -> None:
    torch.manual_seed(case.seed)
    rng = random.Random(case.seed)
    sizes = [int(size) for size in case.sizes.split("x")]
    parts, others = [], [int(size) for size in case.others.split("x") if size]
    for size, layout in ((sizes[case.dim], case.layout), *((size, case.other_layout) for size in others)):
        sizes[case.dim] = size
        values = torch.randint(-100, 100, sizes).to(getattr(torch, case.dtype))
        parts.append(laid_out(values, layout, rng))
    got, expected = ops.concat(parts, case.dim), torch.cat(parts, case.dim)
    expect_equal("the result", got, expected)
    if all(part.numel() for part in parts) and min(parts[0].shape) > 1 and min(others, default=2) > 1:
        assert got.stride() == expected.stride()


FAMILY = Family("concat", ConcatCase, sample, check)


def test_cases(case_batch: list[ConcatCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_tails() -> None:
    FAMILY.run_all(
        ConcatCase(seed=size, sizes=f"{size}x3x{size}", dim=dim, others=others, dtype=dtype, layout=layout)
        for size in (1, 2, 7, 33)
        for dim in range(3)
        for others in ("1", "8", "3x1x5")
        for dtype in ("int8", "bfloat16", "float32")
        for layout in ("contiguous", "permuted", "slice")
    )


def test_long_runs_on_threads(torch_threads: None) -> None:
    """A cache of four heads, of which each is one run."""
    cache, new = torch.randn(1, 4, 999, 64), torch.randn(1, 1, 4, 64).transpose(1, 2)
    expected = torch.cat((cache, new), -2)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(ops.concat([cache, new], -2), expected)


# ---- Blocks ----------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Patches with a token of the model's own before them, which stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 32))
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.token.expand(x.shape[0], -1, -1), patches), dim=1)
        return tokens + self.down(self.up(self.norm(tokens)).relu())  # type: ignore[no-any-return]


class Across(nn.Module):
    """A decoder's convolution that reads what the encoder had."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Conv2d(*sizes, 3, padding=1) for sizes in ((3, 8), (8, 8), (16, 4)))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x).relu()
        return self.last(torch.cat([kept, self.second(kept).relu()], 1))  # type: ignore[no-any-return]


class Dense(nn.Module):
    """Each convolution reads what all before it gave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(3 if n == 0 else 8 * n, 8, 3, padding=1) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        features = [self.convs[0](x)]
        for conv in list(self.convs)[1:]:
            features.append(conv(torch.cat(features, 1)).relu())
        return torch.cat(features, 1)


class Branches(nn.Module):
    """More of them than one call of the operator joins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs, self.last = nn.ModuleList(nn.Conv2d(3, 8, 1) for _ in range(17)), nn.Conv2d(8 * 17, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([conv(x) for conv in self.convs], dim=1)).relu()  # type: ignore[no-any-return]


def copies() -> int:
    return calls_of("concat")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "calls", "in_place"), [(Tokens, 1, 0), (Across, 1, 1), (Dense, 4, 3), (Branches, 3, 3)]
)
def test_in_a_chain(make: Any, calls: int, in_place: int, dtype: torch.dtype) -> None:
    """Where sizes have come before, what joins images has parts that were written where they go."""
    source = make().eval()
    optimized = xopt.optimize(source, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    with torch.no_grad():
        for known, batch in enumerate((1, 2, 2, 2, 2, 1)):
            x = torch.randn(batch, 3, 16, 16).to(memory_format=torch.channels_last)
            before = copies()
            torch.testing.assert_close(optimized(x), source(x), atol=tolerance, rtol=tolerance)
            assert copies() - before == (calls - in_place if known in (2, 3, 4) else calls)


def test_what_was_joined_before_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To each feature but the first two, what came before is one part."""
    optimized = xopt.optimize(Dense().eval(), dtype=torch.float32)
    texts: list[str] = []
    watch_chains(monkeypatch, texts.append)
    with torch.no_grad():
        optimized(torch.randn(1, 3, 16, 16))
    joined = [line for line in "\n".join(texts).split("\n") if line.startswith("concat ")]
    assert [line.count("$") for line in joined] == [1, 2, 2, 2]


def test_a_wider_part_has_the_other_written_so() -> None:
    """Torch makes fp32 of both, and what is written so is rounded once less."""
    source = Tokens().eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        optimized.down.weight.zero_()
        optimized.down.bias.zero_()
        weight = source.patches.weight.bfloat16().float()
        exact = nn.functional.conv2d(x.bfloat16().float(), weight, source.patches.bias, stride=4)
        patches = exact.flatten(2).transpose(1, 2)
        assert not torch.equal(patches, patches.bfloat16().float())
        torch.testing.assert_close(optimized(x)[:, 1:], patches, atol=1e-5, rtol=1e-5)


def test_parts_that_torch_alone_joins() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.back = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.linear(x)
            return self.back(torch.cat((torch.cat((x, y, x), 0), y)))  # type: ignore[no-any-return]

    source = Others().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for y in (torch.randn(3, 16), torch.randn(1, 16), torch.randn(3, 16).double().float()):
            x = torch.randn(2, 16)
            torch.testing.assert_close(optimized(x, y), source(x, y), atol=1e-5, rtol=1e-5)
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            optimized(torch.randn(2, 16), torch.randn(3, 15))
