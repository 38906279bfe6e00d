"""A batch over several streams: the result is the model's own, however the arguments are nested and divided."""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import xopt
from xopt.runtime import CorePool, Hints, MultiStream
from xopt.runtime.hints import join, split_call, split_sizes

CPUS = sorted(CorePool())
ONE = CorePool(cores=CPUS[:1])

Tensor = torch.Tensor


class Calls(nn.Module):
    """Calls a function, so that each test can say what its model does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def streams(function: Callable[..., Any], count: int = 3, **hints: Any) -> MultiStream:
    return MultiStream(Calls(function), [ONE] * count, **hints)


@dataclasses.dataclass
class Pair:
    left: Tensor
    right: Any


class Named(NamedTuple):
    x: Tensor
    y: Tensor


# ---- Splitting and joining ------------------------------------------------------------------------------------------


@given(total=st.integers(0, 40), parts=st.integers(1, 12))
def test_sizes_are_at_most_one_apart(total: int, parts: int) -> None:
    sizes = split_sizes(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == max(1, min(total, parts))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert total == 0 or min(sizes) > 0


def nested(rows: int) -> st.SearchStrategy[tuple[Any, Any]]:
    """Values and hints that fit them. What is split has `rows` rows along the dimension that its hint names."""

    def tensor(dims: int, dim: int, negative: bool) -> tuple[Tensor, int]:
        dim = dim % dims
        shape = [2 + place for place in range(dims)]
        shape[dim] = rows
        return torch.randn(shape), dim - dims if negative else dim

    split_tensors = st.builds(tensor, st.integers(1, 4), st.integers(0, 3), st.booleans())
    whole = st.sampled_from(
        [(torch.randn(7, 5), None), (torch.tensor(2.0), None), ("text", 0), (None, None), (3, None)]
    )

    def structures(inner: st.SearchStrategy[tuple[Any, Any]]) -> st.SearchStrategy[tuple[Any, Any]]:
        several = st.lists(inner, max_size=3)
        return st.one_of(
            several.map(lambda pairs: ([value for value, _ in pairs], [hint for _, hint in pairs])),
            several.map(lambda pairs: (tuple(value for value, _ in pairs), tuple(hint for _, hint in pairs))),
            several.map(
                lambda pairs: (
                    {f"key{place}": value for place, (value, _) in enumerate(pairs)},
                    {f"key{place}": hint for place, (_, hint) in enumerate(pairs)},
                )
            ),
            st.tuples(split_tensors, inner).map(
                lambda pairs: (Pair(pairs[0][0], pairs[1][0]), {"left": pairs[0][1], "right": pairs[1][1]})
            ),
        )

    return st.recursive(st.one_of(split_tensors, whole), structures, max_leaves=6)


def same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return torch.equal(value, other)
    if dataclasses.is_dataclass(value):
        return same(vars(value), vars(other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(0, 9), parts=st.integers(1, 5))
def test_what_is_split_and_joined_is_what_it_was(data: st.DataObject, rows: int, parts: int) -> None:
    value, hint = data.draw(nested(rows))
    batch = torch.arange(rows)
    calls = split_call(((batch,), {"value": value}), Hints(value=hint), parts)
    assert len(calls) == max(1, min(rows, parts))
    values = [kwargs["value"] for _, kwargs in calls]
    assert all(type(each) is type(value) for each in values)
    assert same(join(values, hint), value)
    assert torch.equal(torch.cat([args[0] for args, _ in calls]), batch)


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(0, 9), parts=st.integers(1, 5), dim=st.integers(-3, 2))
def test_a_part_is_a_view_of_its_rows(rows: int, parts: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = rows
    x = torch.randn(shape)
    calls = split_call(((x,), {}), dim, parts)
    expected = torch.tensor_split(x, len(calls), dim)
    for ((part,), _), rows_of_it in zip(calls, expected, strict=True):
        assert torch.equal(part, rows_of_it)
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_structures_keep_their_types() -> None:
    value = {
        "ordered": collections.OrderedDict(a=torch.arange(5)),
        "named": Named(torch.arange(5), torch.arange(5)),
        "pair": Pair(torch.arange(5), ["text", torch.arange(5)]),
    }
    parts = [kwargs["value"] for _, kwargs in split_call(((), {"value": value}), 0, 2)]
    assert [len(part["named"].x) for part in parts] == [3, 2]
    joined = join(parts, 0)
    assert same(joined, value)
    assert [type(each) for each in joined.values()] == [collections.OrderedDict, Named, Pair]


def test_the_outputs_of_transformers_are_joined() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    parts = [
        outputs.BaseModelOutput(torch.full((rows, 2), rows), hidden_states=(torch.zeros(rows, 3),)) for rows in (2, 1)
    ]
    joined = join(parts, 0)
    assert type(joined) is outputs.BaseModelOutput
    assert joined.last_hidden_state.tolist() == [[2, 2], [2, 2], [1, 1]]
    assert joined.hidden_states[0].shape == (3, 3)
    assert joined.attentions is None


@pytest.mark.parametrize(
    ("hint", "error"),
    [
        (Hints(0, 0), r"different sizes .*argument 0: 4, argument 1: 6.*give hints, None for"),
        (Hints(3), r"argument 0: split along dimension 3, but its shape is \[4, 2\]"),
        (Hints(None, None), "no argument holds a tensor to split"),
        (Hints(0, 0, 0), "hints for 3 positional arguments, but the call has 2"),
        (Hints([0, 0], None), "argument 0: the hint .* does not fit a value of type Tensor"),
        (Hints(len, None), "argument 0: the hint .* does not fit a value of type Tensor"),
        (Hints("0", None), "argument 0: the hint '0' does not fit"),
        (Hints(True, None), "argument 0: the hint True does not fit"),
        ([0, None], r"split: expected a dimension, None or xopt.runtime.Hints"),
    ],
)
def test_hints_that_do_not_fit_arguments(hint: Any, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        split_call(((torch.zeros(4, 2), torch.zeros(6)), {}), hint, 2)


def test_hints_that_do_not_fit_structures() -> None:
    with pytest.raises(ValueError, match=r"argument 0: 1 hints, but it has 2 elements"):
        split_call((((torch.zeros(4), torch.zeros(4)),), {}), Hints([0]), 2)
    with pytest.raises(ValueError, match=r"state: a hint for \['b'\], but it has only \['a'\]"):
        split_call(((), {"state": {"a": torch.zeros(4)}}), Hints(state={"b": 0}), 2)


@pytest.mark.parametrize(
    ("values", "hint", "error"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], 0, r"output: cannot be joined along dimension 0: shapes \[2, 3\]"),
        ([torch.tensor(1.0), torch.tensor(2.0)], 0, "output: tensors without dimensions cannot be joined"),
        ([{"a": 1}, {"a": 2}], 0, r"output\['a'\]: the streams returned different values of type int"),
        ([[1], [1, 2]], 0, "output: the streams returned different structures"),
        ([(1,), [1]], 0, "output: the streams returned different structures: tuple"),
        ([torch.zeros(2), 3], 0, "output: the streams returned different values of type Tensor and int"),
        ([{"a": 1}, {"a": 1}], {"b": 0}, r"output: a hint for \['b'\]"),
        ([torch.zeros(2)], [0], r"output: the hint \[0\] does not fit a value of type Tensor"),
    ],
)
def test_outputs_that_cannot_be_joined(values: list[Any], hint: Any, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        join(values, hint)


def test_hints_of_outputs() -> None:
    values = [{"loss": torch.tensor(float(part)), "rows": torch.ones(1, part), "cache": object()} for part in (1, 2)]
    hint = {"loss": lambda parts: torch.stack(parts).sum(), "rows": 1, "cache": None}
    joined = join(values, hint)
    assert (joined["loss"].item(), joined["rows"].tolist()) == (3.0, [[1, 1, 1]])
    assert joined["cache"] is values[0]["cache"]
    assert join(values, list) == values


# ---- The module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
def test_the_result_is_the_models_own(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    x = torch.randn(rows, 3, 8, 8)
    with torch.inference_mode():
        assert torch.allclose(MultiStream(model, [ONE] * 3)(x), model(x), atol=1e-5)


def test_an_optimized_model_in_streams() -> None:
    """Its blocks are recorded in the first call, which here comes from all streams at once."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(5, 12, 64)
    with torch.inference_mode():
        exact = model(x)
        optimized = xopt.optimize(model, dtype=torch.bfloat16, inplace=False)
        multi = MultiStream(optimized, CorePool(cores=CPUS))
        for _ in range(3):
            assert torch.allclose(multi(x), exact, atol=0.1)
        assert torch.equal(multi(x), multi(x))


def test_streams_can_be_optimized() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    x = torch.randn(5, 64)
    with torch.inference_mode():
        exact = model(x)
        multi = xopt.optimize(MultiStream(model, [ONE] * 2), dtype=torch.float32)
        assert torch.allclose(multi(x), exact, atol=1e-5)
        assert torch.allclose(multi(x), exact, atol=1e-5)
    assert "linear+gelu_erf" in str(xopt.report(multi))


def test_each_stream_runs_on_its_cores() -> None:
    seen: list[tuple[int, set[int], int, int]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((threading.get_ident(), os.sched_getaffinity(0), torch.get_num_threads(), len(x)))
        return x

    multi = MultiStream(Calls(look), CorePool(cores=CPUS))
    x = torch.randn(2 * len(CPUS), 3)
    assert torch.equal(multi(x), x)
    assert sorted(core for _, (core,), _, _ in seen) == CPUS
    assert len({thread for thread, _, _, _ in seen}) == len(CPUS)
    assert {(threads, rows) for _, _, threads, rows in seen} == {(1, 2)}
    assert threading.get_ident() not in {thread for thread, _, _, _ in seen}


def test_streams_run_at_the_same_time() -> None:
    together = threading.Barrier(3)

    def meet(x: Tensor) -> Tensor:
        together.wait()
        return x

    assert len(streams(meet)(torch.zeros(3))) == 3


def test_of_a_small_batch_only_some_streams_run() -> None:
    rows: list[int] = []

    def look(x: Tensor) -> Tensor:
        rows.append(len(x))
        return x

    for batch, expected in ((0, [0]), (2, [1, 1]), (5, [1, 2, 2])):
        rows.clear()
        assert len(streams(look)(torch.zeros(batch))) == batch
        assert sorted(rows) == expected


def test_an_exception_of_a_stream_reaches_the_caller() -> None:
    """That of the first stream that failed, and only after all have ended."""
    ended: list[int] = []

    def fail(x: Tensor) -> Tensor:
        if x[0] == 0:
            raise KeyError("stream 0")
        if x[0] == 1:
            raise ValueError("stream 1")
        time.sleep(0.02)
        ended.append(int(x[0]))
        return x

    multi = streams(fail)
    for _ in range(5):
        ended.clear()
        with pytest.raises(KeyError, match="stream 0"):
            multi(torch.arange(3))
        assert ended == [2]
    assert multi(torch.full((3,), 2)).shape == (3,)


def test_hints_of_a_call() -> None:
    def work(x: Tensor, table: Tensor, *, state: dict[str, Tensor], flag: str) -> dict[str, Any]:
        assert (table.shape, flag) == ((7, 2), "on")
        return {"out": x @ table.T + state["wide"].T, "whole": table, "many": [state["wide"], x.sum()]}

    torch.manual_seed(0)
    x, table, state = torch.randn(5, 2), torch.randn(7, 2), {"wide": torch.randn(7, 5)}
    hints = Hints(0, None, state={"wide": 1})
    outputs = {"whole": None, "many": [1, lambda sums: sum(sums)]}
    multi = streams(work, split=hints, join=outputs)
    result, expected = multi(x, table, state=state, flag="on"), work(x, table, state=state, flag="on")
    assert torch.allclose(result["out"], expected["out"], atol=1e-5)
    assert torch.equal(result["whole"], table)
    assert torch.equal(result["many"][0], state["wide"])
    assert torch.allclose(result["many"][1], x.sum(), atol=1e-5)


def test_gradients_flow_through_streams() -> None:
    model = nn.Linear(4, 2)
    x = torch.randn(5, 4, requires_grad=True)
    streams_of = MultiStream(model, [ONE] * 2)
    streams_of(x).square().sum().backward()
    got = x.grad, model.weight.grad
    x.grad = model.weight.grad = None
    model(x).square().sum().backward()
    for one, other in zip(got, (x.grad, model.weight.grad), strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, atol=1e-5)


def test_autocast_and_inference_mode_hold_in_streams() -> None:
    multi = MultiStream(nn.Linear(4, 2), [ONE] * 2)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        result = multi(torch.randn(3, 4))
    assert result.dtype == torch.bfloat16
    assert result.is_inference()


def test_streams_of_streams_and_several_callers() -> None:
    inner = streams(lambda x: x + 1, 2)
    outer = MultiStream(inner, [ONE] * 2)
    x = torch.arange(9)
    results: list[Tensor] = []
    callers = [threading.Thread(target=lambda: results.append(outer(x))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(result, x + 1) for result in results)
    assert len(results) == 4


def test_it_is_a_module_like_others() -> None:
    multi = MultiStream(nn.Linear(3, 2), CorePool(cores=CPUS), streams=1)
    x = torch.randn(4, 3)
    assert list(multi.state_dict()) == ["model.weight", "model.bias"]
    assert f"streams=1, cores=[{CPUS}]" in repr(multi)
    for other in (copy.deepcopy(multi), pickle.loads(pickle.dumps(multi))):
        assert other.model is not multi.model
        assert other.pools == multi.pools
        assert torch.equal(other(x), multi(x))


@pytest.mark.parametrize(
    ("pool", "count", "error"),
    [
        (ONE, 2, "streams is 2, expected 1 to 1, the number of cores"),
        (ONE, 0, "streams is 0"),
        ([ONE, ONE], 3, "streams is 3, but 2 pools were given"),
        ([], None, "expected a CorePool or a list of them"),
        ([0, 1], None, "expected a CorePool or a list of them"),
    ],
)
def test_pools_that_do_not_fit(pool: Any, count: int | None, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        MultiStream(nn.Identity(), pool, count)
