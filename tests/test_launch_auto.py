"""--auto-optimize: which models of an unchanged script are optimized, when, and which are left alone."""

from __future__ import annotations

import copy
import pathlib
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from tests.launched import launch, script
from xopt.launch.auto import FirstForward, Watch


class Block(nn.Module):
    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, 64), nn.Linear(64, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.blocks(x) * scale
        return result


class LeftAlone(Block):
    pass


@pytest.fixture
def said() -> Iterator[list[str]]:
    messages: list[str] = []
    with Watch(torch.bfloat16, ["Left*"], messages.append):
        yield messages


def is_optimized(model: nn.Module) -> bool:
    try:
        return bool(xopt.report(model).entries)
    except ValueError:
        return False


def infer(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.ones(3, 32))
    return result


def test_a_model_is_optimized_at_its_first_forward(said: list[str]) -> None:
    model = Stack().eval()
    expected = infer(copy.deepcopy(model).train())
    assert not is_optimized(model)
    result = infer(model)
    assert is_optimized(model)
    assert result.dtype == torch.float32
    assert float((result - expected).norm() / expected.norm()) < 0.02
    assert [message for message in said if message.startswith("Stack is optimized to bfloat16: 4 of its")] == said


def test_nothing_of_the_watch_stays_in_later_forwards(said: list[str]) -> None:
    by_hand = xopt.optimize(Stack().eval(), dtype=torch.bfloat16, inplace=True)
    model = Stack().eval()
    infer(model)
    infer(by_hand)
    assert type(model.__dict__.get("forward")) is type(by_hand.__dict__.get("forward"))
    for mine, its in zip(model.modules(), by_hand.modules(), strict=True):
        assert not isinstance(mine.__dict__.get("forward"), FirstForward)
        assert len(mine._forward_pre_hooks) == len(its._forward_pre_hooks)
    assert not nn.modules.module._global_forward_pre_hooks
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_the_root_is_optimized_not_its_parts(said: list[str]) -> None:
    model = Stack()
    model.blocks[0].eval()
    model.eval()
    infer(model)
    assert is_optimized(model)
    assert len(said) == 1


def test_each_model_of_a_script(said: list[str]) -> None:
    models = [Block().eval(), Stack().eval()]
    for model in models:
        infer(model)
    assert all(map(is_optimized, models))
    assert [message.split()[0] for message in said] == ["Block", "Stack"]


def test_models_that_are_left_alone(said: list[str]) -> None:
    model = LeftAlone().eval()
    infer(model)
    assert not is_optimized(model)
    assert said == ["LeftAlone is left alone, as asked for"]


def test_training_is_left_alone(said: list[str]) -> None:
    model = Stack()
    model(torch.ones(3, 32)).sum().backward()
    model.eval()
    model.train()
    infer(model)
    assert not is_optimized(model)
    assert said == []


def test_gradients_keep_a_model_as_it_is_until_none_are_wanted(said: list[str]) -> None:
    model = Stack().eval()
    model(torch.ones(3, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not is_optimized(model)
    assert said == [
        "Stack is left as it is while gradients are wanted: "
        "inference runs under torch.inference_mode() or torch.no_grad()"
    ]
    infer(model)
    assert is_optimized(model)


def test_a_model_that_the_script_has_optimized(said: list[str]) -> None:
    model = xopt.optimize(Stack().eval(), dtype=torch.bfloat16)
    report = xopt.report(model)
    infer(model.eval())
    assert xopt.report(model).entries == report.entries
    assert said == []


def test_a_forward_of_its_own_is_kept(said: list[str]) -> None:
    model = Stack()
    model.forward = lambda x: x + 1  # type: ignore[method-assign,assignment]
    model.eval()
    assert torch.equal(infer(model), torch.full((3, 32), 2.0))
    assert said == ["Stack is left alone: its forward is not that of its class"]


def test_a_model_with_nothing_to_optimize_is_told(said: list[str]) -> None:
    model = nn.Sequential(nn.PReLU()).eval()
    infer(model)
    assert len(said) == 1
    assert said[0].startswith("Sequential is left as it is: none of its")


def test_an_error_of_optimize_is_told_and_the_script_goes_on(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(xopt, "optimize", failing)
    assert infer(Stack().eval()).shape == (3, 32)
    assert said == ["Stack could not be optimized: RuntimeError: no memory"]


def test_copies_pickles_and_signatures(said: list[str]) -> None:
    model = Stack().eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        infer(other)
        assert is_optimized(other)
        assert not is_optimized(model)
    assert list(model.forward.__signature__.parameters) == ["x", "scale"]  # type: ignore[attr-defined]


def test_threads_wait_until_the_model_is_optimized(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is in pieces while it is changed in place."""
    model = Stack().eval()
    optimize, in_pieces, seen = xopt.optimize, threading.Event(), []

    def slowly(changed: nn.Module, **options: Any) -> nn.Module:
        in_pieces.set()
        time.sleep(0.2)
        optimize(changed, **options)
        in_pieces.clear()
        return changed

    monkeypatch.setattr(xopt, "optimize", slowly)
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(in_pieces.is_set()))
    results: list[torch.Tensor] = []

    def call(after: threading.Event | None) -> None:
        if after is not None:
            after.wait()
        results.append(infer(model))

    threads = [threading.Thread(target=call, args=(after,)) for after in (None, in_pieces, in_pieces, in_pieces)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False] * 4
    assert len(results) == 4
    assert len(said) == 1
    assert not model._forward_pre_hooks


def test_without_a_watch_all_is_as_before() -> None:
    train = nn.Module.train
    with Watch(None, [], print):
        model = Stack().eval()
    assert nn.Module.train is train
    infer(model)
    assert not is_optimized(model)


SCRIPT = """
    import sys
    import torch
    from torch import nn

    if __name__ == "__main__":
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
        with torch.inference_mode():
            model(torch.ones(2, 64))
        print(type(model[0]).__module__.split(".")[0], sys.argv[1:], sys.path[0].endswith("scripts"))
"""


def test_through_the_launcher(tmp_path: pathlib.Path) -> None:
    (tmp_path / "scripts").mkdir()
    path = script(tmp_path / "scripts", SCRIPT)
    done = launch("--auto-optimize", "--dtype", "bfloat16", path, "--dtype", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1)[1] == "['--dtype', 'x'] True\n"
    assert "xopt-launch: Sequential is optimized to bfloat16: 2 of its" in done.stderr


@pytest.mark.parametrize("chosen", [["--dtype", "bfloat16"], ["--auto-optimize", "--no-python"]], ids=" ".join)
def test_refusals(chosen: list[str], tmp_path: pathlib.Path) -> None:
    done = launch(*chosen, script(tmp_path, "pass"))
    assert done.returncode == 2
    assert "--auto-optimize" in done.stderr
