"""What microbatches that take turns leave is looked at in each turn, and again there alone where it may be something else."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.attributes import AttributesOfLayer
from lightning_harmony.held.held_state import ALL, Held
from lightning_harmony.held.places import Places
from lightning_harmony.held.reads import Readers, Watched
from lightning_harmony.held.walk import Other
from lightning_harmony.microbatches.lane_attributes import KnownChanges, LaneAttributes
from lightning_harmony.microbatches.stale_reads import StaleReads


class WithSlots:
    __slots__ = ("number",)


class OfItsOwn(Tensor):
    pass


class Counts(dict[str, Any]):
    """A dict of a class of one's own."""


def has_changed(kept: Any, what: str, change: Callable[[Any], Any]) -> bool:
    """Whether a change in a turn behind the first ones is seen: it is known to happen in a microbatch's last turn alone."""
    owner = SimpleNamespace(kept=kept)
    places = Places(nn.Linear(1, 1), lambda names: [Other("owner", owner)])
    (held,) = [held for held in places.look().places if held.name == what]
    name = next(iter(held.newest), None) if held.is_named else None
    names = {name, "number", "tensor"} - {None} if held.is_named else {ALL}
    reads = StaleReads([held], [], KnownChanges(changed={what: names}, harmless={what: {*names, ALL}}))
    for microbatch in (0, 1, 0):
        reads.leave()
        reads.enter(microbatch)
    change(kept)
    for microbatch in (1, 0):
        reads.leave()
        reads.enter(microbatch)
    found = reads.early()
    reads.close()
    return found is not None


def filled() -> Any:
    return SimpleNamespace(number=0, tensor=torch.zeros(2))


def halved() -> Any:
    return SimpleNamespace(tensor=torch.zeros(2).as_subclass(OfItsOwn))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a number": (filled, lambda kept: setattr(kept, "number", 1)),
    "a name that goes": (filled, lambda kept: delattr(kept, "number")),
    "a name that comes": (lambda: SimpleNamespace(number=0), lambda kept: setattr(kept, "tensor", 1)),
    "the first name": (SimpleNamespace, lambda kept: setattr(kept, "number", 1)),
    "the first names, at once": (SimpleNamespace, lambda kept: vars(kept).update(vars(filled()))),
    "another tensor": (filled, lambda kept: setattr(kept, "tensor", torch.zeros(2))),
    "a tensor in place": (filled, lambda kept: kept.tensor.add_(1)),
    "a view in place": (filled, lambda kept: kept.tensor[:1].add_(1)),
    "a tensor for a number": (filled, lambda kept: setattr(kept, "number", torch.zeros(2))),
    "a tensor of another class": (halved, lambda kept: setattr(kept, "tensor", torch.zeros(2))),
    "a tensor of another class in place": (halved, lambda kept: kept.tensor.add_(1)),
    "a slot": (WithSlots, lambda kept: setattr(kept, "number", 1)),
    "an entry": (lambda: {"number": 0}, lambda kept: kept.update(number=1)),
    "an entry in order": (lambda: OrderedDict(number=0), lambda kept: kept.update(number=1)),
    "an entry past the code of a class": (lambda: Counts(number=0), lambda kept: dict.__setitem__(kept, "number", 1)),
    "an entry of an object": (lambda: UserDict(number=0), lambda kept: kept.update(number=1)),
    "an item": (lambda: [0], lambda kept: kept.append(1)),
    "a tensor of a list in place": (lambda: [torch.zeros(2)], lambda kept: kept[0].add_(1)),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_what_changes_in_any_turn_is_seen(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    what = "owner.kept.data" if (kept := make()).__class__ is UserDict else "owner.kept"
    assert has_changed(kept, what, change)
    assert not has_changed(make(), what, lambda kept: None)


def test_tensors_of_inference_are_looked_at_as_others_are() -> None:
    """They count no changes, and to ask for these raises."""

    def replace(kept: Any) -> None:
        kept.tensor = torch.zeros(2)

    def of_inference() -> SimpleNamespace:
        with torch.inference_mode():
            return SimpleNamespace(tensor=torch.zeros(2), other=torch.ones(2))

    assert has_changed(of_inference(), "owner.kept", replace)
    assert not has_changed(of_inference(), "owner.kept", lambda kept: None)


def test_what_is_as_it_was_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of attributes of layers' objects were looked at twice in each turn: it took as long as the step itself."""
    owner = SimpleNamespace(number=0, tensor=torch.zeros(2), other=1)
    (held,) = [
        h for h in Places(nn.Linear(1, 1), lambda names: [Other("owner", owner)]).look().places if h.name == "owner"
    ]
    reads = StaleReads([held], [], KnownChanges(changed={"owner": {"number", "tensor"}}))
    reads.enter(0)
    looked: list[Any] = []
    monkeypatch.setattr(
        "lightning_harmony.microbatches.stale_reads.State", SimpleNamespace(of=lambda *args: looked.append(args))
    )
    reads.leave()
    reads.enter(1)
    owner.other = 2
    reads.leave()
    assert not looked
    reads.close()


def test_to_look_at_a_layers_attributes_asks_no_watched_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was asked in Python half a dozen times around each call of its layer."""
    asked: list[Any] = []
    monkeypatch.setattr(Watched, "__torch_function__", classmethod(lambda cls, func, *args: asked.append(func)))
    readers, module = Readers((), lambda place: None, asked.append), nn.Module()
    module.kept = torch.zeros(3)
    readers.watch(module.kept, "found")
    before = AttributesOfLayer([module], []).read()
    assert before.are_current()
    with torch._C.DisableTorchFunctionSubclass():
        module.kept.add_(1)
    assert not before.are_current()
    assert not asked
    readers.close()


# ---- what lanes switch -----------------------------------------------------------------------------------------------------


def lanes_of(module: nn.Module, names: set[str]) -> LaneAttributes:
    lanes = LaneAttributes(Places(module), KnownChanges(names))
    lanes.begin()
    return lanes


def test_what_a_layer_sets_in_a_later_turn_others_find_from_then_on() -> None:
    module = nn.Module()
    module.begun = None
    lanes = lanes_of(module, {""})
    for microbatch in (0, 1, 0):
        lanes.switch(microbatch)
        module.begun = f"by {microbatch}"
    lanes.switch(2)
    assert module.begun is None
    lanes.switch(0)
    assert module.begun == "by 0"
    lanes.set_by_layer(vars(module), {"begun"})
    lanes.switch(2)
    assert module.begun == "by 1"
    lanes.finish()


def test_a_list_that_holds_tensors_no_more_is_for_its_microbatch_alone() -> None:
    module = nn.Module()
    module.kept = None
    lanes = lanes_of(module, {""})
    lanes.switch(0)
    own = module.kept = [torch.zeros(1)]
    lanes.switch(1)
    assert module.kept is own
    lanes.switch(0)
    own.clear()
    lanes.switch(1)
    assert module.kept is None
    lanes.finish()


def test_hooks_keep_the_order_in_which_a_microbatch_has_set_them() -> None:
    module = nn.Linear(1, 1)
    lanes = lanes_of(module, {"_forward_hooks"})
    orders: dict[int, list[int]] = {}
    for microbatch in (0, 1):
        lanes.switch(microbatch)
        handles = [module.register_forward_hook(print) for _ in range(2 + microbatch)]
        handles[0].remove()
        orders[microbatch] = list(module._forward_hooks)
    for microbatch in (0, 1, 0):
        lanes.switch(microbatch)
        assert list(module._forward_hooks) == orders[microbatch]


def test_what_nobody_changes_is_copied_in_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attributes of thousands of objects were put, compared and copied twice in each turn."""
    module = nn.ModuleList(nn.Module() for _ in range(3))
    lanes = lanes_of(module, {"0", "1", "2"})
    for microbatch in (0, 1):
        lanes.switch(microbatch)
        for each in module:
            each.kept = torch.ones(1)
    lanes.switch(0)
    copied: list[str] = []
    copy = Held._copy
    monkeypatch.setattr(Held, "_copy", lambda held: (copied.append(held.name), copy(held)))
    kept = [each.kept for each in module]
    for microbatch in (1, 0, 1, 0):
        lanes.switch(microbatch)
    assert not copied
    assert all(each.kept is own for each, own in zip(module, kept, strict=True))
