"""Residents: which packs are on the device, who comes next, and who makes way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.memory.agenda import Agenda, Place
from lightning_harmony.engine.memory.stash import Stash
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.memory.weight_checks import WeightChecks
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.task import Phase


@dataclass
class Visit:
    """The stay of lanes in a pack, one after the other.

    Attributes:
        place: where they are.
        reserved_bytes: what the lane that comes next will allocate.
        has_prefetched: whether all that is fetched ahead is under way.
    """

    place: Place
    reserved_bytes: int
    has_prefetched: bool = False


class Residents:
    """Swaps packs in and out within the capacity of one device, as a plan tells, or else as it predicts their use.

    What a device has room for at one moment depends on how fast copies are. So a plan that knows what its layers cost tells
    what comes and what goes, and room is waited for; other packs make way only where it is wrong.

    Args:
        device: where they reside.
        swapper: makes the copies.
        sums: of their gradients.
        stash: has tensors on their way out, whose memory can be had by waiting.
        number: of the device in the plan.
        let_go: lets the memory go of what is recorded of layers on the device; whether there was any.

    Attributes:
        agenda: what the plan tells.
        packs: those of the plan, by their indices, and those that it doesn't know, as they are on this device.
        pinned: the packs that lanes behind the running one will come through, wherever that is.
        visit: where lanes are on this device.
        waited_seconds: how long the host has waited for copies to leave room.
        weight_checks: compare weights from before and after the forward.
    """

    def __init__(
        self,
        device: Device,
        swapper: Swapper,
        sums: Sums,
        stash: Stash,
        number: int = 0,
        let_go: Callable[[], bool] = lambda: False,
    ) -> None:
        self.agenda = Agenda(number)
        self.packs: list[SwappedPack] = []
        self.pinned: frozenset[int] = frozenset()
        self.visit: Visit | None = None
        self.waited_seconds = 0.0
        self.device = device
        self.swapper = swapper
        self.sums = sums
        self.stash = stash
        self.weight_checks = WeightChecks(device)
        self._let_go = let_go

    def enter(self, place: Place, work_bytes: int, *, alone: bool) -> None:
        """Bring the pack of a place, with room for its work, and start to fetch what comes after it.

        Args:
            place: where a lane comes to.
            work_bytes: what it will allocate there.
            alone: whether the pack gets all memory there is, since its work isn't known.

        Raises:
            CapacityError: if there is no room for its weights.
        """
        visit = self.visit
        if visit is not None and visit.place == place and place.pack.residency is not None and self.agenda.plan.groups:
            # A further lane in the same pack: only the room that the last one took may be missing.
            visit.reserved_bytes = work_bytes
            if alone:
                self.await_leaving()
            else:
                self.ensure_room(work_bytes, place)
        else:
            visit = self.begin_visit(place, work_bytes, alone=alone)
        if not alone and not visit.has_prefetched:
            visit.has_prefetched = self.prefetch(place, visit.reserved_bytes)

    def begin_visit(self, place: Place, work_bytes: int, *, alone: bool) -> Visit:
        """Bring the pack of a place, whatever was visited before."""
        if alone:
            self.evict_all_but(place.pack)
        elif not self.agenda.plan.just_in_time:
            self._take_away()
        else:
            # What is over would go when room is needed, too, but what comes would find that in pieces.
            over = self._over(place) if self.agenda.ends_with_forward else []
            for index in [*self.agenda.begin_visit(place), *over]:
                self.evict(self.packs[index])
            self._await_update(place, work_bytes)
            self._await_lasting_room(place)
        if isinstance(self.device, VirtualDevice):
            # First, as what is fetched now may need room already: the one for the pack before could evict this one.
            self.device.relieve = partial(self.make_room, place)
        self.bring(place, work_bytes)
        self.visit = Visit(place, work_bytes)
        return self.visit

    def _await_update(self, place: Place, work_bytes: int) -> None:
        """Wait until a pack is updated. Those that follow it may have been updated sooner, and come."""
        pack = place.pack
        if pack.residency is None:
            reserved_bytes = work_bytes + self._swap_in_bytes(pack, place)
            self.swapper.await_update(pack, lambda: not self.prefetch(place, reserved_bytes))

    def _await_lasting_room(self, place: Place) -> None:
        """Wait for updates to use up what is there, before more of weights and sums takes the memory of what passes."""
        pack = place.pack
        num_bytes = 0 if pack.residency is not None else self._swap_in_bytes(pack, place)
        if place.phase is Phase.BACKWARD and not pack.accumulators:
            num_bytes += pack.gradient_layout()[1]
        while not self.device.has_lasting_room(num_bytes) and (
            self._make_room_at_once(place) or self._await_room(of_stash=False)
        ):
            pass

    def end_forward(self) -> None:
        """The forward of all lanes is over: compare the weights of packs that are still there."""
        for pack in self.packs:
            self.weight_checks.end(pack)
        self.weight_checks.conclude()

    def admit(self, num_bytes: int) -> None:
        """Free what isn't needed now for something that comes from another device."""
        if self.visit is not None and not self.device.room_for(num_bytes):
            # A lane asks for it, in the middle of its own work: what makes way was computed by others.
            with self.device.scheduling():
                self.ensure_room(num_bytes, self.visit.place)

    def reset(self) -> None:
        """Leave nothing on the device: weights are stale after any update."""
        if isinstance(self.device, VirtualDevice):
            self.device.relieve = lambda: False
        self.visit = None
        self.agenda.reset()
        # The host may be far ahead of the copies that were asked for. What comes next is user's code, which may write weights.
        self.swapper.finish_reading()
        self.sums.finish_gathering()
        self.stash.drain()
        for pack in self.packs:
            self.sums.drop(pack)
            self.evict(pack)
            pack.is_narrow = False
        self.weight_checks.forget()
        self.drain()

    def bring(self, place: Place, work_bytes: int) -> None:
        """Swap the pack of a place in, with room for its work, and let the caller's computing wait for it.

        Raises:
            CapacityError: if there is no room for its weights.
        """
        pack = place.pack
        self.ensure_room(work_bytes + (0 if pack.residency is not None else self._swap_in_bytes(pack, place)), place)
        if not self.agenda.plan.lookahead and pack.residency is None:
            # The host is ahead of the device: what it asks for now would come while the device still computes.
            self.device.swap_in.submit_brief(lambda: None, after=[self.device.record()])
        try:
            self.swapper.swap_in(pack, keeps_masters=self.agenda.keeps_masters(pack, place))
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"pack {pack.index} ({pack.name}) does not fit beside what glue keeps, such as the batch and activations "
                "that several layers read: use smaller microbatches with HarmonyStrategy(num_microbatches=...), or more "
                f"memory with HarmonyStrategy(device_memory=...). ({error})"
            ) from error
        assert pack.residency is not None
        pack.residency.ready.wait()

    def ensure_room(self, num_bytes: int, place: Place) -> None:
        """Free what isn't needed now, until there is room or nothing is left to free."""
        while not self.device.room_for(num_bytes) and self.make_room(place):
            pass

    def make_room(self, place: Place) -> bool:
        """Free something that isn't needed now, cheapest first; False if there is nothing left.

        To wait for a copy stops the host, which then has no work ready for the device: what nobody needs any more goes
        first. But a pack that is needed again would have to come again, which takes longer than to wait.
        """
        if self._make_room_at_once(place) or self._await_room():
            return True
        others = self._evictable(place)
        if others or (others := [pack.index for pack in self._others(place.pack)]):
            self._evict_one_of(others, place)
            return True
        # Those of the pack itself are needed in its own backward alone, and not in that of the loss before.
        kept = place.pack if place.phase is Phase.BACKWARD else None
        summing = [pack for pack in self.packs if pack.accumulators and pack is not kept]
        for pack in summing:
            self.sums.park(pack)
        return bool(summing) or self._forget_graphs(place.pack) or self._let_go()

    def _make_room_at_once(self, place: Place) -> bool:
        """Free something that has left, or that nobody needs any more."""
        if self.device.leaving.retire() or self.stash.retire():
            return True
        over = self._over(place)
        if over:
            self._evict_one_of(over, place)
        return bool(over)

    def await_leaving(self) -> None:
        """Wait until all has gone that is on its way out, for what may need all memory there is."""
        while self._await_room():
            pass

    def _await_room(self, *, of_stash: bool = True) -> bool:
        """Wait for the oldest copy that leaves room, or for an update on the device; whether there was one."""
        start = perf_counter()
        has_waited = (of_stash and self.stash.retire(wait=True)) or self.device.leaving.retire(wait=True)
        self.waited_seconds += perf_counter() - start
        return has_waited

    def prefetch(self, place: Place, reserved_bytes: int) -> bool:
        """Start to swap in the packs that come next, as far as there is room.

        Args:
            place: where the running lane is.
            reserved_bytes: what must stay free for its work.

        Returns:
            Whether all have come, or are on their way.
        """
        have_come = True
        for following in self.agenda.following(place, self.packs):
            if following.residency is not None:
                self.agenda.come(following.index)
                continue
            if not self.swapper.is_current(following):
                # The host has better to do than to wait for its update. Those behind it may have been updated sooner.
                have_come = False
                if following is not place.pack:
                    reserved_bytes += self._swap_in_bytes(following, place)
                continue
            if not self._make_room_ahead(following, self._swap_in_bytes(following, place) + reserved_bytes, place):
                return False
            self.agenda.come(following.index)
            self.swapper.swap_in(following, keeps_masters=self.agenda.keeps_masters(following, place))
        return have_come

    def _swap_in_bytes(self, pack: SwappedPack, place: Place) -> int:
        return pack.swap_in_bytes(keeps_masters=self.agenda.keeps_masters(pack, place))

    def _make_room_ahead(self, following: SwappedPack, num_bytes: int, place: Place) -> bool:
        """Whether there is room to fetch a pack ahead. Where no plan tells what goes, what is needed later makes way."""
        while not self.device.has_lasting_room(self._swap_in_bytes(following, place)):
            if not self._make_room_at_once(place):
                return False
        while not self.device.room_for(num_bytes):
            last = self.agenda.needed_last([following.index, *self._evictable(place)], place)
            if self.agenda.has_moves or last == following.index:
                return False
            self.evict(self.packs[last])
        return True

    def evict(self, pack: SwappedPack) -> None:
        """Take a pack off the device."""
        self._forget_graphs(pack)
        self.weight_checks.end(pack)
        self.swapper.evict(pack)

    @staticmethod
    def _forget_graphs(pack: SwappedPack) -> bool:
        """Let the graphs go that calls of a pack's layers keep; whether there were any."""
        if pack.residency is None or not pack.residency.graphs:
            return False
        for call in list(pack.residency.graphs):
            call.forget()
        pack.residency.graphs.clear()
        return True

    def evict_all_but(self, pack: SwappedPack) -> None:
        """Leave one pack alone on the device, with all memory for its work: the host has updated it."""
        self.swapper.await_update(pack)
        for other in self.packs:
            if other is not pack:
                self.evict(other)
                if other.accumulators:
                    self.sums.park(other)
        self.await_leaving()

    def _take_away(self) -> None:
        """Leave no weights and no sums on the device."""
        for pack in self.packs:
            if pack.residency is not None:
                self.evict(pack)
            if pack.accumulators:
                self.sums.park(pack)

    def drain(self) -> None:
        """Wait until nothing is on its way out."""
        self.stash.drain()
        self.device.leaving.drain()
        for pack in self.packs:
            self.swapper.finish_write_back(pack)

    def _others(self, pack: SwappedPack) -> list[SwappedPack]:
        return [other for other in self.packs if other.residency is not None and other is not pack]

    def _evictable(self, place: Place) -> list[int]:
        """The packs on the device besides that of a place that no lane needs soon, as far as the plan tells."""
        return [pack.index for pack in self._others(place.pack) if pack.index not in self.pinned]

    def _over(self, place: Place) -> list[int]:
        return [index for index in self._evictable(place) if self.agenda.is_over(index, place)]

    def _evict_one_of(self, packs: Sequence[int], place: Place) -> None:
        self.evict(self.packs[self.agenda.needed_last(packs, place)])
