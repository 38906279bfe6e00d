"""Forwards that branch on what their arguments say (whether a mask hides anything, whether positions follow each other)
are recorded, once for each way; what layers have computed is nothing to branch on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import xopt
from tests.block_models import Mlp, X
from tests.test_chain_programs import lengths_of_chains
from xopt.modules.block import PROGRAMS


class Branches(Mlp):
    """`looks` says which way to go; `runs` counts the forwards that are run as they are."""

    def __init__(self, looks: Callable[[Mlp, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.looks = looks
        self.runs = itertools.count()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        next(self.runs)
        return super().forward(x if self.looks(self, x, mask) else -x)


TOLD: dict[str, Callable[[Mlp, Tensor, Tensor], Any]] = {
    "all": lambda self, x, mask: mask.all(),
    "not": lambda self, x, mask: not mask.any(),
    "both": lambda self, x, mask: mask.all() and x.sum() > 0,
    "one element": lambda self, x, mask: mask[0, -1],
    "of floats": lambda self, x, mask: x.abs().max() > 2.5,
    "positions": lambda self, x, mask: (torch.diff(mask.long().cumsum(-1), dim=-1) == 1).all(),
    "of sizes": lambda self, x, mask: (torch.arange(x.shape[1]) < 4).all(),
    "an assertion": lambda self, x, mask: bool((mask <= 1).all()) and mask.any(),
}
VALUE = "it depends on the value or the layout of a tensor"
UNTOLD: dict[str, tuple[Callable[[Mlp, Tensor, Tensor], Any], str]] = {
    "a layer's": (lambda self, x, mask: self.up(x).sum() > 0, VALUE),
    "a weight's": (lambda self, x, mask: self.up.weight.sum() > 0, VALUE),
    "several": (lambda self, x, mask: mask.tolist()[0][0], VALUE),
    "drawn": (lambda self, x, mask: torch.rand(()) < 0.5, "it makes random numbers"),
}


def optimized_of(looks: Callable[[Mlp, Tensor, Tensor], Any]) -> tuple[Any, Branches]:
    torch.manual_seed(0)
    source = Branches(looks).eval()
    parent = nn.Sequential(source).eval()
    return xopt.optimize(parent, dtype=torch.float32)[0], copy.deepcopy(source)


def masks() -> list[Tensor]:
    full = torch.ones(X.shape[0], X.shape[1], dtype=torch.bool)
    padded, empty = full.clone(), torch.zeros_like(full)
    padded[:, -2:] = False
    return [full, padded, full, empty, padded, padded, full, empty]


def runs_of(block: Any) -> int:
    return int(next(copy.copy(block.runs)))


@pytest.mark.parametrize("name", TOLD)
def test_each_way_has_a_program(name: str) -> None:
    block, source = optimized_of(TOLD[name])
    with torch.no_grad():
        for turn, scale in itertools.product(range(3), (1.0, 0.1, -1.0)):
            before = runs_of(block)
            for mask in masks():
                for x in (X * scale, X[:, :4] * scale):
                    cut = mask[:, : x.shape[1]]
                    torch.testing.assert_close(block(x, cut), source(x, cut))
            if turn == 2:
                assert runs_of(block) == before, "the module's own forward ran again"
    assert block.__dict__[PROGRAMS].fused


@pytest.mark.parametrize("name", UNTOLD)
def test_what_a_layer_has_computed_is_no_branch_of_a_program(name: str) -> None:
    looks, problem = UNTOLD[name]
    block, source = optimized_of(looks)
    with torch.no_grad():
        for seed, mask in enumerate(masks()):
            torch.manual_seed(seed)
            result = block(X, mask)
            torch.manual_seed(seed)
            torch.testing.assert_close(result, source(X, mask))
    assert problem in str(block.__dict__[PROGRAMS].problem)


class Remembers(Mlp):
    def forward(self, x: Tensor, cache: transformers.DynamicCache) -> Tensor:  # type: ignore[override]
        keys, _ = cache.update(x[:, None], x[:, None], 0)
        return super().forward(x if x.sum() > 0 else -x) + keys.sum()


def test_a_branch_after_a_cache_has_grown_is_not_recorded() -> None:
    """A call that turned out to go another way could not be begun again."""
    source = Remembers().eval()
    block: Any = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)[0]
    own = Remembers().eval()
    own.load_state_dict(source.state_dict())
    caches = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        for x in (X, -X, X, X, -X):
            torch.testing.assert_close(block(x, caches[0]), own(x, caches[1]))
            assert caches[0].get_seq_length() == caches[1].get_seq_length()


def small(kind: str) -> Any:
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**common, intermediate_size=48)).eval()
    config = transformers.LlamaConfig(**common, intermediate_size=48, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config).eval()


def result_of(model: Any, inputs: dict[str, Any]) -> Any:
    result = model(**inputs)
    return result.logits if "logits" in result else result.last_hidden_state


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_models_with_a_mask_that_hides_nothing_or_something(kind: str) -> None:
    """As a tokenizer gives it for one text, or for several of other lengths."""
    source = small(kind)
    optimized = xopt.optimize(source, dtype=torch.float32)
    ids = torch.randint(0, 64, (2, 11))
    full = torch.ones_like(ids)
    padded = full.clone()
    padded[0, -4:] = 0
    more: dict[str, Any] = {} if kind == "bert" else {"use_cache": False}
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]]).expand(2, -1)
    with torch.no_grad():
        for mask in (full, padded, full, None, padded, full):
            for length in (11, 7):
                cut = None if mask is None else mask[:, :length]
                inputs = {"input_ids": ids[:, :length], "attention_mask": cut, **more}
                wanted, result = result_of(source, inputs), result_of(optimized, inputs)
                seen = torch.ones(2, length, dtype=torch.bool) if cut is None else cut.bool()
                torch.testing.assert_close(result[seen], wanted[seen], atol=1e-4, rtol=1e-4)
        if kind == "llama":  # two texts in one line
            for positions in (packed, torch.arange(11)[None].expand(2, -1), packed):
                inputs = {"input_ids": ids, "position_ids": positions, **more}
                wanted, result = result_of(source, inputs), result_of(optimized, inputs)
                torch.testing.assert_close(result, wanted, atol=1e-4, rtol=1e-4)


def test_a_language_model_is_one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no cache, whatever its length, and its head with it, which takes a slice that is all there is."""
    optimized: Any = xopt.optimize(small("llama"), dtype=torch.bfloat16)
    with torch.no_grad():
        optimized(input_ids=torch.randint(0, 64, (1, 5)), use_cache=False)
        lengths = lengths_of_chains(monkeypatch)
        for length in (5, 9, 5, 12):
            optimized(input_ids=torch.randint(0, 64, (1, length)), use_cache=False)
    assert len(lengths) == 4
    (whole,) = (fusion for fusion in xopt.report(optimized).fusions if fusion.path == "")
    assert len(whole.fused) > 10, whole


class Slices(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        y = super().forward(x[:])
        return x[:, :], y[:, -0:, :], y[..., 0:], y[:, 1:], self.up(y[:][()])


def test_slices_of_everything() -> None:
    source = Slices().eval()
    optimized: Any = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)
    with torch.no_grad():
        for x in (X, X[:, :3], X[:1]):
            result, expected = optimized(x), source(x)
            assert result[0] is not x
            for ours, theirs in zip(result, expected, strict=True):
                torch.testing.assert_close(ours, theirs)
