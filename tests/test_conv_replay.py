"""Convolutions of a chain that are run again as they were run before: the same results as of one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fresh_process import output_of
from tests.test_chain import Calls, forget_kept_outputs, image, ops, random_calls
from tests.test_conv_bands import L2_BYTES, inverted_residuals, large_residual
from tests.test_runtime import not_when_sanitized
from xopt import _C
from xopt.ops.chain import Given, Result


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Under grad mode nothing is run again: each call looks whether a gradient is wanted."""
    with torch.no_grad():
        yield


def check(calls: Calls, returned: list[int]) -> None:
    """That a chain gives what single operators do, bit by bit, and as it lies in memory there."""
    for number, result in zip(returned, ops.chain(*calls.arguments(returned)), strict=True):
        wanted = calls.results[number]
        assert result.dtype == wanted.dtype
        assert result.stride() == wanted.stride()
        assert torch.equal(result.nan_to_num(), wanted.nan_to_num())


def bottleneck(side: int = 14, dtype: torch.dtype = torch.float32, values: int = 0) -> Calls:
    torch.manual_seed(values)
    calls = Calls(image(1, 32, side, side, dtype=dtype))
    named: dict[str, Any] = {"bias": torch.randn(64), "activation": "relu", "out_dtype": dtype}
    calls.add(Given(0), torch.randn(64, 32, 1, 1).to(dtype), **named)
    calls.add(Result(0), torch.randn(64, 64, 3, 3).to(dtype) / 24, padding=[1] * 4, **named)
    calls.add(Result(1), torch.randn(32, 64, 1, 1).to(dtype) / 8, Given(0), binary="add", out_dtype=dtype)
    return calls


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", range(60))
def test_other_values_of_the_same_sizes(seed: int) -> None:
    for values in (0, 1000, 2000, 1000):
        calls = random_calls(seed, values)
        for returned in ([len(calls.lines) - 1], [0]):
            check(calls, returned)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.sanitize] if seed < 4 else []) for seed in range(20)]
)
def test_bands(seed: int, torch_threads: None) -> None:
    for values in (0, 0, 1000):
        torch.set_num_threads(1 + seed % 3)
        calls = inverted_residuals(seed, values).calls
        check(calls, [len(calls.results) - 1])


@not_when_sanitized
def test_results_between_share_one_block() -> None:
    """Of eight results of 16 MB the last one is a tensor, and two are in the block at a time."""
    calls = Calls(image(1, 16, 512, 512))
    for link in range(8):
        calls.add(Result(link - 1) if link else Given(0), torch.randn(16, 16, 3, 3) / 12, padding=[1] * 4)
    check(calls, [7])
    arguments = calls.arguments([7])
    ops.chain(*arguments)
    calls.results.clear()
    forget_kept_outputs()
    before = _C.output_statistics()
    (result,) = ops.chain(*arguments)
    after = _C.output_statistics()
    assert after[2] - before[2] == 2
    assert after[0] - before[0] == result.nbytes
    assert after[1] - before[1] == 2 * result.nbytes


@pytest.mark.sanitize
def test_tensors_in_other_places_and_layouts() -> None:
    """Sizes alone are noted: inputs behind a gap, with channels first or expanded come with sizes of their own."""
    calls = bottleneck()
    tensors, text = calls.arguments([2])
    x = tensors[0]
    wide = torch.zeros(1, 32, 14, 20).to(memory_format=torch.channels_last)
    wide[..., 3:17] = x
    for same in (x, x.clone(), x.contiguous(), wide[..., 3:17], x.clone(memory_format=torch.preserve_format)):
        for _ in range(2):
            (result,) = ops.chain([same, *tensors[1:]], text)
            assert torch.equal(result, calls.results[2])
    spread = x[..., :1].expand_as(x)
    (wanted,) = ops.chain([spread.clone(), *tensors[1:]], text)
    for _ in range(3):
        assert torch.equal(ops.chain([spread, *tensors[1:]], text)[0], wanted)


def test_threads_and_sizes_may_change(torch_threads: None) -> None:
    for side, threads in ((14, 1), (7, 2), (14, 3), (14, 1), (1, 2), (7, 1), (14, 2)) * 2:
        torch.set_num_threads(threads)
        check(bottleneck(side), [2])


def test_no_images() -> None:
    calls = bottleneck()
    tensors, text = calls.arguments([2])
    for images in (0, 1, 0, 0, 1):
        (result,) = ops.chain([tensors[0][:images], *tensors[1:]], text)
        assert torch.equal(result, calls.results[2][:images])


def test_more_sizes_than_are_kept() -> None:
    for side in (*range(1, 40), *range(39, 0, -1)):
        check(bottleneck(side), [2])


@pytest.mark.sanitize
@pytest.mark.skipif(L2_BYTES < 1 << 19, reason="not even some lines stay in L2")
def test_what_is_added_may_be_the_first_input_or_not() -> None:
    """Which tensors are one makes a difference to how convolutions are best done together."""
    torch.manual_seed(0)
    source, height = large_residual()
    x = source.tensors[0]
    weights = [torch.randn(96, 24, 1, 1), torch.randn(96, 1, 3, 3), torch.randn(24, 96, 1, 1)]
    for added in (torch.randn_like(x), x, torch.randn_like(x), x, x):
        calls = Calls(x, added)
        calls.add(Given(0), weights[0])
        calls.add(Result(0), weights[1], groups=96, padding=[1] * 4)
        calls.add(Result(1), weights[2], Given(1), binary="add")
        assert calls.results[2].shape == (1, 24, height, 32)
        check(calls, [2])


def test_other_operators_between() -> None:
    """They take results of convolutions, and convolutions theirs."""
    for values in (0, 0, 1, 2):
        torch.manual_seed(values)
        calls = Calls(image(2, 8, 9, 9))
        window = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
        for part in range(3):
            calls.add(Result(3 * part - 1) if part else Given(0), torch.randn(8, 8, 3, 3), padding=[1] * 4)
            calls.add(Result(3 * part), torch.randn(8, 8, 1, 1), bias=torch.randn(8))
            named = {**window, "ceil_mode": True, "count_include_pad": False, "divisor": 0}
            calls.call("pool", input=Result(3 * part + 1), kind="max", **named)
        check(calls, [8])
        check(calls, [0, 4, 7, 8])


def spoiled(packed: Tensor, byte: int) -> Tensor:
    changed = packed.clone()
    changed[byte] ^= 255
    return changed


@pytest.mark.sanitize
def test_a_weight_of_another_kind_is_seen() -> None:
    calls = bottleneck()
    tensors, text = calls.arguments([2])
    for _ in range(3):
        check(calls, [2])
        for byte in (0, 9, 20, 33):
            with pytest.raises(RuntimeError, match="packed: expected a packed weight"):
                ops.chain([tensors[0], spoiled(tensors[1], byte), *tensors[2:]], text)
        moved = torch.empty(len(tensors[1]) + 64, dtype=torch.uint8)
        place = -moved.data_ptr() % 64 + 4
        moved = moved[place : place + len(tensors[1])].copy_(tensors[1])
        with pytest.raises(RuntimeError, match="packed: expected data at a multiple of 64 bytes"):
            ops.chain([tensors[0], moved, *tensors[2:]], text)


def test_a_weight_of_another_dtype_of_that_size() -> None:
    """bf16 and fp16 weights are packed into as many bytes."""
    torch.manual_seed(0)
    x, weight = image(1, 32, 5, 5), torch.randn(32, 32, 3, 3)
    for dtype in (torch.bfloat16, torch.float16) * 2:
        calls = Calls(x)
        calls.add(Given(0), weight.to(dtype), padding=[1] * 4)
        calls.add(Result(0), weight.to(dtype), padding=[1] * 4)
        for _ in range(2):
            check(calls, [1])


def test_a_gradient_that_is_wanted_is_an_error() -> None:
    calls = bottleneck()
    for _ in range(2):
        check(calls, [2])
    tensors, text = calls.arguments([2])
    with torch.enable_grad(), pytest.raises(RuntimeError, match="input: requires a gradient"):
        ops.chain([tensors[0].clone().requires_grad_(), *tensors[1:]], text)


@pytest.mark.sanitize
def test_an_error_in_the_middle_leaves_the_next_call_whole(torch_threads: None) -> None:
    torch.set_num_threads(2)
    calls = bottleneck(64)
    check(calls, [2])
    try:
        _C.set_arena_limit(0)
        with pytest.raises(Exception, match="scratch"):
            ops.chain(*calls.arguments([2]))
    finally:
        _C.set_arena_limit(-1)
    check(calls, [2])


def test_threads_may_share_a_chain() -> None:
    """Several run it at once, of two sizes and with weights of their own."""
    all_calls = [bottleneck(side, values=values) for side in (14, 7) for values in range(3)]
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda turn: check(all_calls[turn % 6], [2]), range(200)):
            pass


@pytest.mark.sanitize
def test_threads_that_come_late_or_never() -> None:
    """Of five threads that share one CPU the first is mostly done before the others come."""
    program = f"""
        import os, torch
        os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})
        from tests.test_conv_bands import inverted_residuals, large_residual
        from tests.test_conv_replay import bottleneck
        torch.set_num_threads(5)
        bands = inverted_residuals(1).calls
        with torch.no_grad():
            for calls in (bottleneck(14), bottleneck(40, torch.bfloat16), bands, large_residual()[0]):
                arguments = calls.arguments([len(calls.results) - 1])
                for _ in range(12):
                    assert torch.equal(torch.ops.xopt.chain(*arguments)[0], calls.results[-1])
        print("equal")
    """
    assert output_of(program, OMP_WAIT_POLICY="passive") == "equal"


def test_fork_after_convolutions_were_run_again() -> None:
    program = """
        import os, torch
        from tests.test_conv_replay import bottleneck, check
        torch.set_num_threads(2)
        with torch.no_grad():
            calls = bottleneck()
            for _ in range(3):
                check(calls, [2])
            arguments = calls.arguments([2])
            wanted = torch.ops.xopt.chain(*arguments)[0].numpy().tobytes()
            child = os.fork()
            if child == 0:
                same = torch.ops.xopt.chain(*arguments)[0].numpy().tobytes() == wanted
                os._exit(0 if same else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert output_of(program) == "0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_tensor_as_operands(dtype: torch.dtype) -> None:
    """As bias and scale, in any run of the chain."""
    for values in range(3):
        torch.manual_seed(values)
        calls = Calls(image(1, 16, 6, 6, dtype=dtype))
        vectors = torch.randn(80)
        calls.add(Given(0), torch.randn(16, 16, 1, 1).to(dtype), bias=vectors[:16], scale=vectors[32:48])
        calls.add(Result(0), torch.randn(16, 16, 1, 1).to(dtype), bias=vectors[64:])
        tensors, text = calls.arguments([1])
        together = [tensors[0], tensors[1], tensors[4], vectors]
        text = text.replace("%5", "%3[64:80]").replace("%2", "%3[0:16]").replace("%3 ", "%3[32:48] ")
        text = text.replace("%4", "%2")
        for _ in range(3):
            assert torch.equal(ops.chain(together, text)[0], calls.results[1])


BAD_PARTS = {
    "behind the end": ("[64:80]", "[64:81]", r"expected elements of a tensor in %1\[64:81\], got one of shape \[80\]"),
    "no end": ("[64:80]", "[64]", r"expected elements of a tensor, as in %0\[16:32\], got %1\[64\]"),
    "no numbers": ("[64:80]", "[a:b]", "expected elements of a tensor, as in"),
    "backwards": ("[64:80]", "[80:64]", "expected elements of a tensor, as in"),
    "before the beginning": ("[64:80]", "[-1:15]", "expected elements of a tensor, as in"),
    "not opened": ("[64:80]", "64:80]", "expected the place of a tensor below"),
    "of several dimensions": ("%1[64:80]", "%0[0:1]", r"expected elements of a tensor in %0\[0:1\], got one of shape"),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_bad_parts(name: str) -> None:
    written, instead, message = BAD_PARTS[name]
    packed = ops.conv_pack(torch.randn(16, 16, 1, 1), dtype=torch.float32)
    tensors = [image(1, 16, 3, 3), torch.randn(80), packed]
    call = "conv %0 %2 [16,16,1,1] %1[64:80] [1,1] [0,0,0,0] [1,1] 1 - none 0.0 0.0 none - false float32\nreturn $0"
    assert len(ops.chain(tensors, call)) == 1
    with pytest.raises(RuntimeError, match=f"xopt::chain: calls: {message}"):
        ops.chain(tensors, call.replace(written, instead))
