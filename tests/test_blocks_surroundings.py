"""What forwards read beside tensors (attributes, plain objects, classes, globals, generators) and what looks on from
outside: programs do not outlive its changes, neither the model's own nor those of a block inside."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.block_models import X, calls

SCALE = 1.0
SCALES = {"all": 1.0}
Change = Callable[[Any], None]


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    mode: str = "plus"
    scales: list[float] = dataclasses.field(default_factory=lambda: [1.0])
    by_name: dict[str, float] = dataclasses.field(default_factory=lambda: {"all": 1.0})
    flags: set[str] = dataclasses.field(default_factory=set)
    inner: Any = None
    factor = 1.0


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Reader(nn.Module):
    """Reads numbers in all places."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.leaky = (
            nn.Linear(64, 64),
            nn.Linear(64, 64),
            nn.GroupNorm(1, 5),
            nn.LeakyReLU(0.1),
        )
        self.scale, self.mode, self.flag, self.function = 1.0, "plus", False, functional.gelu
        self.stride = (1, 2)
        self.settings = Settings(inner=Settings())
        self.space, self.slots = SimpleNamespace(scale=1.0), Slots()
        self.ordered, self.queue = OrderedDict(all=1.0), deque([1.0])
        self.many = (Settings(), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.leaky(self.norm(self.down(self.function(self.up(x)))))
        y = y * self.scale * self.factor * self.stride[0] * self.ordered["all"] * self.queue[0] * self.many[0].scale
        y = y * self.settings.scale * self.settings.factor * self.settings.scales[0] * self.settings.by_name["all"]
        y = y * self.settings.inner.scale * self.space.scale * self.slots.scale * SCALE * SCALES["all"]
        if self.flag or "minus" in self.settings.flags or "minus" in (self.mode, self.settings.mode):
            y = -y
        return self.finish(y)

    def finish(self, y: Tensor) -> Tensor:
        return y


def set_in(read: Callable[[Any], Any], name: str, value: Any) -> Change:
    return lambda reader: setattr(read(reader), name, value)


def set_item(read: Callable[[Any], Any], key: Any, value: float) -> Change:
    return lambda reader: read(reader).__setitem__(key, value)


CHANGES: dict[str, Change] = {
    "number": set_in(lambda m: m, "scale", 3.0),
    "word": set_in(lambda m: m, "mode", "minus"),
    "flag": set_in(lambda m: m, "flag", True),
    "tuple": set_in(lambda m: m, "stride", (3, 2)),
    "function": set_in(lambda m: m, "function", torch.tanh),
    "method": set_in(lambda m: m, "finish", lambda y: y * 2),
    "attribute of the class's name": set_in(lambda m: m, "factor", 3.0),
    "beside torch": lambda m: m.__dict__.update(scale=3.0),
    "new object": set_in(lambda m: m, "settings", Settings(4.0, inner=Settings())),
    "object's number": set_in(lambda m: m.settings, "scale", 3.0),
    "object's word": set_in(lambda m: m.settings, "mode", "minus"),
    "object's list": set_item(lambda m: m.settings.scales, 0, 3.0),
    "object's dictionary": set_item(lambda m: m.settings.by_name, "all", 3.0),
    "object's set": lambda m: m.settings.flags.add("minus"),
    "object's object": set_in(lambda m: m.settings.inner, "scale", 3.0),
    "object's attributes": lambda m: setattr(m.settings, "__dict__", {**vars(m.settings), "scale": 3.0}),
    "object in a tuple": set_in(lambda m: m.many[0], "scale", 3.0),
    "namespace": set_in(lambda m: m.space, "scale", 3.0),
    "slots": set_in(lambda m: m.slots, "scale", 3.0),
    "ordered dictionary": set_item(lambda m: m.ordered, "all", 3.0),
    "deque": set_item(lambda m: m.queue, 0, 3.0),
    "torch's eps": set_in(lambda m: m.norm, "eps", 0.5),
    "torch's slope": set_in(lambda m: m.leaky, "negative_slope", 0.9),
}


def model_of(inside: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(64, 64), Reader()).eval() if inside else Reader().eval()
    optimized = xopt.optimize(source, dtype=torch.float32, inplace=False)
    with torch.no_grad():
        for _ in range(2):
            assert_alike(optimized, source)
    assert "gelu" in str(xopt.report(optimized))
    return source, optimized


def assert_alike(optimized: nn.Module, source: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_forwards_read_is_seen_to_change(name: str, inside: bool) -> None:
    source, optimized = model_of(inside)
    with torch.no_grad():
        before = source(X)
    for model in (source, optimized):
        CHANGES[name](model[1] if inside else model)
    for _ in range(2):
        assert_alike(optimized, source)
    with torch.no_grad():
        assert not torch.allclose(source(X), before)


@pytest.mark.parametrize("inside", [False, True])
def test_classes_and_globals_that_forwards_read_are_seen_to_change(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, optimized = model_of(inside)
    for holder, name, value in ((Reader, "factor", 2.0), (Settings, "factor", 3.0)):
        monkeypatch.setattr(holder, name, value)
        assert_alike(optimized, source)
    monkeypatch.setattr(Reader, "finish", lambda self, y: y + 1)
    assert_alike(optimized, source)
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    assert_alike(optimized, source)
    monkeypatch.setitem(SCALES, "all", 5.0)
    assert_alike(optimized, source)


def test_what_forwards_do_not_read_may_change() -> None:
    _, optimized = model_of(inside=False)
    optimized.trainer = Settings()
    with torch.no_grad():
        for _ in range(2):
            optimized(X)
        before = calls()["gemm"]
        for step in range(40):
            optimized.trainer.scale = float(step)
            optimized.settings.scale = 1.0  # as it is
            optimized(X)
    assert calls()["gemm"] - before == 80
    assert "gelu" in str(xopt.report(optimized))
    assert optimized.__dict__["_xopt_programs"]._failures <= 1


def test_an_object_that_leads_back_to_the_model_does_not_keep_it() -> None:
    _, optimized = model_of(inside=False)
    optimized.settings.inner.scale = optimized.settings.scale
    optimized.settings.inner.owner = optimized
    with torch.no_grad():
        optimized(X)
        optimized(X)
    gone = weakref.ref(optimized)
    del optimized
    gc.collect()
    assert gone() is None


# ---- Random numbers --------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.draw = draw
        self.python, self.numpy = random.Random(3), numpy.random.default_rng(3)
        self.old, self.torch = numpy.random.RandomState(3), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x))) * (1 + self.draw(self))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "draw",
    [
        lambda model: random.random(),
        lambda model: float(numpy.random.rand()),
        lambda model: model.python.random(),
        lambda model: float(model.numpy.random()),
        lambda model: float(model.old.rand()),
        lambda model: torch.rand(1).item(),
        lambda model: 1.0 if torch.rand(()) > 0.5 else 2.0,
        lambda model: torch.rand(1, generator=model.torch).item(),
    ],
    ids=["python", "numpy", "python's own", "numpy's own", "numpy's old own", "torch", "branch", "torch's own"],
)
def test_random_numbers_of_others_are_drawn_in_each_call(draw: Callable[[Any], float]) -> None:
    source = Drawing(draw).eval()
    optimized = xopt.optimize(source, dtype=torch.float32, inplace=False)
    results = []
    for model in (source, optimized):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(torch.stack([model(X) for _ in range(8)]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


# ---- Running statistics ----------------------------------------------------------------------------------------------


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.norm(self.conv(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("alone", [False, True])
def test_statistics_that_a_norm_learned_between_calls_are_seen(alone: bool) -> None:
    source: Any = ConvNorm().eval()
    optimized: Any = xopt.optimize(source, dtype=torch.float32, inplace=False)
    x = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        assert_alike(optimized, source, x)
        for model in (source, optimized):
            model.norm.train()
            with torch.no_grad():
                (model.norm if alone else model)(torch.ones(2, 8, 4, 4) if alone else x)
            model.norm.eval()
    assert_alike(optimized, source, x)
    for model in (source, optimized):
        model.norm.eps = 0.5
    assert_alike(optimized, source, x)


# ---- Hooks on all modules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_on_all_modules_are_called_for_those_inside(inside: bool) -> None:
    source, optimized = model_of(inside)
    hooks = nn.modules.module
    names: list[str] = []

    def count(module: nn.Module, *_: Any) -> None:
        names.append(type(module).__name__)

    def double(module: nn.Module, args: Any, result: Tensor) -> Tensor | None:
        return result * 2 if isinstance(module, nn.GroupNorm) else None

    for register, hook in (
        (hooks.register_module_forward_pre_hook, count),
        (hooks.register_module_forward_hook, count),
        (hooks.register_module_forward_hook, double),
    ):
        handle = register(hook)  # type: ignore[arg-type]
        try:
            assert_alike(optimized, source)
            assert hook is double or names[: len(names) // 2] == names[len(names) // 2 :] != []
        finally:
            handle.remove()
            names.clear()
    before = calls()["gemm"]
    with torch.no_grad():
        optimized(X)
    assert calls()["gemm"] - before == 2 + inside


def test_hooks_that_only_look_on_leave_programs_alone() -> None:
    _, optimized = model_of(inside=False)
    before = calls()
    with torch.utils.flop_counter.FlopCounterMode(display=False), torch.no_grad():
        optimized(X)
    assert calls()["gemm"] - before["gemm"] == 2
    assert optimized.__dict__["_xopt_programs"]._failures == 0


# ---- Forwards that an instance was given -----------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.forward = self.chosen

    def chosen(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.second(self.first(x)) * factor  # type: ignore[no-any-return]


class Other(Pair):
    def __init__(self) -> None:
        super().__init__()
        del self.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.relu(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Pair, Other])
def test_a_forward_that_the_instance_was_given_is_what_runs(kind: type, dtype: torch.dtype) -> None:
    source = kind().eval()
    source.forward = source.chosen
    optimized = xopt.optimize(source, dtype=dtype, inplace=False)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        for model in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
            for _ in range(2):
                result = model(x, factor=2.0)
                assert result.dtype == x.dtype
                torch.testing.assert_close(result, source(x, factor=2.0), rtol=2e-2, atol=2e-2)
        changed = copy.deepcopy(optimized)
        changed.second.bias.add_(1)  # the copy's forward is of the copy
        assert (changed(x) - optimized(x)).abs().min() > 0.5
