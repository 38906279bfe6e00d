"""Forwards that give torch's functions results of two parts, where only the optimized model has them of two dtypes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import xopt

WIDTH = 48


def scattered(words: Tensor, features: Tensor, places: Tensor) -> Tensor:
    return words.masked_scatter(places.unsqueeze(-1), features[places])


def scattered_in_place(words: Tensor, features: Tensor, places: Tensor) -> Tensor:
    return words.clone().masked_scatter_(mask=places.unsqueeze(-1), source=features[places])


def set_by_mask(words: Tensor, features: Tensor, places: Tensor) -> Tensor:
    words = words.clone()
    words[places] = features[places]
    return words


def put(words: Tensor, features: Tensor, places: Tensor) -> Tensor:
    return words.index_put((places,), features[places])


def added(words: Tensor, features: Tensor, places: Tensor) -> Tensor:
    rows = places.flatten().nonzero().squeeze(1)
    return words.flatten(0, 1).index_add(0, rows, features[places]).view_as(words)


def summed_by_place(words: Tensor, features: Tensor, places: Tensor) -> Tensor:
    return words.scatter_add(1, places.long().unsqueeze(-1).expand_as(words), src=features)


class TwoKinds(nn.Module):
    """Words, which an embedding makes, and in some places what a parameter has made wider."""

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.words = nn.Embedding(30, WIDTH)
        self.factor = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.write = write

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        words = self.words(ids)
        result: Tensor = self.head(self.write(words, words * self.factor, places))
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "write", [scattered, scattered_in_place, set_by_mask, put, added, summed_by_place], ids=lambda f: f.__name__
)
@torch.no_grad()
def test_what_is_written_gets_the_dtype_of_what_it_is_written_into(
    write: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    source = TwoKinds(write).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    for _ in range(3):
        ids, places = torch.randint(0, 30, (2, 7)), torch.rand(2, 7) > 0.5
        got = optimized(ids, places)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, source(ids, places), atol=0.1, rtol=0.05)


WIDENING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lerp": lambda words, wide: torch.lerp(words, wide, 0.5),
    "lerp with weights": lambda words, wide: wide.lerp(end=words, weight=wide.sigmoid()),
    "mv": lambda words, wide: torch.mv(words[0], wide[0, 0]),
    "addmv": lambda words, wide: torch.addmv(wide[0, :, 0], words[0], wide[0, 0], beta=0.5),
    "dot": lambda words, wide: words[0, 0].dot(wide[0, 0]),
    "inner": lambda words, wide: torch.inner(words, wide[0, 0]),
    "tensordot": lambda words, wide: torch.tensordot(words, wide, dims=([2], [2])),
    "multi_dot": lambda words, wide: torch.linalg.multi_dot([words[0], wide[0].T, words[0]]),
    "bilinear": lambda words, wide: nn.functional.bilinear(words, words, wide[0, :3, :, None] * wide[0, 0]),
    "cross": lambda words, wide: torch.cross(words[..., :3], wide[..., :3], dim=-1),
    "embedding bag": lambda words, wide: nn.functional.embedding_bag(
        torch.tensor([[0, 1]]), wide[0], per_sample_weights=words[0, :1, :2], mode="sum"
    ),
}


@pytest.mark.parametrize("name", WIDENING)
@torch.no_grad()
def test_what_is_computed_of_two_dtypes_is_so_in_the_wider(name: str) -> None:
    class Computes(TwoKinds):
        def forward(self, ids: Tensor, places: Tensor) -> Tensor:
            words: Tensor = self.words(ids)
            if float(words.sum()) > 1e9:  # no fixed sequence of operations
                return words
            return WIDENING[name](words, words * self.factor)

    torch.manual_seed(0)
    source = Computes(scattered).eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    for _ in range(3):
        ids, places = torch.randint(0, 30, (2, 7)), torch.rand(2, 7) > 0.5
        got, expected = optimized(ids, places), source(ids, places)
        assert got.dtype == torch.float32
        assert (got - expected).norm() <= 0.03 * expected.norm()


@torch.no_grad()
def test_what_torch_refuses_in_the_source_too_stays_an_error() -> None:
    class Whole(TwoKinds):
        def forward(self, ids: Tensor, places: Tensor) -> Tensor:
            return super().forward(ids, places).masked_scatter(places.unsqueeze(-1), ids)

    optimized = xopt.optimize(Whole(scattered).eval(), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="masked_scatter"):
        optimized(torch.randint(0, 30, (2, 7)), torch.ones(2, 7).bool())


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mv": lambda weight, x: torch.mv(weight, x[0]),
    "mv of a part": lambda weight, x: weight[:5].mv(x[0]),
    "tensordot": lambda weight, x: torch.tensordot(x, weight, dims=([1], [0])),
    "multi_dot": lambda weight, x: torch.linalg.multi_dot([x, weight, weight]),
    "einsum of three": lambda weight, x: torch.einsum("bi,oi,bj->boj", x, weight, x),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PRODUCTS)
def test_layers_weights_are_factors_in_any_dtype(name: str, mode: Callable[[], AbstractContextManager[None]]) -> None:
    class Multiplies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), PRODUCTS[name](self.layer.weight, x)

    torch.manual_seed(0)
    source, x = Multiplies().eval(), torch.randn(4, WIDTH)
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    with mode():
        for _ in range(3):
            got, expected = optimized(x)[1], source(x)[1]
            assert got.dtype == torch.float32
            assert (got - expected).norm() <= 0.03 * expected.norm()
