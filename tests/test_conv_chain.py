"""torch.ops.xopt.conv_chain against the single convolutions, and the programs that call it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import xopt
from tests.test_optimize_conv import settled
from tests.test_runtime import not_when_sanitized
from xopt import _C
from xopt.modules import conv_chain as chains
from xopt.modules.block import PROGRAMS
from xopt.ops.conv import ChainLink
from xopt.ops.fakes import FLOATING

ops: Any = torch.ops.xopt

# ---- The operator ----------------------------------------------------------------------------------------------------


class Calls:
    """The arguments of a chain that grows link by link, and what its single convolutions give."""

    def __init__(self, *values: Tensor) -> None:
        self.tensors = list(values)
        self.links: list[ChainLink] = []
        self.parameters: list[float] = []
        self.names: list[str] = []
        self.results: list[Tensor] = []

    def add(self, input: int, weight: Tensor, other: int | None = None, groups: int = 1, **options: Any) -> None:
        """`input`, `other`: places of values, or ~i for the result of link i."""
        dims = weight.dim() - 2
        packed = ops.conv_pack(weight, groups, dtype=weight.dtype)
        bias, scale = (options.get(name) for name in ("bias", "scale"))
        places: list[Any] = [input]
        for tensor in (packed, bias, scale):
            places.append(None if tensor is None else len(self.tensors))
            self.tensors += [] if tensor is None else [tensor]
        geometry = {name: options.get(name, [1] * dims) for name in ("stride", "dilation")}
        geometry["padding"] = options.get("padding", [0] * (2 * dims))
        fused = {name: options.get(name, 0.0) for name in ("alpha", "beta")}
        fused |= {name: options.get(name, "none") for name in ("activation", "binary")}
        last = options.get("activation_last", False)
        dtype = options.get("out_dtype", torch.float32)
        places.append(other)
        self.links.append(ChainLink(places, groups, last, dtype, weight.shape, **geometry))
        self.parameters += [fused["alpha"], fused["beta"]]
        self.names += [fused["activation"], fused["binary"]]
        more = {"scale": scale, "other": None if other is None else self.value(other), "activation_last": last}
        shape = list(weight.shape)
        result = ops.conv(
            self.value(input), packed, shape, bias, **geometry, groups=groups, **fused, **more, out_dtype=dtype
        )
        self.results.append(result)

    def value(self, place: int) -> Tensor:
        return self.tensors[place] if place >= 0 else self.results[~place]

    def arguments(self, wanted: Sequence[int]) -> tuple[Any, ...]:
        count = len(self.tensors)
        links: list[int] = []
        for link in self.links:
            places = [-1 if place is None else place if place >= 0 else count + ~place for place in link.places]
            links += link._replace(places=places).numbers()
        return self.tensors, links, self.parameters, " ".join(self.names), list(wanted)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1).to(dtype)


def random_calls(seed: int) -> Calls:
    """A chain of up to five links in 1 to 3 dimensions that keep the image's size, so that any two can be added."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    dims, channels, dtype = draw.choice((1, 2, 3)), draw.choice((1, 8, 33)), draw.choice(FLOATING)
    x = image(draw.choice((1, 2)), channels, *(draw.choice((1, 5, 9)) for _ in range(dims)), dtype=dtype)
    calls = Calls(x)
    for link in range(draw.choice((1, 3, 5))):
        kernel, groups = draw.choice((1, 3)), draw.choice((1, channels))
        weight = (torch.randn(channels, channels // groups, *[kernel] * dims) / (channels * kernel)).to(dtype)
        options: dict[str, Any] = {
            "padding": [kernel // 2] * (2 * dims),
            "out_dtype": draw.choice((dtype, FLOATING[0])),
        }
        if draw.random() < 0.5:
            options |= {"bias": torch.randn(channels)}
        if draw.random() < 0.5:
            options |= {"scale": torch.randn(channels)}
        if draw.random() < 0.5:
            options |= {"activation": "clamp", "alpha": -0.5, "beta": 0.25}
        if draw.random() < 0.5:
            earlier = draw.choice([0, *(~before for before in range(link))])
            options |= {"other": earlier, "binary": draw.choice(("add", "mul")), "activation_last": draw.random() < 0.5}
        calls.add(draw.choice([0, *(~before for before in range(link))]), weight, groups=groups, **options)
    return calls


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", range(60))
def test_a_chain_gives_what_single_convolutions_give(seed: int) -> None:
    calls = random_calls(seed)
    wanted = sorted(random.Random(seed).sample(range(len(calls.links)), min(2, len(calls.links))))
    results = ops.conv_chain(*calls.arguments(wanted))
    for number, result in zip(wanted, results, strict=True):
        assert result.dtype == calls.results[number].dtype
        assert result.stride() == calls.results[number].stride()
        assert torch.equal(result.nan_to_num(), calls.results[number].nan_to_num())


@not_when_sanitized
def test_what_no_later_link_reads_is_freed() -> None:
    """Of eight images of 16 MB, two are enough at a time: the others lie where an earlier one was."""
    calls = Calls(image(1, 16, 512, 512))
    for link in range(8):
        calls.add(~(link - 1) if link else 0, torch.randn(16, 16, 1, 1))
    arguments = calls.arguments([7])
    calls.results.clear()
    xopt.runtime.keep_outputs(0)  # forgets those
    xopt.runtime.keep_outputs(256 << 20)
    before = _C.output_statistics()
    (result,) = ops.conv_chain(*arguments)
    after = _C.output_statistics()
    assert result.shape == (1, 16, 512, 512)
    assert after[2] - before[2] == 8
    assert 1 <= after[3] - before[3] <= 2
    assert after[0] - before[0] == result.nbytes


def bad(change: Callable[[list[Any]], None]) -> tuple[Any, ...]:
    calls = Calls(image(1, 4, 5, 5))
    calls.add(0, torch.randn(4, 4, 1, 1), bias=torch.randn(4))
    arguments = list(calls.arguments([0]))
    change(arguments)
    return tuple(arguments)


def put(which: int, place: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda arguments: arguments[which].__setitem__(place, value)


def instead(which: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda arguments: arguments.__setitem__(which, value)


BAD = {
    "place of no tensor": (put(1, 0, 3), "links: expected places of the 3 tensors or of results before link 0, got 3"),
    "negative place": (put(1, 1, -2), "links: expected places of the 3 tensors"),
    "dimensions": (put(1, 8, 4), "links: expected 1 to 3 spatial dimensions, got 4"),
    "dtype": (put(1, 7, 3), "links: expected the number of a dtype below 3, got 3"),
    "too few numbers": (lambda arguments: arguments[1].pop(), "links: expected more numbers"),
    "too few parameters": (lambda arguments: arguments[2].pop(), "parameters: expected 2 for each link, got 1"),
    "too few names": (instead(3, "relu"), "names: expected an activation and a binary for each link"),
    "activation": (instead(3, "swoosh none"), "activation: expected .*, got 'swoosh'"),
    "wanted": (instead(4, [1]), "wanted: expected numbers of links below 1, got 1"),
    "channels": (put(0, 0, image(1, 3, 5, 5)), "input: expected 4 channels"),
    "stride": (put(1, 13, 0), "stride: expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(RuntimeError, match=f"xopt::conv.*: {message}"):
        ops.conv_chain(*bad(change))


# ---- Programs --------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of links of each call of the operator."""
    lengths: list[int] = []

    def counted(tensors: Any, links: Any, parameters: Any, names: Any, wanted: Any) -> Any:
        lengths.append(len(parameters) // 2)
        return torch.ops.xopt.conv_chain(tensors, links, parameters, names, wanted)

    monkeypatch.setattr(chains, "_conv_chain", counted)
    return lengths


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
