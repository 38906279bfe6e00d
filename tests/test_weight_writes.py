"""Weights that are written to by parts and by views, as if they were plain parameters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.test_inference_mode import MODES
from xopt.modules.packed_parameter import PackedParameter


class Gated(nn.Module):
    """Two of its weights are packed as one, and three of another block's."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = nn.Linear(8, 8)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.weighted(x)) * self.up(x)  # type: ignore[no-any-return]


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.weighted, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.query(x), self.weighted(x), self.value(x)], -1)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[0] + x @ self.weight[3]


class OfStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weighted = Stack()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.weighted(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, weighted: nn.Module) -> None:
        super().__init__()
        self.weighted = weighted

    def forward(self, x: Tensor) -> Tensor:
        return self.weighted(x).relu()  # type: ignore[no-any-return]


ROWS, IMAGE = torch.randn(2, 4, 8), torch.randn(2, 4, 6, 6)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: Layer(nn.Linear(8, 8)), ROWS),
    "gated": (Gated, ROWS),
    "siblings": (Siblings, ROWS),
    "stack": (OfStack, ROWS),
    "conv": (lambda: Layer(nn.Conv2d(4, 8, 3)), IMAGE),
    "conv of groups": (lambda: Layer(nn.Conv2d(4, 8, 3, groups=2)), IMAGE),
    "transposed conv": (lambda: Layer(nn.ConvTranspose2d(4, 4, 3, stride=2)), IMAGE),
}


def by_rows(weight: Tensor) -> None:
    for row in weight:
        row.div_(row.norm())


def through_the_whole(weight: Tensor) -> None:
    row = weight[1]
    weight.mul_(2)
    row.add_(1)
    weight.mul_(2)
    assert torch.equal(row, weight[1])


def set_data(weight: Tensor) -> None:
    weight.data = weight.detach().clone() * 3


def set_data_in_place(weight: Tensor) -> None:
    weight.data = weight.data.mul_(3)


WRITES: dict[str, Callable[[Any], Any]] = {
    "item": lambda weight: weight.__setitem__(0, 0.0),
    "places": lambda weight: weight.__setitem__((slice(1, 3), 0), 1.0),
    "mask": lambda weight: weight.__setitem__(weight < 0, 0.5),
    "list": lambda weight: weight.__setitem__([0, 2], 0.5),
    "row": lambda weight: weight[0].fill_(1.0),
    "part of a row": lambda weight: weight[0][1].fill_(1.0),
    "two indices": lambda weight: weight[0, 1].fill_(1.0),
    "column": lambda weight: weight[:, 1].mul_(2),
    "added in place": lambda weight: weight[0].__iadd__(1.0),
    "data's row": lambda weight: weight.data[0].zero_(),
    "row's data": lambda weight: weight[0].data.zero_(),
    "data's item": lambda weight: weight.data.__setitem__(0, 0.0),
    "detached": lambda weight: weight.detach().mul_(2),
    "detached row": lambda weight: weight.detach()[1].mul_(2),
    "data": set_data,
    "own data": set_data_in_place,
    "view": lambda weight: weight.view(-1).__setitem__(0, 9.0),
    "view of a view": lambda weight: weight.view(-1)[2:9].view(7, 1)[3].fill_(4.0),
    "transposed": lambda weight: weight.transpose(0, 1).copy_(weight.transpose(0, 1).clone() * 2),
    "transposed row": lambda weight: weight.transpose(-2, -1)[0].fill_(2.0),
    "chunk": lambda weight: weight.chunk(2)[0].zero_(),
    "flattened": lambda weight: weight.flatten(1)[0].fill_(2.0),
    "rows": by_rows,
    "out": lambda weight: torch.mul(weight[0], 2, out=weight[0]),
    "many": lambda weight: torch._foreach_mul_([weight[0], weight[1]], 2.0),
    "initialized": lambda weight: nn.init.ones_(weight[0]),
    "row and whole": through_the_whole,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_to_a_part_is_there(name: str, mode: str) -> None:
    make, x = MODELS[name]
    for described, write in WRITES.items():
        for is_recorded in (False, True):
            torch.manual_seed(0)
            source: Any = make().eval().requires_grad_(False)
            optimized: Any = xopt.optimize(source, dtype=torch.float32)
            with MODES[mode]():
                if is_recorded:
                    optimized(x)
                for model in (source, optimized):
                    torch.manual_seed(0)
                    write(model.weighted.weight)
                for _ in range(2):
                    torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-4, msg=described)
                assert type(optimized.weighted.weight) is PackedParameter
                expected = source.weighted.weight
                torch.testing.assert_close(optimized.state_dict()["weighted.weight"], expected.detach(), msg=described)


@torch.no_grad()
def test_parameters_of_a_vector() -> None:
    source = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=IMAGE)
    for model in (source, optimized):
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 2, model.parameters())
    torch.testing.assert_close(optimized(IMAGE), source(IMAGE), rtol=1e-4, atol=1e-4)


def test_other_data_keeps_the_shape() -> None:
    model: Any = xopt.optimize(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())
    with pytest.raises(RuntimeError, match=r"keeps its shape \(8, 8\), got \(4, 8\)"):
        model[0].weight.data = torch.zeros(4, 8)


@torch.no_grad()
def test_views_are_plain_to_those_who_read_them() -> None:
    model: Any = xopt.optimize(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())
    weight, plain = model[0].weight, model.state_dict()["0.weight"]
    row = weight[1]
    for copied in (row, copy.deepcopy(row), pickle.loads(pickle.dumps(row)), row.clone(), row * 1):
        torch.testing.assert_close(copied, plain[1])
    assert [type(each) for each in (copy.deepcopy(row), pickle.loads(pickle.dumps(row)), row + 1)] == [Tensor] * 3
    assert (repr(row), f"{row[0]:.3f}") == (repr(plain[1]), f"{plain[1, 0]:.3f}")
    assert row.tolist() == plain[1].tolist() == row.numpy().tolist()
    file = io.BytesIO()
    torch.save({"row": row}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["row"], plain[1])
    copied = copy.deepcopy(model)
    copied[0].weight[1] = 0.0
    assert torch.equal(weight, plain)


PARTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "row": lambda weight, x: weight[1],
    "slice": lambda weight, x: weight[0:2] * x[0, :2],
    "chunk": lambda weight, x: functional.linear(x, weight.chunk(2)[0]),
    "unbind": lambda weight, x: weight.unbind(0)[1],
    "view": lambda weight, x: weight.view(4, 16).sum(0),
    "expand": lambda weight, x: torch.baddbmm(x, x, weight.unsqueeze(0).expand(x.shape[0], -1, -1), beta=0.5),
    "conv": lambda weight, x: functional.conv1d(x.mT, weight.unsqueeze(-1)),
}


class Reads(nn.Module):
    def __init__(self, part: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.part = part

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.part(self.linear.weight, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", PARTS)
def test_parts_are_read_in_all_modes(part: str, mode: str, dtype: torch.dtype) -> None:
    source = Reads(PARTS[part]).eval().requires_grad_(False)
    optimized = xopt.optimize(source, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    with MODES[mode]():
        for _ in range(3):
            results = optimized(ROWS)
            for result, expected in zip(results, source(ROWS), strict=True):
                torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
