"""Random plans, and what a schedule computes, told without times, bytes or rules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lightning_harmony.plan.simulate.schedule import Schedule
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan, Predicted, visits_of
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from lightning_harmony.plan.values.task import KINDS, Errand, Phase, Task

small = st.integers(0, 9)
seconds = st.integers(0, 4).map(float)
speeds = st.none() | st.sampled_from([1.0, 5.0])


WITHOUT_MICROBATCH = [Errand.SWAP_IN, Errand.EVICT, Errand.SWAP_OUT, Errand.PARK, Errand.UPDATE]
with_microbatch = st.sampled_from([*Phase, *(errand for errand in Errand if errand not in WITHOUT_MICROBATCH)])
numbers = st.integers(0, 10**6)
tasks = st.builds(Task, numbers, with_microbatch, numbers) | st.builds(
    Task, numbers, st.sampled_from(WITHOUT_MICROBATCH), st.none()
)


# A small step that uses every stream of one device: its weights take 1 s to come, its stash a quarter of that.
STEP_PACK = Cost(
    "pack",
    1024,
    1024,
    copied_bytes=2048,
    stash_bytes=512,
    forward_seconds=1.0,
    backward_seconds=2.0,
    recompute_seconds=1.0,
)
STEP_MACHINE = DeviceLimits(None, 2048.0, 2048.0)
STEP_LAYERS = tuple(replace(STEP_PACK, name=name) for name in ("a & b", "c"))
STEP = Plan(
    (("a & b",), ("c", "d")),
    (0, 1),
    1,
    num_microbatches=2,
    profile=Profile(STEP_LAYERS, STEP_MACHINE),
)


def parse_task(text: str) -> Task:
    """What prints so."""
    match = re.fullmatch(r"([0-9]+)([A-Z_]+)([0-9]*)", text)
    assert match is not None, text
    return Task(int(match[1]), KINDS[match[2]], int(match[3]) if match[3] else None)


def parse_schedule(grid: str) -> Schedule:
    """What prints as this grid."""
    devices: defaultdict[str, list[Task]] = defaultdict(list)
    for line in filter(str.strip, grid.splitlines()):
        name, _, cells = line.partition("|")
        devices[name] += [parse_task(cell) for cell in cells.split() if cell != "."]
    return Schedule(tuple(map(tuple, devices.values())))


def names(num_packs: int) -> tuple[tuple[str, ...], ...]:
    return tuple((f"layer {index}",) for index in range(num_packs))


@st.composite
def costs(draw: st.DrawFn, name: str = "layer") -> Cost:
    sizes = [draw(small) for _ in range(8)]
    return Cost(name, *sizes, *(draw(seconds) for _ in range(3)), *(draw(small) for _ in range(3)))


@st.composite
def plans(draw: st.DrawFn, *, max_devices: int = 3, repeats: bool = True) -> tuple[Plan, tuple[Cost, ...]]:
    """A plan that doesn't contradict itself, and what its packs cost."""
    num_packs = draw(st.integers(1, 5))
    visits = tuple(range(num_packs))
    if repeats and draw(st.booleans()):
        visits = visits_of(draw(st.lists(st.integers(0, num_packs - 1), min_size=1, max_size=7)))
    firsts = [n for n in range(len(visits) + 1) if not set(visits[:n]) & set(visits[n:])]
    first = draw(st.sampled_from(firsts))
    kept = frozenset(draw(st.sets(st.sampled_from(visits[:first])))) if first else frozenset()
    lookahead = draw(st.integers(0, 3))
    reuse = draw(st.sampled_from(["just-in-time", "just-in-time", "visit", "none"]))
    if reuse != "just-in-time":
        first, kept, lookahead = len(visits), frozenset(), 0
    num_devices, parallel = draw(st.integers(1, max_devices)), draw(st.sampled_from(["pipeline", "data"]))
    joined: frozenset[int] = frozenset()
    if first > 1 and reuse == "just-in-time" and (num_devices == 1 or parallel == "data"):
        joined = frozenset(draw(st.sets(st.integers(1, first - 1))))
    spread: frozenset[int] = frozenset()
    if num_devices > 1 and parallel == "pipeline" and reuse == "just-in-time":
        spread = frozenset(draw(st.sets(st.sampled_from(visits))))
    device_updated: frozenset[int] = frozenset()
    once = [pack for pack in visits if visits.count(pack) == 1 and pack not in spread]
    if once and reuse == "just-in-time" and (num_devices == 1 or parallel == "pipeline"):
        device_updated = frozenset(draw(st.sets(st.sampled_from(once))))
    plan = Plan(
        names(num_packs),
        visits,
        first,
        kept,
        joined,
        device_updated,
        spread,
        num_microbatches=draw(st.integers(1, 4)),
        num_devices=num_devices,
        parallel=parallel,
        reuse=reuse,
        lookahead=lookahead,
    )
    return plan, tuple(draw(costs(f"layer {index}")) for index in range(num_packs))


machines = st.builds(DeviceLimits, st.none() | st.integers(10, 150), speeds, speeds, speeds, speeds)


@st.composite
def full_plans(draw: st.DrawFn) -> Plan:
    """A plan with all that it may know."""
    plan, layers = draw(plans())
    predicted = st.builds(Predicted, st.floats(0, 1e9), st.lists(small, max_size=3).map(tuple))
    return replace(
        plan,
        fingerprint=draw(st.text(max_size=4)),
        profile=draw(st.none() | st.builds(Profile, st.just(layers), machines)),
        predicted=draw(st.none() | predicted),
    )


class CannotRun(Exception):
    """What a task needs is not there, and never comes."""


def compute(plan: Plan, packs: Sequence[Cost], schedule: Schedule) -> dict[int, Any]:
    """Run a schedule on symbols instead of tensors: what each pack that has gradients was updated from.

    Raises:
        CannotRun: if a task lacks what it computes with.
    """
    run = _Symbols(plan, {pack for pack, cost in enumerate(packs) if cost.gradient_bytes})
    todo = [list(tasks) for tasks in schedule.devices]
    while any(todo):
        before = sum(map(len, todo))
        for device, tasks in enumerate(todo):
            while tasks and run.does(device, tasks[0]):
                tasks.pop(0)
        if sum(map(len, todo)) == before:
            raise CannotRun(str([tasks[0] for tasks in todo if tasks]))
    unused = (run.made, run.sums, run.parked)
    if run.updated.keys() != run.gradients.keys() or any(any(each.values()) for each in unused):
        raise CannotRun("gradients that nobody uses")
    return run.updated


class _Symbols:
    """Tensors by what they were made from."""

    def __init__(self, plan: Plan, trained: set[int]) -> None:
        self.plan = plan
        self.trained = trained
        self.weights: dict[tuple[int, int], int] = {}
        self.num_swaps = 0
        self.lanes: dict[int, Any] = {}
        self.saved: dict[Any, list[Any]] = defaultdict(list)
        self.on_host: dict[Any, list[Any]] = defaultdict(list)
        self.made: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.sums: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.parked: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.gradients: dict[int, Any] = {}
        self.updated: dict[int, Any] = {}

    def does(self, device: int, task: Task) -> bool:
        """Run a task; False if what it needs isn't there."""
        if isinstance(task.kind, Phase):
            return self._runs(device, *task)
        if task.kind in (Errand.SWAP_IN, Errand.EVICT):
            return self._moves_weights(device, *task)
        if task.kind in (Errand.TRANSFER_FORWARD, Errand.TRANSFER_BACKWARD):
            return self._transfers(device, *task)
        if task.kind in (Errand.STASH_OUT, Errand.STASH_IN):
            return self._stashes(device, *task)
        if task.kind is Errand.UPDATE and task.pack in self.plan.device_updated:
            return self._updates_here(device, task.pack)
        return self._hands_over_gradients(device, *task)

    def _next(self, number: Any) -> tuple[Any, int]:
        """What a lane does next, in which visit."""
        visits, done = self.plan.visits, self.lanes[number][1]
        if done < len(visits):
            return Phase.FORWARD, done
        return Phase.BACKWARD, 2 * len(visits) - 1 - done

    def _runs(self, device: int, pack: int, kind: Any, number: Any) -> bool:
        where, done, value = self.lanes.setdefault(number, (device, 0, ("input", number)))
        phase, position = self._next(number)
        if phase is not kind or position < 0 or self.plan.visits[position] != pack or where != device:
            return False
        weights, saved = self.weights.get((device, pack)), self.saved[device, pack, number]
        if weights is None:
            return False
        if kind is Phase.FORWARD:
            saved.append((value, weights if self.plan.keeps_graph(position) else None))
        else:
            if not saved or saved.pop()[1] not in (None, weights):
                return False
            if any(part[0] == position for part in self.parked[device, pack]):
                return False
            if pack in self.trained:
                sums = self.made[pack, number] if pack in self.plan.spread else self.sums[device, pack]
                sums.append((position, number, value))
        self.lanes[number] = device, done + 1, (kind, pack, value)
        return True

    def _moves_weights(self, device: int, pack: int, kind: Any, _: Any) -> bool:
        if kind is Errand.EVICT:
            return self.weights.pop((device, pack), None) is not None
        self.num_swaps += 1
        self.weights[device, pack] = self.num_swaps
        return True

    def _transfers(self, device: int, pack: int, kind: Any, number: Any) -> bool:
        if number not in self.lanes:
            return False
        phase, position = self._next(number)
        wanted = Errand.TRANSFER_FORWARD if phase is Phase.FORWARD else Errand.TRANSFER_BACKWARD
        if kind is not wanted or position < 0 or self.plan.visits[position] != pack:
            return False
        self.lanes[number] = device, *self.lanes[number][1:]
        return True

    def _stashes(self, device: int, pack: int, kind: Any, number: Any) -> bool:
        source, target = (self.saved, self.on_host) if kind is Errand.STASH_OUT else (self.on_host, self.saved)
        if not source[device, pack, number]:
            return False
        target[device, pack, number].append(source[device, pack, number].pop())
        return True

    def _hands_over_gradients(self, device: int, pack: int, kind: Any, number: Any) -> bool:
        sums, gradients, updated = self.sums, self.gradients, self.updated
        if kind is Errand.GATHER:
            if not self.made[pack, number]:
                return False
            sums[device, pack].append(self.made[pack, number].pop(0))
        elif kind is Errand.REDUCE:
            if number == device or not self._is_complete(number, pack):
                return False
            sums[device, pack] += sums.pop((number, pack))
        elif kind is Errand.SWAP_OUT:
            if not sums[device, pack]:
                return False
            parts = (*self.parked.pop((device, pack), ()), *sums.pop((device, pack)))
            gradients[pack] = (*gradients.get(pack, ()), *parts)
        elif kind is Errand.PARK:
            self.parked[device, pack] += sums.pop((device, pack), [])
        elif kind is Errand.UNPARK:
            self._brings_sums(device, pack, number)
        else:
            if pack not in gradients or pack in updated:
                return False
            # Sums of different uses are added in an order of their own, and so are those of devices that add up on the host.
            updated[pack] = sorted(gradients[pack], key=lambda part: (-part[0], self._sender(pack, part[1])))
        return True

    def _updates_here(self, device: int, pack: int) -> bool:
        """The sums are used up where they are."""
        if not self._is_complete(device, pack) or pack in self.updated:
            return False
        self.gradients[pack] = self.sums.pop((device, pack))
        self.updated[pack] = sorted(self.gradients[pack], key=lambda part: -part[0])
        return True

    def _brings_sums(self, device: int, pack: int, number: Any) -> None:
        parked, position = self.parked.pop((device, pack), []), self._next(number)[1]
        self.sums[device, pack] = [part for part in parked if part[0] == position] + self.sums[device, pack]
        self.parked[device, pack] = [part for part in parked if part[0] != position]

    def _sender(self, pack: int, number: int) -> int:
        return 0 if self.plan.just_in_time else self.plan.device_of(pack, number)

    def _is_complete(self, device: int, pack: int) -> bool:
        visits, plan = self.plan.visits, self.plan
        lanes = [m for m in range(plan.num_microbatches or 0) if plan.device_of(pack, m) == device]
        return 0 < len(self.sums[device, pack]) == visits.count(pack) * len(lanes)


LAYER = Cost("layer", 100, 100, 5, 8, 30, 100, 4, 4, 1.0, 3.0, 1.0)
