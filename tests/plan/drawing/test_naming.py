"""Names and colours of what is drawn."""

import re
from dataclasses import replace

from lightning_harmony.plan.drawing.naming import colour_of, ink_on, pack_name, task_name
from lightning_harmony.plan.values.prediction import Span
from lightning_harmony.plan.values.task import Errand, Phase, Task
from support.plans import STEP, WITHOUT_MICROBATCH

PLAN = replace(STEP, packs=(("net.wte",), ("net.h.0", "net.h.1", "net.h.2"), (), ("net.h.3",)))


def test_packs_are_called_by_their_layers_without_what_all_have_in_common() -> None:
    assert [pack_name(PLAN, pack) for pack in range(4)] == ["wte", "h.0 to h.2", "pack 2", "h.3"]


def test_no_name_begins_with_a_number() -> None:
    """Packs of a stack were called "0 0.0" and "1 1.0" in the key."""
    plan = replace(STEP, packs=(("model.net.0.0",), ("model.net.1.0", "model.net.2.0")))
    assert [pack_name(plan, pack) for pack in range(2)] == ["net.0.0", "net.1.0 to net.2.0"]


def test_tasks_are_told_in_words() -> None:
    assert task_name(PLAN, Task(3, Phase.FORWARD, 3)) == "h.3 forward, microbatch 3"
    assert task_name(PLAN, Task(1, Errand.SWAP_IN)) == "h.0 to h.2 weights to the device"
    for kind in (*Phase, *Errand):
        words = task_name(PLAN, Task(0, kind, 5))
        assert ("5" in words) == (kind not in WITHOUT_MICROBATCH), words


def test_26_packs_have_colours_of_their_own() -> None:
    colours = [colour_of(pack, is_light=light) for pack in range(26) for light in (False, True)]
    assert len(set(colours)) == 52
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_letters_are_white_on_dark_packs_only() -> None:
    inks = {pack: ink_on(Span(Task(pack, Phase.BACKWARD, 0), "compute", 0.0, 1.0)) for pack in (0, 10, 20)}
    assert inks == {0: "#333333", 10: "#333333", 20: "#ffffff"}
    assert ink_on(Span(Task(20, Phase.FORWARD, 0), "compute", 0.0, 1.0)) == "#333333"
