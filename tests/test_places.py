"""All places in which Python holds something for a step: found by one walk, and looked at in one go."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_harmony.engine.model.attributes import LONGEST
from lightning_harmony.held import held_state
from lightning_harmony.held import places as places_module
from lightning_harmony.held.held_state import Held, Kind
from lightning_harmony.held.places import Places
from lightning_harmony.held.walk import Walk
from support.counters import counter


class Kept:
    """An object of the user's."""


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(70))
        self.numbers = [1, 2]
        self.by_name = OrderedDict(one=1, two=2)
        self.names = {"a"}
        self.table: dict[str, int] = {}
        self.unordered: OrderedDict[str, int] = OrderedDict()
        self.helper = SimpleNamespace(seen=[])
        self.hidden: Any = None
        self.long = list(range(LONGEST + 1))


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Walk]:
    """All walks."""
    made: list[Walk] = []

    def walk(*args: Any) -> Walk:
        made.append(Walk(*args))
        return made[-1]

    monkeypatch.setattr(places_module, "Walk", walk)
    return made


def names_of(changed: Any) -> set[str]:
    return {held.name for held, _, _ in changed}


CHANGES: dict[str, tuple[Callable[[Module], Any], str]] = {
    "attribute": (lambda m: setattr(m, "hidden", 3), ""),
    "of a layer": (lambda m: setattr(m.inner[69], "calls", 3), "inner.69"),
    "list": (lambda m: m.numbers.append(3), "numbers"),
    "list, in place": (lambda m: m.numbers.__setitem__(0, 3), "numbers"),
    "order": (lambda m: m.by_name.move_to_end("one"), "by_name"),
    "name": (lambda m: m.by_name.update(three=m.by_name.pop("two")), "by_name"),
    "name and order": (lambda m: m.by_name.popitem(last=False), "by_name"),
    "other": (lambda m: m.by_name.__ior__({"one": 3}), "by_name"),
    "empty dict": (lambda m: m.table.update(calls=1), "table"),
    "empty dict, by another": (lambda m: m.table.update({"calls": 1, "of": 2}), "table"),
    "empty dict, merged": (lambda m: m.table.__ior__({"calls": 1}), "table"),
    "set": (lambda m: m.names.add("b"), "names"),
    "empty list": (lambda m: m.helper.seen.append(1), "helper.seen"),
    "hook": (lambda m: m.inner[3].register_forward_hook(max), "inner.3._forward_hooks"),
    "object": (lambda m: setattr(m.helper, "calls", 1), "helper"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_told_and_nothing_else(change: str, walks: list[Walk]) -> None:
    module = Module()
    places = Places(module)
    begun = places.look()
    assert begun.changed() == []
    apply, where = CHANGES[change]
    apply(module)
    assert names_of(begun.changed()) == {where}
    assert places.look().changed() == []
    assert len(walks) == 1


def test_what_comes_into_an_order_may_change_it_later() -> None:
    module = Module()
    places = Places(module)
    places.look()
    module.unordered.update(one=1, two=2)
    filled = places.look()
    assert filled.changed() == []
    module.unordered.move_to_end("one")
    assert names_of(filled.changed()) == {"unordered"}


def test_a_dict_that_was_emptied_is_seen_to_be_filled_at_once() -> None:
    """From Python 3.12 on, torch does not count that."""
    module = Module()
    module.table.update(one=1)
    places = Places(module)
    places.look()
    module.table.clear()
    emptied = places.look()
    module.table |= {"one": 1}
    assert names_of(emptied.changed()) == {"table"}


# Python has ways of its own for what is set often.
OFTEN: dict[str, tuple[Callable[[Module], Callable[[int], None]], str]] = {
    "attribute": (lambda m: lambda i: setattr(m, "hidden", i), ""),
    "of an object": (lambda m: _counting(m.helper), "helper"),
    "of a class": (lambda m: _counting(type(m)), "class Module"),
    "global": (lambda m: _set_global, __name__),
}
_calls = 0


def _counting(owner: Any) -> Callable[[int], None]:
    def count(calls: int) -> None:
        owner.calls = calls

    return count


def _set_global(calls: int) -> None:
    global _calls  # noqa: PLW0603
    _calls = calls


@pytest.mark.parametrize("kind", OFTEN)
def test_what_changes_often_is_told_each_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Module, "calls", 0, raising=False)
    module = Module()
    module.helper.calls = 0
    places = Places(module)
    change, where = OFTEN[kind]
    set_to = change(module)
    for number in range(1000, 1300):
        begun = places.look()
        set_to(number)
        assert names_of(begun.changed()) == {where}


def test_what_has_not_changed_is_copied_once() -> None:
    module = Module()
    places = Places(module)
    one = places.look()
    module.numbers.append(3)
    other = places.look()
    copies = [(held.name, a is b) for (held, a), (_, b) in zip(one, other, strict=True)]
    assert [name for name, is_same in copies if not is_same] == ["numbers"]


def test_what_is_put_is_known_until_it_changes() -> None:
    module = Module()
    places = Places(module)
    begun = places.look()
    helper = next(held for held, _ in begun if held.content is vars(module.helper))
    helper.put_known({"calls": 1})
    begun.know([helper])
    [(held, _, now)] = begun.changed()
    assert (held, now["calls"]) == (helper, 1)
    module.helper.calls = 2
    [(held, _, now)] = begun.changed()
    assert (held, now["calls"]) == (helper, 2)
    module.helper.calls = 1
    [(held, _, now)] = begun.changed()
    assert (held, now["calls"]) == (helper, 1)


NEW: dict[str, tuple[Callable[[Module], Any], str]] = {
    "object": (lambda m: setattr(m, "hidden", SimpleNamespace(calls=0)), "hidden"),
    "list in a list": (lambda m: m.numbers.append([]), "numbers[2]"),
    "list in a tuple": (lambda m: setattr(m, "hidden", (1, [])), "hidden[1]"),
    "layer": (lambda m: m.inner.append(nn.Linear(2, 2)), "inner.70"),
    "hook of a backward": (lambda m: m.register_full_backward_hook(lambda *_: None), "_backward_hooks"),
    "list that was long": (lambda m: m.long.clear(), "long"),
    "in a new attribute of a layer": (lambda m: setattr(m.inner[5], "seen", []), "inner.5.seen"),
}


@pytest.mark.parametrize("change", NEW)
def test_places_that_come_are_found(change: str) -> None:
    module = Module()
    places = Places(module)
    places.look()
    apply, where = NEW[change]
    apply(module)
    found = [held.name for held in places.look().places]
    assert any(name.startswith(where) for name in found)


@pytest.mark.parametrize("change", NEW)
@pytest.mark.parametrize("is_seen", [False, True], ids=["at the end", "meanwhile"])
def test_places_that_come_in_a_step_are_found_in_the_next(change: str, is_seen: bool) -> None:
    """What an object that a step had made was changed to in later steps, nobody saw."""
    module = Module()
    places = Places(module)
    begun = places.look()
    apply, where = NEW[change]
    apply(module)
    if is_seen:
        begun.changed()
    places.let_go()
    found = [held.name for held in places.look().places]
    assert any(name.startswith(where) for name in found)


def test_places_that_have_gone_are_not_looked_at_and_not_kept() -> None:
    module = Module()
    places = Places(module)
    module.hidden = Kept()
    gone = weakref.ref(module.hidden)
    places.look()
    module.hidden = None
    assert "hidden" not in {held.name for held in places.look().places}
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("within", [lambda t: t, lambda t: (1, t), lambda t: (1, (t,))])
def test_between_steps_no_tensors_are_kept_and_other_ones_are_nothing_new(
    within: Callable[[Any], Any], walks: list[Walk]
) -> None:
    module, tensor = Module(), torch.zeros(2)
    gone = weakref.ref(tensor)
    module.hidden, module.numbers, module.by_name["t"] = within(tensor), [within(tensor)], within(tensor)
    places = Places(module)
    places.look()
    places.let_go()
    tensor = torch.ones(2)
    module.hidden, module.numbers[0], module.by_name["t"] = within(tensor), within(tensor), within(tensor)
    gc.collect()
    assert gone() is None
    places.look()
    assert len(walks) == 1


def wrapped(function: Callable[[], int]) -> Callable[[], int]:
    return lambda: 2 * function()


def test_variables_are_places_where_a_function_sets_them() -> None:
    """Each of the thousands of decorated functions of a library was looked at in each microbatch."""
    module = Module()
    count, read = counter()
    module.hidden = [read, wrapped(count)]
    names = [held.name for held in Places(module).look().places]
    assert [name for name in names if name.endswith("calls")] == ["hidden[1].function.calls"]
    module.hidden = [read]
    assert not any("calls" in held.name for held in Places(module).look().places)


def test_of_a_list_that_grows_what_is_new_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list to which each step adds its loss was looked through in each turn: steps took ever longer."""
    asked: list[Any] = []
    mark_of = held_state.mark_of
    monkeypatch.setattr(held_state, "mark_of", lambda value: (asked.append(value), mark_of(value))[1])
    content = [torch.zeros(()) for _ in range(1000)]
    held = Held("losses", content, Kind.CONTAINER)
    before, num_asked = held.marks.now(), len(asked)
    content.append(torch.zeros(()))
    assert held.look() == content
    assert len(asked) == num_asked + 1
    assert held.marks.now() == [[*before[0], 0]]
    # What was there before still tells of changes in place, asked for in one go.
    content[5].add_(1)
    assert held.marks.now() != [[*before[0], 0]]
    assert len(asked) == num_asked + 1
    content[0] = torch.zeros(())
    held.look()
    assert held.marks.tensors == content


def test_what_goes_from_a_list_to_the_next_one_is_a_change_of_both() -> None:
    """All lists were compared as one: everything was in the same order as before."""
    module = nn.Module()
    module.one, module.two = [1, 2], [3]
    places = Places(module)
    contents = places.look()
    module.two.insert(0, module.one.pop())
    assert [held.name for held, _, _ in contents.changed()] == ["one", "two"]
