"""The search: which packs, and whose graphs are kept, so that a step is predicted to take the least time.

What is searched, all within the capacity:

- packs of consecutive layers in execution order. Several layers are a pack only where `packing.has_room` for it.
- the visit from which packs are fused: none, or each of `graphs.fusable_from`. Where each pack has its device, none or the
  last one.
- how many of the packs before keep the graphs of all microbatches: the last ones, on each device, as far as there is room.
- in a pipeline, which layers that are packs are spread: none, or the longest one of the device that computes for longest, and
  so on while one computes clearly longer than they do on average. Of two plans, the one that spreads more has to be faster by
  `SPREAD_SHARE`.

Then, for the plan that was found, the packs of its forward: runs of packs that a microbatch goes through in one turn. They
are of one length, counted from the fused packs: what is left over is the first one, whose way in nothing hides.

A larger capacity only adds to this. So it makes the best no slower, but for one that spreads nothing in the place of one that
does, for a rarity of a single plan (with more room a prefetch may come so early that it takes what another task waits for),
and for where the climb ends.

Up to `ALL_LAYERS` layers all of it is searched; beyond, the packs of four packers at a ladder of counts, and a ladder of
numbers of packs that are fused or keep their graphs. Replays judge: the plans are replayed in the order of the least that
they could take, until no other one could take less than the best. From that one a climb goes on: a boundary of packs is moved
by a layer, one is taken out or put in, or a few packs more or fewer are fused or keep their graphs, as long as that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, combinations, zip_longest
from math import inf
from random import Random

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search.bound import least_seconds, runs_of, seconds_of_visits
from lightning_harmony.plan.search.graphs import fusable_from, fused_alone, kept_on_devices
from lightning_harmony.plan.search.packing import balanced, fill_capacity, filled, filled_from_end, has_room
from lightning_harmony.plan.search.rules import packed
from lightning_harmony.plan.simulate.replay import with_prediction
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel, Plan
from lightning_harmony.plan.values.profile import Profile

# 128 ways to cut them.
ALL_LAYERS = 8
# Of all replays together: they take about two seconds.
MOST_TASKS = 80_000
# What of that is left for the climb, and for packs of the forward.
CLIMB_SHARE, FORWARD_SHARE = 0.25, 0.1
# By how many a climb changes the packs that are fused, or that keep their graphs.
_STRIDES = (1, -1, 4, -4)
# A prediction may be wrong by so much, and more by what a lane's turn takes beside what its layers do: that is in what was
# measured for each layer, but a pack has it once.
CLEAR_SHARE = 0.1
TURN_SECONDS = 3.5e-4
# Packs are spread where that saves so much of a step: its copies take part of the memory, and of the way between devices. What
# is wrong in a prediction is about the same in both.
SPREAD_SHARE = 0.05
# Turns of a shorter step are so short that their times are mostly noise, and there is little to gain.
SHORT_SECONDS = 0.5
# A prediction of what is on a device may be wrong by so much.
SPARE_SHARE = 0.1
# Where packs begin, how many visits are fused, and how many rounds of packs keep their graphs.
_Change = tuple[tuple[int, ...], int, int]
# Sums in another order differ in their last digits.
_ROUNDING = 1e-9


def search_better(
    plan: Plan, calls: Sequence[int], *, with_its_packs: bool = False, most_tasks: float = MOST_TASKS
) -> Plan:
    """A plan that is predicted to be clearly faster than one, or that one if there is none.

    Clearly: by more than `CLEAR_SHARE` of its seconds and `TURN_SECONDS` for each turn of a lane, within the capacity less
    `SPARE_SHARE`; the same plan with packs spread, by more than `SPREAD_SHARE`. A step of less than `SHORT_SECONDS` is left as
    it is.

    Args:
        plan: the plan, with its profile and number of microbatches, and with its prediction. Of one that has none, as it does
            not fit, any plan is better that does; it stays where none fits, and the executor has to improvise.
        calls: the order in which a microbatch's forward calls the layers, as indices into those of the profile.
        with_its_packs: whether only its graphs and the turns of its forward are searched.
        most_tasks: how many tasks are replayed in all.

    Returns:
        The plan itself, or a better one, with what it is predicted to take within its smaller capacity.

    Raises:
        PlanError: if the plan has no profile, or doesn't know its number of microbatches.
    """
    if plan.profile is None or plan.num_microbatches is None:
        raise PlanError("to search for a better plan takes one with a profile and a number of microbatches")
    if plan.predicted_seconds < SHORT_SECONDS:
        return plan
    capacity, packs = plan.profile.machine.capacity_bytes, plan.packs if with_its_packs else None
    # Where nothing is known to fit, what fits barely is better than that.
    for spared in (SPARE_SHARE, 0.0) if plan.predicted is None else (SPARE_SHARE,):
        smaller = None if capacity is None else int(capacity * (1 - spared))
        profile = replace(plan.profile, machine=replace(plan.profile.machine, capacity_bytes=smaller))
        space = Space(profile, calls, plan.num_microbatches, plan.num_devices, plan.parallel, packs)
        spread = space.spread(plan)
        found = space.best(most_tasks, spread.predicted_seconds * (1 - CLEAR_SHARE), TURN_SECONDS, spread) or spread
        if found.predicted is not None:
            return plan if found is plan else replace(found, fingerprint=plan.fingerprint, profile=plan.profile)
    return plan


def _num_tasks(plan: Plan) -> int:
    """About as many tasks as a schedule has: what it takes to replay it."""
    number = plan.num_microbatches or 0
    transfers = 2 if plan.num_devices > 1 and plan.parallel == "pipeline" else 0
    gathered = sum(pack in plan.spread for pack in plan.visits)
    stashes = sum(2 for place in range(len(plan.visits)) if not plan.keeps_graph(place))
    return number * ((2 + transfers) * len(plan.visits) + gathered + stashes)


def _num_turns(plan: Plan) -> int:
    """How often a lane has to wait for its turn in a step, on the busiest device."""
    around = plan.num_devices if plan.parallel == "pipeline" else 1
    forward, backward = (-(-number // around) for number in (len(plan.forward_turns), plan.first_fused))
    number = plan.num_microbatches or 0
    return (number if plan.parallel == "pipeline" else -(-number // plan.num_devices)) * (forward + backward + 1)


def _weighed(plan: Plan, seconds: float) -> float:
    """By what plans are compared that take so long."""
    return seconds / (1 - SPREAD_SHARE) ** len(plan.spread)


def _ladder(most: int) -> list[int]:
    """0, 1, 2, 4, 8, ... and a number that they lead up to."""
    return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), *([most] if most else [])]


class Space:
    """The plans that are searched.

    Args:
        profile: what the layers cost, and the machine.
        calls: the order in which a microbatch's forward calls the layers, as indices into those of the profile.
        num_microbatches: of the batch.
        num_devices: how many devices share the work.
        parallel: how packs are placed on the devices.
        given: the packs, if they stay as they are.
    """

    def __init__(
        self,
        profile: Profile,
        calls: Sequence[int],
        num_microbatches: int,
        num_devices: int,
        parallel: Parallel,
        given: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._profile, self._calls, self._num_microbatches = profile, calls, num_microbatches
        self._num_devices, self._parallel = num_devices, parallel
        self._given = given
        self._order = list(dict.fromkeys(calls))
        self._layers = [profile.layers[index] for index in self._order]
        self._takes_all = len(self._layers) <= ALL_LAYERS

    def best(self, most_tasks: float, below: float, turn_seconds: float, start: Plan | None = None) -> Plan | None:
        """The plan with the least predicted seconds; None if none fits, or none keeps below the limit.

        With up to `ALL_LAYERS` layers called and both numbers infinite, no plan in what is searched (see above) is predicted
        to take less. Otherwise it is the best of those that were replayed.

        Args:
            most_tasks: how many tasks are replayed in all.
            below: how many seconds it must not reach.
            turn_seconds: overhead per turn of a lane, subtracted from those.
            start: where the climb begins if none keeps below the limit.
        """
        if below <= 0:
            return None
        tasks_of_forward, tasks_of_climb = FORWARD_SHARE * most_tasks, CLIMB_SHARE * most_tasks
        most_tasks *= 1 - FORWARD_SHARE - (0 if self._takes_all else CLIMB_SHARE)
        machine = self._profile.machine
        # What each takes at least, weighed; how many visits it has, of which fewer come first; and a number of its own.
        candidates: list[tuple[float, int, int, Plan]] = []
        for plan, packs in self._plans(most_tasks):
            least = least_seconds(plan, packs, machine) * (1 - _ROUNDING)
            if least < below - turn_seconds * _num_turns(plan):
                candidates.append((_weighed(plan, least), len(plan.visits), len(candidates), plan))
        found: Plan | None = None
        for least, _, _, plan in sorted(candidates):
            if found is not None and least >= _weighed(found, found.predicted_seconds):
                break
            if _num_tasks(plan) > most_tasks:
                continue
            most_tasks -= _num_tasks(plan)
            found = self._better(found, plan, below - turn_seconds * _num_turns(plan))
        start = found or start
        if not self._takes_all and start is not None:
            climbed = self._climbed(start, tasks_of_climb, turn_seconds)
            found = self._better(found, climbed, below - turn_seconds * _num_turns(climbed))
        return None if found is None else self._joined(found, tasks_of_forward, turn_seconds)

    def spread(self, plan: Plan) -> Plan:
        """The plan with those of its packs spread with which it takes clearly less time; the plan itself if there are none."""
        best = plan
        for other in self._spread(plan, self._profile.pack_costs(plan.packs)):
            best = self._better(best, replace(other, profile=self._profile), inf) or best
        return best

    def _climbed(self, plan: Plan, most_tasks: float, turn_seconds: float) -> Plan:
        """A plan that small changes lead to, each of which makes it faster."""
        order = Random(0)
        plan, seen = replace(plan, profile=self._profile, joined=frozenset()), set()
        while True:
            changes = self._changes(plan)
            order.shuffle(changes)
            for change in changes:
                if change in seen:
                    continue
                seen.add(change)
                other = self._changed(plan, change)
                if other is None:
                    continue
                most_tasks -= _num_tasks(other)
                if most_tasks < 0:
                    return plan
                below = plan.predicted_seconds * (1 - _ROUNDING) + turn_seconds * (_num_turns(plan) - _num_turns(other))
                if (faster := self._better(None, other, below)) is not None:
                    plan = faster
                    break
            else:
                return plan

    def _changes(self, plan: Plan) -> list[_Change]:
        """Small ones."""
        starts = tuple(self._given_cut(plan.packs))
        fused, num_kept = len(plan.visits) - plan.first_fused, len(plan.kept)
        changes = [(starts, fused + by, num_kept) for by in _STRIDES] + [
            (starts, fused, num_kept + by) for by in _STRIDES
        ]
        # What is spread is known by its pack.
        if self._given is None and not plan.spread:
            inner = frozenset(starts[1:])
            others = {inner - {place} | {place + by} for place in inner for by in (1, -1)}
            others |= {inner ^ {place} for place in range(1, len(self._layers))}
            cuts = sorted(tuple(sorted({0, *other})) for other in others if len(self._layers) not in other)
            changes += [(cut, fused, num_kept) for cut in cuts]
        return changes

    def _changed(self, plan: Plan, change: _Change) -> Plan | None:
        """The plan with a change; None if there is no room for it."""
        starts, fused, num_kept = change
        if fused < 0 or num_kept < 0:
            return None
        if starts != tuple(self._given_cut(plan.packs)) and not self._has_room(starts):
            return None
        base, packs = self._packed(starts)
        first = len(base.visits) - fused
        if first not in self._all_firsts(base.visits, packs):
            return None
        kept = frozenset(chain.from_iterable(self._kept_rounds(base.visits, first, packs)[:num_kept]))
        return replace(base, first_fused=first, kept=kept, spread=plan.spread)

    def _joined(self, plan: Plan, most_tasks: float, turn_seconds: float) -> Plan:
        """The plan with those packs of the forward with which it takes the least time."""
        if self._num_devices > 1 and self._parallel == "pipeline":
            return plan
        best, end = plan, plan.first_fused
        for length in self._rungs(end):
            joined = frozenset(place for place in range(1, end) if length and (end - place) % length)
            if not joined or _num_tasks(plan) > most_tasks:
                continue
            most_tasks -= _num_tasks(plan)
            other = replace(plan, joined=joined)
            below = best.predicted_seconds + turn_seconds * (_num_turns(best) - _num_turns(other))
            best = self._better(None, other, below) or best
        return best

    def _better(self, found: Plan | None, plan: Plan, below: float) -> Plan | None:
        """The faster one of a plan that was found and another one, if that fits and keeps below a limit."""
        plan = with_prediction(plan)
        most = inf if found is None else _weighed(found, found.predicted_seconds)
        if plan.predicted_seconds >= below or _weighed(plan, plan.predicted_seconds) >= most:
            return found
        return plan

    # ---- what is searched ----------------------------------------------------------------------------------------------

    def _plans(self, most_tasks: float) -> Iterator[tuple[Plan, Sequence[Cost]]]:
        """All plans but those with more packs than can be replayed; if that is all of them, those with fewest."""
        cuts = list(self._cuts())
        replayable = [starts for starts in cuts if 2 * self._num_microbatches * len(starts) <= most_tasks]
        for starts in replayable or [min(cuts, key=len)]:
            base, packs = self._packed(starts)
            for first_fused, keeping in self._graphs(base.visits, packs):
                plan = replace(base, first_fused=first_fused, kept=keeping)
                yield plan, packs
                for other in self._spread(plan, packs):
                    yield other, packs

    def _cuts(self) -> Iterator[Sequence[int]]:
        """Where packs begin, once for each way to cut that has room."""
        if self._given is not None:
            yield self._given_cut(self._given)
            return
        seen = set()
        for starts in self._all_cuts() if self._takes_all else self._packed_cuts():
            if starts not in seen and self._has_room(starts):
                seen.add(starts)
                yield starts

    def _given_cut(self, packs: Sequence[Sequence[str]]) -> Sequence[int]:
        pack_of = {name: number for number, pack in enumerate(packs) for name in pack}
        numbers = [pack_of[cost.name] for cost in self._layers]
        return [place for place, number in enumerate(numbers) if place == 0 or numbers[place - 1] != number]

    def _all_cuts(self) -> Iterator[tuple[int, ...]]:
        inner = range(1, len(self._layers))
        for number in range(len(self._layers)):
            for starts in combinations(inner, number):
                yield (0, *starts)

    def _packed_cuts(self) -> Iterator[tuple[int, ...]]:
        """What each packer makes of each number of packs."""
        num_layers = len(self._layers)
        seconds = [cost.forward_seconds + cost.backward_seconds for cost in self._layers]
        state = [float(cost.state_bytes) for cost in self._layers]
        around = self._num_devices if self._parallel == "pipeline" else 1
        counts = {factor * rung for factor in {1, 3, around} for rung in _ladder(num_layers)}
        for count in sorted(count for count in counts if 0 < count <= num_layers):
            yield balanced(seconds, count)
            yield balanced(state, count)
            yield filled(state, sum(state) / count)
            yield filled_from_end(state, sum(state) / count)
        packs = fill_capacity(self._layers, self._profile.machine.free_bytes, around)
        yield tuple(accumulate((len(pack) for pack in packs[:-1]), initial=0))

    def _has_room(self, starts: Sequence[int]) -> bool:
        capacity = self._profile.machine.free_bytes
        packs = self._slices(starts)
        return all(len(pack) == 1 or has_room(pack, capacity) for pack in packs)

    def _slices(self, starts: Sequence[int]) -> list[list[Cost]]:
        ends = [*starts[1:], len(self._layers)]
        return [self._layers[start:end] for start, end in zip(starts, ends, strict=True)]

    def _packed(self, starts: Sequence[int]) -> tuple[Plan, Sequence[Cost]]:
        """A plan with these packs, and a pack for each layer that isn't called."""
        names = [cost.name for cost in self._profile.layers]
        packs = [[cost.name for cost in pack] for pack in self._slices(starts)]
        plan = packed(packs, names, [names[call] for call in self._calls], self._num_devices, self._parallel)
        plan = replace(plan, num_microbatches=self._num_microbatches, profile=self._profile)
        return plan, self._profile.pack_costs(plan.packs)

    def _graphs(self, visits: Sequence[int], packs: Sequence[Cost]) -> Iterator[tuple[int, frozenset[int]]]:
        """From where packs are fused, and which of those before keep their graphs."""
        for first in self._firsts(visits, packs):
            rounds = self._kept_rounds(visits, first, packs)
            for number in self._rungs(len(rounds)):
                yield first, frozenset(chain.from_iterable(rounds[:number]))

    def _kept_rounds(self, visits: Sequence[int], first: int, packs: Sequence[Cost]) -> list[list[int]]:
        """The packs that may keep their graphs: the last one of each device, then the one before that, ..."""
        capacities = [self._profile.machine.free_bytes] * self._num_devices
        kept_of = kept_on_devices(visits, first, packs, self._num_microbatches, capacities, self._parallel)
        return [[pack for pack in each if pack is not None] for each in zip_longest(*kept_of)]

    def _spread(self, plan: Plan, packs: Sequence[Cost]) -> Iterator[Plan]:
        """The plan with more and more packs spread, as long as a device computes clearly longer than the average."""
        if self._num_devices == 1 or self._parallel == "data":
            return
        visits = plan.visits
        seconds = [sum(both) for both in zip(*seconds_of_visits(plan, packs), strict=True)]
        average = self._num_microbatches * sum(seconds) / self._num_devices
        while True:
            runs = runs_of(plan)
            loads = [sum(number * seconds[place] for place, number in each.items()) for each in runs]
            busiest = max(range(self._num_devices), key=loads.__getitem__)
            # One of several layers is better cut.
            alone = [p for p in runs[busiest] if visits[p] not in plan.spread and len(plan.packs[visits[p]]) == 1]
            if loads[busiest] <= (1 + SPREAD_SHARE) * average or not alone:
                return
            # Of several, the last one: it is there for the shortest time.
            longest = max(alone, key=lambda place: (seconds[place], place))
            plan = replace(plan, spread=plan.spread | {visits[longest]})
            yield plan

    def _firsts(self, visits: Sequence[int], packs: Sequence[Cost]) -> list[int]:
        firsts = self._all_firsts(visits, packs)
        return [firsts[rung] for rung in self._rungs(len(firsts) - 1)]

    def _all_firsts(self, visits: Sequence[int], packs: Sequence[Cost]) -> list[int]:
        """The visits from which packs may be fused."""
        if self._num_devices > 1 and self._parallel == "pipeline":
            return sorted({len(visits), fused_alone(visits)})
        return [len(visits), *fusable_from(visits, packs, self._profile.machine.free_bytes, may_be=True)]

    def _rungs(self, most: int) -> list[int]:
        return list(range(most + 1)) if self._takes_all else _ladder(most)
