"""Blocks: what is fused, that it computes the same, and that whatever cannot be fused for all calls is left alone."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import xopt
from xopt import _C

torch.manual_seed(0)
X = torch.randn(2, 5, 64)


class Mlp(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = functional.gelu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.activation = activation
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.up(x))
        return self.down(y if self.scale == 1 else y * self.scale)  # type: ignore[no-any-return]


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.LayerNorm(64), Mlp(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.norm(x)))  # type: ignore[no-any-return]


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.mlp(x)) + x)  # type: ignore[no-any-return]


class WrittenOutRmsNorm(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * (self.weight + self.offset)).type_as(x) if self.offset else self.weight * normed.to(x.dtype)


class Gated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = functional.silu) -> None:
        super().__init__()
        self.norm = WrittenOutRmsNorm()
        self.gate, self.up, self.down = (nn.Linear(64, 96, bias=False) for _ in range(3))
        self.down = nn.Linear(96, 64)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(self.activation(self.gate(y)) * self.up(y)) + x  # type: ignore[no-any-return]


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


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, 4, 16).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, 64))  # type: ignore[no-any-return]


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
    """As in diffusers' residual blocks, whose factors mostly are one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(64, 64), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1 * self.linear(x / self.factor)) / self.factor  # type: ignore[no-any-return]


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


FUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "activation": (Mlp, ["linear+gelu_erf"]),
    "relu": (lambda: Mlp(torch.relu), ["linear+relu"]),
    "method": (lambda: Mlp(lambda x: x.sigmoid()), ["linear+sigmoid"]),
    "in place": (lambda: Mlp(lambda x: functional.silu(x, inplace=True)), ["linear+silu"]),
    "gelu written out": (lambda: Mlp(gelu_of_gpt2), ["linear+gelu_tanh"]),
    "modules": (lambda: nn.Sequential(nn.Linear(64, 96), nn.Hardswish(), nn.Linear(96, 64)), ["linear+hardswish"]),
    "pre-norm": (PreNorm, ["layer_norm", "linear+gelu_erf", "linear+add"]),
    "post-norm": (PostNorm, ["linear+gelu_erf", "linear+add+layer_norm"]),
    "gated": (Gated, ["rms_norm", "gated linear (silu)", "linear+add"]),
    "gated, written out": (lambda: Gated(gelu_of_gpt2), ["rms_norm", "gated linear (gelu_tanh)", "linear+add"]),
    "halves": (Halves, ["gated halves (gelu_erf)", "linear+add"]),
    "halves, gate first": (lambda: Halves(True), ["gated halves (silu)", "linear+add"]),
    "rms_norm": (WrittenOutRmsNorm, ["rms_norm"]),
    "rms_norm with offset": (lambda: WrittenOutRmsNorm(1.0), ["rms_norm"]),
    "attention": (Attention, ["merged linear", "attention"]),
    "parallel": (Parallel, ["merged linear", "attention", "linear+gelu_erf", "linear+add"]),
    "factors of one": (Rescaled, ["linear+add"]),
    "positions": (lambda: Positions(apart=False), ["linear+relu", "linear+relu"]),
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


def calls() -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in xopt.kernels():
        counts[record.name] = counts.get(record.name, 0) + record.calls
    return counts


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


# ---- Forwards that are no fixed sequence of steps ------------------------------------------------------------------


class BranchOnValue(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class ItemOfValue(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(x.amax().item()))


class Counter(Mlp):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class LoopOverRows(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([Mlp.forward(self, row) for row in x])


class ChangesItsInput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class KeepsAnAlias(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        alias = y.view(-1)
        y += 1
        return self.down(y) + alias.sum()  # type: ignore[no-any-return]


class ConstantInside(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.full((1,), float(x.shape[0])))


class WritesToAPart(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y[..., 0] = 7
        return self.down(y)  # type: ignore[no-any-return]


class ReadsBeforeItWrites(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        before = y + 1
        y[..., 0] = 7
        return super().forward(x) + before.mul(2) + y


class WritesToWhatIsSeenTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape)
        part = y[..., :2]
        part.copy_(x[..., :2])
        return super().forward(x) + part.sum() + y


class ChangesWhatAViewShows(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        view = y.transpose(0, 1)
        y.add_(1)
        return super().forward(x) + view.sum()


class DrawsANumber(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(())


class UsesNumpy(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.from_numpy(x.numpy() * 2))


UNFIXED = [
    *(BranchOnValue, ItemOfValue, Counter, LoopOverRows),
    *(ChangesItsInput, KeepsAnAlias, ConstantInside, WritesToAPart, UsesNumpy),
    *(ReadsBeforeItWrites, WritesToWhatIsSeenTwice, ChangesWhatAViewShows),
]


@pytest.mark.parametrize("kind", UNFIXED)
def test_what_is_no_fixed_sequence_runs_its_own_forward(kind: type[nn.Module]) -> None:
    source = nn.Sequential(kind()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    source = copy.deepcopy(source)
    with torch.no_grad():
        for x in (X, X[:, :3], -X, X[:1], torch.randn(4, 8, 64)):
            given, kept = x.clone(), x.clone()
            torch.testing.assert_close(optimized(given), source(kept))
            assert torch.equal(given, kept)
    assert all(not fusion.fused for fusion in xopt.report(optimized).fusions if fusion.path == "0")


def test_a_number_drawn_in_the_call_is_no_constant() -> None:
    model = xopt.optimize(nn.Sequential(DrawsANumber()).eval(), dtype=torch.float32)
    with torch.no_grad():
        torch.manual_seed(0)
        first, second = model(X), model(X)
        torch.manual_seed(0)
        assert torch.equal(model(X), first)
    assert not torch.allclose(first, second)


class SetsWhatFits(Mlp):
    """Sets an attribute by the sizes of its input, as Swin's layers do."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] <= 5:
            self.scale = 2.0
        return super().forward(x)


def test_a_forward_that_sets_an_attribute_once_is_recorded_from_then_on() -> None:
    source = SetsWhatFits().eval()
    optimized: Any = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)
    large = torch.randn(2, 7, 64)
    with torch.no_grad():
        for x in (large, X, large, X, X):
            torch.testing.assert_close(optimized(x), source(x))
            assert optimized[0].scale == source.scale
        optimized[0].scale = source.scale = 3.0
        torch.testing.assert_close(optimized(large), source(large))
        torch.testing.assert_close(optimized(X), source(X))
    settled: Any = xopt.optimize(nn.Sequential(SetsWhatFits().eval()).eval(), dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            settled(X)
    assert "linear+gelu_erf" in xopt.report(settled).fusions[0].fused


# ---- Forwards that look at sizes -----------------------------------------------------------------------------------


class BranchOnSize(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.shape[1] > 5 else x * 2)


class SizeAsNumber(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / math.sqrt(x.size(-1))) * float(len(range(x.shape[1])))


class SizeAsTruth(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] - 3 else x


class SizeAmongOthers(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.shape[1] in (3, 8) else 1) + (x.shape[0] == x.shape[1])


@pytest.mark.parametrize("kind", [BranchOnSize, SizeAsNumber, SizeAsTruth, SizeAmongOthers])
def test_a_forward_that_looks_at_sizes_has_a_program_for_each_way(kind: type[nn.Module]) -> None:
    source = nn.Sequential(kind()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    source = copy.deepcopy(source)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for length in (8, 3, 8, 3, 1, 2, 4, 5, 6, 7, 8, 3, 8, 1):  # more than there are programs for
            for batch in (1, 2):
                x = torch.randn(batch, length, 64, generator=generator)
                torch.testing.assert_close(optimized(x), source(x))
    assert any(fusion.fused for fusion in xopt.report(optimized).fusions)


def test_both_ways_of_a_branch_stay_fused() -> None:
    runs = []

    class Watched(BranchOnSize):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(x.shape)
            return super().forward(x)

    optimized = xopt.optimize(nn.Sequential(Watched()).eval(), dtype=torch.float32)
    with torch.no_grad():
        for length in (8, 3, 8, 3):
            optimized(torch.randn(2, length, 64))
        before = len(runs)
        for length in (8, 3, 9, 2):
            optimized(torch.randn(2, length, 64))
    assert len(runs) == before, "the module's own forward ran again"


class Options(Mlp):
    def forward(
        self, x: Tensor, *more: Tensor, twice: bool = False, named: dict[str, Tensor] | None = None, **rest: Any
    ) -> Any:
        y = super().forward(x)
        for other in more:
            y = y + other
        y = y * 2 if twice else y
        y = y if named is None else y - named["offset"]
        return {"y": y, "rest": (rest.get("flag"), [y])}


def test_arguments_of_all_kinds() -> None:
    source = Options().eval()
    optimized: Any = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)[0]
    with torch.no_grad():
        for args, kwargs in (
            ((X,), {}),
            ((X, X), {}),
            ((X,), {"twice": True}),
            ((X,), {"twice": False, "flag": 3}),
            ((X, X), {"named": {"offset": X}, "flag": "a"}),
        ):
            result, expected = optimized(*args, **kwargs), source(*args, **kwargs)
            torch.testing.assert_close(result["y"], expected["y"])
            assert result["rest"][0] == expected["rest"][0]
            torch.testing.assert_close(result["rest"][1][0], expected["rest"][1][0])


def test_what_was_of_one_shape_may_be_broadcast_later() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.norm(self.linear(x) + y) + self.norm(x + y)  # type: ignore[no-any-return]

    source = nn.Sequential(Adds()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for x, y in ((X, X), (X, X[:1]), (X[:1], X), (X, X[:, :1]), (X, X[..., :1])):
            torch.testing.assert_close(optimized[0](x, y), source[0](x, y))


# ---- What changes after the recording --------------------------------------------------------------------------------


def set_attribute(model: Any) -> None:
    model[0].mlp.scale = 3.0


def exchange_child(model: Any) -> None:
    torch.manual_seed(5)
    model[0].mlp = nn.Linear(64, 64)


def exchange_weight(model: Any) -> None:
    torch.manual_seed(5)
    model[0].mlp.up.weight = nn.Parameter(torch.randn(96, 64))


def write_to_weight(model: Any) -> None:
    with torch.no_grad():
        model[0].mlp.up.weight.mul_(2)


def hook(model: Any) -> None:
    model[0].mlp.up.register_forward_hook(lambda module, args, output: output * 2)


def pre_hook(model: Any) -> None:
    model[0].norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def replace_forward(model: Any) -> None:
    model[0].mlp.forward = lambda x: x * 3


def load_other(model: Any) -> None:
    torch.manual_seed(7)
    model.load_state_dict(nn.Sequential(PreNorm()).state_dict())


@pytest.mark.parametrize(
    "change",
    [set_attribute, exchange_child, exchange_weight, write_to_weight, hook, pre_hook, replace_forward, load_other],
)
def test_changes_are_seen(change: Callable[[Any], None]) -> None:
    source = nn.Sequential(PreNorm()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    source = copy.deepcopy(source)
    with torch.no_grad():
        for model in (source, optimized):
            model(X)
            change(model)
            model.eval()
        for _ in range(3):
            torch.testing.assert_close(optimized(X), source(X), rtol=1e-4, atol=1e-5)


def test_a_hook_that_leaves_lets_the_program_come_back() -> None:
    optimized: Any = xopt.optimize(nn.Sequential(PreNorm()).eval(), dtype=torch.float32, sample_input=X)
    seen: list[Tensor] = []
    handle = optimized[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        expected = optimized(X)
        handle.remove()
        before = calls()
        torch.testing.assert_close(optimized(X), expected)
    assert len(seen) == 1
    assert calls()["norm"] - before["norm"] == 1
    assert calls()["gemm"] - before["gemm"] == 2


def test_containers_of_numbers_are_looked_at() -> None:
    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.factors = {"all": 2.0}

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factors["all"]

    optimized: Any = xopt.optimize(nn.Sequential(Scaled()).eval(), dtype=torch.float32)
    with torch.no_grad():
        first = optimized(X)
        optimized[0].factors["all"] = 4.0
        torch.testing.assert_close(optimized(X), 2 * first)


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


def assert_gone_when_dropped(models: list[nn.Module]) -> None:
    """Of a list with the only reference: without the garbage collector."""
    alive = weakref.ref(models[0])
    gc.disable()
    try:
        models.clear()
        assert alive() is None
    finally:
        gc.enable()


def test_a_dropped_model_is_gone_at_once() -> None:
    model = nn.Sequential(PreNorm()).eval()
    assert_gone_when_dropped([xopt.optimize(model, dtype=torch.bfloat16, sample_input=X)])


def test_threads_that_come_first_together() -> None:
    source = nn.Sequential(Gated(), Attention()).eval()
    for _ in range(5):
        optimized = xopt.optimize(source, dtype=torch.float32)

        def call(_: int, model: nn.Module = optimized) -> Tensor:
            with torch.no_grad():
                return model(X)  # type: ignore[no-any-return]

        with ThreadPoolExecutor(6) as pool, torch.no_grad():
            expected = source(X)
            for result in pool.map(call, range(12)):
                torch.testing.assert_close(result, expected)


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


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.query(x), self.key(x), self.value(x)], -1)


def test_changed_biases_of_merged_layers_are_seen() -> None:
    model = xopt.optimize(Siblings().eval().requires_grad_(False), dtype=torch.float32)
    x = torch.randn(3, 64)
    before = model(x)
    assert "merged linear" in str(xopt.report(model))
    by_layer = [3.0, 1.0, 2.0]
    model.key.bias.add_(by_layer[1])
    model(x)
    model.value.bias = nn.Parameter(model.value.bias + by_layer[2], requires_grad=False)
    model(x)
    model.query.bias.data.add_(by_layer[0])  # which no version counts
    assert torch.allclose(model(x) - before, torch.tensor(by_layer).repeat_interleave(64).expand(3, -1), atol=1e-5)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_on_another_device_it_runs_its_own_forward() -> None:
    class NoneOfOurs(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "xopt" not in str(func)
            return func(*args, **(kwargs or {}))

    model = xopt.optimize(PreNorm().eval().requires_grad_(False), dtype=torch.float32)
    model(torch.randn(3, 64))
    model.to("meta")
    with NoneOfOurs():
        for _ in range(3):
            assert model(torch.randn(3, 64, device="meta")).is_meta


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


def test_a_guard_wants_modules_after_their_parents() -> None:
    guard, module = _C.ModuleGuard(0), nn.Identity()
    with pytest.raises(ValueError, match="parent: expected an earlier module's place, below 1, got 1"):
        guard.add(1, "child", weakref.ref(module), 0)
    guard.add_container(3, "sizes", {})
    with pytest.raises(IndexError, match="container"):
        guard(module)
