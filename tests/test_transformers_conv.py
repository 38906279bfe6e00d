"""xopt.optimize on the convolutional models of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xopt
from tests.test_optimize_conv import DTYPES, ROUNDING, relative_error, settled


def transformers_models() -> dict[str, Callable[[Any], Any]]:
    sizes = {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 2, 2, 1]}
    return {
        "resnet basic": lambda t: t.ResNetModel(t.ResNetConfig(layer_type="basic", embedding_size=32, **sizes)),
        "resnet bottleneck": lambda t: t.ResNetModel(t.ResNetConfig(embedding_size=32, **sizes)),
        "convnext": lambda t: t.ConvNextModel(t.ConvNextConfig(**sizes)),
        "mobilenet": lambda t: t.MobileNetV2Model(t.MobileNetV2Config(depth_multiplier=0.35)),
        "regnet": lambda t: t.RegNetModel(t.RegNetConfig(embedding_size=32, groups_width=8, **sizes)),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", transformers_models())
def test_transformers(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    source, x = settled(transformers_models()[name](transformers)), torch.randn(2, 3, 97, 64)
    with torch.no_grad():
        exact = copy.deepcopy(source).double()(x.double()).last_hidden_state
        plain = copy.deepcopy(source).to(dtype)(x.to(dtype)).last_hidden_state
        optimized = xopt.optimize(source, dtype=dtype)
        result = optimized(x).last_hidden_state
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert relative_error(result, exact) <= 1.1 * relative_error(plain, exact) + ROUNDING
    assert xopt.report(optimized).optimized_conv_share == 1.0
