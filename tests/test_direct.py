"""Whole models that are called without anything being set up for them: the same results, and only where that is so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import xopt
from xopt.modules import direct

Counted = Callable[[], int]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.pool = nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x).relu()
        x = self.norm(self.conv(x)).relu() + x
        return {"map": x, "logits": self.head(self.pool(x).flatten(1))}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        x = self.table(words)
        x = self.norm(x + self.down(nn.functional.gelu(self.up(x))))
        return {"hidden": x, "again": self.norm(x + self.down(nn.functional.gelu(self.up(x))))}


def images(batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, 12, 12)


def words(batch: int = 1) -> Tensor:
    return torch.randint(0, 50, (batch, 7))


MODELS: dict[str, tuple[Any, Callable[..., Tensor]]] = {"images": (Images, images), "words": (Words, words)}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """How many calls have gone the short way since this was asked last."""
    found = [0]
    first_that_holds = direct._first_that_holds

    def count(*args: Any) -> Any:
        result = first_that_holds(*args)
        found[0] += result is not NotImplemented
        return result

    monkeypatch.setattr(direct, "_first_that_holds", count)

    def since() -> int:
        count, found[0] = found[0], 0
        return count

    with torch.no_grad():
        yield since


def settled(name: str, dtype: torch.dtype, taken: Counted) -> tuple[Any, Any]:
    make, inputs = MODELS[name]
    source = make().eval()
    optimized = xopt.optimize(source, dtype=dtype)
    for _ in range(3):
        optimized(inputs())
    taken()
    return source, optimized


def expect_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert ours.keys() == theirs.keys()
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype
        assert ours[name].stride() == expected.stride()
        torch.testing.assert_close(ours[name], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_the_whole_way(
    name: str, dtype: torch.dtype, taken: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, optimized = settled(name, dtype, taken)
    for batch in (1, 2, 1, 3):
        x = MODELS[name][1](batch)
        results = optimized(x)
        assert taken() == 1
        expect_alike(results, source(x), dtype)
        with monkeypatch.context() as without:
            without.setattr(direct, "_first_that_holds", lambda *args: NotImplemented)
            whole = optimized(x)
        optimized.forward._direct._to_skip = 0
        assert all(torch.equal(results[each], whole[each]) for each in whole)


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def with_gradients(model: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        return model(x)


def under_autocast(model: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return {name: value.float() for name, value in model(x).items()}


def in_a_mode(model: Any, x: Tensor) -> Any:
    with Seeing():
        return model(x)


def profiled(model: Any, x: Tensor) -> Any:
    with profile(activities=[ProfilerActivity.CPU]):
        return model(x)


def with_a_hook(model: Any, x: Tensor) -> Any:
    seen: list[Any] = []
    part = next(each for each in model.children() if isinstance(each, (nn.BatchNorm2d, nn.LayerNorm)))
    handle = part.register_forward_hook(lambda *args: seen.append(args))
    try:
        return model(x)
    finally:
        handle.remove()
        assert seen


def with_a_hook_for_all(model: Any, x: Tensor) -> Any:
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *args: seen.append(args))
    try:
        return model(x)
    finally:
        handle.remove()
        assert seen


def compiled(model: Any, x: Tensor) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager")(x)


UNUSUAL: dict[str, Callable[[Any, Tensor], Any]] = {
    each.__name__: each
    for each in (with_gradients, under_autocast, in_a_mode, profiled, with_a_hook, with_a_hook_for_all, compiled)
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unusual", UNUSUAL)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_unusual_goes_the_whole_way(name: str, unusual: str, dtype: torch.dtype, taken: Counted) -> None:
    source, optimized = settled(name, dtype, taken)
    x = MODELS[name][1]()
    results = UNUSUAL[unusual](optimized, x)
    assert taken() == 0
    tolerance = 1e-5 if dtype == torch.float32 and unusual != "under_autocast" else 5e-2
    for each, expected in source(x).items():
        torch.testing.assert_close(results[each].detach(), expected, atol=tolerance, rtol=tolerance)
    for _ in range(8):  # and then the short one again
        optimized(x)
    assert taken() > 0


def test_images_with_their_channels_last(taken: Counted) -> None:
    source, optimized = settled("images", torch.float32, taken)
    x = images(2).contiguous(memory_format=torch.channels_last)
    expect_alike(optimized(x), source(x), torch.float32)
    assert taken() == 0


def test_training_weights_and_bad_input(taken: Counted) -> None:
    _, optimized = settled("images", torch.float32, taken)
    x = images()
    other = Images()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    optimized.load_state_dict(other.state_dict())
    expect_alike(optimized(x), other.eval()(x), torch.float32)
    with pytest.raises(RuntimeError, match="expected 3 channels"):
        optimized(torch.randn(1, 4, 12, 12))
    with pytest.raises(TypeError):
        optimized(x, x)
    taken()
    optimized.train()
    optimized(x)
    assert taken() == 0


def test_what_never_holds_is_tried_less_and_less(taken: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimized = settled("words", torch.float32, taken)
    tries = [0]

    def none_holds(*args: Any) -> Any:
        tries[0] += 1
        return NotImplemented

    monkeypatch.setattr(direct, "_first_that_holds", none_holds)
    for _ in range(300):
        optimized(words())
    assert tries[0] < 15


def test_threads_of_several_models(taken: Counted) -> None:
    """A model within another one, each with images in its own layout."""
    _, inner = settled("images", torch.float32, taken)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return inner(self.first(x))["map"]  # type: ignore[no-any-return]

    source = Outer().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    for _ in range(4):
        x = images()
        result = optimized(x)
        assert result.is_contiguous()
        torch.testing.assert_close(result, source(x), atol=1e-5, rtol=1e-5)
