"""torch's own transformer layers: kept on the path that calls their linear layers.

In eval mode torch would hand the weights of a whole layer to one fused operator, which knows no packed ones.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from xopt.modules.base import Context, Replacement, own_forward


class LayerByLayer(Replacement):
    source: ClassVar[type[nn.Module]] = nn.TransformerEncoderLayer
    switch: ClassVar[str] = "weights_prepack"

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        return "it has a forward of its own" if own_forward(module, cls.source) else None

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        module.activation_relu_or_gelu = 0  # to torch: an activation that its fused operator does not know
        return "calls its layers instead of torch's fused operator"


class EncoderLayerByLayer(Replacement):
    source: ClassVar[type[nn.Module]] = nn.TransformerEncoder
    switch: ClassVar[str] = "weights_prepack"

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        return "it has a forward of its own" if own_forward(module, cls.source) else None

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        module.use_nested_tensor = False
        return "keeps padded tensors instead of nested ones"
