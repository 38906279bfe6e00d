"""Rotary embeddings found where models write them out: by halves or in pairs, of whole heads or of their beginning."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt

HEADS, DEPTH = 4, 16


def turned_halves(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def turned_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Rotated(nn.Module):
    """What of a model's attention comes before its products of query and key."""

    def __init__(
        self,
        turned: Callable[[Tensor], Tensor] = turned_halves,
        *,
        columns: int = DEPTH,
        heads_dim: int = 1,
        in_float: bool = False,
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.turned, self.columns, self.heads_dim = turned, columns, heads_dim
        self.in_float, self.apart = in_float, apart

    def angles(self, angles: Tensor) -> Tensor:
        if self.turned is turned_pairs:  # each angle twice, side by side
            angles = angles[..., : angles.shape[-1] // 2]
            return torch.repeat_interleave(angles[:, :, None, :], 2, 3) if self.heads_dim == 2 else self.pairs(angles)
        return angles.unsqueeze(self.heads_dim)

    def pairs(self, angles: Tensor) -> Tensor:
        return angles.unsqueeze(1).repeat_interleave(2, dim=-1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kept = x[..., self.columns :] if self.columns < DEPTH else None
        part = x[..., : self.columns] if self.columns < DEPTH else x
        wide = part.float() if self.in_float else part
        result = (wide * cos) + (self.turned(wide) * sin)
        if self.in_float:
            result = result.to(x.dtype)
        return result if kept is None else torch.cat([result, kept], dim=-1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        heads = [linear(x).view(x.shape[0], x.shape[1], -1, DEPTH) for linear in (self.query, self.key)]
        if self.heads_dim == 1:
            heads = [each.transpose(1, 2) for each in heads]
        shared = self.angles(cos), self.angles(sin)
        query, key = (
            self.rotate(each, *((self.angles(cos), self.angles(sin)) if self.apart else shared)) for each in heads
        )
        return query, key


def angles_of(positions: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    steps = torch.outer(torch.arange(positions) + 3.0, 0.5 ** torch.arange(columns // 2))
    both = torch.cat([steps, steps], dim=-1)[None]
    return both.cos().to(dtype), both.sin().to(dtype)


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def check(source: Any, *, rotary: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        optimized = xopt.optimize(nn.Sequential(source).eval(), dtype=dtype, config=xopt.Config(autocast=False))
        inner: Any = optimized[0]
        for batch, positions in ((2, 7), (1, 1), (3, 1), (1, 5)):
            x = torch.randn(batch, positions, 64, generator=torch.Generator().manual_seed(positions)).to(dtype)
            angles = angles_of(positions, source.columns, dtype)
            with torch.no_grad():
                exact = copy.deepcopy(source).double()(x.double(), *(each.double() for each in angles))
                theirs = copy.deepcopy(source).to(dtype)(x, *angles)
                results = inner(x, *angles)
            for ours, other, right in zip(results, theirs, exact, strict=True):
                assert ours.dtype == other.dtype
                assert relative_error(ours, right) <= 1.1 * relative_error(other, right) + 1e-6
        (report,) = (fusion for fusion in xopt.report(optimized).fusions if fusion.path == "0")
        assert report.problem is None, report
        assert report.fused.count("rotary") == rotary, report


FORMS = list(itertools.product((turned_halves, turned_pairs), (DEPTH, 6), (1, 2), (False, True)))


@pytest.mark.parametrize(("turned", "columns", "heads_dim", "in_float"), FORMS)
def test_each_form_is_one_step(
    turned: Callable[[Tensor], Tensor], columns: int, heads_dim: int, in_float: bool
) -> None:
    torch.manual_seed(0)
    check(Rotated(turned, columns=columns, heads_dim=heads_dim, in_float=in_float), rotary=1)


def test_angles_that_are_broadcast_for_each_apart() -> None:
    torch.manual_seed(0)
    check(Rotated(turned_pairs, heads_dim=2, apart=True), rotary=1)


class OfPatches(Rotated):
    """As timm's vision transformers have it: angles in one matrix for all images, tokens before the patches that stay
    as they are, and the query put together before the key is rotated."""

    prefix = 1

    def rotate_patches(self, x: Tensor, angles: Tensor) -> Tensor:
        sin, cos = angles.chunk(2, -1)
        if self.turned is turned_pairs:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        else:
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
        return (x * cos + turned * sin).to(dtype=x.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.turned is turned_pairs:
            cos, sin = (each[..., : DEPTH // 2].repeat_interleave(2, -1) for each in (cos, sin))
        angles = torch.cat((sin[0], cos[0]), -1)[self.prefix :]
        query, key = (
            linear(x).view(x.shape[0], x.shape[1], -1, DEPTH).transpose(1, 2) for linear in (self.query, self.key)
        )
        query, key = (
            torch.cat([each[:, :, : self.prefix, :], self.rotate_patches(each[:, :, self.prefix :, :], angles)], dim=2)
            for each in (query, key)
        )
        return query.type_as(x), key.type_as(x)


@pytest.mark.parametrize("turned", [turned_halves, turned_pairs])
def test_angles_of_one_matrix_for_all_images(turned: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check(OfPatches(turned), rotary=1)


class NeededBefore(Rotated):
    """The key depends on the rotated query, so both cannot be had at once."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        shape, cos, sin = (x.shape[0], x.shape[1], -1, DEPTH), self.angles(cos), self.angles(sin)
        query = self.rotate(self.query(x).view(shape).transpose(1, 2), cos, sin)
        key = self.key(x).view(shape).transpose(1, 2) * query.tanh()
        return query, self.rotate(key, cos, sin)


class Mirrored(Rotated):
    """It turns the other way round, which the kernel does not."""

    def __init__(self) -> None:
        super().__init__(lambda x: -turned_halves(x))


class Unordered(Rotated):
    def __init__(self) -> None:
        super().__init__(lambda x: torch.cat((x[..., DEPTH // 2 :], x[..., : DEPTH // 2]), dim=-1))


@pytest.mark.parametrize("make", [NeededBefore, Mirrored, Unordered])
def test_what_is_no_rotation_of_both_is_left(make: Callable[[], Rotated]) -> None:
    torch.manual_seed(0)
    check(make(), rotary=0)


def unbound_pairs(x: Tensor) -> Tensor:
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-imaginary, real], dim=-1).flatten(3)


def unbound_halves(x: Tensor) -> Tensor:
    first, second = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.cat([-second, first], dim=-1)


def wrongly_unbound(x: Tensor) -> Tensor:
    """Halves for pairs, and pairs for halves."""
    first, second = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.stack([-second, first], dim=-1).flatten(3)


class OfDiffusers(Rotated):
    """Flux, CogVideoX, Hunyuan: angles in a matrix, on the tensor's device, and parts of views of their own."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.heads_dim == 2:
            cos, sin = cos[0][None, :, None, :].to(x.device), sin[0][None, :, None, :].to(x.device)
        else:
            cos, sin = cos[0][None, None, :, :].to(x.device), sin[0][None, None].to(x.device)
        return (x.float() * cos + self.turned(x).float() * sin).to(x.dtype)

    def angles(self, angles: Tensor) -> Tensor:
        return angles


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize(("turned", "found"), [(unbound_pairs, 1), (unbound_halves, 1), (wrongly_unbound, 0)])
def test_parts_of_views_by_pairs_and_halves(turned: Callable[[Tensor], Tensor], found: int, heads_dim: int) -> None:
    torch.manual_seed(0)
    check(OfDiffusers(turned, heads_dim=heads_dim), rotary=found)


class BeforeHeads(Rotated):
    """LTX: all columns of a row have angles of their own, and become heads afterwards."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rows = [linear(x) for linear in (self.query, self.key)]
        turned = [(row.float() * cos + self.turned(row).float() * sin).to(row.dtype) for row in rows]
        query, key = (each.unflatten(2, (HEADS, -1)) for each in turned)
        return query, key


def rows_in_pairs(x: Tensor) -> Tensor:
    real, imaginary = x.unflatten(2, (-1, 2)).unbind(-1)
    return torch.stack([-imaginary, real], dim=-1).flatten(2)


def rows_turned_back(x: Tensor) -> Tensor:
    real, imaginary = x.unflatten(2, (-1, 2)).unbind(-1)
    return torch.stack([imaginary, -real], dim=-1).flatten(2)


@pytest.mark.parametrize(("turned", "found"), [(rows_in_pairs, 1), (turned_halves, 1), (rows_turned_back, 0)])
def test_rows_that_become_heads_afterwards(turned: Callable[[Tensor], Tensor], found: int) -> None:
    torch.manual_seed(0)
    check(BeforeHeads(turned, columns=64), rotary=found)


class InParts(OfDiffusers):
    """Wan: the angles of a pair once, of two tensors' even and odd columns, and each part written to its place."""

    wrong = False

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        places = (1, -1, 1, DEPTH) if self.heads_dim == 2 else (1, 1, -1, DEPTH)
        cos, sin = cos[0].reshape(places)[..., 0::2], sin[0].reshape(places)[..., 1::2]
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.empty_like(x)
        out[..., 0::2] = first * cos - second * sin
        out[..., 1::2] = first * sin + (first if self.wrong else second) * cos
        return out.type_as(x)


class WronglyInParts(InParts):
    wrong = True


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize(("kind", "found"), [(InParts, 1), (WronglyInParts, 0)])
def test_parts_that_are_written_to_their_places(kind: type[Rotated], found: int, heads_dim: int) -> None:
    torch.manual_seed(0)
    check(kind(heads_dim=heads_dim), rotary=found)


class Complex(OfDiffusers):
    """Qwen-Image, Z-Image, Llama 4: pairs are complex numbers, and so are angles, of each text or of all."""

    of_all = False

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        angles = torch.complex(cos[..., : DEPTH // 2].float(), sin[..., : DEPTH // 2].float())
        angles = angles[0].unsqueeze(1) if self.of_all else angles.unsqueeze(self.heads_dim)
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * angles
        return torch.view_as_real(turned).flatten(3).type_as(x)


class ComplexOfAll(Complex):
    of_all = True


class Swapped(Complex):
    """Of each pair the second comes first."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        swapped: Tensor = super().rotate(x, cos, sin).unflatten(-1, (-1, 2)).flip(-1).flatten(3)
        return swapped


class SwappedBefore(Complex):
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        angles = torch.complex(cos[..., : DEPTH // 2].float(), sin[..., : DEPTH // 2].float()).unsqueeze(1)
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * angles
        return torch.view_as_real(turned).flip(-1).flatten(3).type_as(x)


class TakenApart(Complex):
    """Two steps read the real numbers."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        angles = torch.complex(cos[..., : DEPTH // 2].float(), sin[..., : DEPTH // 2].float()).unsqueeze(1)
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * angles
        numbers = torch.view_as_real(turned)
        return torch.stack([numbers[..., 0], numbers[..., 1]], dim=-1).flatten(3).type_as(x)


COMPLEX = [
    *((Complex, 1, 1), (Complex, 2, 1), (ComplexOfAll, 2, 1), (Swapped, 1, 1)),
    *((SwappedBefore, 1, 0), (TakenApart, 1, 0)),
]


@pytest.mark.parametrize(("kind", "heads_dim", "found"), COMPLEX)
def test_complex_numbers(kind: type[Rotated], heads_dim: int, found: int) -> None:
    torch.manual_seed(0)
    check(kind(heads_dim=heads_dim), rotary=found)
