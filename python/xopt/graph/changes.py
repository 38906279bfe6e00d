"""What a recorded forward does to tensors in place, as steps that make new ones, which is right where nobody sees
the old."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from xopt.graph.fresh import is_blank, is_read_after, memory_of
from xopt.graph.steps import copied_with_part, with_part
from xopt.graph.symbol import CannotRecord, Symbol


class TooManySteps(CannotRecord):
    """A forward goes step by step along one of its input's dimensions, which may be shorter in other calls."""


_MOST_PLACES = 24  # of a tensor that a forward takes one by one


class Changes:
    def __init__(self) -> None:
        self._replaced: list[tuple[Node, Node]] = []
        """Memory, and the step that stands for what is in it after a change."""
        self._partly: list[tuple[Node, Node]] = []
        """The same of blank tensors, whose parts are written to where they lie."""
        self._of_objects: set[Node] = set()
        self._places: dict[Node, set[int]] = {}

    def in_place(self, function: Any, target: Any = None, *args: Any, **kwargs: Any) -> Any:
        """An operation in place, recorded as one that makes a new tensor. Right only where the old one is fresh and
        not seen otherwise, which `check` looks at. The symbol stands for the new one from then on."""
        if function is None or type(target) is not Symbol or not isinstance(target._example, torch.Tensor):
            raise CannotRecord("it changes something in place")
        result = target._recorder.call(function, target, *args, **kwargs)
        memory = memory_of(target._node)
        if memory is None or result._example.dtype != target._example.dtype:
            raise CannotRecord("it changes a tensor in place that others may see")
        self._replaced.append((memory, result._node))
        target._node, target._example = result._node, result._example
        return target

    def take_place(self, target: Symbol, key: Any) -> None:
        """Looks at how many places of a tensor are taken by their numbers: to record as many steps as a text has words
        takes longer than a program saves."""
        numbers = [each for each in (key if type(key) is tuple else (key,)) if type(each) is int]
        if numbers and target._node.op != "get_attr" and isinstance(target._example, torch.Tensor):
            places = self._places.setdefault(target._node, set())
            places.update(numbers)
            if len(places) > _MOST_PLACES:
                raise TooManySteps("it goes along a dimension step by step")

    def write_part(self, target: Symbol, key: Any, value: Any) -> None:
        """`target[key] = value`, recorded as a step: in a copy, if it is no blank tensor."""
        if not isinstance(target._example, torch.Tensor):
            raise CannotRecord("it writes to a part of something that is no tensor")
        if not is_blank(target._node.target):
            self.in_place(copied_with_part, target, key, value)
            return
        given = (target, key, value)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            example = with_part(*target._recorder.examples(given))
        result = target._recorder.record("call_function", with_part, given, {}, example)
        self._partly.append((target._node, result._node))
        target._node = result._node

    def copy_into(self, target: Symbol, source: Any) -> None:
        """`target.copy_(source)`, where the target is a part of a blank tensor, all of one, or held by an object."""
        if target._part_of is not None:
            self.write_part(*target._part_of, source)
            return
        memory, known = target._node, target._example
        of_object = memory in self._of_objects
        is_like = type(source) is Symbol and getattr(source._example, "shape", None) == known.shape
        if not is_like or not (of_object or is_blank(memory.target)):
            raise CannotRecord("it changes something in place")
        value = source.to(known.dtype) if of_object else source.to(known.dtype, copy=True)
        self._replaced.append((memory, value._node))
        if of_object:
            target._recorder.call_late(memory, torch.Tensor.copy_, (memory, value))
        target._node, target._example = value._node, value._example

    def may_be_written(self, symbol: Symbol) -> None:
        """Of a tensor that an object holds: the forward may write all of it, which is done at the end."""
        self._of_objects.add(symbol._node)

    def check(self, graph: Graph) -> None:
        """Once the whole graph is known."""
        places = {node: index for index, node in enumerate(graph.nodes)}
        for memory, change in self._replaced:
            if is_read_after(memory, change, places):
                raise CannotRecord("it changes a tensor in place that is used again")
        for old, new in self._partly:
            if any(user.users for user in set(old.users) - {new}):  # not what the part itself was taken by
                raise CannotRecord("it writes to a part of a tensor that is used again")
