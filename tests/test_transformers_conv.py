"""xopt.optimize on the convolutional models of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xopt
from tests.test_optimize_conv import DTYPES, ROUNDING, relative_error, settled
from xopt.modules.block import PROGRAMS


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


# ---- Whole models as programs ----------------------------------------------------------------------------------------


def classifier(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    if name == "mobilenet":  # its padding looks at the image's size
        config = transformers.MobileNetV2Config(depth_multiplier=0.35, num_labels=5)
        return settled(transformers.MobileNetV2ForImageClassification(config))
    sizes = {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 2, 2, 1]}
    config = transformers.ResNetConfig(embedding_size=32, num_labels=5, **sizes)
    return settled(transformers.ResNetForImageClassification(config))


def check_same(source: Any, optimized: Any, x: torch.Tensor, **options: Any) -> None:
    with torch.no_grad():
        expected, result = source(x, **options), optimized(x, **options)
    assert type(result) is type(expected)
    if not isinstance(expected, tuple):
        assert list(result) == list(expected)
        assert list(vars(result)) == list(vars(expected))
        expected, result = expected.to_tuple(), result.to_tuple()
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["mobilenet", "resnet"])
def test_a_whole_model_is_a_program_that_answers_as_the_model_does(name: str) -> None:
    source = classifier(name)
    optimized = xopt.optimize(source)
    for size in (64, 97, 64, 50):
        check_same(source, optimized, torch.randn(2, 3, size, 64))
    assert optimized.__dict__[PROGRAMS].fused
    x = torch.randn(2, 3, 64, 64)
    for options in ({"output_hidden_states": True}, {"return_dict": False}, {"labels": torch.tensor([1, 4])}, {}):
        for _ in range(2):
            check_same(source, optimized, x, **options)


def test_a_configuration_may_change_after_the_first_call() -> None:
    source = classifier("resnet")
    optimized = xopt.optimize(source)
    x = torch.randn(1, 3, 64, 64)
    for setting, value in (("output_hidden_states", True), ("return_dict", False), ("output_hidden_states", False)):
        check_same(source, optimized, x)
        for model in (source, optimized):
            setattr(model.config, setting, value)
        for _ in range(2):
            check_same(source, optimized, x)


def test_a_layer_deep_inside_may_be_exchanged_frozen_or_hooked() -> None:
    source = classifier("resnet")
    optimized = xopt.optimize(source)
    x, path = torch.randn(1, 3, 64, 64), "resnet.encoder.stages.1.layers.0.layer.1.convolution"
    check_same(source, optimized, x)
    handles = []
    for model in (source, optimized):
        handles.append(model.get_submodule(path).register_forward_hook(lambda module, args, result: result * 2.0))
    check_same(source, optimized, x)
    for handle in handles:
        handle.remove()
    check_same(source, optimized, x)
    for model in (source, optimized):
        torch.manual_seed(3)
        convolution = model.get_submodule(path)
        shape = convolution.weight.shape
        parent = model.get_submodule(path.rpartition(".")[0])
        parent.convolution = torch.nn.Conv2d(shape[1], shape[0], 3, convolution.stride, 1, bias=False)
    for _ in range(2):
        check_same(source, optimized, x)
    source.load_state_dict({name: value * 0.9 for name, value in source.state_dict().items()})
    optimized.load_state_dict(source.state_dict())
    check_same(source, optimized, x)


def test_gradients_of_a_whole_model() -> None:
    source = classifier("resnet")
    optimized = xopt.optimize(source)
    check_same(source, optimized, torch.randn(1, 3, 64, 64))
    given = torch.randn(1, 3, 64, 64)
    gradients = []
    for model in (source, optimized):
        x = given.clone().requires_grad_()
        model(x).logits.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
