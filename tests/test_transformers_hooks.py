"""transformers leaves hooks on all layers once it was asked for hidden states: they are part of programs, while they
sleep, and see what they always saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xopt
from tests.test_transformers import SMALL

transformers = pytest.importorskip("transformers")
capturing = pytest.importorskip("transformers.utils.output_capturing")

WORDS = torch.arange(12).reshape(2, 6) + 1
MASK = torch.ones(2, 6, dtype=torch.long)


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **SMALL)).eval()


def tensors_of(output: Any) -> list[torch.Tensor]:
    return [tensor for value in output.values() for tensor in (value if isinstance(value, tuple) else (value,))]


def root_of(model: Any) -> tuple[tuple[str, ...], str | None]:
    (found,) = [fusion for fusion in xopt.report(model).fusions if fusion.path == ""]
    return found.fused, found.problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_are_those_of_the_source_and_no_call_is_slower_after(dtype: torch.dtype) -> None:
    source = bert()
    optimized = xopt.optimize(source, dtype=dtype)
    most = 1e-5 if dtype == torch.float32 else 3e-2
    with torch.no_grad():
        for asked in (False, True, True, True, False, False, True, False):
            inputs = {"input_ids": WORDS, "attention_mask": MASK, "output_hidden_states": asked}
            got, known = tensors_of(optimized(**inputs)), tensors_of(source(**inputs))
            assert len(got) == len(known) == (5 if asked else 2)
            for one, other in zip(got, known, strict=True):
                assert float((one - other).norm() / other.norm()) < most
    fused, problem = root_of(optimized)
    assert problem is None
    assert fused.count("linear+gelu_erf") == 2


def test_a_hook_that_somebody_else_has_woken_sees_each_layer() -> None:
    source = bert()
    optimized = xopt.optimize(source, dtype=torch.float32)
    states = torch.randn(2, 6, 64)
    with torch.no_grad():
        for model in (source, optimized):
            model(WORDS, attention_mask=MASK, output_hidden_states=True)  # which leaves the hooks there
        for is_awake in (False, True, False, True):
            seen = []
            for model in (source, optimized):
                collected: dict[str, list[torch.Tensor]] = {"hidden_states": []}
                token = capturing._active_collector.set(collected if is_awake else None)
                try:
                    seen.append([model.encoder(states).last_hidden_state, *collected["hidden_states"]])
                finally:
                    capturing._active_collector.reset(token)
            assert len(seen[0]) == len(seen[1]) == (4 if is_awake else 1)
            for one, other in zip(*seen, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_hooks_of_the_users_own_are_called_beside_them() -> None:
    optimized = xopt.optimize(bert(), dtype=torch.float32)
    seen: list[Any] = []
    with torch.no_grad():
        for _ in range(3):
            optimized(WORDS, attention_mask=MASK, output_hidden_states=True)
        handle = optimized.encoder.layer[1].register_forward_hook(lambda module, args, output: seen.append(output))
        for asked in (True, False):
            optimized(WORDS, attention_mask=MASK, output_hidden_states=asked)
        assert len(seen) == 2
        handle.remove()
        optimized(WORDS, attention_mask=MASK)
        assert len(seen) == 2
