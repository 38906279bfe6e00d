"""What every operator owes its caller: its schema, calls that it has to answer, and the errors of bad arguments.

Each file here, but for operands.py, is the contract of the operators of one file of csrc/ops, and is found by itself:

- `SCHEMAS`: the operators' schemas by name,
- `samples_<operator>()`: calls of each, which opcheck and the other tests of all operators walk,
- `BAD_ARGUMENTS`: calls, and what their errors say; left out where the operators' own test file has them,
- `ON_XPU = True` where the operators run on Intel GPUs too.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

import torch

from tests.contracts.operands import BadArgument, Call


def registered_ops() -> list[str]:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("xopt::")}
    return sorted(name.removeprefix("xopt::") for name in names)


def schemas() -> dict[str, str]:
    return {op: contract.SCHEMAS[op] for op, contract in _contracts_by_op().items()}


def samples_of(op: str) -> list[Call]:
    generator = getattr(_contracts_by_op().get(op), f"samples_{op}", None)
    assert generator is not None, f"xopt::{op} has no samples: add samples_{op}() to its file in tests/contracts/"
    return list(generator())


def runs_on_xpu(op: str) -> bool:
    return getattr(_contracts_by_op()[op], "ON_XPU", False)


def bad_arguments() -> list[BadArgument]:
    return [bad for contract in _contracts() for bad in getattr(contract, "BAD_ARGUMENTS", [])]


@functools.cache
def _contracts() -> list[ModuleType]:
    files = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    return [file for file in files if hasattr(file, "SCHEMAS")]


@functools.cache
def _contracts_by_op() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for contract in _contracts():
        for op in contract.SCHEMAS:
            if op in found:
                raise ValueError(f"the schema of xopt::{op} is in two files: {found[op].__name__}, {contract.__name__}")
            found[op] = contract
    return found
