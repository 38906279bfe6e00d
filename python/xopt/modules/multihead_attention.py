"""nn.MultiheadAttention with packed projections, one product for those of one input, and xopt's attention between.

Everything that torch's forward takes works the same: batch first or second or none, both kinds of masks, weights asked
for. What wants gradients goes through torch's own function on the unpacked weights.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional

from xopt.graph.autocast import autocast_dtype
from xopt.graph.record import EXAMPLE
from xopt.graph.symbol import is_symbolic, recorder_of
from xopt.modules.attention import join_masks, scaled_dot_product_attention
from xopt.modules.base import (
    Context,
    Replacement,
    cast_parameter,
    derive,
    own_forward,
    plain_parameter_problem,
    result_dtype,
)
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.gradients import wants_gradient
from xopt.modules.linear import linear_call
from xopt.modules.matmul import matmul
from xopt.modules.packed_parameter import PackedParameter, place_of
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import step
from xopt.modules.product import is_for_torch
from xopt.modules.substitute import are_plain, in_place_of
from xopt.modules.views import narrowed
from xopt.ops.fakes import FLOATING

_linear = torch.ops.xopt.linear.default
_PANEL = 32


class PackedMultiheadAttention(Replacement, PackedState, nn.MultiheadAttention):
    source: ClassVar[type[nn.Module]] = nn.MultiheadAttention
    switch: ClassVar[str] = "weights_prepack"
    packs: ClassVar[bool] = True

    _xopt_own_attention: bool

    @classmethod
    def why_not(cls, module: nn.MultiheadAttention, context: Context) -> str | None:
        if own_forward(module, nn.MultiheadAttention) or own_forward(module.out_proj, nn.Linear):
            return "it has a forward of its own"
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            return "it appends keys of its own (add_bias_kv, add_zero_attn)"
        problems = [plain_parameter_problem(module, name) for name in _weights(module)]
        if module.in_proj_bias is not None:
            problems.append(plain_parameter_problem(module, "in_proj_bias"))
        return next((problem for problem in problems if problem), None)

    @classmethod
    def replace(cls, module: nn.MultiheadAttention, context: Context) -> str:
        module.__dict__["_xopt_own_attention"] = context.config.fuse_attention
        for name in _weights(module):
            weight: Any = module._parameters[name]
            shared = id(weight) in context.shared
            module._parameters[name] = cast_parameter(weight, context) if shared else context.pack(weight)
        module.__class__ = derive(cls, type(module))
        return f"packed as {str(context.target(weight)).removeprefix('torch.')}"

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: is_causal: expected attn_mask to be given with it, got None")
        if not self._can_compute(query, key, value):
            return self._plain_forward(
                (query, key, value), key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _mask(attn_mask, key_padding_mask, self.num_heads)
        recording = is_symbolic((query, key, value), {})
        if recording:
            recorder, out_dtype = recorder_of(query, key, value), result_dtype(query)
            projected = recorder.call_module(self, in_projection, query, key, value, out_dtype=out_dtype)
        else:
            projected = in_projection(self, query, key, value)
        queries, keys, values = (_heads(part, self.num_heads, self.head_dim, self.batch_first) for part in projected)
        weights = None
        if need_weights:
            attended, weights = _attend_with_weights(
                queries, keys, values, mask, average=average_attn_weights, dims=query.ndim
            )
        elif self._xopt_own_attention and not recording:
            attended = scaled_dot_product_attention(queries, keys, values, mask, causal=causal, scale=None, gqa=False)
        else:
            attended = functional.scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal)
        return self.out_proj(_joined(attended, query.ndim, self.batch_first)), weights

    def _can_compute(self, *inputs: Any) -> bool:
        weights = [self._parameters[name] for name in _weights(self)]
        if not all(type(weight) is PackedParameter for weight in weights):
            return False
        if any(tensor.dtype not in FLOATING or tensor.is_nested for tensor in inputs):
            return False
        return not wants_gradient(*inputs, self._parameters["in_proj_bias"], self.out_proj.bias)

    def _plain_forward(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        swap = self.batch_first and inputs[0].ndim == 3
        dtype = None if autocast_dtype(inputs[0].device) else inputs[0].dtype
        query, key, value = (tensor.transpose(0, 1) for tensor in inputs) if swap else inputs
        separate = not self._qkv_same_embed_dim
        attended, weights = functional.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            _plain(self.in_proj_weight, dtype),
            _plain(self.in_proj_bias, dtype),
            None,
            None,
            False,
            self.dropout,
            _plain(self.out_proj.weight, dtype),  # type: ignore[arg-type]
            _plain(self.out_proj.bias, dtype),
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=separate,
            q_proj_weight=_plain(self.q_proj_weight, dtype),
            k_proj_weight=_plain(self.k_proj_weight, dtype),
            v_proj_weight=_plain(self.v_proj_weight, dtype),
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return attended.transpose(0, 1) if swap else attended, weights


def _heads(projected: Any, heads: int, depth: int, batch_first: bool) -> Any:
    """[batch, heads, length, depth], wherever the input has its batch, and whatever is in it."""
    split = projected.unflatten(-1, (heads, depth))
    if split.ndim == 3:
        return split.transpose(0, 1).unsqueeze(0)
    return split.transpose(1, 2) if batch_first else split.permute(1, 2, 0, 3)


def _joined(attended: Any, dims: int, batch_first: bool) -> Any:
    """And back."""
    joined = attended.transpose(1, 2).flatten(-2)
    if dims == 2:
        return joined.squeeze(0)
    return joined if batch_first else joined.transpose(0, 1)


def _weights(module: nn.MultiheadAttention) -> tuple[str, ...]:
    if module._qkv_same_embed_dim:
        return ("in_proj_weight",)
    return ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _plain(parameter: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if isinstance(parameter, PackedParameter):
        parameter = parameter.unpack()
    return parameter if parameter is None or dtype is None else parameter.to(dtype)


@step("merged linear")
def in_projection(
    module: PackedMultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out_dtype: torch.dtype | None = None,  # what follows from the query; for chains
) -> tuple[Tensor, ...]:
    """Queries, keys and values. Which of the inputs are the same tensor is so in all calls of a recorded graph."""
    size, bias = module.embed_dim, module._parameters["in_proj_bias"]
    biases = (None, None, None) if bias is None else bias.chunk(3)
    inputs = (query, key, value)
    if not module._qkv_same_embed_dim:
        weights = [module._parameters[name] for name in _weights(module)]
        return tuple(_product(*each, size) for each in zip(inputs, weights, biases, strict=True))
    weight = module._parameters["in_proj_weight"]
    if query is key and key is value:
        return _product(query, weight, bias, 3 * size).chunk(3, -1)
    if size % _PANEL:  # a part would not begin where a panel does
        return tuple(_product(each, weight, bias, 3 * size).chunk(3, -1)[n] for n, each in enumerate(inputs))
    queries = _product(query, weight, biases[0], size)
    if key is value:
        both = None if bias is None else bias[size:]
        return queries, *_product(key, weight, both, 2 * size, size).chunk(2, -1)
    return queries, _product(key, weight, biases[1], size, size), _product(value, weight, biases[2], size, 2 * size)


def _is_of_one(node: Node) -> bool:
    """Whether all three are computed from one tensor, by one weight."""
    module: Any = node.args[0]
    same = node.args[1] is node.args[2] and node.args[2] is node.args[3]
    return same and module.meta[EXAMPLE]._qkv_same_embed_dim and node.kwargs["out_dtype"] in FLOATING


@chainable(in_projection, where=_is_of_one, has_parts=True)
def _in_projection_calls(
    seen: Seen,
    module: PackedMultiheadAttention,
    query: Value,
    key: Value,
    value: Value,
    *,
    out_dtype: torch.dtype,
) -> list[Call] | None:
    place = place_of(module._parameters["in_proj_weight"])
    if place is None:
        return None
    packed = seen.packed(module, "in_proj_weight", place.packed)
    size, bias = seen.attribute(module, "embed_dim"), seen.parameter(module, "in_proj_bias")
    together = seen.call(linear_call(query, packed, 3 * size, bias, out_dtype, place.first_column))
    return [narrowed(together, part * size, size) for part in range(3)]


def _product(input: Tensor, weight: Any, bias: Tensor | None, features: int, first_column: int = 0) -> Tensor:
    place = place_of(weight)
    if place is None:  # somebody put another weight in its place since the graph was recorded
        dtype = result_dtype(input)
        rows = weight[first_column : first_column + features].to(dtype)
        return functional.linear(input.to(dtype), rows, None if bias is None else bias.to(dtype))
    return _linear(  # type: ignore[no-any-return]
        input,
        place.packed,
        features,
        bias,
        out_dtype=result_dtype(input),
        first_column=place.first_column + first_column,
    )


def _mask(attn_mask: Any, key_padding_mask: Any, heads: int) -> Any:
    """One mask for [batch, heads, queries, keys]; of booleans, where True is a key that takes part, or to be added."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, heads)))
    if key_padding_mask is not None:
        keys = key_padding_mask if key_padding_mask.ndim == 2 else key_padding_mask.unsqueeze(0)
        masks.append(keys.unsqueeze(1).unsqueeze(1))
    masks = [~mask if mask.dtype == torch.bool else mask for mask in masks]
    return join_masks(*masks) if len(masks) == 2 else next(iter(masks), None)


def _attend_with_weights(query: Any, key: Any, value: Any, mask: Any, *, average: bool, dims: int) -> tuple[Any, Any]:
    """Attention step by step, and its weights as the caller wants to see them, who has inputs of `dims` dimensions."""
    product: Any = torch.matmul if is_symbolic((query, key, value), {}) else matmul  # patterns find torch's
    scores = product(query * query.shape[-1] ** -0.5, key.transpose(-2, -1))
    if mask is not None:
        hidden = mask if mask.dtype == torch.bool else None
        scores = scores + mask if hidden is None else scores.masked_fill(~hidden, float("-inf"))
    weights = torch.softmax(scores, -1)
    attended = product(weights.to(value.dtype), value)
    weights = weights.mean(1) if average else weights
    return attended, weights if dims == 3 else weights.squeeze(0)


@in_place_of(functional.multi_head_attention_forward, switch="weights_prepack")
def _attention_of_torch(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Of a forward that hands its layers' weights to torch's function, as fairseq's do."""
    weights = q_proj_weight, k_proj_weight, v_proj_weight, out_proj_weight
    inputs = query, key, value
    unusual = any(each is not None for each in (bias_k, bias_v, static_k, static_v)) or add_zero_attn
    if training and dropout_p:
        return NotImplemented
    if unusual or not use_separate_proj_weight or any(place_of(weight) is None for weight in weights):
        return NotImplemented
    if is_causal and attn_mask is None:
        return NotImplemented
    if not are_plain(*inputs, in_proj_bias, out_proj_bias, attn_mask, key_padding_mask):
        return NotImplemented
    if any(is_for_torch(each, in_proj_bias) for each in inputs) or is_for_torch(query, out_proj_bias):
        return NotImplemented
    size = embed_dim_to_check
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    projected = (_product(*each, size) for each in zip(inputs, weights, biases, strict=False))
    queries, keys, values = (_heads(each, num_heads, size // num_heads, False) for each in projected)
    mask, shown = _mask(attn_mask, key_padding_mask, num_heads), None
    if need_weights:
        attended, shown = _attend_with_weights(
            queries, keys, values, mask, average=average_attn_weights, dims=query.ndim
        )
    else:
        attended = scaled_dot_product_attention(queries, keys, values, mask, causal=False, scale=None, gqa=False)
    return _product(_joined(attended, query.ndim, False), out_proj_weight, out_proj_bias, size), shown
