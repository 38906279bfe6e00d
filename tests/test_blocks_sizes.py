"""What forwards do with sizes and tensors as with any values of Python's, programs do as well."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.block_models import Mlp, X
from xopt.graph.record import record
from xopt.modules import block

TABLE = {5: 2.0, 7: 3.0}
SHAPES = {torch.Size((2, 5, 64)): 2.0, (2, 7, 64): 3.0}
NAMES = {"5": 2.0, "7": 3.0}

LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "get": lambda x: TABLE.get(x.shape[1], 1.0),
    "in a dict": lambda x: 2.0 if x.shape[1] in TABLE else 1.0,
    "in a set": lambda x: 2.0 if x.size(1) in {5, 7} else 1.0,
    "set": lambda x: len(set(x.shape)),
    "a set of sizes": lambda x: len({x.size(1), 5}),
    "shape": lambda x: SHAPES.get(x.shape, 1.0),
    "tuple": lambda x: SHAPES.get(tuple(x.shape), 1.0),
    "map": lambda x: sum(map(TABLE.get, (5, 7, x.shape[1], 5), (1, 1, 1, 1))),
    "str": lambda x: NAMES.get(str(x.shape[1]), 1.0),
    "f-string": lambda x: NAMES.get(f"{x.size(1)}", 1.0),
    "percent": lambda x: NAMES.get("%d" % x.size(1), 1.0),  # noqa: UP031
    "repr of all": lambda x: 2.0 if "5" in str(list(x.shape)) else 1.0,
    "a size as torch's": lambda x: 2.0 if isinstance(x.shape, torch.Size) else 1.0,
    "a part of a size as torch's": lambda x: 2.0 if isinstance(x.shape[1:], torch.Size) else 1.0,
    "numel of a size": lambda x: x.shape[1:].numel() / 100,
    "class of a tensor": lambda x: 2.0 if type(x) is Tensor else 1.0,
    "class by attribute": lambda x: 2.0 if x.__class__ is Tensor else 1.0,
    "class of a size": lambda x: 2.0 if type(x.shape[1]) is int else 1.0,
    "class of sizes": lambda x: 2.0 if type(x.shape) is torch.Size else 1.0,
    "attribute": lambda x: getattr(x, "scale", 1.0),
    "counts": lambda x: _counted(x.shape[1]),
}


def _counted(size: Any) -> Any:
    size += 1
    return size


class Looks(Mlp):
    def __init__(self, look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.look(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("lengths", [(5, 7, 6, 64, 5, 7), (6, 5, 7, 5)])
def test_a_forward_that_looks_at_sizes_or_classes(name: str, lengths: tuple[int, ...]) -> None:
    source = nn.Sequential(Looks(LOOKS[name])).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    source = copy.deepcopy(source)
    with torch.no_grad():
        for length in lengths:
            x = torch.randn(2, length, 64)
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-4)


def test_an_attribute_that_somebody_has_set_on_a_tensor() -> None:
    source = nn.Sequential(Looks(LOOKS["attribute"])).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    source = copy.deepcopy(source)
    with torch.no_grad():
        for scale in (1.0, 2.0, 3.0):
            x: Any = X.clone()
            x.scale = scale
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["get", "in a set", "shape", "f-string", "a size as torch's", "counts"])
def test_what_a_size_can_be_asked_for_stays_fused(name: str) -> None:
    model = xopt.optimize(nn.Sequential(Looks(LOOKS[name])).eval(), dtype=torch.float32)
    with torch.no_grad():
        model(X)
    assert "linear+gelu_erf" in xopt.report(model).fusions[0].fused


@functools.lru_cache
def rows_of(rows: int) -> Tensor:
    return torch.arange(rows).view(-1, 1)


def test_a_cached_function_of_a_size_leaves_the_size_open() -> None:
    class Cached(Mlp):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * rows_of(x.shape[1]))

    model: Any = xopt.optimize(nn.Sequential(Cached()).eval(), dtype=torch.float32)
    rows_of.cache_clear()
    with torch.no_grad():
        for length in range(1, 12):  # more than there are programs for
            model(torch.randn(2, length, 64))
    assert rows_of.cache_info().currsize == 0, "the forward itself has run"


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(x.shape[0], x.shape[1], 64),
    "zeros of one": lambda x: torch.zeros(x.shape[1], 64, dtype=x.dtype) + torch.ones(x.shape[1])[:, None],
    "eye": lambda x: torch.eye(x.shape[1], 64),
    "linspace": lambda x: torch.linspace(0, 1, x.shape[1])[:, None],
    "tensor": lambda x: torch.tensor([[x.shape[1], 2.0]]).repeat(1, 32),
    "expand": lambda x: torch.ones(1, 1, 64).expand(x.shape[0], x.shape[1], -1),
    "part": lambda x: torch.arange(512)[: x.shape[1], None],
    "rest of a sum": lambda x: torch.full((x.shape[1] + 2, 64), x.shape[1] / 3)[2:],
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_tensors_made_by_sizes_leave_the_sizes_open(name: str, context: Any) -> None:
    runs = itertools.count()

    class Made(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            next(runs)
            return super().forward(x) + MADE[name](x)

    source = Made().eval()
    optimized = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)
    source = copy.deepcopy(source)
    with context():
        optimized(X)
        before = next(runs)
        for x in (X, X[:, :3], X[:1]):
            result = optimized(x)
            assert next(runs) == before + 1, "the module's own forward ran again"
            torch.testing.assert_close(result, source(x))
            before = next(runs)


def test_sizes_are_returned_as_torchs() -> None:
    class Sizes(Mlp):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.shape, y.shape[1:]

    model = xopt.optimize(nn.Sequential(Sizes()).eval(), dtype=torch.float32)
    with torch.no_grad():
        for x in (X, X[:, :3]):
            y, *sizes = model(x)
            assert sizes == [y.shape, y.shape[1:]]
            assert {type(each) for each in sizes} == {torch.Size}
    assert xopt.report(model).fusions[0].fused


def test_what_goes_step_by_step_is_recorded_only_where_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan over a text's words: as many steps take longer to record than a program saves. A single word, as in each
    later step of a language model, is a program all the same, whichever came first."""
    recorded: list[int] = []

    def count(root: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        recorded.append(args[0].shape[1])
        return record(root, forward, args, kwargs)

    monkeypatch.setattr(block, "record", count)

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y, state, states = self.first(x).relu(), torch.zeros(x.shape[0], 16), []
            for place in range(x.shape[1]):
                state = state * 0.5 + y[:, place]
                states.append(state)
            return self.last(torch.stack(states, 1)) + x  # type: ignore[no-any-return]

    source = Scan().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for length in (90, 90, 120, 1, 1, 120, 40, 40, 60, 2, 1, 90):
            x = torch.randn(2, length, 16)
            torch.testing.assert_close(optimized(x), source(x), atol=1e-5, rtol=1e-5)
    assert recorded == [90, 1, 40, 2]
    (fusion,) = xopt.report(optimized).fusions
    assert fusion.fused
    assert fusion.problem is None
