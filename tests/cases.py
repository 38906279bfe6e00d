"""Seeded generators: shapes around the tile sizes, values of many kinds, and tensors of many strides.

Shapes and options are drawn from a `random.Random`, values from a `torch.Generator`, so that a case is known by its
fields alone. Memory between the elements of a strided tensor is poisoned (NaN, or the largest integer): a kernel that
reads what is not its own shows it in the result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

import torch

Tensor = torch.Tensor
T = TypeVar("T")

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "s8": torch.int8,
    "u8": torch.uint8,
}
FLOATS = ("f32", "bf16", "f16")

# ---- Sizes ---------------------------------------------------------------------------------------------------------

# Around the sizes of vectors, tiles, panels and pairs of panels.
EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129)
# Around the sizes of blocks of them.
LARGE = (191, 193, 255, 256, 257, 300, 383, 385, 511, 513, 700, 768, 1023, 1025, 1537, 2049, 3072, 4097)
WORK_LIMIT = 2_500_000  # products of a case: a float64 reference of that size costs a few milliseconds


def pick(rng: random.Random, weights: dict[T, int]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]


def pick_size(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.02:
        return 0
    return rng.choice(EDGES) if kind < 0.8 else rng.randint(1, 140)


def pick_sizes(rng: random.Random) -> tuple[int, int, int]:
    """m, n, k, of which at times one is large."""
    sizes = [pick_size(rng) for _ in range(3)]
    if rng.random() < 0.25:
        sizes[0] = rng.randint(1, 6)  # the path that streams weights
    if rng.random() < 0.25:
        sizes[rng.randrange(3)] = rng.choice(LARGE)
    while math.prod(sizes) > WORK_LIMIT:
        largest = max(range(3), key=lambda i: sizes[i])
        sizes[largest] = sizes[largest] // 2 + 1
    return sizes[0], sizes[1], sizes[2]


def pick_lead(rng: random.Random, m: int) -> str:
    """The leading dimensions of an input of about m rows, as 2x3; `-`: none at all."""
    if m == 1 and rng.random() < 0.3:
        return "-"
    dims = [m]
    while rng.random() < 0.35 and len(dims) < 4:
        factor = rng.choice((1, 2, 3))
        dims[-1] = -(-dims[-1] // factor)
        dims.append(factor)
    rng.shuffle(dims)
    return "x".join(map(str, dims))


def lead_dims(lead: str) -> tuple[int, ...]:
    return () if lead == "-" else tuple(int(dim) for dim in lead.split("x"))


def row_count(lead: str) -> int:
    return math.prod(lead_dims(lead))


# ---- Values --------------------------------------------------------------------------------------------------------

VALUE_WEIGHTS = {
    "normal": 35,
    "integers": 25,  # sums are exact, so nothing is forgiven
    "one_hot": 10,  # picks single weights out
    "mixed": 8,
    "specials": 8,
    "tiny": 5,
    "huge": 4,
    "zeros": 3,
    "ones": 2,
}
INT8_VALUE_WEIGHTS = {"normal": 60, "extremes": 20, "one_hot": 10, "zeros": 5, "ones": 5}
# NaNs of every look: rounded carelessly, the first two become infinity and minus zero.
ODD_NANS = (0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000)


def values(kind: str, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A contiguous tensor of values of one of the kinds above."""
    shape = tuple(shape)
    if not dtype.is_floating_point:
        return integer_values(kind, shape, dtype, generator)
    normal = torch.randn(shape, generator=generator)
    half = dtype == torch.float16
    if kind == "normal":
        x = normal
    elif kind == "integers":
        x = torch.randint(-8, 9, shape, generator=generator).float()
    elif kind == "one_hot":
        x = one_hot(shape, generator)
    elif kind == "mixed":
        x = normal * 10.0 ** (torch.rand(shape, generator=generator) * 6 - (4 if half else 3))
    elif kind == "specials":
        x = with_specials(normal, generator)
    elif kind == "tiny":
        low, high = (-24, -13) if half else (-149, -120)
        x = normal.sign() * torch.exp2(torch.rand(shape, generator=generator).double() * (high - low) + low)
    elif kind == "huge":
        x = normal * (1e3 if half else 1e17)
    elif kind == "zeros":
        x = torch.where(normal < 0, -0.0, torch.zeros(shape))
    elif kind == "ones":
        x = torch.ones(shape)
    else:
        raise ValueError(f"no such kind of values: {kind}")
    return x.to(dtype)


def integer_values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    info = torch.iinfo(dtype)
    if kind == "normal":
        return torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=dtype)
    if kind == "extremes":  # pairs of these saturate in 16 bits
        either = torch.randint(0, 4, shape, generator=generator)
        return torch.where(either == 0, info.min, info.max).to(dtype)
    if kind == "one_hot":
        return (one_hot(shape, generator) * 3).to(dtype)
    return torch.full(shape, {"zeros": 0, "ones": 1}[kind], dtype=dtype)


def one_hot(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.zeros(shape)
    if x.numel() > 0 and len(shape) > 0:
        place = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=generator)
        x.scatter_(-1, place, 1.0)
    return x


def with_specials(x: Tensor, generator: torch.Generator) -> Tensor:
    """A few NaNs, infinities and zeros in an otherwise plain tensor."""
    flat = x.flatten()
    for _ in range(min(flat.numel(), 3)):
        place = int(torch.randint(0, flat.numel(), (), generator=generator))
        which = int(torch.randint(0, 8, (), generator=generator))
        if which < len(ODD_NANS):
            flat.view(torch.int32)[place] = ODD_NANS[which]
        else:
            flat[place] = (math.inf, -math.inf, 0.0, -0.0)[which - len(ODD_NANS)]
    return flat.reshape(x.shape)


# ---- Strides -------------------------------------------------------------------------------------------------------

INPUT_LAYOUTS = {
    "contiguous": 50,
    "offset": 8,  # starts one element into its storage
    "sliced": 10,  # the first columns of something wider
    "row_step": 8,  # every second row
    "swapped": 10,  # the first two leading dimensions transposed
    "expanded": 6,  # the first dimension repeated without being stored
    "k_strided": 8,  # the last dimension is not dense
}
VECTOR_LAYOUTS = {"contiguous": 70, "offset": 15, "k_strided": 15}


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    poison = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(tuple(shape), poison, dtype=dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x (of an `expanded` one: of its first entry) in other strides, amid poison."""
    if layout == "contiguous" or x.ndim == 0:
        return x
    if layout == "offset":
        store = poisoned((x.numel() + 2,), x.dtype)
        view = store[1 : 1 + x.numel()].view(x.shape)
    elif layout == "expanded":
        return x[:1].expand(x.shape) if x.shape[0] > 0 else x
    elif layout == "sliced":
        view = poisoned((*x.shape[:-1], x.shape[-1] + 3), x.dtype)[..., : x.shape[-1]]
    elif layout == "k_strided":
        view = poisoned((*x.shape, 2), x.dtype)[..., 0]
    elif layout == "row_step" and x.ndim >= 2:
        view = poisoned((*x.shape[:-2], x.shape[-2] * 2, x.shape[-1]), x.dtype)[..., ::2, :]
    elif layout in ("swapped", "transposed") and x.ndim >= 2:
        view = poisoned((x.shape[1], x.shape[0], *x.shape[2:]), x.dtype).transpose(0, 1)
    else:
        return x
    return view.copy_(x)


def tensor(
    kind: str, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, layout: str = "contiguous"
) -> Tensor:
    return laid_out(values(kind, shape, dtype, generator), layout)
