"""The order of a step by a plan: what runs while which packs stay on a device, and which device sums and updates a pack."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import Phase


@dataclass(frozen=True)
class Run:
    """One microbatch's way through one visit."""

    phase: Phase
    position: int
    microbatch: int


@dataclass(frozen=True)
class Stay:
    """What runs while the same packs stay on the device.

    Attributes:
        phase: of its place.
        place: where in the plan's order of that phase it begins.
        runs: in order.
    """

    phase: Phase
    place: int
    runs: tuple[Run, ...]


def stays(plan: Plan) -> Iterator[Stay]:
    """The order of a step: all microbatches run through packs while they are there, and back at once through fused ones.

    Or, in a plan that doesn't group, one after the other through all packs, and then one after the other back.
    """
    numbers, num_visits = range(_num_microbatches(plan)), len(plan.visits)
    if not plan.groups:
        for phase in Phase:
            for number, place in product(numbers, range(num_visits)):
                position = place if phase is Phase.FORWARD else num_visits - 1 - place
                yield Stay(phase, place, (Run(phase, position, number),))
        return
    for turn in plan.forward_turns:
        runs = tuple(Run(Phase.FORWARD, position, number) for number, position in product(numbers, turn))
        yield Stay(Phase.FORWARD, turn.start, runs)
    fused = range(plan.first_fused, num_visits)
    through = [(Phase.FORWARD, position) for position in fused] + [(Phase.BACKWARD, p) for p in reversed(fused)]
    if through:
        runs = tuple(Run(phase, position, number) for number in numbers for phase, position in through)
        yield Stay(Phase.FORWARD, plan.first_fused, runs)
    for position in reversed(range(plan.first_fused)):
        runs = tuple(Run(Phase.BACKWARD, position, number) for number in numbers)
        yield Stay(Phase.BACKWARD, num_visits - 1 - position, runs)


def owner(plan: Plan, pack: int) -> int:
    """The device that sends a pack's gradients to the host: of one that is spread, its home."""
    if plan.parallel == "pipeline":
        return plan.device_of(pack, 0)
    return pack % min(plan.num_devices, _num_microbatches(plan))


def summing_devices(plan: Plan, pack: int) -> range:
    """The devices that sum gradients of a pack."""
    if plan.parallel == "pipeline":
        device = plan.device_of(pack, 0)
        return range(device, device + 1)
    return range(min(plan.num_devices, _num_microbatches(plan)))


def _num_microbatches(plan: Plan) -> int:
    if plan.num_microbatches is None:
        raise PlanError("the plan does not say for how many microbatches it is")
    return plan.num_microbatches
