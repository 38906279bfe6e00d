"""Programs that call xopt::chain: what is one call, and what has to be seen when it changes."""

from __future__ import annotations

import concurrent.futures
import copy
import pathlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import xopt
from tests.block_models import assert_gone_when_dropped
from tests.test_optimize_conv import settled
from xopt.modules import chain as chains
from xopt.modules.block import PROGRAMS
from xopt.ops.chain import call_text
from xopt.ops.fakes import FLOATING


class Bottleneck(nn.Module):
    def __init__(self, channels: int = 32, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, stride, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.last = nn.Sequential(nn.Conv2d(16, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.last(self.middle(self.first(x))) + x)


def optimized_block() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    source = settled(Bottleneck())
    optimized = xopt.optimize(source)
    x = torch.randn(2, 32, 9, 7)
    with torch.no_grad():
        optimized(x)
    return source, optimized, x


def watch_chains(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]) -> None:
    """Tells `note` the text of each call of the operator from now on."""

    def noted(tensors: Any, calls: str) -> Any:
        note(calls)
        return torch.ops.xopt.chain(tensors, calls)

    monkeypatch.setattr(chains, "_chain", noted)


def lengths_of_chains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in each call of the operator from now on."""
    lengths: list[int] = []
    watch_chains(monkeypatch, lambda calls: lengths.append(calls.count("\n")))
    return lengths


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return lengths_of_chains(monkeypatch)


def check(source: nn.Module, optimized: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)


def test_a_block_is_one_call(chained: list[int]) -> None:
    source, optimized, x = optimized_block()
    chained.clear()
    check(source, optimized, x)
    check(source, optimized, x.contiguous(memory_format=torch.channels_last))
    check(source, optimized, torch.randn(1, 32, 4, 4))
    assert chained == [3, 3, 3]
    assert any("conv+batch_norm+add+relu" in fused for fused in optimized.__dict__[PROGRAMS].fused)


def test_single_images_are_no_chain(chained: list[int]) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.convolutions(x)
            return result * 2.0

    source = settled(Single())
    check(source, xopt.optimize(source), torch.randn(3, 9, 9))
    assert not chained


def change_norm(block: Any) -> None:
    with torch.no_grad():
        block.first[1].running_mean.add_(1.0)


def change_stride(block: Any) -> None:
    block.first[0].stride, block.first[0].padding = (2, 2), (4, 4)


def change_weight(block: Any) -> None:
    block.first[0].weight = nn.Parameter(torch.ones(16, 32, 1, 1))


def change_bias(block: Any) -> None:
    block.last[0].bias = None


def change_values(block: Any) -> None:
    block.load_state_dict({name: value * 0.5 for name, value in block.state_dict().items()})


@pytest.mark.parametrize("change", [change_norm, change_weight, change_bias, change_values])
def test_a_module_may_change(change: Callable[[Any], None]) -> None:
    source, optimized, x = optimized_block()
    check(source, optimized, x)
    for block in (source, optimized):
        change(block)
    check(source, optimized, x)
    check(source, optimized, x)


def test_geometry_may_change_and_what_is_added_may_be_spread() -> None:
    source, optimized, x = optimized_block()
    for block in (source, optimized):
        change_stride(block)
    one = torch.randn(2, 32, 1, 1)  # 5 x 5 outputs, to which it is added
    check(source, optimized, one)
    with pytest.raises(RuntimeError), torch.no_grad():
        optimized(x)  # 9 x 8 and 9 x 7
    check(source, optimized, one)


def test_a_hook_inside_sees_its_convolution() -> None:
    source, optimized, x = optimized_block()
    seen: list[torch.Size] = []
    inside = optimized.get_submodule("middle.0")
    handle = inside.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    check(source, optimized, x)
    assert seen == [torch.Size([2, 16, 9, 7])]
    handle.remove()
    check(source, optimized, x)


def test_profilers_and_modes_see_each_convolution() -> None:
    _, optimized, x = optimized_block()
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        with Seen():
            optimized(x)
        with torch.profiler.profile() as profile:
            optimized(x)
    assert seen.count("xopt.conv.default") == 3
    assert sum(event.count for event in profile.key_averages() if event.key == "xopt::conv") == 3


class SizedPadding(nn.Module):
    """Looks at the size of each image, as TensorFlow's padding does."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(8, 8, 3, stride=2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            amounts = [1 if int(size) % 2 == 0 else 2 for size in x.shape[-2:]]
            x = functional.pad(x, (amounts[1] // 2, amounts[1] - amounts[1] // 2, amounts[0] // 2, 1))
            x = functional.relu(convolution(x))
        return x


def test_sizes_that_follow_from_the_input_are_asked_once(chained: list[int]) -> None:
    torch.manual_seed(0)
    source = settled(SizedPadding())
    optimized = xopt.optimize(source)
    for size in (32, 31, 32, 31, 18):
        for _ in range(2):
            check(source, optimized, torch.randn(1, 8, size, 32))
    assert set(chained) == {3}
    assert len(chained) >= 7


# ---- What is asked once ----------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of calls that chains were told, one by one."""
    ops_told: list[str] = []

    def counted(op: str, arguments: Sequence[Any]) -> str:
        ops_told.append(op)
        return call_text(op, arguments)

    monkeypatch.setattr(chains, "call_text", counted)
    return ops_told


def test_calls_are_told_once_and_again_after_a_change(told: list[str]) -> None:
    source, optimized, x = optimized_block()
    for _ in range(3):
        check(source, optimized, x)
    assert told == ["conv"] * 3
    for block in (source, optimized):
        change_norm(block)
    for _ in range(3):
        check(source, optimized, x)
    assert told == ["conv"] * 6


def test_loaded_values_are_seen_without_being_told(told: list[str]) -> None:
    """Those of packed weights: they lie where they lay."""
    source, optimized, x = optimized_block()
    check(source, optimized, x)
    told.clear()
    with torch.no_grad():
        for block in (source, optimized):
            block.get_parameter("first.0.weight").mul_(0.5)
    check(source, optimized, x)
    assert not told


def test_a_list_of_a_module_may_be_changed_in_place() -> None:
    source, optimized, x = optimized_block()
    inside: Any = (source.get_submodule("middle.0"), optimized.get_submodule("middle.0"))
    for module in inside:
        module.padding = [1, 1]
    check(source, optimized, x)
    for module in inside:
        module.padding[0] = 3
        module.dilation = [3, 1]
    check(source, optimized, x)


def test_a_module_inside_may_be_exchanged() -> None:
    source, optimized, x = optimized_block()
    check(source, optimized, x)
    for block in (source, optimized):
        torch.manual_seed(1)
        middle: Any = block.get_submodule("middle")
        middle[0] = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    check(source, optimized, x)
    check(source, optimized, x)


def test_copies_have_calls_of_their_own() -> None:
    source, optimized, x = optimized_block()
    copied = copy.deepcopy(optimized)
    with torch.no_grad():
        before = optimized(x)
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(optimized(x), before)
        assert not torch.equal(copied(x), before)
    check(source, optimized, x)


def test_the_memory_of_a_replaced_weight_is_free_at_once() -> None:
    _, optimized, x = optimized_block()
    inside: Any = optimized.get_submodule("first.0")
    packed = weakref.ref(inside.weight.place.packed)
    inside.weight = nn.Parameter(torch.zeros(16, 32, 1, 1), requires_grad=False)
    assert packed() is None
    with torch.no_grad():
        optimized(x)


def test_a_dropped_block_is_gone_at_once() -> None:
    assert_gone_when_dropped([optimized_block()[1]])


class Net(nn.Module):
    """A small network whole: a pool among the convolutions, and more than a hundred modules."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(*(Bottleneck() for _ in range(depth)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x)))
        return result


def test_a_network_is_one_call(chained: list[int]) -> None:
    torch.manual_seed(0)
    source = settled(Net())
    optimized = xopt.optimize(source)
    x = torch.randn(2, 3, 33, 40)
    for _ in range(2):
        check(source, optimized, x)
    chained.clear()
    check(source, optimized, x)
    assert chained == [1 + 1 + 12 * 3 + 1 + 1 + 1]
    check(source, optimized, torch.randn(1, 3, 64, 64))


class Called(nn.Module):
    """Pools as functions, and means of all pixels: within a block, and before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.next = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 1, 1)
        self.less, self.more = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(x).relu(), 3, stride=2, padding=1)
        x = functional.avg_pool2d(self.next(x), [2, 2])
        x = self.next(x) + self.more(self.less(x.mean((2, 3), keepdim=True)).relu())
        result: Tensor = self.head(functional.adaptive_avg_pool2d(x, (2, 3)).mean([-2, -1]))
        return result


def test_pools_and_means_that_are_called_are_links(chained: list[int]) -> None:
    torch.manual_seed(0)
    source = settled(Called())
    optimized = xopt.optimize(source)
    for size in ((2, 3, 33, 40), (1, 3, 64, 64), (2, 3, 33, 40)):
        x = torch.randn(size)
        for _ in range(2):
            check(source, optimized, x)
    chained.clear()
    check(source, optimized, x)
    assert sum(chained) >= 10
    assert len(chained) <= 2, "the sum of an image and a pixel alone is between them"
    check(source, optimized, torch.randn(0, 3, 33, 40))


def test_a_hook_deep_in_a_network_leaves_the_rest_its_chains(chained: list[int]) -> None:
    torch.manual_seed(0)
    source = settled(Net())
    optimized = xopt.optimize(source)
    x = torch.randn(1, 3, 32, 32)
    check(source, optimized, x)
    seen: list[int] = []
    handle = optimized.get_submodule("blocks.3.first.0").register_forward_hook(lambda *given: seen.append(1))
    for _ in range(2):
        chained.clear()
        check(source, optimized, x)
    assert len(seen) == 2
    assert sorted(chained) == [2] + [3] * 11
    handle.remove()
    chained.clear()
    check(source, optimized, x)
    assert chained == [41]


def test_threads_may_run_and_change_one_network() -> None:
    """Half of them see the weights before and half after; none anything else."""
    torch.manual_seed(0)
    optimized = xopt.optimize(settled(Net(3)))
    x = torch.randn(1, 3, 32, 32)
    norm: Any = optimized.get_submodule("blocks.1.first.1")
    with torch.no_grad():
        before = optimized(x)
        norm.bias.add_(1.0)
        after = optimized(x)
        norm.bias.sub_(1.0)

    def run(_: int) -> bool:
        with torch.no_grad():
            result = optimized(x)
        return any(torch.allclose(result, known, rtol=1e-4, atol=1e-5) for known in (before, after))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = [threads.submit(run, each) for each in range(40)]
        with torch.no_grad():
            norm.bias.add_(1.0)
        assert all(result.result() for result in results)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), after, rtol=1e-4, atol=1e-5)


def test_products_that_follow_each_other_are_one_call(chained: list[int]) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers(x) + x
            return result

    torch.manual_seed(0)
    source = settled(Rows())
    optimized = xopt.optimize(source)
    for shape in ((3, 24), (2, 5, 24), (24,), (2, 3, 4, 24)):
        check(source, optimized, torch.randn(shape))
    with torch.no_grad():
        for block in (source, optimized):
            block.get_parameter("layers.0.bias").add_(1.0)
    chained.clear()
    check(source, optimized, torch.randn(3, 24))
    assert chained == [2]


@pytest.mark.parametrize("made_in_inference_mode", [True, False])
@pytest.mark.parametrize("dtype", FLOATING)
def test_norms_are_seen_when_they_change_in_inference_mode(dtype: torch.dtype, made_in_inference_mode: bool) -> None:
    """Nobody counts the changes of tensors that were made in it."""
    torch.manual_seed(0)
    with torch.inference_mode(made_in_inference_mode):
        source = settled(Bottleneck())
        copied = copy.deepcopy(source)
    with torch.inference_mode():
        optimized = xopt.optimize(copied, dtype=dtype, inplace=True)
        x = torch.randn(2, 32, 9, 7)
        for _ in range(3):
            tolerance = 1e-4 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(optimized(x), source(x), rtol=tolerance, atol=tolerance)
            for block in (source, optimized):
                change_norm(block)


def test_calls_are_told_once_of_what_was_optimized_or_loaded_in_inference_mode(
    told: list[str], tmp_path: pathlib.Path
) -> None:
    source = settled(Bottleneck())
    with torch.inference_mode():
        xopt.save(xopt.optimize(source), tmp_path)
        for optimized in (xopt.optimize(source), xopt.load(tmp_path, lambda: settled(Bottleneck()))):
            told.clear()
            x = torch.randn(2, 32, 9, 7)
            for _ in range(3):
                torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-4)
            assert told == ["conv"] * 3
