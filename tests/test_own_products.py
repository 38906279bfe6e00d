"""Matrices that a module holds as parameters of its own and multiplies by itself: packed, one copy, and used packed."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.test_optimize_matmul import flop_by_op
from xopt.modules.own_product_text import Use, uses_of
from xopt.modules.packed_parameter import PackedParameter

IN, OUT, HEADS = 48, 64, 4


class Own(nn.Module):
    """With a matrix of [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(IN, OUT) / 7)
        self.bias = nn.Parameter(torch.randn(OUT))
        self.norm = nn.LayerNorm(OUT)


class Turned(Own):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(OUT, IN) / 7)


class ByOperator(Own):
    def forward(self, x: Tensor) -> Any:
        return self.norm(x @ self.down)


class ByFunction(Own):
    def forward(self, x: Tensor) -> Any:
        return self.norm(torch.relu(torch.matmul(x, self.down) + self.bias))


class ByMethod(Own):
    def forward(self, x: Tensor) -> Any:
        return self.norm(x.matmul(self.down))


class ByMm(Own):
    def forward(self, x: Tensor) -> Any:
        return self.norm(torch.mm(x.flatten(0, -2), self.down)).unflatten(0, x.shape[:-1])


class ByAddmm(Own):
    def forward(self, x: Tensor) -> Any:
        return self.norm(torch.addmm(self.bias, x.flatten(0, -2), self.down)).unflatten(0, x.shape[:-1])


class ByEinsum(Own):
    def forward(self, x: Tensor) -> Any:
        return self.norm(torch.einsum("...i,io->...o", x, self.down))


class ByLinear(Turned):
    def forward(self, x: Tensor) -> Any:
        return self.norm(functional.gelu(functional.linear(x, self.down, self.bias)))


class ByKeyword(Turned):
    def forward(self, x: Tensor) -> Any:
        return self.norm(functional.linear(input=x, weight=self.down))


class ByT(Turned):
    def forward(self, x: Tensor) -> Any:
        return self.norm(x @ self.down.T)


class ByTranspose(Turned):
    def forward(self, x: Tensor) -> Any:
        return self.norm(torch.matmul(x, self.down.transpose(0, 1)))


class FromTheLeft(Turned):
    def forward(self, x: Tensor) -> Any:
        return self.norm((self.down @ x.mT).mT)


class Elsewhere(Turned):
    """In a method, and a property, which the forward leads to."""

    @property
    def matrix(self) -> Tensor:
        return self.down.t()

    def project(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.down)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.project(x))


class Above(ByLinear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + 1


class OnePerHead(Own):
    """As XLNet has it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(IN, HEADS, OUT // HEADS) / 7)
        self.back = nn.Parameter(torch.randn(OUT, HEADS, OUT // HEADS) / 7)
        self.up = nn.Parameter(torch.randn(HEADS, OUT // HEADS, OUT) / 7)

    def forward(self, x: Tensor) -> Any:
        heads = torch.einsum("bth,hnd->btnd", x, self.down).relu()
        return self.norm(
            torch.einsum("btnd,ndo->bto", heads, self.up) + torch.einsum("btnd,hnd->bth", heads, self.back)
        )


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, OUT + 5, IN) / 7)
        self.down = nn.Parameter(torch.randn(3, OUT + 5, OUT) / 7)
        self.norm = nn.LayerNorm(OUT)

    def forward(self, x: Tensor) -> Any:
        parts = [torch.relu(functional.linear(x, self.up[i])) @ self.down[i] for i in range(3)]
        return self.norm(parts[0] + parts[1] * parts[2])


class StackAtOnce(nn.Module):
    """Of matrices so large that one product for each pays."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 2757, IN) / 7)
        self.down = nn.Parameter(torch.randn(2, 2757, OUT) / 53)
        self.norm = nn.LayerNorm(OUT)

    def forward(self, x: Tensor) -> Any:
        each = torch.bmm(x.flatten(0, 1).expand(2, -1, -1), self.up.transpose(1, 2))
        return self.norm(torch.bmm(each.relu(), self.down).sum(0).unflatten(0, x.shape[:2]))


class SmallStackAtOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(3, IN, OUT) / 7)

    def forward(self, x: Tensor) -> Any:
        return torch.bmm(x.flatten(0, 1).expand(3, -1, -1), self.down)[1].unflatten(0, x.shape[:2])


class Unrecordable(nn.Module):
    """As JetMoe's experts: how many rows each has, a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, OUT, IN) / 7)
        self.last = nn.Parameter(torch.randn(OUT, OUT) / 7)
        self.bias = nn.Parameter(torch.randn(OUT))

    def forward(self, x: Tensor) -> Any:
        rows = x.flatten(0, 1)
        counts = (torch.tensor([1, 2, 3]) * len(rows) // 6).tolist()
        parts = [functional.linear(part, self.weight[i]) for i, part in enumerate(rows.split(counts))]
        return torch.addmm(self.bias, torch.cat(parts) @ self.last, self.last).unflatten(0, x.shape[:2])


ALL: tuple[Callable[[], nn.Module], ...] = (
    *(ByOperator, ByFunction, ByMethod, ByMm, ByAddmm, ByEinsum, ByLinear, ByKeyword, ByT, ByTranspose, FromTheLeft),
    *(Elsewhere, Above, OnePerHead, Stack, StackAtOnce, Unrecordable),
)


def made(kind: Callable[[], nn.Module], inside: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = kind()
    return (nn.Sequential(nn.Linear(IN, IN), module) if inside else module).eval()


def expect_close(got: Tensor, source: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    with torch.no_grad():
        expected = copy.deepcopy(source).double()(x.double())
    bound = 1e-5 if dtype == torch.float32 else 5e-2
    assert (got - expected).abs().max() < bound * max(1, expected.abs().max())


@pytest.mark.parametrize("inside", [False, True], ids=["model", "part"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ALL)
def test_all_products_run_on_packed_weights(kind: Callable[[], nn.Module], dtype: torch.dtype, inside: bool) -> None:
    source = made(kind, inside)
    optimized = xopt.optimize(source, dtype=dtype)
    matrices = {name for name, parameter in source.named_parameters() if parameter.ndim > 1}
    packed = {name for name, parameter in optimized.named_parameters() if type(parameter) is PackedParameter}
    assert packed == matrices
    for sizes in ((2, 6), (2, 6), (3, 4), (1, 6)):
        x = torch.randn(*sizes, IN)
        with torch.no_grad():
            expect_close(optimized(x), source, x, dtype)
    counted = flop_by_op(optimized, torch.randn(2, 6, IN)).keys() - {"xopt.layer_norm", "xopt.pointwise"}
    assert counted == {"xopt.linear"}


@pytest.mark.parametrize("kind", ALL)
def test_gradients_copies_and_compilation(kind: Callable[[], nn.Module]) -> None:
    source = made(kind)
    optimized = xopt.optimize(source, dtype=torch.float32)
    inputs = [torch.ones(2, 6, IN, requires_grad=True) for _ in range(2)]
    for model, input in zip((source, optimized), inputs, strict=True):
        model(input).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=2e-3, rtol=1e-3)
    x = torch.randn(2, 6, IN)
    with torch.inference_mode():
        expected = optimized(x)
        for other in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
            assert torch.equal(other(x), expected)
            assert isinstance(other, type(source))


@pytest.mark.parametrize("kind", [ByFunction, ByLinear, OnePerHead, Stack])
@torch.no_grad()
def test_compile_and_export(kind: Callable[[], nn.Module]) -> None:
    source, x = made(kind, inside=True), torch.randn(2, 6, IN)
    optimized = xopt.optimize(source, dtype=torch.float32)
    expected = source(x)
    torch._dynamo.reset()
    compiled: Any = torch.compile(optimized, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, atol=1e-4, rtol=1e-4)
    exported = torch.export.export(optimized, (x,)).module()
    torch.testing.assert_close(exported(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inside", [False, True], ids=["model", "part"])
@pytest.mark.parametrize("kind", [ByOperator, ByT, OnePerHead, Stack])
@torch.no_grad()
def test_states_come_and_go_as_the_sources(kind: Callable[[], nn.Module], inside: bool) -> None:
    source, x = made(kind, inside), torch.randn(2, 6, IN)
    before = copy.deepcopy(source.state_dict())
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())
    state = optimized.state_dict()
    assert state.keys() == before.keys()
    for name, value in state.items():
        if value.ndim > 1:
            assert torch.equal(value, before[name].bfloat16())
            assert value.shape == before[name].shape
    other = made(kind, inside, seed=1)
    optimized.load_state_dict(other.state_dict())
    expect_close(optimized(x), other, x, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        xopt.save(optimized, folder)
        loaded = xopt.load(folder, made(kind, inside))
    assert torch.equal(loaded(x), optimized(x))
    moved = copy.deepcopy(optimized).float()
    expect_close(moved(x), other, x, torch.bfloat16)


@torch.no_grad()
def test_a_parameter_that_takes_the_place_of_a_packed_one_is_used() -> None:
    source, x = made(ByFunction), torch.randn(2, 6, IN)
    optimized: Any = xopt.optimize(source, dtype=torch.float32)
    optimized(x)
    for model in (source, optimized):
        model.down = nn.Parameter(torch.ones(IN, OUT), requires_grad=False)
    torch.testing.assert_close(optimized(x), source(x), atol=1e-4, rtol=1e-4)
    given = {"down": torch.full((IN, OUT), 0.5), "bias": torch.ones(OUT)}
    called = [torch.func.functional_call(model, given, (x,)) for model in (optimized, source)]
    torch.testing.assert_close(*called, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "name"), [(ByLinear, "down"), (Stack, "up"), (Unrecordable, "weight")])
@torch.no_grad()
def test_what_is_changed_in_place_counts(kind: Callable[[], nn.Module], name: str) -> None:
    source: Any = made(kind)
    optimized: Any = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 6, IN)
    optimized(x)
    kept = getattr(optimized, name)[1].clone()
    for change in (lambda weight: weight.mul_(2), lambda weight: weight.copy_(torch.randn(weight.shape))):
        for model in (source, optimized):
            torch.manual_seed(1)
            change(getattr(model, name))
        torch.testing.assert_close(optimized(x), source(x), atol=1e-4, rtol=1e-4)
        assert not torch.equal(getattr(optimized, name)[1], kept)


@torch.no_grad()
def test_a_module_may_call_its_own_whatever_it_wants() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attributes: Any = nn.Linear(IN, IN)
            self.source: Any = nn.Linear(IN, IN)
            self.last = nn.Identity()
            self.switch = nn.Parameter(torch.randn(IN, OUT))

        def forward(self, x: Tensor) -> Any:
            return self.last(torch.relu(self.attributes(x) + self.source(x)) @ self.switch)

    torch.manual_seed(0)
    source, x = nn.Sequential(Names(), nn.Sequential(nn.Linear(OUT, OUT))).eval(), torch.randn(2, 6, IN)
    optimized: Any = xopt.optimize(source, dtype=torch.float32)
    torch.testing.assert_close(optimized(x), source(x), atol=1e-3, rtol=1e-4)
    assert type(optimized[0].switch) is PackedParameter


@torch.no_grad()
def test_sizes_that_do_not_fit_are_torchs_errors() -> None:
    optimized = xopt.optimize(made(OnePerHead), dtype=torch.float32)
    optimized(torch.randn(2, 6, IN))
    with pytest.raises(RuntimeError):
        optimized(torch.randn(2, 6, IN + 1))
    turned: Any = xopt.optimize(made(ByLinear), dtype=torch.float32)
    with pytest.raises(RuntimeError):
        turned(torch.randn(2, 6, OUT))


# ---- Which are packed ------------------------------------------------------------------------------------------------


class BothWays(Own):
    """An autoencoder with one matrix."""

    def forward(self, x: Tensor) -> Any:
        return (x @ self.down).relu() @ self.down.T


class Scaled(Own):
    def forward(self, x: Tensor) -> Any:
        return x @ (2 * self.down)


class Added(Own):
    def forward(self, x: Tensor) -> Any:
        return x @ self.down + self.down.sum(0)


class Narrow(Own):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(IN, 4))

    def forward(self, x: Tensor) -> Any:
        return x @ self.down


@pytest.mark.parametrize("kind", [BothWays, Scaled, Added, Narrow, SmallStackAtOnce])
@torch.no_grad()
def test_what_is_more_than_a_matrix_stays(kind: Callable[[], nn.Module]) -> None:
    source, x = made(kind), torch.randn(2, 6, IN)
    optimized: Any = xopt.optimize(source, dtype=torch.bfloat16)
    assert type(optimized.down) is nn.Parameter
    expect_close(optimized(x), source, x, torch.bfloat16)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, IN)
        self.head = self.words.weight

    def forward(self, x: Tensor) -> Any:
        return functional.linear(self.words(x), self.head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_weight_that_an_embedding_reads_stays_tied(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, x = Tied().eval(), torch.randint(0, 50, (2, 6))
    optimized: Any = xopt.optimize(source, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(optimized(x), source(x), atol=tolerance, rtol=tolerance)
    assert optimized.head is optimized.words.weight


@torch.no_grad()
def test_two_that_share_a_matrix_go_on_sharing_it() -> None:
    source, x = nn.ModuleList([made(ByOperator), made(ByFunction)]).eval(), torch.randn(2, 6, IN)
    source[1].down = source[0].down
    optimized: Any = xopt.optimize(source, dtype=torch.bfloat16)
    assert optimized[0].down is optimized[1].down
    for place in (0, 1):
        expect_close(optimized[place](x).float(), source[place], x, torch.bfloat16)


def test_switches_and_the_report() -> None:
    source = made(ByFunction, inside=True)
    entries = {entry.path: entry for entry in xopt.report(xopt.optimize(source, dtype=torch.bfloat16)).entries}
    assert entries["1"].optimized
    assert entries["1"].detail == "packed as bfloat16: down"
    for config, reason in (
        (xopt.Config(weights_prepack=False), "Config(weights_prepack=False)"),
        (xopt.Config(autocast=False), "in their dtype"),
    ):
        left = {
            entry.path: entry
            for entry in xopt.report(xopt.optimize(source, dtype=torch.bfloat16, config=config)).entries
        }
        assert not left["1"].optimized
        assert reason in left["1"].detail


@torch.no_grad()
def test_there_is_one_copy() -> None:
    source = made(Stack)
    expected = sum(parameter.numel() for parameter in source.parameters() if parameter.ndim == 3)
    optimized: Any = xopt.optimize(source, dtype=torch.bfloat16, inplace=True, sample_input=torch.randn(2, 6, IN))
    packed = [parameter.packed for parameter in optimized.parameters() if type(parameter) is PackedParameter]
    assert sum(each.numel() * each.element_size() for each in packed) < 2 * expected * 1.6  # padded to whole panels
    assert not [tensor for tensor in optimized.__dict__.values() if isinstance(tensor, Tensor)]


# ---- What the text says ----------------------------------------------------------------------------------------------


def test_uses() -> None:
    expected = {
        ByOperator: {"down": Use(True)},
        ByLinear: {"down": Use(False)},
        ByTranspose: {"down": Use(False)},
        FromTheLeft: {"down": Use(False)},
        Elsewhere: {"down": Use(False)},
        Above: {"down": Use(False)},
        Stack: {"up": Use(False, stack=True), "down": Use(True, stack=True)},
        StackAtOnce: {"up": Use(False, stack=True, at_once=True), "down": Use(True, stack=True, at_once=True)},
        OnePerHead: {"down": Use(True, split=1), "back": Use(False, split=1), "up": Use(True, split=2)},
        BothWays: {},
        Scaled: {},
    }
    for kind, uses in expected.items():
        assert uses_of(kind) == uses


def test_a_class_without_a_text_says_nothing() -> None:
    made_up: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x @ self.down", made_up)
    assert uses_of(type("MadeUp", (Own,), {"forward": made_up["forward"]})) == {}
