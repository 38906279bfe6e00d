"""Attention in windows that are shifted (Swin): an image is padded, rolled and cut into windows in one copy, and put
together, rolled back and cut to its size in another. Torch makes one for each of these. Where an image is rolled before
it is padded, and cut before it is rolled back, it has to be of whole windows, with nothing to pad or to cut.

    x.view(batch, down, height, across, width, channels).permute(0, 1, 3, 2, 4, 5)

A partition with neither padding nor roll is one copy already, and left to torch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.modules.chain import Call, Seen, Shape, Value, always, chainable
from xopt.modules.pattern import (
    Pattern,
    argument,
    calls,
    dtype_of,
    is_call,
    is_on_cpu,
    only_reader,
    permutation,
    replace,
    shape_of,
    step,
)
from xopt.modules.told_sizes import is_told_size, numbers_of
from xopt.ops.chain import Computed, Number, SizeOf
from xopt.ops.fakes import COPIED
from xopt.ops.views import contiguous_unless_channels_last

_ROLL = (torch.roll, "roll")
_VIEWS = ("view", "reshape", torch.reshape)
_CONTIGUOUS = ("contiguous", contiguous_unless_channels_last)
_BY_WINDOWS = (0, 1, 3, 2, 4, 5)
_window_partition = torch.ops.xopt.window_partition.default
_window_merge = torch.ops.xopt.window_merge.default


class FindWindowPartition(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_windows"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in list(graph.nodes):
            view: Any = node.args[0] if permutation(node) == _BY_WINDOWS else None
            if _view_sizes(view, 6) is None or only_reader(view) is not node or dtype_of(view) not in COPIED:
                continue
            image, found = _before_windows(graph, view)
            if found and len(shape_of(image)) == 4:
                replace(graph, node, window_partition, (image, _view_sizes(view, 6)), found)


class FindWindowMerge(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_windows"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in reversed(calls(graph, operator.getitem, *_ROLL)):  # the last step first
            image, found = _behind_windows(node) if node.users else (node, {})
            windows = _merged_windows(image) if found else None
            if windows is not None:
                replace(graph, node, window_merge, (windows, _view_sizes(image, 4)), found)


def _before_windows(graph: Graph, view: Node) -> tuple[Any, dict[str, Any]]:
    """The image that is padded and rolled before it is cut up, in either order, and how."""
    image: Any = view.args[0]
    reader, found = view, dict[str, Any]()
    while isinstance(image, Node) and only_reader(image) is reader:
        if "shift" not in found and (shift := _shift(image)) is not None:
            found |= {"shift": shift, "padded_first": "padding" not in found}
        elif "padding" not in found and (padding := _padding(image)) is not None:
            found["padding"] = padding
        else:
            break
        _tell_sizes(graph, image)
        image, reader = image.args[0], image
    return image, found


def _behind_windows(node: Node) -> tuple[Any, dict[str, Any]]:
    """The image that is rolled back and cut to its size, in either order, and how."""
    image: Any = node
    found = dict[str, Any]()
    while isinstance(image, Node) and (image is node or only_reader(image) is not None):
        if "shift" not in found and (shift := _shift(image)) is not None:
            found["shift"] = shift
        elif "kept" not in found and (kept := _kept(image)) is not None:
            found |= {"kept": kept, "rolled_first": "shift" not in found}
        elif not found or not is_call(image, *_CONTIGUOUS):
            break
        image = image.args[0]
    return image, found


def _view_sizes(node: Any, count: int) -> tuple[Any, ...] | None:
    """What a view of so many dimensions asks for."""
    if not is_call(node, *_VIEWS) or len(shape_of(node)) != count:
        return None
    given = node.args[1:] if len(node.args) > 2 else argument(node, 1, "shape")
    return tuple(given) if isinstance(given, (tuple, list)) and len(given) == count else None


def _shift(node: Any) -> tuple[Any, Any] | None:
    """By how much a step rolls images [batch, height, width, channels]."""
    if not is_call(node, *_ROLL) or len(shape_of(node)) != 4:
        return None
    shifts, dims = argument(node, 1, "shifts"), argument(node, 2, "dims", ())
    shifts, dims = ([each] if isinstance(each, (int, Node)) else list(each) for each in (shifts, dims))
    if not dims or not all(isinstance(dim, int) for dim in dims):
        return None
    by_dim = {dim % 4: shift for dim, shift in zip(dims, shifts, strict=True)}
    return (by_dim.get(1, 0), by_dim.get(2, 0)) if len(by_dim) == len(dims) and {1, 2} >= by_dim.keys() else None


def _padding(node: Any) -> tuple[Any, Any] | None:
    """How many zeros a step puts after the height and the width of such images."""
    if not is_call(node, functional.pad) or len(shape_of(node)) != 4:
        return None
    amounts, value = argument(node, 1, "pad"), argument(node, 3, "value")
    plain = argument(node, 2, "mode", "constant") == "constant" and (value is None or value == 0)
    if not plain or not isinstance(amounts, (tuple, list)) or len(amounts) != 6:
        return None
    before = (*amounts[:3], amounts[4])
    return (amounts[5], amounts[3]) if all(type(each) is int and each == 0 for each in before) else None


def _tell_sizes(graph: Graph, step: Node) -> None:
    """Those who ask for sizes of the padded or rolled image get those of the image, with what is added."""
    padding = _padding(step)
    for user in [user for user in step.users if is_call(user, "size")]:
        dim = argument(user, 1, "dim") % 4
        with graph.inserting_before(user):
            size = graph.call_method("size", (step.args[0], dim))
            if padding is not None and dim in (1, 2):
                size = graph.call_function(operator.add, (size, padding[dim - 1]))
        size.meta.update(user.meta)
        user.replace_all_uses_with(size)
        graph.erase_node(user)


def _kept(node: Any) -> tuple[Any, Any] | None:
    """The size that a step cuts images to: `x[:, :height, :width, :]`."""
    if not is_call(node, operator.getitem) or len(shape_of(node)) != 4 or not isinstance(node.args[1], tuple):
        return None
    parts = [*node.args[1], slice(None)][:4]
    if len(node.args[1]) not in (3, 4) or any(type(part) is not slice for part in parts):
        return None
    whole = [part.start in (None, 0) and part.step in (None, 1) for part in parts]
    return (parts[1].stop, parts[2].stop) if all(whole) and parts[0] == parts[3] == slice(None) else None


def _merged_windows(image: Any) -> Any:
    """The windows [images, down, across, height, width, channels] that an image is made of, which nobody else reads."""
    if _view_sizes(image, 4) is None or only_reader(image) is None or dtype_of(image) not in COPIED:
        return None
    permuted = image.args[0]
    if is_call(permuted, *_CONTIGUOUS) and only_reader(permuted) is image:
        permuted = permuted.args[0]
    return permuted.args[0] if permutation(permuted) == _BY_WINDOWS else None


def _fit(asked: Sequence[Any], real: Sequence[int]) -> bool:
    """Whether a view of these sizes, one of which may be left to torch, has the real ones."""
    return all(type(one) is int and one in (-1, other) for one, other in zip(asked, real, strict=True))


def _partitioned(image: Sequence[int], sizes: Sequence[int], padding: Sequence[int]) -> Shape | None:
    """The windows that cover an image of this shape, if these sizes are theirs and the padding fills the last ones."""
    window = (sizes[2], sizes[4])
    if not all(type(each) is int and each > 0 for each in window):
        return None
    count = [-(-length // of) for length, of in zip(image[1:3], window, strict=True)]
    filled = [length + more for length, more in zip(image[1:3], padding, strict=True)]
    real = (image[0], count[0], window[0], count[1], window[1], image[3])
    is_full = filled == [of * each for of, each in zip(window, count, strict=True)]
    return real if is_full and _fit(sizes, real) else None


@step(lambda kwargs: "+".join(["pad"] * ("padding" in kwargs) + ["roll"] * ("shift" in kwargs) + ["windows"]))
def window_partition(
    image: Tensor,
    sizes: Sequence[int],
    shift: Sequence[int] = (0, 0),
    padding: Sequence[int] = (0, 0),
    padded_first: bool = True,
) -> Tensor:
    """Windows [images, down, across, height, width, channels] of an image that is padded and rolled."""
    in_order = padded_first or not any(padding)
    if image.is_cpu and in_order and _partitioned(image.shape, sizes, padding) is not None:
        return _window_partition(image, (sizes[2], sizes[4]), shift)  # type: ignore[no-any-return]
    amounts = (0, 0, 0, padding[1], 0, padding[0])
    image = functional.pad(image, amounts) if padded_first else image
    image = image.roll(tuple(shift), (1, 2))
    image = image if padded_first else functional.pad(image, amounts)
    return image.view(*sizes).permute(_BY_WINDOWS)


def _is_told(node: Node) -> bool:
    """Whether there is a kernel, and all that it takes beside the tensor is numbers and sizes, or left out."""
    given = [*node.args[1:], *node.kwargs.values()]
    numbers = [each for one in given for each in (one if isinstance(one, (tuple, list)) else (one,))]
    return is_on_cpu(node) and all(each is None or type(each) in (int, bool) or is_told_size(each) for each in numbers)


@chainable(window_partition, where=_is_told, is_row_major=always)
def _window_partition_call(
    seen: Seen,
    image: Value,
    sizes: tuple[Number, ...],
    shift: tuple[Number, ...] = (0, 0),
    padding: tuple[Number, ...] = (0, 0),
    padded_first: bool = True,
) -> Call:
    others, numbers = numbers_of((*sizes, *padding))

    def windows(image: Shape, *shapes: Shape) -> Shape | None:
        known = numbers(*shapes)
        in_order = padded_first or not any(known[6:])
        return _partitioned(image, known[:6], known[6:]) if in_order else None

    return Call(
        "window_partition",
        (image, (sizes[2], sizes[4]), shift),
        image,
        lambda *shapes: windows(*shapes) or (),
        others=others,
        fits=lambda *shapes: windows(*shapes) is not None,
    )


def _merged(
    windows: Sequence[int], sizes: Sequence[int], kept: Sequence[int | None], rolled_first: bool
) -> list[int] | None:
    """Height and width of what is kept of the images that windows of this shape make up, if these sizes are theirs."""
    images, down, across, height, width, channels = windows
    whole = [down * height, across * width]
    size = [most if part is None else min(part, most) for part, most in zip(kept, whole, strict=True)]
    is_known = _fit(sizes, (images, *whole, channels)) and min(size) >= 0 and (rolled_first or size == whole)
    return size if is_known else None


@step(lambda kwargs: "+".join(["windows"] + ["roll"] * ("shift" in kwargs) + ["crop"] * ("kept" in kwargs)))
def window_merge(
    windows: Tensor,
    sizes: Sequence[int],
    shift: Sequence[int] = (0, 0),
    kept: Sequence[int | None] = (None, None),
    rolled_first: bool = True,
) -> Tensor:
    """The images that windows [images, down, across, height, width, channels] make up, rolled and cut to size."""
    size = _merged(windows.shape, sizes, kept, rolled_first) if windows.is_cpu else None
    if size is not None:
        return _window_merge(windows, size, shift)  # type: ignore[no-any-return]
    merged = windows.permute(_BY_WINDOWS).reshape(*sizes)
    merged = merged.roll(tuple(shift), (1, 2)) if rolled_first else merged
    merged = merged[:, : kept[0], : kept[1], :]
    return merged if rolled_first else merged.roll(tuple(shift), (1, 2))


@chainable(window_merge, where=_is_told, is_row_major=always)
def _window_merge_call(
    seen: Seen,
    windows: Value,
    sizes: tuple[Number, ...],
    shift: tuple[Number, ...] = (0, 0),
    kept: tuple[Number | None, ...] = (None, None),
    rolled_first: bool = True,
) -> Call:
    """A call that asks for more than the windows cover is none: it would cost every call a comparison."""
    asked = [
        Computed("*", SizeOf(windows, 1 + i), SizeOf(windows, 3 + i)) if part is None else part
        for i, part in enumerate(kept)
    ]
    others, numbers = numbers_of((*sizes, *asked))

    def fits(windows: Shape, *shapes: Shape) -> bool:
        known = numbers(*shapes)
        return _merged(windows, known[:4], known[4:], rolled_first) == known[4:]

    def shape(windows: Shape, *shapes: Shape) -> Shape:
        return (windows[0], *numbers(*shapes)[4:], windows[5])

    return Call("window_merge", (windows, asked, shift), windows, shape, others=others, fits=fits)
