"""What a recorded program asks before each call (`_C.ModuleGuard`, `_C.Operands`): that every kind of change is seen at
once, also by those who remember what they saw in the call before."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from xopt import _C

Change = Callable[[Any], None]


def network() -> Any:
    return nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), nn.ReLU()).eval()


class Watched:
    """A network, and guards made for what it is now."""

    def __init__(self) -> None:
        self.root: Any = network()
        self.root[0][0].padding = [1, 1]
        self.guard = _C.ModuleGuard(0)
        self.guard.add(0, "0", weakref.ref(self.root[0]), 0)
        self.guard.add(1, "0", weakref.ref(self.root[0][0]), 0)
        self.guard.add(1, "1", weakref.ref(self.root[0][1]), 0)
        self.guard.add(0, "1", weakref.ref(self.root[1]), 0)
        self.guard.add_container(2, "padding", [1, 1])
        self.operands = _C.Operands()
        conv, norm = self.root[0]
        self.operands.expect_attribute(2, "stride", conv.stride)
        self.operands.expect_attribute(2, "dilation", conv.dilation)
        self.operands.take_tensor(2, "weight", conv.weight)
        self.operands.take_tensor(2, "bias", conv.bias)
        self.operands.take(torch.ones(1))
        self.operands.expect_tensor(3, "weight", norm.weight, norm.weight._version)
        self.operands.expect_tensor(3, "running_mean", norm.running_mean, norm.running_mean._version)
        self.operands.take_tensor(3, "running_var", norm.running_var)

    def find(self) -> list[Any] | None:
        modules = self.guard(self.root)
        return None if modules is None else self.operands.gather(modules, (self.root[0][0].bias,))

    def check(self) -> None:
        conv, norm = self.root[0]
        modules: Any = self.guard(self.root)
        assert [id(module) for module in modules] == [
            id(each) for each in (self.root, self.root[0], conv, norm, self.root[1])
        ]
        found = self.find()
        assert found is not None
        assert [id(each) for each in found[:3]] == [id(conv.bias), id(conv.weight), id(conv.bias)]
        assert found[4] is norm.running_var


class Thing:
    size = 1
    owner: Any = None

    def __init__(self) -> None:
        self.size = 1


class Slotted:
    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 1


class WithMore:
    """A guard over what is no module, too, and how often that was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.thing, self.slotted, self.kind = Thing(), Slotted(), type("Kind", (), {"size": 1})
        self.names, self.items, self.flags, self.scope = (
            {"size": 1},
            [1.5, self.thing],
            {"one"},
            {"size": 1, "other": 1},
        )
        self.module: Any = nn.Linear(2, 2)
        self.module.__dict__["size"] = 1
        self.items.append(self.module)
        self.guard = _C.ModuleGuard(0)
        self.guard.add_check(0, self.check("module"))
        for name in ("thing", "slotted", "kind"):
            self.guard.add_dictionary(getattr(self, name), self.check(name))
        self.guard.add_dictionary(self.names, self.check("names", lambda names: names["size"]))
        self.guard.add_items(self.items, (1.5, self.thing, weakref.ref(self.module)))
        self.guard.add_set(self.flags, frozenset({"one"}))
        self.guard.add_global(self.scope, "size", 1)

    def check(self, name: str, size_of: Callable[[Any], int] = lambda owner: owner.size) -> Callable[[Any], bool]:
        def check(owner: Any) -> bool:
            self.asked.append(name)
            return size_of(owner) == 1

        return check

    def passes(self) -> bool:
        self.asked.clear()
        return self.guard(self.module) is not None


MORE: dict[str, tuple[Change, Change]] = {
    "module": (lambda w: setattr(w.module, "size", 2), lambda w: setattr(w.module, "size", 1)),
    "thing": (lambda w: setattr(w.thing, "size", 2), lambda w: setattr(w.thing, "size", 1)),
    "attributes": (lambda w: setattr(w.thing, "__dict__", {"size": 2}), lambda w: setattr(w.thing, "__dict__", {})),
    "slots": (lambda w: setattr(w.slotted, "size", 2), lambda w: setattr(w.slotted, "size", 1)),
    "class": (lambda w: setattr(w.kind, "size", 2), lambda w: setattr(w.kind, "size", 1)),
    "dictionary": (lambda w: w.names.update(size=2), lambda w: w.names.update(size=1)),
    "item": (lambda w: w.items.__setitem__(0, 2.5), lambda w: w.items.__setitem__(0, 0.5 + 1.0)),
    "kind of item": (lambda w: w.items.__setitem__(0, Thing()), lambda w: w.items.__setitem__(0, 1.5)),
    "item that is a module": (
        lambda w: w.items.__setitem__(2, nn.Linear(2, 2)),
        lambda w: w.items.__setitem__(2, w.module),
    ),
    "more items": (lambda w: w.items.append(1), lambda w: w.items.pop()),
    "set": (lambda w: w.flags.add("two"), lambda w: w.flags.remove("two")),
    "global": (lambda w: w.scope.update(size=2), lambda w: w.scope.update(size=1)),
    "global's kind": (lambda w: w.scope.update(size=True), lambda w: w.scope.update(size=1)),
    "global less": (lambda w: w.scope.pop("size"), lambda w: w.scope.update(size=1)),
}


@pytest.mark.parametrize("name", MORE)
def test_changes_of_what_is_no_module_are_seen(name: str) -> None:
    watched = WithMore()
    change, undo = MORE[name]
    for _ in range(3):
        assert watched.passes()
        change(watched)
        assert not watched.passes()
        assert not watched.passes()
        undo(watched)
        assert watched.passes()


def test_what_has_not_changed_is_not_asked_for_again() -> None:
    watched = WithMore()
    assert watched.passes()
    assert watched.asked == ["module", "thing", "slotted", "kind", "names"]
    assert watched.passes()
    assert watched.asked == ["slotted"]  # which has no dictionary that tells
    watched.scope["other"] = 2
    assert watched.passes()
    assert watched.asked == ["slotted"]


def test_a_guard_that_its_objects_lead_to_is_collected() -> None:
    watched = WithMore()
    watched.thing.owner = watched
    gone = weakref.ref(watched.thing)
    assert watched.passes()
    del watched
    gc.collect()
    assert gone() is None


def hook(*_: Any) -> None:
    return None


def set_in_place(root: Any) -> None:
    root[0][0].padding[0] = 2


def new_attributes(root: Any) -> None:
    root[0][0].__dict__ = dict(root[0][0].__dict__, stride=(2, 2))


def new_hooks(root: Any) -> None:
    root[1].__dict__["_forward_hooks"] = OrderedDict({0: hook})


CHANGES: dict[str, Change] = {
    "training": lambda root: setattr(root[1], "training", True),
    "all in training": lambda root: root.train(),
    "an epoch": lambda root: root[0].__dict__.update({_C.ModuleGuard.EPOCH: 1}),
    "the root's epoch": lambda root: root.__dict__.update({_C.ModuleGuard.EPOCH: 1}),
    "a forward of its own": lambda root: setattr(root[0][0], "forward", hook),
    "a forward hook": lambda root: root[0][1].register_forward_hook(hook),
    "a hook before": lambda root: root[0].register_forward_pre_hook(hook),
    "a hook on gradients": lambda root: root[1].register_full_backward_hook(hook),
    "other hooks": new_hooks,
    "another module": lambda root: root.__setitem__(1, nn.ReLU().eval()),
    "another module inside": lambda root: root[0].__setitem__(1, nn.BatchNorm2d(4).eval()),
    "another parent": lambda root: root.__setitem__(0, nn.Sequential(*root[0]).eval()),
    "a module less": lambda root: root[0]._modules.pop("1"),
    "all modules": lambda root: root[0]._modules.clear(),
    "a container": set_in_place,
    "an attribute": lambda root: setattr(root[0][0], "stride", (2, 1)),
    "an attribute less": lambda root: root[0][0].__dict__.pop("dilation"),
    "attributes": new_attributes,
    "a weight": lambda root: setattr(root[0][0], "weight", nn.Parameter(root[0][0].weight.clone())),
    "a weight beside torch": lambda root: root[0][0]._parameters.update(weight=root[0][0].weight.clone()),
    "no bias": lambda root: setattr(root[0][0], "bias", None),
    "a weight's values": lambda root: root[0][1].weight.detach().mul_(2),
    "a buffer": lambda root: setattr(root[0][1], "running_var", torch.ones(4)),
    "a buffer's values": lambda root: root[0][1].running_mean.add_(1),
    "a buffer less": lambda root: root[0][1]._buffers.pop("running_mean"),
    "no parameters": lambda root: root[0][1].__dict__.update(_parameters={}),
    "no buffers": lambda root: root[0][1].__dict__.update(_buffers={}),
}


@pytest.mark.parametrize("calls_before", [0, 1, 5])
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(name: str, calls_before: int) -> None:
    watched = Watched()
    for _ in range(calls_before):
        watched.check()
    CHANGES[name](watched.root)
    for _ in range(3):
        assert watched.find() is None


def test_what_is_as_before_passes_again() -> None:
    watched = Watched()
    conv, norm = watched.root[0]
    weight, running_var = conv.weight, norm.running_var
    for _ in range(100):  # enough for the interpreter to make a faster kind of store of each
        watched.check()
        handle = norm.register_forward_hook(hook)
        assert watched.find() is None
        handle.remove()
        watched.check()
        watched.root[1].training = True
        assert watched.find() is None
        watched.root[1].training = False
        watched.check()
        conv.stride = (2, 1)
        assert watched.find() is None
        conv.stride = (1, 1)
        watched.check()
        conv.weight = nn.Parameter(torch.ones(4, 4, 3, 3))
        assert watched.find() is None
        conv.weight = weight
        watched.check()
        norm.running_var = torch.ones(4)
        assert watched.find() is None
        norm.running_var = running_var
        watched.check()
        watched.root[0][1] = nn.Identity().eval()
        assert watched.find() is None
        watched.root[0][1] = norm
        watched.check()


def test_what_has_nothing_to_do_with_a_program_may_change() -> None:
    watched = Watched()
    for number in range(5):
        watched.root.note = number
        watched.root[0][0].note = [number]
        watched.root[0][1].register_buffer(f"note{number}", torch.ones(1))
        watched.root[1]._buffers["note"] = None
        watched.check()


def test_new_objects_where_old_ones_lay() -> None:
    """The allocator gives an exchanged module's memory, and its dictionaries', to the next one."""
    watched = Watched()
    kept = watched.root[0][1]
    for _ in range(50):
        watched.check()
        watched.root[0][1] = nn.BatchNorm2d(4).eval()
        assert watched.find() is None
        watched.root[0][1] = nn.BatchNorm2d(4).eval()
        gc.collect(0)
        assert watched.find() is None
        watched.root[0][1] = kept


def test_a_guard_keeps_nothing_alive() -> None:
    watched = Watched()
    watched.check()
    inside = weakref.ref(watched.root[0][0])
    weight = weakref.ref(watched.root[0][0].weight)
    watched.root[0][0] = nn.Identity().eval()
    assert inside() is None
    assert weight() is None
    assert watched.find() is None
