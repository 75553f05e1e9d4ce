"""Residents: which packs are on the device, who comes next, and who makes way."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from lightning_harmony.engine.device import Device
from lightning_harmony.engine.stash import Stash
from lightning_harmony.engine.swap import SwappedPack, Swapper
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.plan import Plan
from lightning_harmony.plan.task import Phase

# How many packs beyond the running one are fetched ahead, where there is room.
LOOKAHEAD = 2


class Place(NamedTuple):
    """Where a lane is: in a pack, in a phase, and where in the plan's order of that phase."""

    pack: SwappedPack
    phase: Phase
    position: int


class HasGraph(Protocol):
    """A call that keeps its graph, and with it the weights that it was computed with."""

    def forget(self) -> None:
        """Let the graph go."""


class Residents:
    """Swaps packs in and out within the capacity of one device, as a plan foresees their use.

    Args:
        device: where they reside.
        swapper: makes the copies.
        stash: has tensors on their way out, whose memory can be had by waiting.

    Attributes:
        plan: what is needed when.
        packs: those of the plan, by their indices, and those that it doesn't know.
        pinned: the packs that lanes behind the running one will come through, wherever that is.
    """

    def __init__(self, device: Device, swapper: Swapper, stash: Stash) -> None:
        self.plan = Plan((), (), 0)
        self.packs: list[SwappedPack] = []
        self.pinned: frozenset[int] = frozenset()
        self._device = device
        self._swapper = swapper
        self._stash = stash
        self._graphs: dict[int, weakref.WeakSet[HasGraph]] = {}

    def bring(self, place: Place, work_bytes: int) -> None:
        """Swap the pack of a place in, with room for its work, and let the caller's computing wait for it.

        Raises:
            CapacityError: if there is no room for its weights.
        """
        pack = place.pack
        self.ensure_room(work_bytes + (0 if pack.residency is not None else pack.swap_in_bytes), place)
        try:
            self._swapper.swap_in(pack)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"pack {pack.index} ({pack.name}) does not fit beside what glue keeps: {error}"
            ) from error
        assert pack.residency is not None
        pack.residency.ready.wait()

    def ensure_room(self, num_bytes: int, place: Place) -> None:
        """Free what isn't needed now, until there is room or nothing is left to free."""
        while not self._device.room_for(num_bytes) and self.make_room(place):
            pass

    def make_room(self, place: Place) -> bool:
        """Free something that isn't needed now, cheapest first; False if there is nothing left.

        To wait for a copy stops the host, which then has no work ready for the device: what can go at once goes first.
        """
        if self._device.retire() or self._stash.retire():
            return True
        soon = [pack.index for pack in self._following(place)]
        others = self._evictable(place)
        if later := [index for index in others if index not in soon]:
            self._evict_one_of(later, place)
            return True
        if self._stash.retire(wait=True) or self._device.retire(wait=True):
            return True
        if others or (others := [pack.index for pack in self._others(place.pack)]):
            self._evict_one_of(others, place)
            return True
        summing = [pack for pack in self.packs if pack.accumulators and pack is not place.pack]
        for pack in summing:
            self._swapper.park_gradients(pack)
        return bool(summing) or self._forget_graphs(place.pack)

    def prefetch(self, place: Place, reserved_bytes: int) -> bool:
        """Start to swap in the packs that come next, as far as there is room; what is needed later makes way.

        Args:
            place: where the running lane is.
            reserved_bytes: what must stay free for its work.

        Returns:
            Whether there was room for all.
        """
        for following in self._following(place):
            if following.residency is not None:
                continue
            while not self._device.room_for(following.swap_in_bytes + reserved_bytes):
                last = self._needed_last([following.index, *self._evictable(place)], place)
                if last == following.index:
                    return False
                self.evict(self.packs[last])
            self._swapper.swap_in(following)
        return True

    def keep_graph(self, pack: SwappedPack, call: HasGraph) -> None:
        """A call of a layer of this pack keeps its graph, until the pack is evicted."""
        self._graphs.setdefault(pack.index, weakref.WeakSet()).add(call)

    def evict(self, pack: SwappedPack) -> None:
        """Take a pack off the device."""
        self._forget_graphs(pack)
        self._swapper.evict(pack)

    def _forget_graphs(self, pack: SwappedPack) -> bool:
        """Let the graphs of a pack's calls go; whether there were any."""
        calls = list(self._graphs.pop(pack.index, ()))
        for call in calls:
            call.forget()
        return bool(calls)

    def evict_all_but(self, pack: SwappedPack) -> None:
        """Leave one pack alone on the device, with all memory for its work."""
        for other in self.packs:
            if other is not pack:
                self.evict(other)
                if other.accumulators:
                    self._swapper.park_gradients(other)
        self.drain()

    def drain(self) -> None:
        """Wait until nothing is on its way out."""
        self._stash.drain()
        while self._device.retire(wait=True):
            pass

    def _others(self, pack: SwappedPack) -> list[SwappedPack]:
        return [other for other in self.packs if other.residency is not None and other is not pack]

    def _evictable(self, place: Place) -> list[int]:
        """The packs on the device besides that of a place that no lane needs soon, as far as the plan tells."""
        return [pack.index for pack in self._others(place.pack) if pack.index not in self.pinned]

    def _following(self, place: Place) -> list[SwappedPack]:
        """The next packs after a place, as many as are fetched ahead."""
        following: list[SwappedPack] = []
        for index in self.plan.upcoming(place.phase, place.position):
            pack = self.packs[index]
            if pack is not place.pack and pack not in following:
                following.append(pack)
                if len(following) == LOOKAHEAD:
                    break
        return following

    def _evict_one_of(self, packs: Sequence[int], place: Place) -> None:
        self.evict(self.packs[self._needed_last(packs, place)])

    def _needed_last(self, packs: Sequence[int], place: Place) -> int:
        return self.plan.needed_last(packs, place.phase, place.position)
