"""The settings that come from outside, in one place: nothing else in xopt reads environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from xopt import _C


@dataclass(frozen=True)
class Config:
    max_isa: str | None = None
    """XOPT_MAX_ISA: the highest level that kernels are chosen from; None: what the CPU has."""

    def __post_init__(self) -> None:
        if self.max_isa is not None and self.max_isa not in _C.isa_levels():
            known = ", ".join(_C.isa_levels())
            raise ValueError(f"XOPT_MAX_ISA: unknown level {self.max_isa!r}; known levels: {known}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Config":
        return cls(max_isa=environment.get("XOPT_MAX_ISA") or None)

    def apply(self) -> None:
        """Hands the settings to the native side."""
        _C.cap_isa(self.max_isa or _C.isa_levels()[-1])


current = Config.from_environment()
