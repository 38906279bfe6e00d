"""Blocks: what is fused, that it computes the same, copies and gradients too, and that no weight is held twice."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.block_models import Attention, Gated, Mlp, PreNorm, WrittenOutRmsNorm, X, calls


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.mlp(x)) + x)  # type: ignore[no-any-return]


class Halves(nn.Module):
    """GEGLU as diffusers has it, or SwiGLU out of one weight."""

    def __init__(self, gate_first: bool = False) -> None:
        super().__init__()
        self.gate_first = gate_first
        self.proj, self.down = nn.Linear(64, 176), nn.Linear(88, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_first:
            gate, hidden = torch.split(self.proj(x), 88, dim=-1)
            return self.down(functional.silu(gate) * hidden) + x  # type: ignore[no-any-return]
        hidden, gate = self.proj(x).chunk(2, dim=-1)
        return self.down(hidden * functional.gelu(gate)) + x  # type: ignore[no-any-return]


class SlicedHalves(Halves):
    """As Flux 2 has it."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.proj(x)
        half = both.shape[-1] // 2
        return self.down(functional.silu(both[..., :half]) * both[..., half:]) + x  # type: ignore[no-any-return]


class Parallel(nn.Module):
    """Attention and MLP of one input, as in Phi; the key has no bias, as in Whisper."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        return attended + self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Nested(nn.Module):
    """Layers of one input, of which one feeds others that have one input too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        return self.third(first) * self.fourth(first) + second  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """Sizes of the input are what it expands a parameter and a buffer by."""

    numbers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 64))
        self.positions = nn.Embedding(32, 64)
        self.register_buffer("numbers", torch.arange(32).flip(0)[None])
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.numbers[:, : x.shape[1] + 1].expand(x.shape[0], -1)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1)
        return self.norm(x + self.positions(numbers))  # type: ignore[no-any-return]


class Table(nn.Module):
    """Holds something, and computes nothing."""

    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.linspace(-1, 1, 14).reshape(7, 2))


class Positions(nn.Module):
    """What it adds is made of a buffer alone, by layers of its own; the buffer may be another module's."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.holder = Table()
        self.register_buffer("table", None if apart else self.holder.values)
        self.mlp = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 64))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        table = self.mlp(self.holder.values if self.table is None else self.table)
        assert isinstance(table, Tensor)
        return functional.relu(self.linear(x)) + table.amax(0)


class Distances(nn.Module):
    """A table of its own, seen by indices that it makes in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 40).reshape(20, 2))

    def forward(self, size: int) -> Tensor:
        index = torch.arange(int(size))
        return self.table[(index[:, None] - index).abs()].amax(-1).sum(1)


class BySize(nn.Module):
    """What it adds is made by a layer that is given no tensor, but a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.distances = nn.Linear(64, 64), Distances()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.linear(x)) + self.distances(x.shape[1])[:, None]  # type: ignore[no-any-return]


class Highest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.linear(x))
        return y.max(dim=-1).values + torch.topk(y, 2)[0].sum(-1)


class Rescaled(nn.Module):
    """As in diffusers' residual blocks, whose factors mostly are one, and sums of branches, which begin with zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(64, 64), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x + (0 + 1 * self.linear(x / self.factor) + 0.0)) / self.factor  # type: ignore[no-any-return]


class Assembled(nn.Module):
    """Writes what it computes into a blank tensor, part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 40), nn.Linear(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.one(x).relu(), self.two(x)
        both = x.new_empty(*x.shape[:-1], 64)
        both[..., :40].copy_(one)
        both[..., 40:] = two
        factors = torch.zeros_like(both)
        factors.add_(both).mul_(0.5)
        factors /= factors.abs().sum(-1, keepdim=True) + 1
        return both + factors


def gelu_of_gpt2(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_of_bloom(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


FUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "activation": (Mlp, ["linear+gelu_erf"]),
    "relu": (lambda: Mlp(torch.relu), ["linear+relu"]),
    "method": (lambda: Mlp(lambda x: x.sigmoid()), ["linear+sigmoid"]),
    "in place": (lambda: Mlp(lambda x: functional.silu(x, inplace=True)), ["linear+silu"]),
    "gelu written out": (lambda: Mlp(gelu_of_gpt2), ["linear+gelu_tanh"]),
    "gelu written out in factors": (lambda: Mlp(gelu_of_bloom), ["linear+gelu_tanh"]),
    "modules": (lambda: nn.Sequential(nn.Linear(64, 96), nn.Hardswish(), nn.Linear(96, 64)), ["linear+hardswish"]),
    "pre-norm": (PreNorm, ["layer_norm", "linear+gelu_erf", "linear+add"]),
    "post-norm": (PostNorm, ["linear+gelu_erf", "linear+add+layer_norm"]),
    "gated": (Gated, ["rms_norm", "gated linear (silu)", "linear+add"]),
    "gated, written out": (lambda: Gated(gelu_of_gpt2), ["rms_norm", "gated linear (gelu_tanh)", "linear+add"]),
    "halves": (Halves, ["gated halves (gelu_erf)", "linear+add"]),
    "halves as slices": (SlicedHalves, ["gated halves (silu)", "linear+add"]),
    "halves, gate first": (lambda: Halves(True), ["gated halves (silu)", "linear+add"]),
    "rms_norm": (WrittenOutRmsNorm, ["rms_norm"]),
    "rms_norm with offset": (lambda: WrittenOutRmsNorm(1.0), ["rms_norm"]),
    "attention": (Attention, ["merged linear", "attention"]),
    "parallel": (Parallel, ["merged linear", "attention", "linear+gelu_erf", "linear+add"]),
    "nested siblings": (Nested, ["merged linear", "merged linear", "mul+add"]),
    "factors of one": (Rescaled, ["linear+add"]),
    "positions": (lambda: Positions(apart=False), ["linear+relu"]),  # the other one is computed once
    "positions apart": (lambda: Positions(apart=True), ["linear+relu"]),
    "padding with nothing": (lambda: Mlp(lambda x: torch.relu(functional.pad(x, (0, 0, 0, 0)))), ["linear+relu"]),
    "assembled": (Assembled, ["linear+relu"]),
    "number as a tensor": (lambda: Mlp(lambda x: torch.relu(x) * torch.tensor(2.0)), ["linear+relu"]),
    "by size": (BySize, ["linear+relu"]),
    "tokens": (Tokens, ["add+layer_norm"]),
    "named results": (Highest, ["linear+relu"]),
    "causal attention": (lambda: Attention(True), ["merged linear", "attention"]),
}


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", FUSED)
def test_is_fused_and_as_exact_as_torch(name: str) -> None:
    torch.manual_seed(0)  # of few values chance decides who is closer
    source = FUSED[name][0]().eval()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        optimized = xopt.optimize(nn.Sequential(source).eval(), dtype=dtype, config=xopt.Config(autocast=False))
        inner: Any = optimized[0]
        with torch.no_grad():
            for x in (X.to(dtype), X[:1].to(dtype), torch.randn(3, 9, 64).to(dtype)):
                result = inner(x)
                exact = copy.deepcopy(source).double()(x.double())
                theirs = copy.deepcopy(source).to(dtype)(x)
                allowed = 1.2 * relative_error(theirs, exact) + 1e-6  # few values, so chance has a say
                assert relative_error(result, exact) <= allowed, f"{name} {dtype}"
        (report,) = (fusion for fusion in xopt.report(optimized).fusions if fusion.path == "0")
        assert list(report.fused) == FUSED[name][1]


def test_fusion_counts_of_kernel_calls() -> None:
    optimized = xopt.optimize(Attention().eval(), dtype=torch.float32)
    with torch.no_grad():
        optimized(X)
        before = calls()
        optimized(X)
    after = calls()
    assert {name: after[name] - before.get(name, 0) for name in ("gemm", "attention")} == {"gemm": 2, "attention": 1}


def test_sample_input_fuses_at_once() -> None:
    model = xopt.optimize(PreNorm().eval(), dtype=torch.float32, sample_input=X)
    assert xopt.report(model).fusions[0].fused == ("layer_norm", "linear+gelu_erf", "linear+add")
    assert "linear+add" in str(xopt.report(model))
    with pytest.raises(TypeError, match="sample_input"):
        xopt.optimize(PreNorm().eval(), sample_input=3)


def test_switches() -> None:
    for switch, gone in (
        ("fuse_linear", "linear+add"),
        ("fuse_norm", "rms_norm"),
        ("fuse_gated_linear", "gated linear (silu)"),
    ):
        config = xopt.Config(**{switch: False})
        model = xopt.optimize(Gated().eval(), dtype=torch.float32, config=config, sample_input=X)
        assert gone not in xopt.report(model).fusions[0].fused
    for switch, gone in (("fuse_attention", "attention"), ("concat_linear", "merged linear")):
        config = xopt.Config(**{switch: False})
        attention = xopt.optimize(Attention().eval(), dtype=torch.float32, config=config, sample_input=X)
        assert gone not in xopt.report(attention).fusions[0].fused


def test_gradients_with_respect_to_inputs() -> None:
    for name in ("pre-norm", "post-norm", "gated", "halves", "attention"):
        source = FUSED[name][0]().eval()
        optimized = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32, sample_input=X)
        x = X.clone().requires_grad_()
        (expected,) = torch.autograd.grad(source(x).square().sum(), x)
        (result,) = torch.autograd.grad(optimized(x).square().sum(), x)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["gated", "halves", "halves, gate first", "attention", "post-norm", "parallel", "tokens"]
)
def test_copies_and_keys_after_weights_were_packed_together(name: str) -> None:
    source = nn.Sequential(FUSED[name][0]()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    for key, value in source.state_dict().items():
        torch.testing.assert_close(optimized.state_dict()[key], value, rtol=0, atol=0)
    with torch.no_grad():
        expected = optimized(X)
        file = io.BytesIO()
        torch.save(optimized, file)
        file.seek(0)
        for other in (copy.deepcopy(optimized), torch.load(file, weights_only=False)):
            torch.testing.assert_close(other(X), expected)
            torch.testing.assert_close(other(X), expected)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(optimized, backend="eager", fullgraph=True)(X), expected)


def packed_bytes(model: nn.Module) -> int:
    packed = {id(p.packed): p.packed.nbytes for p in model.parameters() if hasattr(p, "packed")}
    return sum(packed.values())


@pytest.mark.parametrize("name", ["gated", "halves", "attention"])
def test_weights_packed_together_are_held_once(name: str) -> None:
    source = nn.Sequential(FUSED[name][0]()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    before = packed_bytes(optimized)
    with torch.no_grad():
        optimized(X)
    assert packed_bytes(optimized) <= before


def test_a_tied_weight_is_not_packed_with_two_others() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
            self.c.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.c(x.flip(-1))  # type: ignore[no-any-return]

    source = nn.Sequential(Tied(), Tied()).eval()
    source[1].a.weight = source[0].b.weight  # type: ignore[union-attr]
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(optimized(X), source(X), rtol=1e-4, atol=1e-4)


class Untouched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.relu(self.linear(x)), x.transpose(0, 1) * 1


def test_a_block_does_not_return_what_it_was_given() -> None:
    model = xopt.optimize(Untouched().eval())
    x = X.clone()
    with torch.no_grad():
        for _ in range(2):
            model(x)[1].zero_()
    assert torch.equal(x, X)


def test_a_norm_whose_weight_is_computed_after_the_sum() -> None:
    class OnePlusWeight(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return functional.layer_norm(input, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), OnePlusWeight(64)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(x)
            return x + self.second(self.norm(x))  # type: ignore[no-any-return]

    source = Block().eval()
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    with torch.no_grad():
        torch.testing.assert_close(optimized(X), source(X))
    (fusion,) = xopt.report(optimized).fusions
    assert "linear+add+layer_norm" in fusion.fused
