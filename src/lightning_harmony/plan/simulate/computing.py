"""What a device computes, and what it holds beside weights meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_harmony.plan.simulate.footprint import Footprint
from lightning_harmony.plan.simulate.order import Run, Stay, owner
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import Errand, Phase, Task


@dataclass
class Held:
    """What a device holds beside weights, in the order of its tasks.

    What is on its way out counts as gone.

    Attributes:
        num_bytes: now.
        most_bytes: at most, since the stay before.
        leaving_bytes: what is on its way out since then.
        sum_bytes: what of it is sums of gradients, or waits for an update with these.
        most_passing_bytes: at most of all else.
        sums: those that there are, by pack and visit.
        outputs: by microbatch, what it has here.
    """

    num_bytes: int = 0
    most_bytes: int = 0
    leaving_bytes: int = 0
    sum_bytes: int = 0
    most_passing_bytes: int = 0
    sums: set[tuple[int, int]] = field(default_factory=set)
    outputs: dict[int, int] = field(default_factory=dict)

    def take(self, num_bytes: int, left_bytes: int) -> None:
        """Something takes bytes, and leaves some of them."""
        self.most_bytes = max(self.most_bytes, self.num_bytes + num_bytes)
        self.most_passing_bytes = max(self.most_passing_bytes, self.num_bytes + num_bytes - self.sum_bytes)
        self.num_bytes += left_bytes


class Computing:
    """The tasks with which one device computes.

    Args:
        plan: the plan.
        footprint: what each visit leaves on its device.
        device: the number of the device.

    Attributes:
        parked: the sums of gradients that have made way, by their packs and visits.
    """

    def __init__(self, plan: Plan, footprint: Sequence[Footprint], device: int) -> None:
        self._plan, self._footprint, self._device = plan, footprint, device
        self.parked: set[tuple[int, int]] = set()

    def here(self, runs: Sequence[Run]) -> tuple[Run, ...]:
        """The runs that compute here, and those whose gradients are gathered here."""
        if self._plan.num_devices == 1:
            return tuple(runs)
        return tuple(run for run in runs if self._computes(run) or self._gathers(run))

    def _computes(self, run: Run) -> bool:
        return self._plan.device_of(self._plan.visits[run.position], run.microbatch) == self._device

    def _gathers(self, run: Run) -> bool:
        """Whether the gradients of a run are added here, one microbatch after the other."""
        if run.phase is Phase.FORWARD or not self._footprint[run.position].is_gathered:
            return False
        return owner(self._plan, self._plan.visits[run.position]) == self._device

    def compute(self, stay: Stay, before: Held) -> tuple[list[Task], Held]:
        """The tasks of a stay besides those of weights, and what the device holds behind them.

        Args:
            stay: which one.
            before: what it holds before.
        """
        tasks: list[Task] = []
        held = Held(before.num_bytes, before.num_bytes, 0, before.sum_bytes, 0, set(before.sums), dict(before.outputs))
        # Else all of them compute here.
        has_spread = bool(self._plan.spread)
        for run in stay.runs:
            if not has_spread or self._computes(run):
                self._run(run, tasks, held)
            if has_spread and self._gathers(run):
                self._gather(run, tasks, held)
        return tasks, held

    def _run(self, run: Run, tasks: list[Task], held: Held) -> None:
        pack = self._plan.visits[run.position]
        if self._comes_from_elsewhere(run):
            self._transfer(run, tasks, held)
        if run.phase is Phase.FORWARD:
            self._forward(run, pack, tasks, held)
        else:
            self._backward(run, pack, tasks, held)

    def _comes_from_elsewhere(self, run: Run) -> bool:
        plan = self._plan
        if plan.num_devices == 1 or plan.parallel == "data":
            return False
        before = run.position - 1 if run.phase is Phase.FORWARD else run.position + 1
        return 0 <= before < len(plan.visits) and plan.device_of(plan.visits[before], run.microbatch) != self._device

    def _transfer(self, run: Run, tasks: list[Task], held: Held) -> None:
        kind, footprint = Errand.TRANSFER_FORWARD, self._footprint[run.position]
        num_bytes = footprint.there_bytes
        if run.phase is Phase.BACKWARD:
            kind, num_bytes = Errand.TRANSFER_BACKWARD, footprint.returning_bytes
        # What the lane left here when it went elsewhere has been fetched, or it could not come back.
        held.num_bytes -= held.outputs.pop(run.microbatch, 0)
        held.take(num_bytes, num_bytes)
        tasks.append(Task(self._plan.visits[run.position], kind, run.microbatch))

    def _forward(self, run: Run, pack: int, tasks: list[Task], held: Held) -> None:
        footprint = self._footprint[run.position]
        held.take(footprint.forward_bytes, footprint.forward_left_bytes - footprint.there_bytes)
        held.outputs[run.microbatch] = footprint.passed_bytes
        tasks.append(Task(pack, Phase.FORWARD, run.microbatch))
        if footprint.stash_bytes:
            tasks.append(Task(pack, Errand.STASH_OUT, run.microbatch))
            held.num_bytes -= footprint.stash_bytes
            held.leaving_bytes += footprint.stash_bytes

    def _backward(self, run: Run, pack: int, tasks: list[Task], held: Held) -> None:
        footprint = self._footprint[run.position]
        if not footprint.is_gathered:
            self._begin_sum(run, held)
        if (pack, run.position) in self.parked:
            self.parked.discard((pack, run.position))
            tasks.append(Task(pack, Errand.UNPARK, run.microbatch))
        if footprint.stash_bytes:
            tasks.append(Task(pack, Errand.STASH_IN, run.microbatch))
            held.take(footprint.loaded_bytes, footprint.loaded_bytes)
        gone = footprint.returning_bytes + footprint.loaded_bytes + footprint.graph_bytes
        held.take(footprint.backward_bytes, footprint.backward_left_bytes - gone)
        held.outputs[run.microbatch] = footprint.backward_left_bytes
        held.leaving_bytes += footprint.gathered_bytes
        tasks.append(Task(pack, Phase.BACKWARD, run.microbatch))

    def _begin_sum(self, run: Run, held: Held) -> None:
        """Where a sum of gradients is not there yet, it comes to be."""
        key = self._plan.visits[run.position], run.position
        if key not in held.sums:
            held.sums.add(key)
            num_bytes = self._footprint[run.position].gradient_bytes
            held.sum_bytes += num_bytes
            held.take(num_bytes, num_bytes)

    def _gather(self, run: Run, tasks: list[Task], held: Held) -> None:
        """Add the gradients of a microbatch, which may come from another device."""
        self._begin_sum(run, held)
        if not self._computes(run):
            num_bytes = self._footprint[run.position].gathered_bytes
            held.take(num_bytes, 0)
            held.leaving_bytes += num_bytes
        tasks.append(Task(self._plan.visits[run.position], Errand.GATHER, run.microbatch))
