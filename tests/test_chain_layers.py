"""Layers of transformers as chains: what is one call, in which layouts and sizes, and what makes it fall back."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import xopt
from tests.block_models import assert_gone_when_dropped
from tests.test_chain_programs import lengths_of_chains
from xopt.modules import chain as chains
from xopt.modules.block import PROGRAMS
from xopt.ops.chain import Given, Result

SIZE, HEADS = 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, SIZE // HEADS).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value, mask)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(x.shape[0], x.shape[1], SIZE))
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.first, self.last = Attention(), nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 96), nn.Linear(96, SIZE)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x + self.attention(x, mask))
        result: Tensor = self.last(x + self.down(functional.gelu(self.up(x))))
        return result


class Encoder(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


CALLS_OF_A_LAYER = 4 + 6 + 4 + 3  # projections, their heads, attention and what it gives as rows, products and norms


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return lengths_of_chains(monkeypatch)


def optimized_pair(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    source = make().eval()
    return source, xopt.optimize(source)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, SIZE)


def check(source: nn.Module, optimized: nn.Module, *inputs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(optimized(*inputs), source(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 30])
def test_an_encoder_is_one_call(depth: int, chained: list[int]) -> None:
    """Also one of more than three hundred modules."""
    source, optimized = optimized_pair(lambda: Encoder(depth))
    check(source, optimized, tokens(2, 5))
    chained.clear()
    for shape in ((2, 5), (1, 5), (3, 1), (1, 1), (4, 17)):
        check(source, optimized, tokens(*shape))
    assert chained == [CALLS_OF_A_LAYER * depth] * 5


MASKS = {
    "none": None,
    "keys": torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None],
    "added": torch.randn(2, 1, 5, 5),
    "of heads": torch.randn(2, HEADS, 5, 5),
    "flat": torch.ones(5, 5, dtype=torch.bool).tril(),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, chained: list[int]) -> None:
    source, optimized = optimized_pair(Layer)
    check(source, optimized, tokens(2, 5), MASKS[mask])
    check(source, optimized, tokens(2, 5))
    chained.clear()
    check(source, optimized, tokens(2, 5), MASKS[mask])
    check(source, optimized, tokens(3, 6))
    assert chained == [CALLS_OF_A_LAYER] * 2


def test_inputs_in_any_layout(chained: list[int]) -> None:
    source, optimized = optimized_pair(Layer)
    check(source, optimized, tokens(2, 5))
    chained.clear()
    for x in (tokens(5, 2).transpose(0, 1), tokens(2, 9)[:, ::2], torch.randn(2, SIZE, 5).mT, tokens(1, 5)):
        check(source, optimized, x)
        check(source, optimized, x.expand(4, 5, SIZE) if len(x) == 1 else x)
    assert len(chained) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_gives_what_its_steps_give(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    optimized = xopt.optimize(Encoder(2).eval(), dtype=dtype)
    with torch.no_grad():
        for inputs in ((tokens(2, 5),), (tokens(2, 5), MASKS["keys"]), (tokens(3, 7),)):
            optimized(*inputs)
            together = optimized(*inputs)
            with monkeypatch.context() as context:
                context.setattr(chains, "is_watched", lambda: True)
                assert torch.equal(optimized(*inputs), together)


def test_a_layer_made_in_inference_mode(chained: list[int]) -> None:
    """Nobody counts changes of its tensors; they are seen all the same."""
    torch.manual_seed(0)
    with torch.inference_mode():
        source = Layer().eval()
        optimized = xopt.optimize(copy.deepcopy(source), inplace=True)
        check_through_changes(source, optimized)
    assert chained == [3 + CALLS_OF_A_LAYER - 4] * 3


def test_a_layer_optimized_in_inference_mode(chained: list[int]) -> None:
    torch.manual_seed(0)
    source = Layer().eval()
    with torch.inference_mode():
        optimized = xopt.optimize(source)
        check_through_changes(source, optimized)
        assert not any(tensor.is_inference() for tensor in optimized.state_dict().values())
    assert chained == [CALLS_OF_A_LAYER] * 3


def check_through_changes(source: nn.Module, optimized: nn.Module) -> None:
    for _ in range(3):
        x = tokens(2, 5)
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
        for layer in (source, optimized):
            change_bias(layer)
            scale_norm(layer)


# ---- What falls back -------------------------------------------------------------------------------------------------


def test_hooks_and_modes_see_what_is_inside(chained: list[int]) -> None:
    source, optimized = optimized_pair(Layer)
    check(source, optimized, tokens(2, 5))
    seen: list[Any] = []
    handle = optimized.attention.key.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    check(source, optimized, tokens(2, 5))
    assert seen == [(2, 5, SIZE)]
    handle.remove()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    chained.clear()
    with torch.no_grad(), Seen():
        optimized(tokens(2, 5))
    assert not chained
    assert [seen.count(f"xopt.{op}.default") for op in ("linear", "attention", "linear_norm")] == [2, 1, 2]
    check(source, optimized, tokens(2, 5))
    assert chained == [CALLS_OF_A_LAYER]


def change_key(layer: Any) -> None:
    layer.attention.key.weight = nn.Parameter(torch.ones(SIZE, SIZE) / SIZE)


def change_bias(layer: Any) -> None:
    with torch.no_grad():
        layer.attention.value.bias.add_(1.0)


def drop_bias(layer: Any) -> None:
    layer.attention.query.bias = None


def change_norm(layer: Any) -> None:
    torch.manual_seed(1)
    layer.last.weight = nn.Parameter(torch.rand(SIZE))


def scale_norm(layer: Any) -> None:
    with torch.no_grad():
        layer.first.weight.mul_(0.5)


def exchange(layer: Any) -> None:
    torch.manual_seed(1)
    layer.down = nn.Linear(96, SIZE)


def load(layer: Any) -> None:
    layer.load_state_dict({name: value * 0.5 for name, value in layer.state_dict().items()})


@pytest.mark.parametrize("change", [change_key, change_bias, drop_bias, change_norm, scale_norm, exchange, load])
def test_what_calls_depend_on_may_change(change: Callable[[Any], None]) -> None:
    source, optimized = optimized_pair(Layer)
    x = tokens(2, 5)
    check(source, optimized, x)
    for layer in (source, optimized):
        change(layer)
    for _ in range(2):
        check(source, optimized, x)


def test_gradients_of_inputs() -> None:
    source, optimized = optimized_pair(Layer)
    check(source, optimized, tokens(2, 5))
    x = tokens(2, 5)
    given = [x.clone().requires_grad_() for _ in range(2)]
    for layer, each in zip((source, optimized), given, strict=True):
        layer(each).square().sum().backward()
    torch.testing.assert_close(given[1].grad, given[0].grad, rtol=1e-3, atol=1e-4)


def test_copies_and_dropped_layers() -> None:
    source, optimized = optimized_pair(Layer)
    x = tokens(2, 5)
    check(source, optimized, x)
    copied = copy.deepcopy(optimized)
    change_bias(copied)
    check(source, optimized, x)
    change_bias(source)
    check(source, copied, x)
    del copied
    models = [optimized]
    del optimized
    assert_gone_when_dropped(models)


def test_what_is_added_may_be_spread() -> None:
    """As it was not when the layer was recorded."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = self.layer(self.norm(x + y))
            return result

    source, optimized = optimized_pair(Sum)
    for _ in range(2):
        check(source, optimized, tokens(2, 5), tokens(2, 5))
        check(source, optimized, tokens(2, 5), tokens(1, 5))
        check(source, optimized, tokens(2, 1), tokens(2, 5))


def test_keys_may_be_spread() -> None:
    class Cross(Attention):
        def forward(self, x: Tensor, states: Any) -> Tensor:
            query, key, value = self.heads(self.query(x)), self.heads(self.key(states)), self.heads(self.value(states))
            attended = functional.scaled_dot_product_attention(query, key, value)
            result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
            return result

    source, optimized = optimized_pair(Cross)
    for _ in range(2):
        check(source, optimized, tokens(2, 5), tokens(2, 7))
        check(source, optimized, tokens(2, 5), tokens(1, 7))


# ---- What stands between links ---------------------------------------------------------------------------------------


def test_views_that_are_wanted_outside() -> None:
    """A block that hands on its heads, and writes into what it returns."""

    class Shown(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
            attended = functional.scaled_dot_product_attention(query, key, value, mask)
            return self.out(attended.transpose(1, 2).flatten(2)), key, value[:, :, 0], key.shape[2]

    source, optimized = optimized_pair(Shown)
    for shape in ((2, 5), (2, 5), (1, 3)):
        x = tokens(*shape)
        with torch.no_grad():
            for result, wanted in zip(optimized(x), source(x), strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
            result = optimized(x)
            result[1].zero_()
            torch.testing.assert_close(result[2], source(x)[2], rtol=1e-4, atol=1e-5)


def test_what_has_nothing_to_do_with_a_chain_may_stand_between(chained: list[int]) -> None:
    class Masked(Layer):
        def forward(self, x: Tensor, places: Any = None) -> Tensor:
            return super().forward(self.first(x), (places.cumsum(0) % 3 < 2)[None, None, None])

    source, optimized = optimized_pair(Masked)
    for length in (5, 5, 9):
        check(source, optimized, tokens(2, length), torch.ones(length, dtype=torch.int64))
    assert set(chained) == {CALLS_OF_A_LAYER + 1 + 3}  # with the mask's own views


ALL = slice(None)


@pytest.mark.parametrize("key", [0, -1, (ALL, 0), (ALL, -1), (0, ALL), (ALL, ALL, 3)])
def test_one_element_of_a_dimension(key: Any, chained: list[int]) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(5 if key == (ALL, ALL, 3) else SIZE)

        def forward(self, x: Tensor) -> Any:
            x = self.layer(x)
            return self.norm(x[key]), x

    source, optimized = optimized_pair(Pooled)
    for batch in (4, 4, 2):
        x = tokens(batch, 5)
        with torch.no_grad():
            for result, wanted in zip(optimized(x), source(x), strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    assert chained == [3] * 3


def test_one_result_in_parts(chained: list[int]) -> None:
    class Together(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.all(x).split(SIZE, dim=2)
            query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
            attended = functional.scaled_dot_product_attention(query, key, value)
            result: Tensor = self.out(attended.transpose(1, 2).contiguous().flatten(2))
            return result

    source, optimized = optimized_pair(Together)
    for length in (5, 5, 9):
        check(source, optimized, tokens(2, length))
    assert len(set(chained)) == 1


PARTS: dict[str, Callable[[Tensor], Any]] = {
    "unequal": lambda x: x.split([16, 48], 2),
    "sizes": lambda x: x.split_with_sizes((60, 4), -1),
    "chunks": lambda x: x.chunk(2, dim=-1),
    "chunks of which one is short": lambda x: x.chunk(5, dim=2)[::4],
    "unbound": lambda x: x.unflatten(-1, (2, -1)).unbind(2),
    "slices": lambda x: (x[:, 1:], x[..., :5, :]),
    "from the end": lambda x: (x[:, -2:], x[:, :-1, ::2]),
    "all": lambda x: (x[...], x[:]),
    "new dimensions": lambda x: (x[:, None, 1], x[..., 0, None, :]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_by_numbers(name: str, chained: list[int]) -> None:
    class InParts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Any:
            first, second = PARTS[name](self.layer(x))
            return functional.layer_norm(first, first.shape[-1:]), functional.layer_norm(second, second.shape[-1:])

    source, optimized = optimized_pair(InParts)
    for shape in ((2, 5), (2, 5), (1, 5), (3, 9)):
        x = tokens(*shape)
        with torch.no_grad():
            for result, wanted in zip(optimized(x), source(x), strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    assert len(chained) == 4
    assert min(chained) >= 4


def test_products_and_softmax_between(chained: list[int]) -> None:
    """Of what is no attention: weights that are squared after softmax, and of each head added up."""

    class Squared(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
            weights = functional.softmax(query @ key.mT * 0.25, dim=-1)
            result: Tensor = self.out((weights @ weights.mT @ value).transpose(1, 2).flatten(2))
            return result

    source, optimized = optimized_pair(Squared)
    for shape in ((2, 5), (2, 5), (1, 5), (3, 9)):
        check(source, optimized, tokens(*shape))
    assert len(chained) == 4
    assert set(chained) == {
        2 + 3 + 6 + 2 + 4 + 2
    }  # layers, parts, heads, turned ones, products and softmax, back again
    check(source, optimized, tokens(2, 2))  # less than the kernel takes
    assert len(chained) == 4


def test_a_part_of_what_sizes_tell_stays_torchs(chained: list[int]) -> None:
    """Where parts come out shorter than they were."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.layer(x).split(3, dim=1)
            return torch.cat([self.norm(self.layer(first)), self.norm(self.layer(second))], 1)

    source, optimized = optimized_pair(Halves)
    for length in (6, 6, 5, 4, 6):
        check(source, optimized, tokens(2, length))
    assert chained


def test_a_cast_to_the_dtype_that_is_there_is_none(chained: list[int]) -> None:
    class Cast(Attention):
        def __init__(self, like: bool) -> None:
            super().__init__()
            self.like = like

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
            attended = functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
            result: Tensor = self.out(attended.to(x) if self.like else attended.to(query.dtype))
            return result

    source, optimized = optimized_pair(lambda: Cast(False))
    for _ in range(3):
        check(source, optimized, tokens(2, 5))
    assert len(set(chained)) == 1
    without, chained[:] = chained[0], []
    source, optimized = optimized_pair(lambda: Cast(True))  # which is of the other tensor's device, too
    for _ in range(3):
        check(source, optimized, tokens(2, 5))
    assert chained
    assert max(chained) < without


def test_a_factor_of_queries_is_one_of_scores(chained: list[int]) -> None:
    class Scaled(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            query, key, value = self.heads(self.query(x) * 0.3), self.heads(self.key(x)), self.heads(self.value(x))
            query, key = query.contiguous(), key.contiguous()
            attended = functional.scaled_dot_product_attention(query, key, value, mask, scale=1.5)
            result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
            return result

    source, optimized = optimized_pair(Scaled)
    for _ in range(2):
        check(source, optimized, tokens(2, 5))
    assert len(chained) == 2
    assert "attention" in optimized.__dict__[PROGRAMS].fused


def test_an_image_of_tokens_goes_to_a_convolution_in_its_layout() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.conv, self.norm = nn.Linear(SIZE, SIZE), nn.Conv2d(SIZE, 32, 3), nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            image = self.layer(x).transpose(1, 2).reshape(x.shape[0], SIZE, 4, -1)
            result: Tensor = self.norm(self.conv(image).flatten(2).transpose(1, 2))
            return result

    source, optimized = optimized_pair(Mixed)
    for length in (16, 16, 24):
        check(source, optimized, tokens(2, length))
        with torch.no_grad():
            x = tokens(2, length)
            assert optimized(x).stride() == source(x).stride()


# ---- What cannot be told ---------------------------------------------------------------------------------------------


def test_what_cannot_be_told_is_not_asked_for_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that somebody has put in a packed one's place, until another packed one comes."""
    source, optimized = optimized_pair(Layer)
    x = tokens(2, 5)
    check(source, optimized, x)
    tries: list[int] = []
    settle = chains.Chain._settle

    def counted(self: Any, modules: Any, given: int) -> Any:
        tries.append(1)
        return settle(self, modules, given)

    monkeypatch.setattr(chains.Chain, "_settle", counted)
    own, packed = source.up.weight, optimized.up.weight
    for layer in (source, optimized):
        layer.up.weight = nn.Parameter(torch.ones(96, SIZE) / SIZE)
    for _ in range(200):
        check(source, optimized, x)
    assert 5 <= len(tries) <= 12
    optimized.up.weight = packed
    for _ in range(65):
        with torch.no_grad():
            optimized(x)
    tries.clear()
    source.up.weight = own
    check(source, optimized, x)
    assert not tries


def test_what_no_later_step_reads_is_freed() -> None:
    """Step by step, too: of three copies, two are alive at a time."""
    alive: list[weakref.ref[Tensor]] = []
    most = []

    def copied(x: Tensor) -> Tensor:
        result = x.clone()
        alive.append(weakref.ref(result))
        most.append(sum(each() is not None for each in alive))
        return result

    given: Any = Given(0)
    chains.linkables[copied] = chains.linkables["contiguous"]
    try:
        links = [chains.Link(copied, (given if place == 0 else Result(place - 1),), {}, 0) for place in range(5)]
        chain = chains.Chain(tuple(links), [Result(1), Result(4)])
        results = chain._step_by_step([nn.Identity()], [torch.ones(3)])
    finally:
        del chains.linkables[copied]
    assert most == [1, 2, 2, 3, 3]
    assert [each() is not None for each in alive] == [False, True, False, False, True]
    assert all(torch.equal(each, torch.ones(3)) for each in results)


@torch.no_grad()
def test_a_part_of_a_mask_is_read_anew_in_each_run() -> None:
    """Of booleans, which kernels but attention's do not know."""
    tensors = [torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)]
    text = "expand %3 [%0:0,-1,5,7]\nsliced $0 0 [0,2,1]\nattention %0 %1 %2 $1 - false 0 0 false -\nreturn $2"
    for seed in range(6):
        mask = torch.rand(1, 1, 5, 7, generator=torch.Generator().manual_seed(seed)) < 0.6
        (result,) = torch.ops.xopt.chain([*tensors, mask], text)
        assert torch.equal(result, torch.ops.xopt.attention(*tensors, mask))
        del mask


@torch.no_grad()
def test_a_mask_of_more_dimensions_is_torchs_error() -> None:
    """It is not taken for one of windows, which the operator knows."""
    source = Attention().eval()
    optimized = xopt.optimize(copy.deepcopy(source))
    x = torch.randn(2, 5, SIZE)
    torch.testing.assert_close(optimized(x, None), source(x, None), rtol=1e-4, atol=1e-5)
    for model in (source, optimized, optimized):
        with pytest.raises(RuntimeError):
            model(x, torch.randn(1, 2, HEADS, 5, 5))
