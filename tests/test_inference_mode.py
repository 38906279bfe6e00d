"""Models that are optimized, copied, saved and changed in `torch.inference_mode()`, as whole scripts run in it."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import xopt

X = torch.randn(3, 8)
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def source() -> Small:
    torch.manual_seed(0)
    return Small().eval()


def unpickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def loaded_by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def state_loaded(model: Any) -> Any:
    model.load_state_dict(model.state_dict())
    return model


def source_loaded(model: Any) -> Any:
    model.load_state_dict(source().state_dict())
    return model


def saved(model: Any, folder: pathlib.Path) -> Any:
    xopt.save(model, folder)
    return xopt.load(folder, Small)


USES: dict[str, Callable[[Any, pathlib.Path], Any]] = {
    "itself": lambda model, _: model,
    "a copy": lambda model, _: copy.deepcopy(model),
    "a pickle": lambda model, _: unpickled(model),
    "torch.save": lambda model, _: loaded_by_torch(model),
    "its own state": lambda model, _: state_loaded(model),
    "the source's state": lambda model, _: source_loaded(model),
    "xopt.save": saved,
    "optimized again": lambda model, _: xopt.optimize(model),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made_in", MODES)
def test_what_one_does_with_models(made_in: str, mode: str, use: str, tmp_path: pathlib.Path) -> None:
    plain = source()
    with MODES[made_in]():
        optimized = xopt.optimize(plain, sample_input=X)
    with MODES[mode]():
        used = USES[use](optimized, tmp_path)
        state = used.state_dict()
        assert state.keys() == plain.state_dict().keys()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(state[name], tensor)
        torch.testing.assert_close(used(X), plain(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inplace", [True, False])
def test_tensors_are_such_that_count_their_changes(inplace: bool, tmp_path: pathlib.Path) -> None:
    plain = source()
    with torch.inference_mode():
        optimized = xopt.optimize(plain, inplace=inplace, sample_input=X)
        xopt.save(optimized, tmp_path)
        loaded = xopt.load(tmp_path, Small)
    for model in (optimized, loaded):
        assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))


class Projections(nn.Module):
    """Of one input, so that their weights are packed as one when they are first used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = (part(x) for part in self.parts)
        return first * second + third  # type: ignore[no-any-return]


def test_weights_packed_and_loaded_in_inference_mode_can_be_changed_elsewhere() -> None:
    plain = Projections().eval()
    x = torch.randn(2, 32)
    with torch.inference_mode():
        optimized = xopt.optimize(plain)
        optimized(x)
        assert not any(tensor.is_inference() for tensor in optimized.state_dict().values())
        optimized.load_state_dict(plain.state_dict())
    state = {name: tensor * 0.5 for name, tensor in plain.state_dict().items()}
    for _ in range(2):
        for model in (plain, optimized):
            model.load_state_dict(state)
        with torch.no_grad():
            for model in (plain, optimized):
                model.get_parameter("parts.1.weight").add_(0.25)
        with torch.inference_mode():
            torch.testing.assert_close(optimized(x), plain(x), rtol=1e-5, atol=1e-5)


def test_a_model_made_in_inference_mode() -> None:
    """Its own tensors can be changed only there; a copy's are like others."""
    with torch.inference_mode():
        plain = source()
    copied = xopt.optimize(plain)
    assert not any(tensor.is_inference() for tensor in (*copied.parameters(), *copied.buffers()))
    with torch.inference_mode():
        changed = xopt.optimize(copy.deepcopy(plain), inplace=True)
        for optimized in (copied, changed):
            torch.testing.assert_close(optimized(X), plain(X), rtol=1e-5, atol=1e-5)
            optimized.load_state_dict({name: tensor * 0.5 for name, tensor in plain.state_dict().items()})
        plain.load_state_dict({name: tensor * 0.5 for name, tensor in plain.state_dict().items()})
        for optimized in (copied, changed):
            torch.testing.assert_close(optimized(X), plain(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_mode_is_left_as_it_was(mode: str) -> None:
    with MODES[mode]():
        before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        xopt.optimize(source(), sample_input=X)
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == before
