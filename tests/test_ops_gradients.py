"""Operators have no gradients: one that is asked for is refused, not lost."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.operands import ANGLES, HEADS, ONE, K, N, Q, X, ops, packed, packed_gated, packed_int8, random


def test_gradient_is_refused_not_lost() -> None:
    x, bias = X.clone().requires_grad_(), torch.nn.Parameter(random(N))
    for wants_gradient in (x, x * 2):
        with pytest.raises(RuntimeError, match="xopt::linear: input: requires a gradient, but this op has none"):
            ops.linear(wants_gradient, packed(), N)
    with pytest.raises(RuntimeError, match="xopt::linear: bias: requires a gradient"):
        ops.linear(X, packed(), N, bias)
    geometry = {"stride": [1], "padding": [0, 0], "dilation": [1]}
    weight = ops.conv_pack(random(2, 3, 1), 1, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="xopt::conv: scale: requires a gradient"):
        ops.conv(random(1, 3, 4), weight, [2, 3, 1], scale=torch.nn.Parameter(random(2)), **geometry)
    with pytest.raises(RuntimeError, match="xopt::linear_gated: up_bias: requires a gradient"):
        ops.linear_gated(X, packed_gated(), N, None, bias)
    with pytest.raises(RuntimeError, match="xopt::linear_norm: norm_weight: requires a gradient"):
        ops.linear_norm(X, packed(), N, norm_weight=bias)
    with pytest.raises(RuntimeError, match="xopt::attention: value: requires a gradient"):
        ops.attention(HEADS, HEADS, HEADS.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="xopt::layer_norm: weight: requires a gradient"):
        ops.layer_norm(X, torch.nn.Parameter(random(K)))
    with pytest.raises(RuntimeError, match="xopt::rotary: cos: requires a gradient"):
        ops.rotary(HEADS, HEADS, ANGLES.clone().requires_grad_(), ANGLES)
    with pytest.raises(RuntimeError, match="xopt::qlinear: bias: requires a gradient"):
        ops.qlinear(Q, ONE, None, packed_int8(), N, bias)
    quantized = ops.conv_pack_int8(random(2, 3, 1, dtype=torch.int8), ONE)
    with pytest.raises(RuntimeError, match="xopt::qconv: bias: requires a gradient"):
        ops.qconv(Q.view(1, 3, K), ONE, None, quantized, [2, 3, 1], torch.nn.Parameter(random(2)), **geometry)


def test_without_grad_mode_parameters_are_fine() -> None:
    x, bias = X.clone().requires_grad_(), torch.nn.Parameter(random(N))
    expected = ops.linear(X, packed(), N, bias.detach())
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = ops.linear(x, packed(), N, bias)
            assert torch.equal(out, expected)
            assert not out.requires_grad
    assert not ops.linear(x.detach(), packed(), N, bias.detach()).requires_grad


def test_packing_a_parameter_is_no_question_of_gradients() -> None:
    weight = torch.nn.Parameter(random(N, K))
    assert torch.equal(ops.linear_pack(weight, dtype=torch.float32), packed())


def test_fake_refuses_a_gradient_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ops.linear(x, packed(), N), backend="aot_eager")
    with pytest.raises(Exception, match="requires a gradient, but this op has none"):
        compiled(X.clone().requires_grad_())
