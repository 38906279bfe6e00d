"""Functions that a forward calls by a global name, done by others: in a copy of the forward, and nowhere else."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import xopt
import xopt.integrations.transformers  # marks its functions, before a test looks at none
from tests.families import calls_of
from tests.test_transformers_states import CONFIGS, LINEAR, SMALL, cache_in, model_of, step
from xopt.modules import called
from xopt.modules.called import in_place_of_named, with_substitutes


def known(x: int) -> int:
    return x + 1


def unknown(x: int) -> int:
    return x + 2


def plain(x: int) -> int:
    return unknown(x)


def calling(x: int, *, twice: bool = True) -> int:
    """Says what it does."""
    return known(known(x)) + later(x) if twice else known(x)


def later(x: int) -> int:
    return 1000 * x


def wrapping(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> int:
        return function(*args, **kwargs) * 2

    return wrapped


def itself(x: int) -> int:
    return 0 if x <= 0 else known(x) + itself(x - 1)


@pytest.fixture
def substituted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(called, "_called", {})
    seen: list[int] = []
    itself_known = known

    @in_place_of_named("known", switch="fuse_attention", fits=lambda function, _: function is itself_known)
    def in_its_place(source: Callable[[int], int], x: int) -> int:
        seen.append(x)
        return source(x) + 100

    return seen


def test_a_copy_finds_substitutes_and_all_else_as_it_was(
    substituted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = with_substitutes(calling)
    assert own is not None
    assert own.switches == {"fuse_attention"}
    assert own.forward(5) == 5 + 202 + 5000
    assert own.forward(5, twice=False) == 106
    assert substituted == [5, 106, 5]
    assert calling(5) == 7 + 5000
    monkeypatch.setitem(globals(), "later", lambda x: 0)  # looked up when it is called
    assert own.forward(5) == 5 + 202


def test_what_has_taken_the_name_since_is_called(substituted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    own = with_substitutes(calling)
    assert own is not None
    monkeypatch.setitem(globals(), "known", unknown)
    assert own.forward(5, twice=False) == 7


def test_what_it_wraps_is_copied_too(substituted: list[int]) -> None:
    both = wrapping(wrapping(calling))
    own = with_substitutes(both)
    assert own is not None
    assert own.forward(5, twice=False) == 4 * 106
    assert both(5, twice=False) == 4 * 6


def test_those_that_call_none_are_left(substituted: list[int]) -> None:
    for function in (plain, wrapping(plain), len, functools.partial(calling, 3)):
        assert with_substitutes(function) is None


def test_a_function_of_the_same_name_is_left(substituted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "known", wrapping(known))
    assert with_substitutes(calling) is None


def test_recursion(substituted: list[int]) -> None:
    own = with_substitutes(itself)
    assert own is not None
    assert own.forward(2) == 103 + 2  # what calls itself by name finds the one that has the name


LEVEL = {"now": 1.0}


def same(x: Tensor) -> Tensor:
    return x


class Leveled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return same(self.layer(x).relu() * LEVEL["now"])


class Leveling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Leveled()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + 1.0  # type: ignore[no-any-return]


@torch.no_grad()
def test_changes_of_globals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(called, "_called", {})

    @in_place_of_named("same", switch="fuse_attention", fits=lambda function, _: function.__module__ == __name__)
    def in_its_place(source: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return source(x) + 1.0

    source = Leveling().eval()
    optimized = xopt.optimize(source)
    x = torch.randn(3, 8)
    for level in (1.0, 1.0, 2.0, 2.0, 3.0):
        monkeypatch.setitem(LEVEL, "now", level)
        torch.testing.assert_close(optimized(x), source(x) + 1.0)
    (whole,) = (fusion for fusion in xopt.report(optimized).fusions if not fusion.path)
    assert "linear+relu" in whole.fused


# ---- The gated delta rule of transformers ---------------------------------------------------------------------------


def qwen() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**SMALL, **LINEAR)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


WORDS = torch.arange(1, 41).reshape(2, 20)


def runs(name: str) -> int:
    return calls_of("selective_scan" if name == "mamba" else "linear_attention")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "lfm 2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_models_run_it(name: str, dtype: torch.dtype) -> None:
    source = model_of(name)
    optimized, before = xopt.optimize(source, dtype=dtype), runs(name)
    expected = source(WORDS).logits
    for _ in range(2):
        logits = optimized(WORDS).logits
        assert float((logits - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert runs(name) >= before + 2 * (2 if "mamba" in name else 3)  # each layer that has it


@pytest.mark.parametrize("name", ["qwen 3.5", "mamba", "mamba 2", "falcon h1"])
@torch.no_grad()
def test_steps_run_it(name: str) -> None:
    source = model_of(name)
    optimized = xopt.optimize(source)
    caches: list[Any] = [None, None]
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 13), (13, 14)):
        before = runs(name)
        results = [
            step(model, WORDS[:, begin:end], cache) for model, cache in zip((optimized, source), caches, strict=True)
        ]
        assert runs(name) >= before + 2
        caches = [cache_in(result) for result in results]
        torch.testing.assert_close(results[0].logits, results[1].logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_short_convolutions_run_on_their_own(name: str) -> None:
    """In a prompt, in each step, and where some words follow."""
    optimized = xopt.optimize(model_of(name), dtype=torch.bfloat16)
    cache: Any = None
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 13), (13, 14)):
        before = calls_of("causal_conv")
        cache = cache_in(step(optimized, WORDS[:, begin:end], cache))
        assert calls_of("causal_conv") >= before + 2
    optimized = xopt.optimize(model_of(name), config=xopt.Config(conv_prepack=False))
    before = calls_of("causal_conv")
    optimized(WORDS)
    assert calls_of("causal_conv") == before


def kimi() -> Any:
    config = getattr(transformers, "KimiLinearConfig", None)
    if config is None:
        pytest.skip("this transformers has no KimiLinear")
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
    mixer = KimiLinearDeltaAttention(config(**sizes), layer_idx=0).eval()
    for parameter in mixer.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return mixer


@torch.no_grad()
def test_decays_by_row() -> None:
    source = kimi()
    optimized, before = xopt.optimize(source, dtype=torch.float32), calls_of("linear_attention")
    x = torch.randn(2, 70, 32)
    for _ in range(2):
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
    assert calls_of("linear_attention") >= before + 2


@torch.no_grad()
def test_a_switch_turns_it_off() -> None:
    optimized, before = xopt.optimize(qwen(), config=xopt.Config(fuse_attention=False)), calls_of("linear_attention")
    optimized(WORDS)
    assert calls_of("linear_attention") == before


@torch.no_grad()
def test_other_models_go_on_as_they_were() -> None:
    source = qwen()
    xopt.optimize(source)
    before = calls_of("linear_attention")
    source(WORDS)
    assert calls_of("linear_attention") == before


@torch.no_grad()
def test_copies_and_pickles_run_it() -> None:
    source = qwen()
    optimized = xopt.optimize(source)
    for model in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        before = calls_of("linear_attention")
        torch.testing.assert_close(model(WORDS).logits, source(WORDS).logits, rtol=1e-4, atol=1e-4)
        assert calls_of("linear_attention") > before


def test_gradients_are_the_source_s() -> None:
    source = qwen()
    found = []
    for model in (source, xopt.optimize(source)):
        x = model.get_input_embeddings()(WORDS).detach().float().requires_grad_()
        model(inputs_embeds=x).logits.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def test_a_function_that_computes_another_thing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    name = "torch_recurrent_gated_delta_rule"
    rule, known = inspect.unwrap(getattr(modeling_qwen3_5, name)), called._called[name]
    assert known.fits(rule, known.substitute)

    def other(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        return rule(query, key, value, g=2 * g, beta=beta, **options)

    assert not known.fits(other, known.substitute)  # it is not transformers'
    monkeypatch.setattr(other, "__module__", rule.__module__)
    assert not known.fits(other, known.substitute)
