"""Blocks that change after the recording, are moved, or are dropped."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import xopt
from tests.block_models import Mlp, PreNorm, X, assert_gone_when_dropped, calls
from xopt import _C


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


class Switches(Mlp):
    """As some models take another forward once their norms are folded (`self.forward = self.forward_fused`)."""

    def use(self, forward: Any) -> None:
        self.forward = forward  # type: ignore[method-assign]

    def doubled(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x))) * 2  # type: ignore[no-any-return]

    def tripled(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x))) * 3  # type: ignore[no-any-return]


def test_a_forward_of_the_modules_own_is_part_of_a_program() -> None:
    inner = Switches()
    inner.use(inner.doubled)
    source: Any = nn.Sequential(PreNorm(), nn.Sequential(inner)).eval()
    optimized: Any = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for name in ("doubled", "doubled", "tripled", "tripled", "doubled"):
            for model in (source, optimized):
                module: Any = model[1][0]
                module.use(getattr(module, name))
            torch.testing.assert_close(optimized(X), source(X))
            assert optimized[1][0].forward.__self__ is optimized[1][0]
    fused = {fusion.path: fusion.fused for fusion in xopt.report(optimized).fusions}
    assert fused[""].count("linear+gelu_erf") == 2


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
    model.query.bias.data.add_(by_layer[0])  # which torch itself does not count
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


def test_a_dropped_model_is_gone_at_once() -> None:
    model = nn.Sequential(PreNorm()).eval()
    assert_gone_when_dropped([xopt.optimize(model, dtype=torch.bfloat16, sample_input=X)])


def test_a_guard_wants_modules_after_their_parents() -> None:
    guard, module = _C.ModuleGuard(0), nn.Identity()
    with pytest.raises(ValueError, match="parent: expected an earlier module's place, below 1, got 1"):
        guard.add(1, "child", weakref.ref(module), 0)
    with pytest.raises(ValueError, match="place: expected a module's, below 1, got 1"):
        guard.add_check(1, lambda module: True)
    guard.add_container(3, "sizes", {})
    with pytest.raises(IndexError, match="container"):
        guard(module)
