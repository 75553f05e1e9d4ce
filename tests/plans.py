"""Random plans, and what a schedule computes, told without times, bytes or rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lightning_harmony.plan.cost import Cost
from lightning_harmony.plan.profile import MachineLimits, Profile
from lightning_harmony.plan.plan import Plan, Predicted, visits_of
from lightning_harmony.plan.schedule import Schedule
from lightning_harmony.plan.task import Errand, Phase, Task

small = st.integers(0, 9)
seconds = st.integers(0, 4).map(float)
speeds = st.none() | st.sampled_from([1.0, 5.0])


WITHOUT_MICROBATCH = [Errand.SWAP_IN, Errand.EVICT, Errand.SWAP_OUT, Errand.UPDATE]
with_microbatch = st.sampled_from([*Phase, *(errand for errand in Errand if errand not in WITHOUT_MICROBATCH)])
numbers = st.integers(0, 10**6)
tasks = st.builds(Task, numbers, with_microbatch, numbers) | st.builds(
    Task, numbers, st.sampled_from(WITHOUT_MICROBATCH), st.none()
)


def names(num_packs: int) -> tuple[tuple[str, ...], ...]:
    return tuple((f"layer {index}",) for index in range(num_packs))


@st.composite
def costs(draw: st.DrawFn, name: str = "layer") -> Cost:
    sizes = [draw(small) for _ in range(8)]
    return Cost(name, *sizes, draw(seconds), draw(seconds))


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
    plan = Plan(
        names(num_packs),
        visits,
        first,
        kept,
        num_microbatches=draw(st.integers(1, 4)),
        num_devices=draw(st.integers(1, max_devices)),
        parallel=draw(st.sampled_from(["pipeline", "data"])),
    )
    return plan, tuple(draw(costs(f"layer {index}")) for index in range(num_packs))


machines = st.builds(MachineLimits, st.none() | st.integers(10, 150), speeds, speeds, speeds, speeds)


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
    if run.updated.keys() != run.gradients.keys() or any(run.sums.values()):
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
        self.sums: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.gradients: dict[int, Any] = {}
        self.updated: dict[int, Any] = {}

    def does(self, device: int, task: Task) -> bool:
        """Run a task; False if what it needs isn't there."""
        pack, kind, number = task
        visits, lanes, weights = self.plan.visits, self.lanes, self.weights
        here = (device, pack)
        mine = (device, pack, number)
        where, done, value = lanes.get(number or 0, (device, 0, ("input", number)))
        if kind is Errand.SWAP_IN:
            self.num_swaps += 1
            weights[here] = self.num_swaps
        elif kind is Errand.EVICT:
            return weights.pop(here, None) is not None
        elif kind is Errand.TRANSFER_FORWARD or kind is Errand.TRANSFER_BACKWARD:
            is_forward = done < len(visits)
            following = visits[done] if is_forward else visits[2 * len(visits) - 1 - done]
            if (kind is Errand.TRANSFER_FORWARD) != is_forward or following != pack:
                return False
            lanes[number or 0] = device, done, value
        elif kind is Phase.FORWARD:
            if done >= len(visits) or visits[done] != pack or where != device or here not in weights:
                return False
            kept = weights[here] if self.plan.keeps_graph(done) else None
            self.saved[mine].append((value, kept))
            lanes[number or 0] = device, done + 1, ("forward", pack, value)
        elif kind is Phase.BACKWARD:
            position = 2 * len(visits) - 1 - done
            if not 0 <= position < len(visits) or visits[position] != pack or where != device or here not in weights:
                return False
            if not self.saved[mine] or (kept := self.saved[mine].pop()[1]) not in (None, weights[here]):
                return False
            if pack in self.trained:
                self.sums[here].append((position, number, value))
            lanes[number or 0] = device, done + 1, ("backward", pack, value)
        elif kind is Errand.STASH_OUT or kind is Errand.STASH_IN:
            source, target = (self.saved, self.on_host) if kind is Errand.STASH_OUT else (self.on_host, self.saved)
            if not source[mine]:
                return False
            target[mine].append(source[mine].pop())
        elif kind is Errand.REDUCE:
            source_sums = self.sums[number or 0, pack]
            if number == device or not source_sums or not self._is_complete(number or 0, pack):
                return False
            self.sums[here] += source_sums
            del self.sums[number or 0, pack]
        elif kind is Errand.SWAP_OUT:
            if not self.sums[here]:
                return False
            self.gradients[pack] = (*self.gradients.get(pack, ()), *self.sums.pop(here))
        else:
            if pack not in self.gradients or pack in self.updated:
                return False
            # Sums of different uses are added in an order of their own.
            self.updated[pack] = sorted(self.gradients[pack], key=lambda part: -part[0])
        return True

    def _is_complete(self, device: int, pack: int) -> bool:
        visits, plan = self.plan.visits, self.plan
        lanes = [m for m in range(plan.num_microbatches or 0) if plan.device_of(pack, m) == device]
        return len(self.sums[device, pack]) == visits.count(pack) * len(lanes)
