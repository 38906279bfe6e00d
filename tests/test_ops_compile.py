"""torch.compile and torch.export of what calls operators, and the fakes by which they know what operators return."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.contracts import registered_ops, samples_of
from tests.contracts.operands import K, N, Tensor, ops, packed, packed_gated, packed_int8, random


class Block(torch.nn.Module):
    """One of each op that has an input, fed one by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Buffer(packed())
        self.gated = torch.nn.Buffer(packed_gated(n=K, k=N))
        self.quantized = torch.nn.Buffer(packed_int8())
        self.bias = torch.nn.Buffer(random(N))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = ops.linear(x, self.up, N, self.bias, activation="gelu_erf")
        back = ops.linear_gated(hidden, self.gated, K) + x
        normed, total = ops.linear_norm(back, self.up, N, self.bias, hidden, return_sum=True)
        scale = back.abs().amax() / 127
        quantized = (back / scale).round().to(torch.int8)
        return normed, total, ops.qlinear(quantized, scale.view(1), None, self.quantized, N, activation="relu")


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    block = Block()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for shape in ((2, 3), (4, 5), (3, 7)):
            x = random(*shape, K)
            assert_same(compiled(x), block(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "recompiled for a new size"


def test_compile_of_packing() -> None:
    def repacked(weight: Tensor) -> Tensor:
        out_features, in_features = weight.shape
        bytes_of = ops.linear_pack(weight, dtype=torch.bfloat16)
        return torch.as_tensor(ops.linear_unpack(bytes_of, out_features, in_features, torch.bfloat16))

    torch._dynamo.reset()
    compiled = torch.compile(repacked, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((33, 65), (70, 20)):
        assert torch.equal(compiled(random(*shape)), random(*shape).bfloat16())


def test_export() -> None:
    block = Block()
    rows = torch.export.Dim("rows", min=1, max=1000)
    with torch.no_grad():
        program = torch.export.export(block, (random(4, K),), dynamic_shapes=({0: rows},))
        targets = {str(node.target) for node in program.graph.nodes}
        assert {"xopt.linear.default", "xopt.linear_gated.default", "xopt.qlinear.default"} <= targets
        for count in (1, 9):
            assert_same(program.module()(random(count, K)), block(random(count, K)))


def test_fakes_tell_what_the_ops_return() -> None:
    for op in registered_ops():
        for args, kwargs in samples_of(op):
            real = getattr(ops, op)(*args, **kwargs)
            args, kwargs = tree_map_only(Tensor, lambda value: value.to("meta"), (args, kwargs))
            meta = getattr(ops, op)(*args, **kwargs)
            reals, metas = (result if isinstance(result, (tuple, list)) else [result] for result in (real, meta))
            for a, b in zip(reals, metas, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), op
