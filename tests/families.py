"""Families of random cases, one for each operator, and how a case is named, repeated and run in bulk.

A family stands in the test file of its operator (family `linear` in test_linear.py) as a module-level `FAMILY`, and is
found by that. A case is a frozen dataclass of plain fields; its line is `family:field=value:field=value`, with fields
at their default left out, and is all that is needed to repeat it:

    pytest tests/test_linear.py --case 'linear:seed=7:lead=5:n=33:k=64:activation=relu'
    python -m tests 'linear:seed=7:lead=5:n=33:k=64:activation=relu'
    python -m tests --count 500 --seed 3 linear qlinear      # random ones; at a level: XOPT_MAX_ISA=avx2

Where a process died of a case, XOPT_TEST_TRACE=FILE tells which: the file holds the line of the last one begun.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from tests import reference
from xopt import _C

SHOWN_FAILURES = 10
TRACE = "XOPT_TEST_TRACE"  # environment variable: a file that holds the line of the case being run, for crashes
C = TypeVar("C")


class CaseFailure(AssertionError):
    """A case that failed, with the line that repeats it."""


@dataclasses.dataclass(frozen=True)
class Family(Generic[C]):
    name: str
    case_type: type[C]
    sample: Callable[[random.Random], C]
    check: Callable[[C], None]  # raises where the case fails

    def line(self, case: C) -> str:
        parts = [self.name]
        for field in dataclasses.fields(case):  # type: ignore[arg-type]
            value = getattr(case, field.name)
            if value != field.default:
                parts.append(f"{field.name}={value}")
        return ":".join(parts)

    def parse(self, line: str) -> C:
        name, *settings = line.split(":")
        if name != self.name:
            raise ValueError(f"a case of {name}, not of {self.name}: {line}")
        types = {field.name: type(field.default) for field in dataclasses.fields(self.case_type)}  # type: ignore[arg-type]
        fields: dict[str, Any] = {}
        for setting in settings:
            key, _, text = setting.partition("=")
            if key not in types:
                raise ValueError(f"{self.name} has no field {key!r}; there are {', '.join(types)}")
            fields[key] = text == "True" if types[key] is bool else types[key](text)
        return self.case_type(**fields)

    def cases(self, seed: int, count: int) -> Iterator[C]:
        rng = random.Random(f"{self.name} {seed}")
        return (self.sample(rng) for _ in range(count))

    def run(self, case: C) -> None:
        if TRACE in os.environ:
            pathlib.Path(os.environ[TRACE]).write_text(self.line(case))
        try:
            self.check(case)
        except Exception as error:
            line = self.line(case)
            raise CaseFailure(
                f"{type(error).__name__}: {error}\n  at level {active_level()}, repeat with:"
                f" pytest tests/test_{self.name}.py --case '{line}'"
            ) from error

    def run_all(self, cases: Iterable[C]) -> int:
        """Runs all and fails at the end, so that one bug does not hide the next."""
        failures: list[str] = []
        count = 0
        for count, case in enumerate(cases, 1):  # noqa: B007
            try:
                self.run(case)
            except CaseFailure as failure:
                failures.append(str(failure))
        if failures:
            shown = "\n\n".join(failures[:SHOWN_FAILURES])
            raise CaseFailure(f"{len(failures)} of {count} cases of {self.name} failed:\n\n{shown}")
        return count


def find_family(name: str) -> Family[Any]:
    family = importlib.import_module(f"tests.test_{name}").FAMILY
    assert isinstance(family, Family)
    assert family.name == name
    return family


def all_families() -> list[Family[Any]]:
    here = pathlib.Path(__file__).parent
    files = sorted(path for path in here.glob("test_*.py") if "\nFAMILY = " in path.read_text())
    return [find_family(path.stem.removeprefix("test_")) for path in files]


def run_line(line: str) -> None:
    family = find_family(line.partition(":")[0])
    family.run(family.parse(line))


# ---- What xopt says of itself --------------------------------------------------------------------------------------


def active_level() -> str:
    return str(_C.active_isa())


def flushes_denormals(packed_dtype: torch.dtype) -> bool:
    """Whether the instructions of the active level for this dtype may take denormals for zero."""
    return packed_dtype == torch.bfloat16 and active_level() in ("avx512_bf16", "amx")


def kernel_calls() -> dict[str, int]:
    """How often each record of the registry was run in this process, by 'name dtype isa'."""
    return {f"{record['name']} {record['dtype']} {record['isa']}": record["calls"] for record in _C.kernels()}


def calls_of(kernel: str) -> int:
    """How often a kernel was run, of whatever dtype and level."""
    return sum(calls for name, calls in kernel_calls().items() if name.startswith(f"{kernel} "))


def as_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What a model is called with, its floating-point tensors in another dtype."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {name: cast(value) for name, value in inputs.items()}


# ---- Checks that every family makes --------------------------------------------------------------------------------


def expect_values(
    what: str,
    got: torch.Tensor,
    expected: reference.Estimate,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    flushes: bool = False,
    scale: float = 1.0,
    zero_point: int = 0,
) -> None:
    """Shape, dtype, and every element of `got`, whose rows are those of `expected`."""
    if tuple(got.shape) != shape or got.dtype != dtype:
        raise AssertionError(f"{what} is {tuple(got.shape)} {got.dtype}, expected {shape} {dtype}")
    if not got.is_contiguous():
        raise AssertionError(f"{what} is not contiguous: strides {got.stride()}")
    rows = got.reshape(expected.value.shape)
    flushes = flushes or flushes_denormals(dtype)  # the conversion to bf16 does so too, whatever was multiplied
    right, low, high = reference.acceptable(rows, expected, flushes, scale, zero_point)
    if bool(right.all()):
        return
    wrong = (~right).nonzero()
    lines = [f"{what}: {len(wrong)} of {right.numel()} elements are wrong"]
    for index in wrong[:4]:
        at = tuple(index.tolist())
        lines.append(
            f"    [{', '.join(map(str, at))}] got {rows[at].item()!r}, expected {expected.value[at].item()!r}"
            f" +- {expected.error[at].item():.3g}, stored as {low[at].item()!r} to {high[at].item()!r}"
        )
    raise AssertionError("\n".join(lines))


def expect_input_gradients(
    model: torch.nn.Module, source: torch.nn.Module, x: torch.Tensor, tolerance: float = 1e-5
) -> None:
    """Of an optimized model, whose parameters want none, as of its source."""
    given, expected = (x.clone().requires_grad_() for _ in range(2))
    model(given).square().sum().backward()
    source(expected).square().sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad, expected.grad, rtol=tolerance, atol=tolerance)


def expect_equal(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, except that a NaN is as good as another."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{what} is {tuple(got.shape)} {got.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        )
    same = (got == expected) & (got.double().sign() == expected.double().sign())
    same |= got.isnan() & expected.isnan()
    if not bool(same.all()):
        at = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(f"{what}: [{at}] is {got[at].item()!r}, expected exactly {expected[at].item()!r}")
