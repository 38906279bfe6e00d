"""The settings: what the environment says, in the only place that reads it, and the switches of `optimize`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from xopt import _C

AUTOTUNE = ("off", "max")
BACKENDS = ("cpu", "sycl")
_CHOICES = {"autotune": AUTOTUNE, "backend": BACKENDS}  # of the settings that are no switches


@dataclass(frozen=True)
class Environment:
    max_isa: str | None = None
    """XOPT_MAX_ISA: the highest level that kernels are chosen from; None: what the CPU has."""
    verbose: bool = False
    """XOPT_VERBOSE=1: `optimize` logs each decision at level INFO to the logger "xopt", which then has a handler."""
    kept_output_mb: int = 256
    """XOPT_KEPT_OUTPUT_MB: how much memory of freed outputs is held for the next ones; 0: none."""
    autotune: str = "off"
    """XOPT_AUTOTUNE=max: all products, convolutions and attention of the process are tuned (`Config.autotune`)."""

    def __post_init__(self) -> None:
        if self.max_isa is not None and self.max_isa not in _C.isa_levels():
            known = ", ".join(_C.isa_levels())
            raise ValueError(f"XOPT_MAX_ISA: unknown level {self.max_isa!r}; known levels: {known}")
        if self.autotune not in AUTOTUNE:
            raise ValueError(f"XOPT_AUTOTUNE: expected one of {', '.join(AUTOTUNE)}, got {self.autotune!r}")

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Environment":
        verbose = environment.get("XOPT_VERBOSE", "0")
        if verbose not in ("", "0", "1"):
            raise ValueError(f"XOPT_VERBOSE: expected 0 or 1, got {verbose!r}")
        kept = environment.get("XOPT_KEPT_OUTPUT_MB") or str(cls.kept_output_mb)
        if not kept.isdecimal():
            raise ValueError(f"XOPT_KEPT_OUTPUT_MB: expected a number of megabytes, got {kept!r}")
        autotune = environment.get("XOPT_AUTOTUNE") or "off"
        return cls(environment.get("XOPT_MAX_ISA") or None, verbose == "1", int(kept), autotune)

    def apply(self) -> None:
        """Hands the settings to the native side."""
        _C.cap_isa(self.max_isa or _C.isa_levels()[-1])
        _C.set_kept_output_bytes(self.kept_output_mb << 20)


current = Environment.read()


def cache_folder() -> Path:
    """Where xopt keeps what it has measured on this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xopt"


@dataclass(frozen=True, init=False)
class Config:
    """Which of its single steps `optimize` takes. All do by default; what is tried beyond that is off."""

    weights_prepack: bool = True
    """Linear layers get packed weights and run on xopt's kernels."""
    recurrent_prepack: bool = True
    """LSTM, GRU and plain recurrent layers and cells get packed weights and run on xopt's kernels."""
    conv_prepack: bool = True
    """Convolutions get packed weights and run on xopt's kernels, with the channels last in memory. Short causal ones of
    language models, which these have as functions, do as they are."""
    conv_bn_folding: bool = True
    """A BatchNorm that follows a convolution is done within it."""
    linear_bn_folding: bool = True
    """A BatchNorm that follows a linear layer is done within it."""
    fuse_conv: bool = True
    """Activations and residual additions that follow a convolution are done within it."""
    pool_images: bool = True
    """Max and average pooling of images whose channels are last runs on xopt's kernels."""
    upsample_images: bool = True
    """Nearest and linear interpolation of images whose channels are last runs on xopt's kernels."""
    fuse_upsample: bool = True
    """A convolution of an image upsampled to twice its size computes on the small image, with sums of its weights,
    which are kept beside them. In fp32 only."""
    fuse_upsample_rounded: bool = False
    """The same in bf16 and fp16. Sums of weights are rounded once more, which one layer alone shows as an error of 1.2
    times torch's."""
    cast_embeddings: bool = True
    """Embedding tables are held in the optimized dtype."""
    concat_linear: bool = True
    """Linear layers that are fed the same tensor (query, key and value) become one product."""
    fuse_linear: bool = True
    """Activations and residual additions that follow a linear layer are done within it."""
    fuse_gated_linear: bool = True
    """act(gate(x)) * up(x) becomes one product."""
    fuse_norm: bool = True
    """LayerNorm and RMSNorm, also written out, run on xopt's kernels, with the addition before them; so do GroupNorm,
    and BatchNorm that no product takes along, with what follows them."""
    fuse_attention: bool = True
    """Scaled dot product attention runs on xopt's kernel."""
    multiply_activations: bool = True
    """Products of two activations outside of attention (torch.matmul, bmm, baddbmm, einsum) run on xopt's kernel, with
    the scale and the addition that follow."""
    fuse_windows: bool = True
    """An image that is padded, rolled and cut into windows (Swin) is copied once, and once on the way back."""
    fuse_rotary: bool = True
    """Rotary position embeddings of queries and keys become one step."""
    fuse_pointwise: bool = True
    """Arithmetic on each value that nothing else has taken along is done in one pass over memory."""
    replace_dropout_with_identity: bool = True
    """Dropout, which does nothing outside training, does not stand between fused steps."""
    autocast: bool = True
    """An optimized model of another dtype than its source computes under autocast by itself, so that the optimized
    dtype flows between its layers. Off: each layer answers in the dtype of its input."""
    autotune: str = "off"
    """"max": for each shape of a product, convolution or attention that the model's forward meets, the instances and
    blockings of its kernel are tried, some seconds for a shape, and what is clearly faster is used from then on, also
    by later processes (`python -m xopt cache`)."""
    backend: str = "cpu"
    """What runs the kernels of a model in the CPU's memory: "cpu", or "sycl", the SYCL kernels on the CPU's own SYCL
    device (`xopt.sycl.device("cpu")`), by which they are tested and shown. Takes the SYCL part."""

    def __init__(self, **switches: bool | str) -> None:
        known = {field.name: field.default for field in fields(self)}
        for name, value in switches.items():
            if name not in known:
                raise ValueError(f"Config: unknown switch {name!r}; known switches: {', '.join(known)}")
            if name in _CHOICES:
                if value not in _CHOICES[name]:
                    raise ValueError(f"Config: {name}: expected one of {', '.join(_CHOICES[name])}, got {value!r}")
            elif not isinstance(value, bool):
                raise ValueError(f"Config: {name}: expected True or False, got {value!r}")
        for name, default in known.items():
            object.__setattr__(self, name, switches.get(name, default))
