"""What every operator owes its caller, as tests/contracts says it: its schema, opcheck, errors that name the argument.

Numbers are checked elsewhere (tests/families.py), and so are strides, gradients and torch.compile (test_ops_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.contracts import bad_arguments, registered_ops, samples_of, schemas
from tests.contracts.operands import K, N, Tensor, X, ops, packed, random
from xopt import _C


@pytest.mark.parametrize("op", registered_ops())
def test_schema_is_pinned(op: str) -> None:
    assert str(getattr(ops, op).default._schema) == f"xopt::{schemas()[op]}"


def test_no_schema_is_missing() -> None:
    assert registered_ops() == sorted(schemas())


@pytest.mark.parametrize("op", registered_ops())
def test_opcheck(op: str) -> None:
    """All of it on each kind of call; on those that differ in their tensors' dtypes alone, all but the tracing, which
    takes longest and sees of dtypes no more than the check of the fake does."""
    traced = set()
    for args, kwargs in samples_of(op):
        kind = str(tree_map_only(Tensor, lambda x: (x.dim(), x.is_contiguous(), x.numel() == 0), (args, kwargs)))
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        checks += ["test_aot_dispatch_dynamic"] if kind not in traced else []
        torch.library.opcheck(getattr(ops, op).default, args, kwargs, test_utils=checks)
        traced.add(kind)


@pytest.mark.parametrize("op", registered_ops())
def test_arguments_are_not_changed_and_results_repeat(op: str) -> None:
    for args, kwargs in samples_of(op):
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        results = [getattr(ops, op)(*args, **kwargs) for _ in range(2)]
        first, second = (result if isinstance(result, (tuple, list)) else [result] for result in results)
        assert all(torch.equal(a, b) and is_dense(a) for a, b in zip(first, second, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def is_dense(x: Tensor) -> bool:
    """Contiguous, or with dimension 1 last in memory, as convolutions answer."""
    return x.is_contiguous() or x.movedim(1, -1).is_contiguous()


@pytest.mark.sanitize
@pytest.mark.parametrize(("call", "message"), bad_arguments())
def test_bad_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"xopt::[a-z_0-9]+: {message}"):
        call()
    weight = random(N, K)
    assert torch.allclose(ops.linear(X, packed(), N), F.linear(X, weight), atol=1e-4), "the next call is wrong"


@pytest.mark.parametrize("argument", ["packed", "bias", "other"])
def test_argument_on_another_device(argument: str) -> None:
    arguments = {"packed": packed(), "bias": random(N), "other": random(3, N)}
    arguments[argument] = arguments[argument].to("meta")
    with pytest.raises(RuntimeError, match=f"xopt::linear: {argument}: expected a tensor on"):
        ops.linear(X, out_features=N, binary="add", **arguments)


@pytest.mark.parametrize("op", registered_ops())
def test_what_is_registered_for_intel_gpus_wants_tensors_there(op: str) -> None:
    """By what the dispatcher would call for them, since torch cannot make one without such a device."""
    args, kwargs = samples_of(op)[0]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XPU)
    named = "conv" if op == "chain" else op  # what the samples of chains call
    message = rf"^xopt::{named}: [a-z_0-9\[\]]+: expected (a tensor|tensors) on .*xpu"
    with pytest.raises(RuntimeError, match=message) as caught:
        getattr(ops, op).default.redispatch(keys, *args, **kwargs)
    assert "\n" not in str(caught.value)


def test_huge_weight_is_an_error_of_memory() -> None:
    with pytest.raises(MemoryError):
        ops.linear_pack(torch.zeros(1, 1).expand(2**24, 2**24), dtype=torch.float32)
    assert ops.linear_pack(X, dtype=torch.float32).dtype == torch.uint8


def test_errors_leak_no_tensor() -> None:
    weight = packed(n=3000, k=1000)
    held = _C.weight_bytes()
    for _ in range(20):
        with pytest.raises(RuntimeError, match="out_features"):
            ops.linear(random(3, 1000), weight, 5)
    del weight
    assert _C.weight_bytes() < held
