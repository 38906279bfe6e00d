"""What of a block's forward is recorded: nothing where it is no fixed sequence, each way where it looks at sizes."""

from __future__ import annotations

import copy
import enum
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.block_models import Attention, Gated, Mlp, X

# ---- Forwards that are no fixed sequence of steps ------------------------------------------------------------------


class BranchOnValue(Mlp):
    """Of a layer: test_blocks_branches.py has those on what a forward is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.up(x).sum() > 0 else -x)


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


def _caught(look: Callable[[Tensor], Any]) -> type[nn.Module]:
    """A forward that does without what it finds only where that raises."""

    class Caught(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            try:
                found = look(x)
            except Exception:
                found = -7.0
            return super().forward(x * found)

    return Caught


CAUGHT = [
    _caught(look)
    for look in (
        *(lambda x: float(x.max()), lambda x: 2.0 if x.is_contiguous() else 3.0, lambda x: torch.from_numpy(x.numpy())),
        *(lambda x: x.nbytes / 1000, lambda x: 2.0 if hasattr(x, "itemsize") else 3.0),
    )
]


class CaughtInALayer(Mlp):
    """Its layer raises for the first input alone."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x[..., : 55 + x.shape[1]])
        except RuntimeError:
            return super().forward(x * 2)


UNFIXED = [
    *(BranchOnValue, ItemOfValue, Counter),
    *(ChangesItsInput, KeepsAnAlias, WritesToAPart, UsesNumpy),
    *(ReadsBeforeItWrites, WritesToWhatIsSeenTwice, ChangesWhatAViewShows),
    *(*CAUGHT, CaughtInALayer),
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


class KeepsATable(Mlp):
    """As LeViT's attention keeps its biases: by the device that they were first asked for on."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.randn(3, 64))
        self.tables: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        name = f"{x.device} {x.shape[1]}"
        if name not in self.tables:
            self.tables[name] = self.biases[torch.arange(x.shape[1]) % 3]
        if self.last is None:
            self.last = self.biases.sum(0)
        return super().forward(x + self.tables[name]) * self.last


def test_a_forward_that_fills_a_table_is_recorded_once_it_is_full() -> None:
    source = KeepsATable().eval()
    optimized: Any = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for x in (X, X, -X, X[:, :3], X[:, :3], X):
            torch.testing.assert_close(optimized(x), source(x))
        assert "linear+gelu_erf" in xopt.report(optimized).fusions[0].fused
        for model in (source, optimized):
            model.tables[f"{X.device} {X.shape[1]}"] = torch.ones(64)
            model.last = None
        for _ in range(3):
            torch.testing.assert_close(optimized(X), source(X))
        optimized.last.zero_()
        assert not optimized(X).any()


class AsksForAnAttribute(Mlp):
    """As transformers asks whether a tensor is one of another library's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if hasattr(x, "jax") else x)


class ComparesWithASize(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        late = (places >= x.shape[1] - 2) | (x.shape[0] == places)
        return super().forward(x * late[None, :, None])


class AsksWhatIsInIt(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3 if 0.0 in x[:, 0] else x)


class SetsASize(Mlp):
    """As Swin sets the size of its windows."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 5

    def forward(self, x: Tensor) -> Tensor:
        self.window = min(x.shape[1], 5)
        return super().forward(x) * self.window


@pytest.mark.parametrize("kind", [AsksForAnAttribute, ComparesWithASize, AsksWhatIsInIt, SetsASize])
def test_what_can_be_asked_of_a_tensor(kind: type[Mlp]) -> None:
    source = kind().eval()
    optimized = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)
    source = copy.deepcopy(source)
    zero, other = X.clone(), X.clone()
    zero[0, 0, 3] = 0.0
    other.jax = True  # type: ignore[attr-defined]
    with torch.no_grad():
        for x in (X, X, zero, X[:, :3], other, X[:1], X, X[:, :3], zero, other):
            torch.testing.assert_close(optimized(x), source(x))
    assert any("linear+gelu_erf" in fusion.fused for fusion in xopt.report(optimized).fusions if fusion.path == "")


def test_what_is_computed_is_an_index_of_a_parameter() -> None:
    class Looks(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.ParameterList([torch.randn(4, 64)])

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + self.table[0][(x[..., 0] > 0).long()]

    source = nn.Sequential(Looks()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for x in (X, -X, X[:1], X[:, :3]):
            torch.testing.assert_close(optimized(x), source(x))
    assert "linear+gelu_erf" in xopt.report(optimized).fusions[0].fused


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


class PartsByRow(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.unbind(1)
        return torch.stack([Mlp.forward(self, row) for row in rows], 1) * len(rows)


class PartsBySize(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([Mlp.forward(self, part) for part in torch.split(x, 2, 1)], 1)


class PartsByNumber(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat(x.chunk(4, dim=1)[::-1], 1))


SIZED = [
    *(BranchOnSize, SizeAsNumber, SizeAsTruth, SizeAmongOthers),
    *(PartsByRow, PartsBySize, PartsByNumber),
    pytest.param(_caught(lambda x: x[..., :1] * x.new_ones(8, 1)), marks=pytest.mark.program_fails),
    *(LoopOverRows, _caught(lambda x: len(x) + 1.0), _caught(lambda x: torch.stack(list(x)))),
]


@pytest.mark.parametrize("kind", SIZED)
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
    runs = itertools.count()  # a list would have to be written to in each call

    class Watched(BranchOnSize):
        def forward(self, x: Tensor) -> Tensor:
            next(runs)
            return super().forward(x)

    optimized = xopt.optimize(nn.Sequential(Watched()).eval(), dtype=torch.float32)
    with torch.no_grad():
        for length in (8, 3, 8, 3):
            optimized(torch.randn(2, length, 64))
        before = next(runs)
        for length in (8, 3, 9, 2):
            optimized(torch.randn(2, length, 64))
    assert next(runs) == before + 1, "the module's own forward ran again"


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


class Mode(enum.Enum):
    HALF = 0.5
    DOUBLE = 2.0


class ToldApart(Mlp):
    def forward(self, x: Tensor, how: Any = Mode.HALF) -> Tensor:
        y = super().forward(x)
        if isinstance(how, Mode):
            return y * 2 if how is Mode.DOUBLE else y / 2
        if how in (torch.relu, functional.silu):
            return how(y)  # type: ignore[no-any-return]
        if how is int or how is Ellipsis or how is torch.channels_last:
            return y + 1
        return y


def test_arguments_that_are_told_apart_by_which_they_are() -> None:
    source = ToldApart().eval()
    optimized: Any = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)[0]
    values = [
        *Mode,
        int,
        float,
        torch.relu,
        functional.silu,
        torch.tanh,
        ...,
        torch.channels_last,
        torch.preserve_format,
    ]
    with torch.no_grad():
        for how in (*values, *values):
            torch.testing.assert_close(optimized(X, how), source(X, how))
            torch.testing.assert_close(optimized(X, how=how), source(X, how=how))
        torch.testing.assert_close(optimized(X), source(X))


def test_functions_that_are_new_in_each_call_leave_room_for_other_kinds() -> None:
    model: Any = xopt.optimize(nn.Sequential(ToldApart()).eval(), dtype=torch.float32)
    with torch.no_grad():
        for _ in range(40):
            model[0](X, lambda x: x)
        model[0](X, Mode.DOUBLE)
    assert any(fusion.fused for fusion in xopt.report(model).fusions)


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


@pytest.mark.program_fails
def test_an_error_of_a_pattern_is_told_apart_from_one_of_the_forward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: object, inside: bool) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr("xopt.modules.block.chain_steps", fail)
    source = nn.Sequential(Mlp()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(optimized(X), source(X))
    said = "could not be fused: ValueError: a fault of ours"
    assert [record.levelname for record in caplog.records if said in record.getMessage()] == ["WARNING"] * 2
    assert said in str(xopt.report(optimized, X))
