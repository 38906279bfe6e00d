"""nn.MultiheadAttention and torch's transformer layers, optimized: everything that their forwards take."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from xopt.modules.packed_parameter import PackedParameter

Tensor = torch.Tensor


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def attention(**options: Any) -> Any:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(options.pop("embed_dim", 64), 4, **options)
    for parameter in module.parameters():  # torch begins with biases of zero, which hide mistakes
        nn.init.normal_(parameter, std=0.2)
    return module.eval()


# How it is made, and the widths of query, key and value.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "plain": ({}, (64, 64, 64)),
    "batch first": ({"batch_first": True}, (64, 64, 64)),
    "no bias": ({"bias": False}, (64, 64, 64)),
    "other widths": ({"kdim": 40, "vdim": 24, "batch_first": True}, (64, 40, 24)),
    "no multiple of a panel": ({"embed_dim": 36}, (36, 36, 36)),
}


def inputs(kind: str, fed: str) -> tuple[Tensor, Tensor, Tensor]:
    options, widths = KINDS[kind]
    torch.manual_seed(1)
    lengths = (7, 7, 7) if fed == "itself" else (7, 9, 9)
    shapes = [(3, n) if options.get("batch_first") else (n, 3) for n in lengths]
    query, key, value = (torch.randn(*shape, width) for shape, width in zip(shapes, widths, strict=True))
    if len(set(widths)) > 1 or fed == "three":
        return query, key, value
    return (query, query, query) if fed == "itself" else (query, key, key)


def masks(keys: int) -> dict[str, dict[str, Any]]:
    hidden = torch.ones(7, keys, dtype=torch.bool).triu(2)
    padding = torch.arange(keys)[None] >= torch.tensor([[keys], [keys - 2], [2]])
    return {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.linspace(-1, 1, 7 * keys).reshape(7, keys)},
        "for each head": {"attn_mask": torch.linspace(-1, 1, 12 * 7 * keys).reshape(12, 7, keys)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "both float": {
            "attn_mask": torch.zeros(7, keys).masked_fill(hidden, float("-inf")),
            "key_padding_mask": torch.zeros(3, keys).masked_fill(padding, float("-inf")),
        },
    }


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("kind", KINDS)
def test_any_call_gives_what_torch_gives(kind: str) -> None:
    source = attention(**KINDS[kind][0])
    exact = copy.deepcopy(source).double()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        optimized = xopt.optimize(source, dtype=dtype)
        for fed, need_weights, average in itertools.product(("itself", "two", "three"), (False, True), (False, True)):
            given = inputs(kind, fed)
            keys = given[1].shape[1 if source.batch_first else 0]
            for name, mask in masks(keys).items():
                options = {"need_weights": need_weights, "average_attn_weights": average}
                doubled = {key: value.double() if value.is_floating_point() else value for key, value in mask.items()}
                with torch.no_grad():
                    expected, their_weights = exact(*(x.double() for x in given), **doubled, **options)
                    result, weights = optimized(*given, **mask, **options)
                assert result.dtype == torch.float32
                assert result.shape == expected.shape
                assert relative_error(result, expected) < tolerance, (fed, name, options)
                assert (weights is None) == (their_weights is None)
                if weights is not None:
                    assert weights.shape == their_weights.shape
                    assert relative_error(weights, their_weights) < tolerance, (fed, name, options)


def test_without_a_batch_and_with_the_causal_hint() -> None:
    source = attention()
    optimized = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(7, 64)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    with torch.no_grad():
        for options in ({}, {"attn_mask": hidden}, {"attn_mask": hidden, "is_causal": True}, {"need_weights": False}):
            for result, expected in zip(optimized(x, x, x, **options), source(x, x, x, **options), strict=True):
                assert (result is None) == (expected is None)
                if result is not None:
                    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="attn_mask"):
            optimized(x, x, x, is_causal=True)


def test_it_stays_what_it_was() -> None:
    source = attention(batch_first=True)
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    assert isinstance(optimized, nn.MultiheadAttention)
    assert isinstance(optimized.in_proj_weight, PackedParameter)
    assert xopt.report(optimized).optimized_linear_share == 1.0
    before = source.state_dict()
    for state in (optimized.state_dict(), copy.deepcopy(optimized).state_dict()):
        assert list(state) == list(before)
        assert torch.equal(state["in_proj_weight"], before["in_proj_weight"].bfloat16())
        assert torch.equal(state["in_proj_bias"], before["in_proj_bias"])
    other = attention(batch_first=True)
    nn.init.normal_(other.in_proj_weight, std=0.3)
    optimized.load_state_dict(other.state_dict())
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        assert relative_error(optimized(x, x, x)[0], other(x, x, x)[0]) < 2e-2


def test_gradients_of_inputs_and_weights_put_in_their_place() -> None:
    torch.manual_seed(0)
    source = attention(batch_first=True)
    optimized = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 5, 64)
    gradients = []
    for model in (source, optimized):
        given = x.clone().requires_grad_()
        model(given, given, given)[0].square().sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    swapped = {name: value * 2 for name, value in source.state_dict().items()}
    with torch.no_grad():
        result = torch.func.functional_call(optimized, swapped, (x, x, x))[0]
        expected = torch.func.functional_call(source, swapped, (x, x, x))[0]
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_what_appends_keys_is_left_alone() -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        source = attention(**options)
        optimized = xopt.optimize(source, dtype=torch.float32)
        entry = xopt.report(optimized).entries[0]
        assert not entry.optimized
        assert "appends keys" in entry.detail
        x = torch.randn(5, 2, 64)
        with torch.no_grad():
            torch.testing.assert_close(optimized(x, x, x)[0], source(x, x, x)[0])


@pytest.mark.filterwarnings("ignore:.*nested tensor")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_layers_are_fused(norm_first: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    source = nn.Transformer(64, 4, 2, 2, 128, activation="gelu", norm_first=norm_first, batch_first=batch_first).eval()
    encoded, decoded = torch.randn(2, 9, 64), torch.randn(2, 7, 64)
    if not batch_first:
        encoded, decoded = encoded.transpose(0, 1), decoded.transpose(0, 1)
    padding = torch.arange(9)[None] >= torch.tensor([[9], [5]])
    options = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(7),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_is_causal": True,
    }
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    with torch.no_grad():
        for each in ({}, options):
            exact = source(encoded, decoded, **each)
            theirs = copy.deepcopy(source).bfloat16()(
                encoded.bfloat16(), decoded.bfloat16(), **{name: cast(value) for name, value in each.items()}
            )
            for _ in range(2):
                error = relative_error(optimized(encoded, decoded, **each), exact)
                assert error <= 1.1 * relative_error(theirs, exact)
    fused = {fusion.kind: fusion.fused for fusion in xopt.report(optimized).fusions}
    for kind, attentions in (("TransformerEncoder", 2), ("TransformerDecoder", 4)):
        assert fused[kind].count("merged linear") == attentions
        assert fused[kind].count("attention") == attentions
        assert "linear+gelu_erf" in fused[kind]
    assert xopt.report(optimized).optimized_linear_share == 1.0


def cast(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("first", [0, 2])
def test_layers_of_an_encoder_take_a_batch_of_nothing(first: int) -> None:
    source = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for batch in (first, 0, 2):
            x = torch.randn(batch, 3, 64)
            torch.testing.assert_close(optimized(x), source(x))


@pytest.mark.program_fails
def test_a_program_of_a_user_that_unflattens_takes_a_batch_of_nothing() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.one(x).unflatten(-1, (4, -1)).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return self.two(attended.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    source = Heads().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for batch in (2, 0, 2):
            x = torch.randn(batch, 3, 64)
            torch.testing.assert_close(optimized(x), source(x))
