"""Products of two activations in recorded forwards: on xopt's kernel, with what follows them, whatever their shapes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import xopt
from tests.test_chain_programs import watch_chains

WIDTH = 64


class Mixer(nn.Module):
    """Three projections of a sequence; `mix` is what is done with them."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = mix
        self.table = nn.Parameter(torch.linspace(-90, 90, WIDTH * WIDTH).sin().reshape(WIDTH, 4, 16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (4, 16)) for layer in (self.one, self.two, self.three))
        result: Tensor = self.out(self.mix(self, *parts).flatten(-2))
        return result


def scaled_and_added(module: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = (each.transpose(1, 2) for each in (a, b, c))
    weights = torch.matmul(a, b.mT) / 16**0.5 + c.mean(-1).unsqueeze(-2)
    return (weights.sigmoid() @ c).transpose(1, 2)


def added_first(module: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = (each.transpose(1, 2) for each in (a, b, c))
    weights = (c.mean(-1).unsqueeze(-1) + a @ b.mT) * 0.25
    return (weights.tanh() @ c).transpose(1, 2)


def transposed_left(module: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Linear attention: keys' columns are the rows."""
    a, b, c = (each.transpose(1, 2) for each in (a, b, c))
    states = b.softmax(-2).mT @ c
    return (a.softmax(-1) @ states).transpose(1, 2)


def with_input(module: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    batch, length = a.shape[:2]
    a, b, c = (each.transpose(1, 2).flatten(0, 1) for each in (a, b, c))
    weights = torch.baddbmm(c.mean(-1, keepdim=True), a, b.mT, beta=0.5, alpha=0.25).relu()
    return torch.bmm(weights, c).view(batch, 4, length, 16).transpose(1, 2)


def as_in_xlnet(module: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    scores = torch.einsum("ibnd,jbnd->bnij", a.transpose(0, 1), b.transpose(0, 1)) * 0.1
    mixed = torch.einsum("bnij,jbnd->ibnd", (scores.sigmoid(), c.transpose(0, 1))).transpose(0, 1)
    return mixed + torch.einsum("bih,hnd->bind", a.flatten(-2), module.table)


def sum_of_two(module: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = (each.transpose(1, 2) for each in (a, b, c))
    return ((a @ b.mT + b @ a.mT).tanh() @ c).transpose(1, 2)


def weights_used_twice(module: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = (each.transpose(1, 2) for each in (a, b, c))
    weights = (a @ b.mT * 0.25).softmax(-1)
    return (weights @ c + weights.amax(-1, keepdim=True)).transpose(1, 2)


MIXES = (
    *(scaled_and_added, added_first, transposed_left, with_input, as_in_xlnet),
    *(sum_of_two, weights_used_twice),
)


def flop_by_op(module: nn.Module, x: Tensor) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
def test_products_run_on_xopt(mix: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = Mixer(mix).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    differences: list[list[Tensor]] = []
    for batch, length in ((2, 10), (2, 10), (1, 33), (2, 1), (6, 5)):
        x = torch.randn(batch, length, WIDTH)
        with torch.no_grad():
            exact = copy.deepcopy(source).double()(x.double())
            results = optimized(x), copy.deepcopy(source).to(dtype)(x.to(dtype))
        assert results[0].dtype == torch.float32
        differences.append([((each.double() - exact) / exact.norm()).flatten() for each in results])
    error, allowed = (float(torch.cat(each).norm()) for each in zip(*differences, strict=True))
    assert error <= 1.1 * allowed + torch.finfo(torch.float32).eps * 8
    (fusion,) = xopt.report(optimized).fusions
    assert "matmul" in fusion.fused, fusion
    counts = flop_by_op(optimized, torch.randn(2, 12, WIDTH))
    assert all(op.startswith("xopt.") for op in counts), counts


def test_few_rows_are_left_to_torch() -> None:
    optimized = xopt.optimize(Mixer(transposed_left).eval(), dtype=torch.float32)
    assert "xopt.matmul" not in flop_by_op(optimized, torch.randn(2, 3, WIDTH))
    assert "xopt.matmul" in flop_by_op(optimized, torch.randn(2, 4, WIDTH))


def test_what_is_added_may_be_larger_in_other_calls() -> None:
    """It broadcasts to the product in the recorded call, and the product to it in another."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.one(x)
            result: Tensor = z @ z.mT + y
            return result

    torch.manual_seed(0)
    source = Added().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(1, 8, WIDTH)
    for y in (torch.randn(1, 8, 8), torch.randn(3, 8, 8), torch.randn(1, 1, 8)):
        with torch.no_grad():
            assert torch.allclose(optimized(x, y), source(x, y), atol=1e-4)


def test_gradients_of_inputs_go_through_torch() -> None:
    torch.manual_seed(0)
    source = Mixer(scaled_and_added).eval().requires_grad_(False)
    optimized = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 9, WIDTH)
    optimized(x)
    gradients: list[Any] = []
    for module in (source, optimized):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-3)


def test_forwards_that_cannot_be_recorded() -> None:
    """Their products run on xopt, too, also in what they call, and without a trace outside of them."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            weights = (y @ y.mT if float(x.detach().sum()) > 0 else torch.bmm(-y, y.mT)).softmax(-1)
            mixed = torch.einsum("...ij,...jd->...id", weights, y)
            mixed = mixed + torch.einsum("bij,bjd->bid", (weights, mixed))
            result: Tensor = torch.baddbmm(mixed, weights, y, beta=0.5)
            return result

    torch.manual_seed(0)
    source = Branches().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 9, WIDTH)
    for each in (x, -x, x[:, :3]):
        with torch.no_grad():
            assert torch.allclose(optimized(each), source(each), atol=1e-4)
    counts = flop_by_op(optimized, x)
    assert counts.keys() == {"xopt.linear", "xopt.matmul"}, counts
    assert "xopt.matmul" not in flop_by_op(source, x)
    leaf = x.clone().requires_grad_()
    optimized(leaf).sum().backward()
    assert leaf.grad is not None
    off = xopt.optimize(source, dtype=torch.float32, config=xopt.Config(multiply_activations=False))
    assert "xopt.matmul" not in flop_by_op(off, x)


def test_tensors_that_are_not_plain_are_left_to_torch() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = torch.matmul(y, y.transpose(-2, -1)) if float(self.one(x).sum()) > -1e9 else x
            return result

    source = Nested().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with warnings.catch_warnings():  # of nested tensors, which torch warns of once in a process
        warnings.simplefilter("ignore")
        y = torch.nested.nested_tensor([torch.randn(5, 8), torch.randn(7, 8)])
    with torch.no_grad():
        got, expected = (module(torch.randn(2, WIDTH), y).unbind() for module in (optimized, source))
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other)


def test_functions_that_are_given_packed_weights() -> None:
    """Of a forward that cannot be recorded, and hands its layers' weights to torch's functions."""

    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor, need_weights: bool, mask: Tensor | None) -> Tensor:
            x = functional.linear(x, self.out.weight, self.out.bias) * (1 if float(x.detach().sum()) > 0 else 2)
            attended, weights = functional.multi_head_attention_forward(
                *(x, x, x, WIDTH, 4, torch.empty(0)),
                torch.cat((self.query.bias, self.key.bias, self.value.bias)),
                *(None, None, False, 0.1, self.out.weight, self.out.bias),
                training=False,
                need_weights=need_weights,
                attn_mask=mask,
                use_separate_proj_weight=True,
                q_proj_weight=self.query.weight,
                k_proj_weight=self.key.weight,
                v_proj_weight=self.value.weight,
            )
            heads = attended.unflatten(-1, (4, 16)).transpose(1, 2)
            again = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            result = attended + again.transpose(1, 2).flatten(-2)
            return result if weights is None else result + weights.mean()

    torch.manual_seed(0)
    source = ByHand().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(9, 2, WIDTH)
    for need_weights in (True, False):
        for mask in (None, torch.randn(9, 9), torch.ones(9, 9).triu(1).bool()):
            with torch.no_grad():
                got, expected = (module(x, need_weights, mask) for module in (optimized, source))
            assert torch.allclose(got, expected, atol=1e-4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        optimized(x, True, None)
    counts = {str(op) for op in counter.get_flop_counts()["Global"]}
    assert counts == {"xopt.linear", "xopt.matmul", "xopt.attention"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recorded", [True, False])
@torch.no_grad()
def test_a_weight_that_stands_on_the_left(recorded: bool, dtype: torch.dtype) -> None:
    """As in Mamba: `weight @ x.transpose(1, 2)`."""

    class WeightFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, 48)

        def forward(self, x: Tensor, columns: Tensor) -> Tensor:
            if not recorded and float(x.sum()) > 1e9:
                return x
            rows: Tensor = self.down.weight @ self.up(x).transpose(1, 2)
            return rows.view(x.shape[0], 48, -1) * 0.5 + torch.matmul(self.down.weight, columns)

    torch.manual_seed(0)
    source = WeightFirst().eval()
    optimized = xopt.optimize(source, dtype=dtype)
    for batch, length in ((2, 12), (1, 5), (3, 1)):
        x, columns = torch.randn(batch, length, WIDTH), torch.randn(96, length)
        got, expected = (module(x, columns) for module in (optimized, source))
        assert got.is_contiguous()
        assert torch.allclose(got, expected, atol=0.05 if dtype == torch.bfloat16 else 1e-5)
    assert bool(xopt.report(optimized).fusions[0].fused) == recorded
    with FlopCounterMode(display=False) as counter:
        optimized(x, columns)
    assert {str(op) for op in counter.get_flop_counts()["Global"]} == {"xopt.linear"}


@pytest.mark.parametrize("recorded", [True, False])
@torch.no_grad()
def test_a_mask_of_a_number_that_scores_cannot_hold(recorded: bool) -> None:
    """As in DeBERTa: a bias widens the queries, whose dtype's least number is what scores are filled with."""

    class Widened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if not recorded and float(x.sum()) > 1e9:
                return x
            query = self.query(x) + self.bias
            scores = query @ self.key(x).transpose(1, 2)
            weights: Tensor = scores.masked_fill(mask, torch.finfo(query.dtype).min).softmax(-1)
            return weights

    torch.manual_seed(0)
    source = Widened().eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    x, mask = 0.1 * torch.randn(2, 12, WIDTH), torch.ones(12, 12).triu(1).bool()
    assert torch.allclose(optimized(x, mask), source(x, mask), atol=0.05)


def test_switch() -> None:
    config = xopt.Config(multiply_activations=False)
    optimized = xopt.optimize(Mixer(transposed_left).eval(), dtype=torch.float32, config=config)
    assert "xopt.matmul" not in flop_by_op(optimized, torch.randn(2, 12, WIDTH))


def test_einsums_that_are_no_products_stay() -> None:
    from xopt.modules.matmul import _plan

    for equation in ("bij,bjd->bid", "ib h, h n d -> i b n d", "abij,abkj->abik", "ij,jk->ki", "...ij,...kj->...ik"):
        dims = (len(each.replace(" ", "").replace("...", "ab")) for each in equation.partition("->")[0].split(","))
        assert _plan(equation, *dims) is not None, equation
    for equation in ("bij,bij->b", "bii,bij->bj", "i,j->ij", "...ij,jk->...ik", "bij,bjd", "bij,bjd->bd", "bij->bji"):
        dims = (len(each.replace("...", "ab")) for each in (*equation.partition("->")[0].split(","), "")[:2])
        assert _plan(equation, *dims) is None, equation


class Scores(nn.Module):
    """A product with a bias that stays in fp32, and another with what comes of it."""

    def __init__(self, in_fp32: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.in_fp32 = nn.Linear(16, 24), nn.Linear(24, 8), in_fp32
        self.bias = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.in_fp32:
            with torch.autocast("cpu", enabled=False):
                y = (y.float() @ y.float().mT).relu() @ y.float()
            return self.last(y)  # type: ignore[no-any-return]
        return self.last((y @ y.mT + self.bias.to(y.dtype)).relu() @ y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_fp32", [False, True])
@torch.no_grad()
def test_products_of_two_dtypes_are_links(in_fp32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward computes in fp32, with autocast off, is computed so."""
    source = Scores(in_fp32).eval()
    optimized = xopt.optimize(copy.deepcopy(source), dtype=torch.bfloat16)
    texts: list[str] = []
    watch_chains(monkeypatch, texts.append)
    for batch in (64, 32, 48):
        x = torch.randn(batch, 6, 16)
        exact = copy.deepcopy(source).double()
        exact.in_fp32 = False
        exact.bias.mul_(0.0 if in_fp32 else 1.0)
        expected = exact(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            theirs = float((source(x) - expected).norm() / expected.norm())
        assert float((optimized(x) - expected).norm() / expected.norm()) <= 1.1 * theirs
    assert [text.count("\nmatmul ") for text in texts] == [2, 2, 2]
