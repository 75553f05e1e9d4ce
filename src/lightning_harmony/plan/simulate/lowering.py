"""Lowering: from a plan to the tasks of each device, with the copies that bring what they need.

Packs come in the order of the visits, and what is needed last makes way; then those that can come earlier do. The executor
does as lowered here: what it finds on a device in the middle of a step depends on how fast copies are; what it swaps must not.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_harmony.plan.simulate.computing import Computing, Held
from lightning_harmony.plan.simulate.fetching import Residence, fetch_ahead
from lightning_harmony.plan.simulate.footprint import Footprint, footprints
from lightning_harmony.plan.simulate.order import Run, Stay, owner, stays, summing_devices
from lightning_harmony.plan.simulate.schedule import Schedule
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.task import Errand, Phase, Task

# For so many stays, what an update on the device uses up counts as there.
STAYS_OF_UPDATES = 2
# What comes and goes before lanes run through a place in the order of a phase, in order: swap-ins and evictions.
Moves = Mapping[tuple[Phase, int], Sequence[Task]]


class DeviceMoves(NamedTuple):
    """What weights do on one device, as a plan says before a step begins.

    Attributes:
        moves: the swap-ins and evictions of weights. There are none where the plan doesn't know what its layers cost, and none
            where nothing is left to be decided, as each visit brings its pack and takes it away.
        lasting_bytes: what weights and sums of gradients may take, so that what passes finds the memory that it had before;
            None for no limit, as where memory is not kept apart.
    """

    moves: Moves
    lasting_bytes: int | None


def moves_of(plan: Plan) -> list[DeviceMoves]:
    """What weights do on each device, as a plan says."""
    if plan.profile is None or not plan.just_in_time:
        return [DeviceMoves({}, None)] * plan.num_devices
    machine, packs = plan.profile.machine, plan.profile.pack_costs(plan.packs)
    return [
        DeviceMoves(each.moves, each.lasting_bytes if machine.pools_apart else None)
        for each in _lowerings(plan, packs, machine)
    ]


def lower(plan: Plan, packs: Sequence[Cost], machine: DeviceLimits, *, is_deferred: bool = False) -> Schedule:
    """The tasks of each device. They are not checked: whether they fit is for `replay` to say.

    Args:
        plan: the plan.
        packs: what each pack costs.
        machine: what the step runs on.
        is_deferred: whether updates come last, and not each behind its pack's gradients.

    Raises:
        PlanError: if the plan doesn't know its number of microbatches.
    """
    lowered = _lowerings(plan, packs, machine)
    devices = [tuple(each.tasks) for each in lowered]
    if is_deferred:
        # Sorting keeps the order of all others.
        devices = [tuple(sorted(tasks, key=lambda task: task.kind is Errand.UPDATE)) for tasks in devices]
    return Schedule(tuple(devices), tuple(each.lasting_bytes for each in lowered))


def _lowerings(plan: Plan, packs: Sequence[Cost], machine: DeviceLimits) -> "list[_Lowering]":
    order, footprint = tuple(stays(plan)), footprints(plan, packs)
    numbers = range(plan.num_devices)
    lowered = [_Lowering(plan, packs, footprint, machine, device, order) for device in numbers]
    if machine.free_bytes is None or not machine.pools_apart or not plan.just_in_time:
        return lowered
    # What passes does not depend on which weights stay.
    limits = [each.lasting_bytes for each in lowered]
    return [_Lowering(plan, packs, footprint, machine, device, order, limits[device]) for device in numbers]


class _Lowering:
    """The tasks of one device.

    Attributes:
        tasks: all of them, in order.
        moves: those of weights, by the place before which they come.
        most_passing_bytes: what all but weights and sums of gradients take at most.
    """

    def __init__(
        self,
        plan: Plan,
        packs: Sequence[Cost],
        footprint: Sequence[Footprint],
        machine: DeviceLimits,
        device: int,
        order: Sequence[Stay],
        lasting_bytes: int | None = None,
    ) -> None:
        capacity_bytes = machine.free_bytes
        # What of the capacity neither weights nor sums may have.
        self._apart_bytes = 0 if capacity_bytes is None or lasting_bytes is None else capacity_bytes - lasting_bytes
        self._plan, self._packs, self._capacity_bytes, self._device = plan, packs, capacity_bytes, device
        self._computing = computing = Computing(plan, footprint, device)
        self._stays = [Stay(stay.phase, stay.place, runs) for stay in order if (runs := computing.here(stay.runs))]
        self._wanted = [self._packs_of(stay) for stay in self._stays]
        # Each visit that is computed here, and whether it is the last backward of its pack.
        self._last = {run_pack: number for number, stay in enumerate(self._stays) for run_pack in self._summed(stay)}
        self._first_visit = {pack: place for place, pack in reversed(list(enumerate(plan.visits)))}
        self._resident: dict[int, Residence] = {}
        self._resident_bytes = 0
        self._residences: list[Residence] = []
        self._held = Held()
        # Until which stay, and how much, updates use up.
        self._staying = deque[tuple[int, int]]()
        # Of the stay that is lowered: what comes behind its computing.
        self._behind: list[Task] = []
        self._now = 0
        self.tasks: list[Task] = []
        self.moves: dict[tuple[Phase, int], tuple[Task, ...]] = {}
        self.most_passing_bytes = 0
        # Of each stay: the sums of gradients, and what updates use up.
        self._sum_bytes: list[int] = []
        # What passes and does not leave, at most.
        self._most_work_bytes = 0
        self._lower()

    def _summed(self, stay: Stay) -> list[int]:
        """The packs that run backward in a stay."""
        visits = self._plan.visits
        return sorted({visits[run.position] for run in stay.runs if run.phase is Phase.BACKWARD})

    @property
    def lasting_bytes(self) -> int | None:
        """What weights and sums may take beside what passes, but no less than a stay with the next's; None for no limit.

        Nor less than that and what updates still use up of the stays before, if only what leaves would have to wait for that.
        """
        if self._capacity_bytes is None:
            return None
        weights = [sum(self._residence(pack, stay).num_bytes for pack in self._packs_of(stay)) for stay in self._stays]
        sums = [sum(self._packs[pack].gradient_bytes for pack in self._summed(stay)) for stay in self._stays]
        least, wanted = (
            max(map(sum, zip(weights, beside, [*weights[1:], 0], strict=False)), default=0)
            for beside in (sums, self._sum_bytes)
        )
        wanted = min(wanted, self._capacity_bytes - self._most_work_bytes)
        return max(self._capacity_bytes - self.most_passing_bytes, wanted, least)

    def _lower(self) -> None:
        """First on demand; then what is fetched ahead comes earlier."""
        computing, behind, needed = [], [], []
        for stay in self._stays:
            self._end_updates()
            tasks, held = self._computing.compute(stay, self._held)
            if self._plan.just_in_time:
                self._drop(stay, held)
            else:
                self._evict_all()
            self._bring(stay, self._beside_weights(held.most_bytes, held))
            passing = held.most_passing_bytes + held.leaving_bytes + self._held.leaving_bytes
            self.most_passing_bytes = max(self.most_passing_bytes, passing)
            computing.append(tasks)
            self._sum_bytes.append(held.sum_bytes)
            self._most_work_bytes = max(self._most_work_bytes, held.most_passing_bytes)
            # Nothing waits for what leaves because of what is fetched ahead.
            needed.append(self._needed_beside(held))
            self._held, self._behind = held, []
            held.most_bytes = held.num_bytes
            for pack in self._summed(stay):
                if self._last[pack] == self._now:
                    self._send_gradients(pack, stay)
                elif not self._plan.just_in_time:
                    self._park(pack)
            behind.append(self._behind)
            self._now += 1
        self._evict_all()
        following = [self._following(number) for number in range(len(self._stays))]
        fetch_ahead(self._residences, needed, following, self._capacity_bytes)
        self._emit(computing, behind)
        if not self._plan.just_in_time:
            self._update_all()

    def _emit(self, computing: Sequence[Sequence[Task]], behind: Sequence[Sequence[Task]]) -> None:
        """The tasks of all stays in order, with those that bring weights and let them go."""
        coming: defaultdict[int, list[Task]] = defaultdict(list)
        going: defaultdict[tuple[int, bool], list[Task]] = defaultdict(list)
        for each in self._residences:
            coming[each.first].append(Task(each.pack, Errand.SWAP_IN))
            going[each.end, each.goes_at_once].append(Task(each.pack, Errand.EVICT))
        moves: list[Task] = []
        for number, stay in enumerate(self._stays):
            now = sorted(going[number, False]) + coming[number]
            self.moves[self._place(stay.runs[0])] = (*moves, *now)
            moves = sorted(going[number + 1, True])
            self.tasks += [*now, *computing[number], *moves, *behind[number]]
        self.tasks += sorted(going[len(self._stays), False])

    def _place(self, run: Run) -> tuple[Phase, int]:
        """Where a run is in the plan's order of its phase."""
        if run.phase is Phase.FORWARD:
            return run.phase, run.position
        return run.phase, len(self._plan.visits) - 1 - run.position

    def _beside_weights(self, num_bytes: int, held: Held) -> int:
        """What weights cannot have: what is there beside them, or what is kept for what passes, with the sums."""
        return max(num_bytes, self._apart_bytes + held.sum_bytes) if self._apart_bytes else num_bytes

    def _needed_beside(self, held: Held) -> int:
        return self._beside_weights(held.most_bytes + held.leaving_bytes + self._held.leaving_bytes, held)

    def _drop(self, stay: Stay, held: Held) -> None:
        """Evict packs that aren't needed any more, before anything waits for what is on its way out."""
        needed = self._needed_beside(held)
        for pack in sorted(self._resident.keys() - set(self._wanted[self._now])):
            if self._capacity_bytes is None or self._resident_bytes + needed <= self._capacity_bytes:
                return
            if self._plan.is_over(pack, stay.phase, stay.place):
                self._evict(pack)

    def _bring(self, stay: Stay, work_bytes: int) -> None:
        """Swap in the packs of a stay, with room for its work."""
        wanted = self._wanted[self._now]
        missing = [pack for pack in wanted if pack not in self._resident]
        coming = [self._residence(pack, stay) for pack in missing]
        missing_bytes = sum(each.num_bytes for each in coming)
        missing_bytes += max((each.staging_bytes for each in coming), default=0)
        self._make_room(work_bytes + missing_bytes, stay, frozenset(wanted))
        for each in coming:
            self._swap_in(each)
        for pack in wanted:
            self._resident[pack].last = self._now

    def _packs_of(self, stay: Stay) -> list[int]:
        """The packs of a stay, in the order of their first use."""
        return list(dict.fromkeys(self._plan.visits[run.position] for run in stay.runs))

    def _following(self, number: int) -> list[int]:
        """The next packs that this device needs after a stay."""
        following: list[int] = []
        wanted = self._wanted[number]
        for later in self._wanted[number + 1 :]:
            for pack in later:
                if len(following) == self._plan.lookahead:
                    return following
                if pack not in following and pack not in wanted:
                    following.append(pack)
        return following

    def _make_room(self, num_bytes: int, stay: Stay, wanted: frozenset[int], *, at_once: bool = False) -> None:
        """Evict what is needed last until there is room."""
        capacity = self._capacity_bytes
        while capacity is not None and self._resident_bytes + num_bytes > capacity:
            others = [pack for pack in sorted(self._resident.keys() - wanted) if not self._has_graphs(pack, stay)]
            if not others:
                return
            self._evict(self._plan.needed_last(others, stay.phase, stay.place), at_once=at_once)

    def _has_graphs(self, pack: int, stay: Stay) -> bool:
        """Whether graphs of a pack are on the device when a stay begins: it has been visited, and not yet come back to."""
        if pack not in self._plan.kept:
            return False
        first = self._first_visit[pack]
        if stay.phase is Phase.FORWARD:
            return first < stay.place
        return len(self._plan.visits) - 1 - first > stay.place

    def _residence(self, pack: int, stay: Stay) -> Residence:
        """The weights of a pack from a stay on; for a backward before an update there, as they are on the host, too."""
        cost = self._packs[pack]
        num_bytes, staging_bytes = cost.weight_bytes, cost.staging_bytes
        if stay.phase is Phase.BACKWARD and pack in self._plan.device_updated and cost.master_bytes:
            num_bytes, staging_bytes = num_bytes + cost.master_bytes, 0
        return Residence(pack, num_bytes, staging_bytes, self._now, self._now, self._now)

    def _swap_in(self, residence: Residence) -> None:
        self._residences.append(residence)
        self._resident[residence.pack] = residence
        self._resident_bytes += residence.num_bytes

    def _evict_all(self) -> None:
        for pack in list(self._resident):
            self._evict(pack)

    def _evict(self, pack: int, *, at_once: bool = False) -> None:
        """Let a pack go before the stay at hand; or at once, behind what it computes."""
        residence = self._resident.pop(pack)
        residence.end, residence.goes_at_once = self._now + at_once, at_once
        self._resident_bytes -= residence.num_bytes

    def _send_gradients(self, pack: int, stay: Stay) -> None:
        """After the last backward: sums go to the device that has the pack's gradients, and from there to the host."""
        num_bytes = self._packs[pack].gradient_bytes
        if not num_bytes:
            return
        if not self._plan.just_in_time:
            self._behind.append(Task(pack, Errand.SWAP_OUT))
            self._let_go_of_sums(pack)
            return
        sums = {key for key in self._held.sums if key[0] == pack}
        if owner(self._plan, pack) == self._device:
            others = [device for device in summing_devices(self._plan, pack) if device != self._device]
            if others:
                self._make_room(self._held.num_bytes + num_bytes * len(sums), stay, frozenset(), at_once=True)
            self._behind += [Task(pack, Errand.REDUCE, device) for device in others]
            if pack in self._plan.device_updated:
                self._behind.append(Task(pack, Errand.UPDATE))
                self._leave_to_update(pack)
                return
            self._behind += [Task(pack, Errand.SWAP_OUT), Task(pack, Errand.UPDATE)]
        self._let_go_of_sums(pack)

    def _leave_to_update(self, pack: int) -> None:
        """What was summed of a pack stays for its update, with the weights as they are on the host."""
        cost = self._packs[pack]
        self._held.sums = {key for key in self._held.sums if key[0] != pack}
        if pack in self._resident:
            self._evict(pack, at_once=True)
        weight_bytes = cost.master_bytes or cost.weight_bytes
        self._held.num_bytes += weight_bytes
        self._held.sum_bytes += weight_bytes
        self._staying.append((self._now + STAYS_OF_UPDATES, cost.gradient_bytes + weight_bytes))

    def _end_updates(self) -> None:
        """What updates have used up by a stay is gone."""
        while self._staying and self._staying[0][0] < self._now:
            _, num_bytes = self._staying.popleft()
            self._held.num_bytes -= num_bytes
            self._held.sum_bytes -= num_bytes

    def _let_go_of_sums(self, pack: int) -> set[tuple[int, int]]:
        """What was summed of a pack is on its way out."""
        sums = {key for key in self._held.sums if key[0] == pack}
        num_bytes = self._packs[pack].gradient_bytes * len(sums)
        self._held.sums -= sums
        self._held.num_bytes -= num_bytes
        self._held.sum_bytes -= num_bytes
        self._held.leaving_bytes += num_bytes
        return sums

    def _park(self, pack: int) -> None:
        """What was summed so far makes way, until a microbatch comes back."""
        if self._packs[pack].gradient_bytes:
            self._behind.append(Task(pack, Errand.PARK))
            self._computing.parked |= self._let_go_of_sums(pack)

    def _update_all(self) -> None:
        """The update after the whole backward."""
        updated = [pack for pack in self._last if self._packs[pack].gradient_bytes]
        self.tasks += [Task(pack, Errand.UPDATE) for pack in updated if owner(self._plan, pack) == self._device]
