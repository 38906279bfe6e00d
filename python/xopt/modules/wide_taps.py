"""Transposed convolutions whose neighbouring outputs along the width are one, by a product with more columns.

A block of `stride` neighbouring outputs is, in memory with the channels last, one pixel of `stride` times the channels.
It depends on the same few inputs, so a transposed convolution of stride 1 along the width gives it, whose weight has a
place for each tap, and zeros where an input adds nothing to an output of the block. With few output channels, or where
the kernel is as wide as the stride, that takes no more products, and A is copied once for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor
_PANEL = 32


class Wide(NamedTuple):
    """Along the width: what the source's geometry is, and what that of the wide one."""

    kernel: int
    stride: int
    padding: int
    output_padding: int
    dilation: int
    wide_kernel: int
    wide_padding: int

    def place(self, tap: int) -> tuple[int, int]:
        """Of a tap of the source's kernel: the output of the block that it adds to, and the tap of the wide kernel."""
        output = (tap * self.dilation - self.padding) % self.stride
        shift = (output + self.padding - tap * self.dilation) // self.stride
        return output, self.wide_padding - shift


def find_wide(channels: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int) -> Wide | None:
    """None, where blocks do not end where lines end, or take more products."""
    narrow = Wide(kernel, stride, padding, output_padding, dilation, 0, 0)
    shifts = [-narrow.place(tap)[1] for tap in range(kernel)]
    wide_padding = max(0, *shifts)
    # With `size` inputs there are (size - 1) * stride + rest outputs, which have to be as many blocks.
    rest = dilation * (kernel - 1) + output_padding + 1 - 2 * padding
    wide_kernel = (rest - stride) // stride + 1 + 2 * wide_padding
    if stride == 1 or rest % stride != 0 or wide_kernel <= wide_padding - min(shifts):
        return None
    panels, wide_panels = (-(-columns // _PANEL) for columns in (channels, channels * stride))
    if wide_panels * wide_kernel > panels * kernel:
        return None
    return Wide(kernel, stride, padding, output_padding, dilation, wide_kernel, wide_padding)


def widened(weight: Tensor, wide: Wide) -> Tensor:
    """[in, out, ..., kernel] as [in, stride * out, ..., wide kernel]."""
    rows, columns, *rest = weight.shape[:-1]
    result = weight.new_zeros((rows, wide.stride, columns, *rest, wide.wide_kernel))
    for tap in range(wide.kernel):
        output, wide_tap = wide.place(tap)
        result[:, output, ..., wide_tap] = weight[..., tap]
    return result.flatten(1, 2)


def narrowed(weight: Tensor, wide: Wide) -> Tensor:
    """The weight that was widened."""
    blocks = weight.reshape(weight.shape[0], wide.stride, -1, *weight.shape[2:])
    taps = [wide.place(tap) for tap in range(wide.kernel)]
    return torch.stack([blocks[:, output, ..., wide_tap] for output, wide_tap in taps], -1)
