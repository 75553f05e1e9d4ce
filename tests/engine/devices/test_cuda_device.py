"""What of a GPU needs no GPU."""

from __future__ import annotations

import torch

from lightning_harmony.engine.devices.cuda_device import _Uses


class Event:
    """One that tells who has waited for it."""

    def __init__(self) -> None:
        self.is_over, self.was_waited_for = False, False

    def wait(self) -> None:
        self.was_waited_for = True

    synchronize = wait

    def done(self) -> bool:
        return self.is_over


def test_who_has_freed_memory_waits_for_what_used_it_and_for_nothing_else() -> None:
    """Weights that are brought meanwhile would otherwise hold up what computes."""
    uses, memory = _Uses(), torch.empty(100, dtype=torch.uint8)
    before, within, behind = Event(), Event(), Event()
    uses.add(memory[:40], [before])
    uses.add(memory[40:60], [within])
    uses.add(memory[60:], [behind])
    uses.wait_for(memory[39:60])
    assert (before.was_waited_for, within.was_waited_for, behind.was_waited_for) == (True, True, False)


def test_uses_that_are_over_are_forgotten() -> None:
    uses, memory = _Uses(), torch.empty(100, dtype=torch.uint8)
    event = Event()
    uses.add(memory[:40], [event])
    event.is_over = True
    uses.add(memory[40:], [])
    uses.wait_for(memory)
    assert not event.was_waited_for
