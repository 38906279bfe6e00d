"""Attention that a module writes out: found in the ways that people write it, left where it is something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import xopt
from tests.families import calls_of

Tensor = torch.Tensor
WIDTH, HEADS, DEPTH = 64, 4, 16


class Attention(nn.Module):
    """Projections and the way back; `attend` is what differs."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend = attend
        self.factor = nn.Parameter(torch.linspace(0.1, 0.4, HEADS)[:, None, None])
        self.register_buffer("seen", torch.ones(40, 40).tril()[None, None])

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        batch, length, width = x.size()
        heads = [
            projection(x).view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        ]
        found = self.attend(self, *heads, *rest)
        attended, *others = found if isinstance(found, tuple) else (found,)
        result = self.out(attended.transpose(1, 2).contiguous().view(batch, length, width))
        return (result, *others) if others else result


def as_in_nano_gpt(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.size(2)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(module.seen[:, :, :length, :length] == 0, float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), 0.1, module.training) @ v


def scaled_query(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores: Tensor = q * DEPTH**-0.5 @ k.mT
    return torch.matmul(scores.softmax(-1), v)


def divided_and_in_fp32(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(DEPTH) + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def einsum_with_a_finite_fill(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * DEPTH**-0.5
    weights = scores.masked_fill(mask < 0, -1e9).softmax(dim=3)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def two_masks(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) + mask
    scores = scores.masked_fill(module.seen[..., : q.shape[2], : q.shape[2]] == 0, -math.inf)
    return torch.softmax(scores, -1) @ v


def three_dimensions(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) + mask[:, 0], -1)
    attended: Tensor = torch.bmm(weights, v.flatten(0, 1))
    return attended.view(-1, HEADS, *attended.shape[1:])


def windows_of_an_image(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in Swin: the batch holds images' windows, and each window has a mask."""
    (batch, heads, length, _), windows = q.shape, (q.shape[0] + 1) // 2
    mask = mask[:windows, 0]
    scores = (q @ k.transpose(-2, -1)) / 4 + module.seen[0, :, :length, :length]
    scores = scores.view(batch // windows, windows, heads, length, length) + mask.unsqueeze(1).unsqueeze(0)
    attended: Tensor = scores.view(-1, heads, length, length).softmax(-1) @ v
    return attended


def windows_of_images(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same, where a view is left to find out how many images there are."""
    (_, heads, length, _), windows = q.shape, 2 if q.shape[0] % 2 == 0 else 1
    scores = q * 0.25 @ k.transpose(-2, -1) + module.seen[0, :, :length, :length]
    scores = scores.view(-1, windows, heads, length, length) + mask[:windows, 0].unsqueeze(1).unsqueeze(0)
    attended: Tensor = scores.view(-1, heads, length, length).softmax(-1) @ v
    return attended


def values_in_columns(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As EfficientViT has it."""
    weights = (q @ k.transpose(-2, -1) * DEPTH**-0.5 + mask).softmax(-1)
    attended: Tensor = v.transpose(-2, -1) @ weights.transpose(-2, -1)
    return attended.transpose(-2, -1)


def columns_of_three_dimensions(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As SAGAN and CompVis' autoencoders have it."""
    query, key, value = (each.flatten(0, 1).transpose(1, 2) for each in (q, k, v))
    weights = torch.softmax(torch.bmm(query.permute(0, 2, 1), key) * DEPTH**-0.5, dim=2)
    attended: Tensor = torch.bmm(value, weights.permute(0, 2, 1))
    return attended.transpose(1, 2).view(-1, HEADS, *attended.transpose(1, 2).shape[1:])


def one_factor_a_head(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in the second Swin."""
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    weights: Tensor = (scores * torch.clamp(module.factor, max=3.0).exp() + mask).softmax(-1)
    return weights @ v


def five_dimensions(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.stack((part, 2 * part, -part), 2) for part in (q, k, v))
    attended: Tensor = (q * 0.3 @ k.transpose(-2, -1)).softmax(-1) @ v
    return attended.amax(2)


def one_factor_an_image(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * q.mean((1, 2, 3), keepdim=True)).softmax(-1) @ v


def flat_and_seen_by_heads(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As DeBERTa does it: what is put on the scores of all heads in a row, a mask by heads, and sizes asked of both."""
    q, k, v = (each.contiguous().view(-1, each.size(2), each.size(3)) for each in (q, k, v))
    scale = torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float) * 2)
    scores = torch.bmm(q, k.transpose(-1, -2) / scale.to(q.dtype)) + q.mean(-1, keepdim=True).expand(-1, -1, k.size(1))
    scores = scores.view(-1, HEADS, scores.size(-2), scores.size(-1))
    scores = scores.masked_fill(mask > 0.5, torch.finfo(torch.float).min)
    weights = scores.softmax(-1)
    result = torch.bmm(weights.view(-1, weights.size(-2), weights.size(-1)), v)
    return result.view(-1, HEADS, result.size(-2), result.size(-1))


def flat_with_a_bias_in_the_product(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As BLOOM does it."""
    batch, heads, length, depth = q.shape
    q, k, v = (each.reshape(batch * heads, length, depth) for each in (q, k, v))
    bias = mask.expand(-1, heads, -1, -1)[:, :, :1].reshape(batch * heads, 1, length)
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=0.5, alpha=DEPTH**-0.5)
    weights = (scores.view(batch, heads, length, length) + mask).softmax(-1).to(v.dtype)
    return torch.bmm(weights.view(batch * heads, length, length), v).view(batch, heads, length, depth)


def flat_and_looked_at(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Somebody else looks at scores, too: at more than their sizes."""
    q, k, v = (each.reshape(-1, each.size(2), each.size(3)) for each in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * DEPTH**-0.5
    weights = (scores.view(-1, HEADS, scores.size(1), scores.size(2)) + mask).softmax(-1)
    result = torch.bmm(weights.view(scores.size(0), scores.size(1), scores.size(2)), v)
    return result.view(-1, HEADS, result.size(1), result.size(2)) + scores.mean()  # type: ignore[no-any-return]


def scores_in_fp32(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As GPT-Neo and GPT-J do it: queries and keys are widened for the scores."""
    scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2)) + mask
    return torch.matmul(F.softmax(scores, dim=-1).to(v.dtype), v)


def heads_with_biases(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the first DeBERTa does it: biases of fp32 make queries and values so."""
    q, v = (each + module.factor.flatten()[None, :, None, None] for each in (q, v))
    return torch.matmul((torch.matmul(q, k.transpose(-1, -2)) * 0.25).softmax(-1), v)


def kept_where(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-2 and its like did it."""
    length = q.size(2)
    seen = module.seen[:, :, :length, :length].bool()
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(DEPTH)
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return torch.matmul(torch.where(seen, scores, lowest).softmax(-1), v)


def einsum_with_a_transposed_key(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bsij,bsjk->bsik", q / math.sqrt(DEPTH), k.transpose(2, 3)).softmax(-1)
    return torch.einsum("bsij,bsjk->bsik", weights, v)


def weights_are_returned(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v, weights


def softmax_over_queries(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


def adds_booleans(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) + (mask > 0)).softmax(-1) @ v


def sum_of_two_products(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) + k @ q.transpose(-2, -1)).softmax(-1) @ v


def scaled_after_the_mask(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1) + mask) * 0.25).softmax(-1) @ v


def columns_of_queries(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention: values are summed over queries."""
    attended: Tensor = v.transpose(-2, -1) @ (q @ k.transpose(-2, -1)).softmax(-1)
    return attended.transpose(-2, -1)


def columns_are_returned(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = (q @ k.transpose(-2, -1)).softmax(-1).transpose(-2, -1)
    return (v.transpose(-2, -1) @ weights).transpose(-2, -1), weights


def between_softmax_and_values(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1).square() @ v


FOUND = (
    *(as_in_nano_gpt, scaled_query, divided_and_in_fp32, einsum_with_a_finite_fill, two_masks, three_dimensions),
    *(windows_of_an_image, windows_of_images, one_factor_a_head, five_dimensions, flat_and_seen_by_heads),
    *(flat_with_a_bias_in_the_product, kept_where, einsum_with_a_transposed_key, scores_in_fp32, heads_with_biases),
    *(values_in_columns, columns_of_three_dimensions),
)
OTHERS = (
    *(weights_are_returned, softmax_over_queries, adds_booleans, sum_of_two_products, scaled_after_the_mask),
    *(between_softmax_and_values, one_factor_an_image, flat_and_looked_at, columns_of_queries, columns_are_returned),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", [*FOUND, *OTHERS], ids=lambda attend: attend.__name__)
def test_attention_written_out(attend: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = Attention(attend).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    takes_mask, before = attend.__code__.co_argcount == 5, attention_runs()
    for batch, length in ((2, 10), (2, 10), (1, 33), (2, 1), (6, 5)):
        x = torch.randn(batch, length, WIDTH)
        masks = torch.linspace(-3, 3, batch * length * length).sin().reshape(batch, 1, length, length)
        if attend is three_dimensions:
            masks = masks[:1].expand(batch * HEADS, 1, length, length)
        rest = (masks,) if takes_mask else ()
        with torch.no_grad():
            results, expected = optimized(x, *rest), source(x, *rest)
        pairs = zip(results, expected, strict=True) if isinstance(expected, tuple) else [(results, expected)]
        for result, exact in pairs:
            assert float((result - exact).norm() / exact.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)
    fused = [step for fusion in xopt.report(optimized).fusions for step in fusion.fused]
    assert ("attention" in fused) == (attend in FOUND)
    assert (attention_runs() > before) == (attend in FOUND)


def attention_runs() -> int:
    return calls_of("attention")


def test_a_row_in_which_all_keys_are_hidden() -> None:
    """Filled with a finite value, such a row is the mean of the values; with -inf, torch makes NaN of it."""
    torch.manual_seed(0)
    source = Attention(einsum_with_a_finite_fill).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    x, mask = torch.randn(1, 6, WIDTH), -torch.ones(1, 1, 6, 6)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(optimized(x, mask), source(x, mask), rtol=1e-4, atol=1e-5)
