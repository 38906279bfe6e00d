"""What a forward computes from its parameters alone is computed once, and again when one of them has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from xopt.modules.computed_once import ComputedOnce


class Biased(nn.Module):
    """Adds biases of relative positions, looked up in a table, as Swin's attention does."""

    index: Tensor

    def __init__(self, length: int = 6, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, length)
        self.table = nn.Parameter(torch.randn(2 * length - 1, 2))
        places = torch.arange(length)
        self.register_buffer("index", places[:, None] - places[None, :] + length - 1)

    def bias(self) -> Tensor:
        length = len(self.index)
        return self.table[self.index.view(-1)].view(length, length, -1).permute(2, 0, 1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).unsqueeze(1) + self.bias().unsqueeze(0)  # type: ignore[no-any-return]


class ReturnsIt(Biased):
    def forward(self, x: Tensor) -> Any:
        bias = self.bias()
        return self.second(self.first(x).relu()).unsqueeze(1) + bias, bias.unsqueeze(0)


class OfAWeight(Biased):
    """Of one that is packed."""

    def bias(self) -> Tensor:
        return self.second.weight.abs().sum(1)


class OfLayers(Biased):
    """What packed layers make of queries of the model's own (DETR), or of embeddings of positions (DeBERTa)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 64))
        self.key, self.value = nn.Linear(64, 16), nn.Linear(64, 16, bias=False)

    def bias(self) -> Tensor:
        keys, values = self.key(self.queries), self.value(self.queries)
        keys, values = (each.view(each.size(0), 4, -1).transpose(0, 1) for each in (keys, values))
        together: Tensor = (keys @ values.transpose(-1, -2)).repeat(1, 1, 1)
        return together.sum((1, 2), keepdim=True)[:1]


class OfTheInput(Biased):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.table[(x[0, :, :6] > 0).long()]
        return self.second(self.first(x).relu()).unsqueeze(1) + rows.permute(2, 0, 1)  # type: ignore[no-any-return]


class OfItsSizes(Biased):
    """Of how many rows the input has, also as its first layer's result tells."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu())
        places = torch.arange(y.shape[1], device=x.device)
        distances = (places[:, None] - torch.arange(len(self.index))[None]).abs().float().log1p()
        return y.unsqueeze(1) + self.table[:2, :1, None] * torch.where(distances > 1, distances, 0.0)  # type: ignore[no-any-return]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often something is computed."""
    count = [0]
    make = ComputedOnce.__init__

    def counted(self: Any, *args: Any) -> None:
        make(self, *args)
        function = self._function

        def compute(*sources: Any) -> Tensor:
            count[0] += 1
            return function(*sources)  # type: ignore[no-any-return]

        self._function = compute

    monkeypatch.setattr(ComputedOnce, "__init__", counted)
    return count


X = torch.randn(3, 6, 64)


def optimized(source: nn.Module, sample: Tensor = X, **options: Any) -> Any:
    return xopt.optimize(source.eval(), sample_input=sample, **options)


@torch.no_grad()
def test_once(computed: list[int]) -> None:
    source = Biased()
    model = optimized(source)
    for _ in range(3):
        torch.testing.assert_close(model(X), source(X))
    assert computed == [1]


def written(model: Any) -> None:
    model.table.mul_(2.0)


def by_data(model: Any) -> None:
    model.table.data = model.table.detach() + 1.0


def loaded(model: Any) -> None:
    values = {name: value + 1 for name, value in model.state_dict().items() if value.is_floating_point()}
    model.load_state_dict(values, strict=False)


def another(model: Any) -> None:
    model.table = nn.Parameter(torch.ones(11, 2))


def index_written(model: Any) -> None:
    model.index.sub_(model.index.clone().clamp(max=2))


@torch.no_grad()
@pytest.mark.parametrize("change", [written, by_data, loaded, another, index_written])
def test_again_when_something_has_changed(change: Callable[[Any], None], computed: list[int]) -> None:
    source = Biased()
    model = optimized(source)
    model(X)
    for each in (source, model):
        change(each)
    for _ in range(2):
        torch.testing.assert_close(model(X), source(X))
    assert 2 <= computed[0] <= 4  # another parameter is another program


def packed_weight_loaded(model: Any) -> None:
    values = model.state_dict()
    model.load_state_dict(
        {name: value * 2.0 if name.startswith(("key", "second.weight")) else value for name, value in values.items()}
    )


def packed_weight_written(model: Any) -> None:
    for layer in (model.key, model.second):
        layer.weight.mul_(2.0)


def rows_of_packed_weights_written(model: Any) -> None:
    for layer in (model.key, model.second):
        layer.weight[:3].mul_(2.0)


def packed_weight_by_data(model: Any) -> None:
    for layer in (model.key, model.second):
        layer.weight.data = layer.weight * 3.0


def bias_written(model: Any) -> None:
    for layer in (model.key, model.second):
        layer.bias.add_(1.0)
    model.second.weight.mul_(0.5)


def another_layer(model: Any) -> None:
    weight = torch.ones(16, 64)
    model.key = nn.Linear(64, 16)
    model.key.weight, model.key.bias = nn.Parameter(weight), nn.Parameter(torch.ones(16))
    model.second.weight.mul_(0.5)


PACKED = [
    packed_weight_loaded,
    packed_weight_written,
    rows_of_packed_weights_written,
    packed_weight_by_data,
    bias_written,
    another_layer,
]


@torch.no_grad()
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", [OfAWeight, OfLayers])
@pytest.mark.parametrize("change", PACKED)
def test_again_when_packed_weights_have_changed(
    change: Callable[[Any], None], kind: Any, inference: bool, computed: list[int]
) -> None:
    source = kind()
    source.key = getattr(source, "key", nn.Linear(64, 16))
    model = optimized(source)
    with torch.inference_mode(inference):
        model(X)
        model(X)
    once = computed[0]
    assert once > 0
    for each in (source, model):
        change(each)
    with torch.inference_mode(inference):
        for _ in range(2):
            torch.testing.assert_close(model(X), source(X))
    assert computed[0] <= 3 * once  # another layer is another program, of which nothing may be computed once
    assert computed[0] > once or change is another_layer


@torch.no_grad()
def test_copies_compute_their_own() -> None:
    source = OfLayers()
    model = optimized(source)
    model(X)
    copied = copy.deepcopy(model)
    copied.key.weight.zero_()
    expected = copy.deepcopy(source)
    expected.key.weight.zero_()
    for _ in range(2):
        torch.testing.assert_close(copied(X), expected(X))
        torch.testing.assert_close(model(X), source(X))


def test_each_time_from_what_nobody_counts_changes_of() -> None:
    with torch.inference_mode():
        source = Biased()
        model = optimized(source)
        for _ in range(2):
            torch.testing.assert_close(model(X), source(X))
            for each in (source, model):
                each.table.add_(1.0)


@torch.no_grad()
@pytest.mark.parametrize("kind", [ReturnsIt, OfTheInput])
def test_not_what_leaves_the_forward_nor_what_depends_on_it(kind: type[Biased], computed: list[int]) -> None:
    source = kind()
    model = optimized(source)
    for x in (X, X[:, :6], X):
        torch.testing.assert_close(model(x), source(x))
    assert computed == [0]


@torch.no_grad()
def test_of_sizes_once_for_each(computed: list[int]) -> None:
    source = OfItsSizes(width=256)
    model = optimized(source, sample=torch.randn(3, 6, 256))
    count = computed[0]
    for rows, more in ((6, 0), (4, 1), (6, 0), (5, 1), (3, 1), (2, 1), (2, 0), (6, 1), (2, 0)):
        x = torch.randn(2, rows, 256)
        torch.testing.assert_close(model(x), source(x))
        count += more
        assert computed == [count], rows
    for each in (source, model):
        each.table.add_(1.0)
    for _ in range(2):
        torch.testing.assert_close(model(x), source(x))
    assert computed == [count + 1]


@torch.no_grad()
def test_what_is_kept_is_made_of_what_is_kept() -> None:
    class Twice(Biased):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1]).float().log1p()
            angles = places[:, None] * self.table[0, 0]
            y = self.second(self.first(x).relu()) * places[:, None].cos()
            return y + angles.sin()  # type: ignore[no-any-return]

    source = Twice()
    model = optimized(source)
    for x in (X, X[:, :5], X):
        torch.testing.assert_close(model(x), source(x))


@torch.no_grad()
def test_of_sizes_no_more_than_a_part_of_the_weights(computed: list[int]) -> None:
    source = OfItsSizes(length=20)
    model = xopt.optimize(source.eval(), sample_input=torch.randn(1, 2, 64))
    few, many = torch.randn(1, 2, 64), torch.randn(1, 200, 64)
    count = computed[0]
    for x, more in ((few, 0), (many, 1), (many, 1), (few, 0)):
        torch.testing.assert_close(model(x), source(x))
        count += more
        assert computed == [count]


@torch.no_grad()
def test_what_parts_are_written_to_is_made_anew(computed: list[int]) -> None:
    class Written(Biased):
        def forward(self, x: Tensor) -> Tensor:
            sums = torch.zeros(1, x.shape[1], 6)
            sums[:, 0] = x.sum((0, 1))[:6]
            return self.second(self.first(x).relu()) + sums  # type: ignore[no-any-return]

    source = Written()
    model = optimized(source)
    for x in (X, X + 1, X):
        torch.testing.assert_close(model(x), source(x))


@torch.no_grad()
def test_no_more_than_a_part_of_the_weights(computed: list[int]) -> None:
    source = Biased(length=90)
    model = xopt.optimize(source.eval(), sample_input=torch.randn(1, 90, 64))
    x = torch.randn(2, 90, 64)
    torch.testing.assert_close(model(x), source(x))
    assert computed == [0]


@torch.no_grad()
def test_the_switch(computed: list[int]) -> None:
    optimized(Biased(), config=xopt.Config(weights_prepack=False))(X)
    assert computed == [0]


def test_gradients_of_inputs_and_of_the_table() -> None:
    source = Biased()
    model = optimized(source)
    with torch.no_grad():
        model(X)
    x = X.clone().requires_grad_()
    for each in (source, model):
        (gradient,) = torch.autograd.grad(each(x).square().sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(source(x).square().sum(), x)[0])


@torch.no_grad()
def test_what_is_repeated_once_is_not_handed_out() -> None:
    """Torch's is a copy, which the caller may write to."""

    class Handed(Biased):
        def forward(self, x: Tensor) -> Any:
            rows = self.table.repeat(1, 1)
            return self.second(self.first(x).relu()).sum(-1), rows.transpose(0, 1)

    source = Handed()
    model = optimized(source)
    for _ in range(2):
        model(X)[1].zero_()
    torch.testing.assert_close(model(X), source(X))
