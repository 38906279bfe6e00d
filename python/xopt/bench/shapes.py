"""The GEMM shapes that the bench measures: the linear layers of common models, over a range of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from xopt.bench.errors import BenchError

DTYPES = ("f32", "bf16", "int8")

ROWS = (1, 4, 16, 32, 128, 197, 512, 1024, 4096)

# (out_features, in_features) of each model's distinct linear layers.
MODEL_LAYERS: dict[str, tuple[tuple[int, int], ...]] = {
    "BERT-base and ViT-base": ((768, 768), (3072, 768), (768, 3072)),
    "BERT-large": ((1024, 1024), (4096, 1024), (1024, 4096)),
    "Llama 3.2 1B": ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)),
    "Llama 3.1 8B": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
}


@dataclass(frozen=True, order=True)
class Shape:
    """C[m, n] = A[m, k] * W[n, k]^T."""

    n: int
    k: int
    m: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def layer(self) -> tuple[int, int]:
        """What the shapes that follow each other have to share to use one weight."""
        return self.n, self.k

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k


def all_shapes() -> list[Shape]:
    """Every number of rows with every distinct layer, one layer after the other."""
    layers = sorted(
        {layer for layers in MODEL_LAYERS.values() for layer in layers}, key=lambda layer: layer[0] * layer[1]
    )
    return [Shape(n=n, k=k, m=m) for n, k in layers for m in ROWS]


def quick_shapes() -> list[Shape]:
    """A fixed few that touch each regime: single rows, small batches, one sentence, many rows."""
    return [
        parse_shape(text)
        for text in (
            "1x4096x4096",
            "4x3072x768",
            "32x1024x1024",
            "128x768x768",
            "128x3072x768",
            "128x768x3072",
            "512x4096x1024",
            "1024x3072x768",
        )
    ]


def parse_shape(text: str) -> Shape:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip())
    if match is None or 0 in (sizes := [int(size) for size in match.groups()]):
        raise BenchError(f"--shapes: '{text}' is not a shape; expected MxNxK of positive numbers, such as 128x3072x768")
    return Shape(m=sizes[0], n=sizes[1], k=sizes[2])


def parse_shapes(text: str) -> list[Shape]:
    """Shapes of one layer stand side by side, so that its weight is made once."""
    shapes = dict.fromkeys(parse_shape(part) for part in text.split(",") if part.strip())
    if not shapes:
        raise BenchError("--shapes: no shape was given; expected a list such as 128x3072x768,1x4096x4096")
    return sorted(shapes)


def parse_dtypes(text: str) -> list[str]:
    wanted = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in wanted if name not in DTYPES]
    if unknown or not wanted:
        raise BenchError(f"--dtype: got '{text}'; expected a list of {', '.join(DTYPES)}")
    return wanted
