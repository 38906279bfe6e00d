"""Whether torch is to differentiate or transform what is computed: the operators have no derivatives and no batching
rules, so it then computes by its own."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether derivatives may be computed along (dual tensors), or tensors stand for others (`torch.func`,
    `torch.vmap`): no tensor says so, and gradients may be off."""
    if forward_ad._current_level >= 0:
        return True
    # A compiler, which has transforms of its own, answers as if there were one.
    return torch._C._functorch.peek_interpreter_stack() is not None and not torch.compiler.is_compiling()


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Of what is computed of these."""
    if is_transformed():
        return True
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
