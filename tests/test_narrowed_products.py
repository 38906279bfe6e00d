"""Forwards that narrow a value before they multiply it by a parameter that stays fp32: in a model optimized to bf16 the
product has the dtype that they ask for, so that attention computes with it and caches hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import xopt
from tests.test_transformers_states import CONFIGS, SMALL, cache_in, step

NORMED: dict[str, dict[str, Any]] = {"Qwen3": {**SMALL, "head_dim": 8}, "Lfm2": CONFIGS["lfm 2"][1]}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**NORMED[kind])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def keys_after(model: Any, *lengths: int) -> Tensor:
    cache: Any = None
    for length in lengths:
        cache = cache_in(step(model, torch.arange(1, length + 1)[None], cache))
    keys: Tensor = cache.layers[1].keys
    return keys


@pytest.mark.parametrize("kind", NORMED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_of_normed_keys_hold_the_optimized_dtype(kind: str, dtype: torch.dtype) -> None:
    source = model_of(kind)
    optimized = xopt.optimize(source, dtype=dtype)
    keys, expected = keys_after(optimized, 5, 1, 1), keys_after(source, 5, 1, 1)
    assert keys.dtype == dtype
    torch.testing.assert_close(keys.float(), expected, rtol=5e-2, atol=5e-2)


def test_autocast_of_the_user_s_is_left_as_it_is() -> None:
    source = model_of("Qwen3")
    optimized = xopt.optimize(source)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = keys_after(optimized, 5, 1), keys_after(source, 5, 1)
    assert found.dtype == expected.dtype == torch.float32


class Scaled(nn.Module):
    """Multiplies by a parameter what it has narrowed, or has not."""

    def __init__(self, narrows: bool) -> None:
        super().__init__()
        self.layer, self.scale, self.narrows = nn.Linear(16, 16), nn.Parameter(torch.rand(16)), narrows

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        dtype = x.dtype
        x = torch.tanh(x.float())
        x = self.scale * (x.to(dtype) if self.narrows else x)
        result: Tensor = self.layer(torch.where(x > 0.5, x, x.exp()).to(dtype))
        return result


class Two(nn.Module):
    def __init__(self, narrows: bool) -> None:
        super().__init__()
        self.first, self.second = Scaled(narrows), Scaled(narrows)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("narrows", [False, True])
@torch.no_grad()
def test_results_are_no_less_exact_than_torch_s(narrows: bool) -> None:
    torch.manual_seed(0)
    source = Two(narrows).eval()
    x = torch.randn(64, 16)
    optimized, own = xopt.optimize(source, dtype=torch.bfloat16), Two(narrows).eval()
    own.load_state_dict(source.state_dict())
    exact, rounded = source.double()(x.double()), own.bfloat16()(x.bfloat16()).double()
    for _ in range(2):
        result = optimized(x)
        assert result.dtype == torch.float32
        assert float((result - exact).norm()) <= 1.1 * float((rounded - exact).norm())
