"""What is computed from a model's parameters follows what is written to these through their `data`, too."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

import xopt
from xopt.modules.counted_parameter import CountedParameter, count_changes

SHAPE = 2, 8, 9, 9


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(8) + 0.5)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.gamma * self.linear(x.permute(0, 2, 3, 1))
        return scaled


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(9, 64), nn.Linear(9, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)], -1)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "transposed convolution": lambda: nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8)),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(648, 16), nn.BatchNorm1d(16)),
    "layer scale": LayerScale,
    "merged": Siblings,
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), nn.ReLU()),
}


def set_data(tensor: Tensor) -> None:
    tensor.data = tensor.detach() * 1.5


def move_average(tensor: Tensor) -> None:
    tensor.data.mul_(0.5).add_(torch.full_like(tensor, 0.75))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "data": set_data,
    "data in place": move_average,
    "an item of data": lambda tensor: tensor.data[0].fill_(1.25),
    "copied to data": lambda tensor: tensor.data.copy_(tensor * 1.25),
    "itself": lambda tensor: tensor.mul_(1.5),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.0)
    return model


def copies_of(model: nn.Module) -> list[nn.Module]:
    pickled = [] if any(map(is_parametrized, model.modules())) else [pickle.loads(pickle.dumps(model))]
    return [model, copy.deepcopy(model), *pickled]


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a program"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", MODELS)
def test_all_that_is_written_is_seen(name: str, write: str, alone: bool) -> None:
    x = torch.randn(SHAPE)
    source = made(name)
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=None if alone else x)
    with torch.no_grad():
        for model in (source, optimized):
            for _ in range(3):
                model(x)
        for model in copies_of(optimized):
            model(x)
            wanted = copy.deepcopy(source)
            written = dict(wanted.named_parameters())
            for path, parameter in model.named_parameters():
                WRITES[write](parameter)
                WRITES[write](written[path])
                torch.testing.assert_close(model(x), wanted(x), rtol=1e-4, atol=1e-3, msg=lambda m, p=path: p + m)


def counted_model() -> nn.Sequential:
    model: Any = xopt.optimize(made("convolutions"), dtype=torch.float32)
    with torch.no_grad():
        model(torch.randn(SHAPE))
    assert type(model[0].bias) is type(model[1].weight) is type(model[1].bias) is CountedParameter
    return model  # type: ignore[no-any-return]


def test_to_others_they_are_parameters() -> None:
    model = counted_model()
    weight: Any = model[1].weight
    weight.note = "kept"
    assert isinstance(weight, nn.Parameter)
    assert type(weight.detach()) is type(weight * 2) is type(weight[1]) is type(weight.data) is Tensor
    assert repr(weight) == repr(nn.Parameter(weight.detach(), requires_grad=weight.requires_grad))
    assert {type(each) for each in model.state_dict().values()} == {Tensor}
    assert weight.data.data_ptr() == weight.data_ptr()
    assert not weight.data.requires_grad
    for copied in copies_of(model)[1:]:
        assert torch.equal(copied[1].weight, weight)  # type: ignore[index]
    file = io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["1.bias"]) is nn.Parameter
    assert pickle.loads(pickle.dumps(weight)).note == "kept"


def test_it_moves_and_is_compiled_as_before() -> None:
    model, x = counted_model(), torch.randn(SHAPE)
    wanted = model(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), wanted)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), wanted)
    torch.testing.assert_close(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), wanted)
    moved = model.double()
    assert moved[1].weight.dtype == torch.float64
    torch.testing.assert_close(moved(x.double()).float(), wanted, rtol=1e-4, atol=1e-4)


def test_what_torch_does_not_count_or_what_is_ours_stays_as_it_is() -> None:
    with torch.inference_mode():
        inference = nn.Parameter(torch.ones(3), requires_grad=False)
    buffer = torch.ones(3)
    packed = xopt.optimize(nn.Linear(8, 8).eval(), dtype=torch.float32).weight
    count_changes(None, inference, buffer, packed)
    assert type(inference) is nn.Parameter
    assert type(buffer) is Tensor
    assert isinstance(packed, nn.Parameter)
    assert not isinstance(packed, CountedParameter)
