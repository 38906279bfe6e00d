"""Written attention with a column of sinks beside the scores, and with heads of keys and values that are repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import xopt
from tests.families import calls_of
from tests.test_written_attention import DEPTH, HEADS, WIDTH, Attention

Tensor = torch.Tensor


def sinks_of(module: Any, q: Tensor) -> Tensor:
    sinks: Tensor = (10 * module.factor).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    return sinks


def as_in_gpt_oss(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * DEPTH**-0.5 + mask
    logits = torch.cat([scores, sinks_of(module, q)], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, 0.1, module.training).to(v.dtype), v)


def in_fp32(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As Flint has it."""
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * 0.3 + mask
    sinks = (10 * module.factor).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = F.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1].to(v.dtype)
    return torch.matmul(weights, v)


def one_a_query(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As the second Inkling has it."""
    logits = torch.cat([q @ k.mT + mask, 3 * q.mean(-1, keepdim=True)], -1).float()
    return F.softmax(logits, dim=-1)[..., :-1].to(q.dtype) @ v


def first_column_is_dropped(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([q @ k.mT, sinks_of(module, q)], -1).softmax(-1)[..., 1:] @ v


def sinks_come_first(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([sinks_of(module, q), q @ k.mT], -1).softmax(-1)[..., :-1] @ v


def two_columns(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinks = sinks_of(module, q)
    return torch.cat([q @ k.mT, sinks, sinks], -1).softmax(-1)[..., :-1] @ F.pad(v, (0, 0, 0, 1))


def last_key_is_dropped(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1)[..., :-1] @ v[:, :, :-1]


def less_another_largest(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.cat([q @ k.mT, sinks_of(module, q)], -1)
    return (logits - 0.5 * logits.amax(-2, keepdim=True)).softmax(-1)[..., :-1] @ v


def logits_are_returned(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    logits = torch.cat([q @ k.mT, sinks_of(module, q)], -1)
    return logits.softmax(-1)[..., :-1] @ v, logits


def repeated(x: Tensor, times: int) -> Tensor:
    batch, heads, length, depth = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, depth).reshape(batch, heads * times, length, depth)


def sinks_and_groups(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return as_in_gpt_oss(module, q, repeated(k[:, :2], 2), repeated(v[:, :2], 2), mask)


def groups_of_all_heads(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    key, value = (each[:, :1].unsqueeze(2).expand(-1, -1, HEADS, -1, -1).reshape(q.shape) for each in (k, v))
    return F.scaled_dot_product_attention(q, key, value, is_causal=True)


def interleaved(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As LitGPT has it."""
    key, value = (each[:, ::2].repeat_interleave(2, dim=1) for each in (k, v))
    return torch.matmul((q @ key.transpose(-1, -2) * 0.25).softmax(-1), value)


def keys_alone(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ repeated(k[:, :2], 2).mT).softmax(-1) @ v


def in_another_order(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whose groups are not of neighbours."""
    return F.scaled_dot_product_attention(q, k[:, :2].repeat(1, 2, 1, 1), v[:, :2].repeat(1, 2, 1, 1))


def repeated_rows(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same sizes at times, but no heads are repeated."""
    key, value = (each[:, :, :, None].expand(-1, -1, -1, 2, -1).reshape(*q.shape[:2], -1, DEPTH) for each in (k, v))
    return (q @ key.mT).softmax(-1) @ value


SINKS = (as_in_gpt_oss, in_fp32, one_a_query, sinks_and_groups)
GROUPS = (sinks_and_groups, groups_of_all_heads, interleaved)
FOUND = (*SINKS, groups_of_all_heads, interleaved, keys_alone, in_another_order, repeated_rows)
OTHERS = (
    *(first_column_is_dropped, sinks_come_first, two_columns, last_key_is_dropped, less_another_largest),
    *(logits_are_returned,),
)


def results_of(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", [*FOUND, *OTHERS], ids=lambda attend: attend.__name__)
def test_attention_with_sinks_and_groups(attend: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = Attention(attend).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    takes_mask, before = attend.__code__.co_argcount == 5, calls_of("attention")
    for batch, length in ((2, 10), (2, 10), (1, 33), (2, 1), (6, 5)):
        x = torch.randn(batch, length, WIDTH)
        masks = torch.linspace(-3, 3, batch * length * length).sin().reshape(batch, 1, length, length)
        rest = (masks,) if takes_mask else ()
        with torch.no_grad():
            results, expected = results_of(optimized(x, *rest)), results_of(source(x, *rest))
        for result, exact in zip(results, expected, strict=True):
            assert float((result - exact).norm() / exact.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert (calls_of("attention") > before) == (attend in FOUND)


@pytest.mark.parametrize("attend", FOUND, ids=lambda attend: attend.__name__)
def test_repeated_heads_are_read_once(attend: Callable[..., Any]) -> None:
    optimized = xopt.optimize(Attention(attend).eval(), dtype=torch.float32)
    x = torch.randn(2, 10, WIDTH)
    rest = (torch.zeros(2, 1, 10, 10),) if attend.__code__.co_argcount == 5 else ()

    def forward() -> Any:
        with torch.no_grad():
            return optimized(x, *rest)

    taken = json.loads(xopt.profile(forward, steps=1, warmup=2, roofs=False).to_json())
    (given,) = (kernel["arguments"] for kernel in taken["kernels"] if kernel["operator"] == "xopt::attention")
    heads = {groups_of_all_heads: 1}.get(attend, 2) if attend in GROUPS else HEADS
    assert [given[name]["shape"][1] for name in ("key", "value")] == [heads, heads]
    assert (given.get("sinks") is not None) == (attend in SINKS)


def test_gradients_of_inputs_are_right() -> None:
    torch.manual_seed(0)
    source = Attention(sinks_and_groups).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    x, mask = torch.randn(2, 10, WIDTH), torch.randn(2, 1, 10, 10)
    found = []
    for model in (source, optimized, optimized):
        x = x.detach().requires_grad_()
        result = model(x, mask)
        result.square().sum().backward()
        assert x.grad is not None
        found.append((result.detach(), x.grad))
    for result, gradient in found[1:]:
        torch.testing.assert_close(result, found[0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-5)
