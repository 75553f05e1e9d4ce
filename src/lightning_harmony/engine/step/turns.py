"""Turns: which of the parked lanes goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf
from typing import Any

from torch import Tensor, nn

from lightning_harmony.engine.glue.one_device import OneDevice
from lightning_harmony.engine.glue.views import Views
from lightning_harmony.engine.lanes.lane import AnyLane
from lightning_harmony.engine.memory.stash import LaneStash
from lightning_harmony.engine.memory.transfer import LaneTransfers
from lightning_harmony.engine.memory.unseen_changes import UnseenChanges
from lightning_harmony.engine.model.layer import BufferKey
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import Phase


@dataclass(eq=False)
class Request:
    """What a parked lane asks for: its turn in a pack, or, with no pack, the gradient of its loss.

    Attributes:
        phase: the phase of the pack.
        pack: its index.
        position: where in the plan's order of that phase.
        place: sorts requests by the order in which they are served: forward before backward, then as planned. The lanes
            behind catch up, and share a pack's visit. Who asks for the gradient of its loss comes behind those who have theirs
            and ask for the last layer's backward: the gradient of what that returned may be large.
    """

    phase: Phase
    pack: int | None
    position: int = 0
    place: tuple[bool, int, float] = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.phase is Phase.BACKWARD, self.position, inf if self.pack is None else self.pack


# Of a lane that has not begun.
_FIRST: tuple[bool, int, float] = False, -1, -1


@dataclass(frozen=True)
class Microbatch:
    """What one lane runs.

    Attributes:
        step: the user's step on this microbatch; returns its loss, None if there is nothing to differentiate.
        weight: what its loss counts in the sum whose gradient is brought.
        seed: of its random stream; None to go on with the caller's.
    """

    step: Callable[[], Tensor | None]
    weight: Fraction
    seed: int | None


@dataclass(eq=False)
class LaneProgress:
    """How far a lane has come in its step.

    Attributes:
        lane: the lane.
        microbatch: what it runs.
        stashes: what it has stashed from each device.
        transfers: its copies from device to device.
        glue: its code between the layers, where there are several devices.
        ready_at: when its last turn ends, counted in turns, if each takes as long as another and devices work side by side.
        task: the phase and the pack that it runs.
        position: where in the plan's order of each phase it is.
        uses: how often it has called each layer.
        tokens: of the parameters that glue used.
        views: of parameters, that its glue was given.
        given: the parameters that autograd functions of the user's own were given.
        pending: how many backwards it still has to run of each pack.
        calls: the layers that it called, in order.
        last_filled: buffers that layers have filled through `.data`, as the last of several calls left them; None after one.
        differentiating: whether it has come to the backward of its loss.
        loss: where the backward follows when the caller brings its gradient.
        unseen_changes: looks for them in its forward, in a step that is watched.
    """

    lane: AnyLane
    microbatch: Microbatch
    stashes: list[LaneStash]
    transfers: LaneTransfers
    glue: OneDevice | None
    ready_at: int = 0
    task: tuple[Phase, int] | None = None
    position: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    uses: Counter[int] = field(default_factory=Counter)
    tokens: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    views: Views = field(default_factory=Views)
    given: set[nn.Parameter] = field(default_factory=set)
    pending: Counter[int] = field(default_factory=Counter)
    calls: list[int] = field(default_factory=list)
    last_filled: dict[BufferKey, Tensor | None] = field(default_factory=dict)
    differentiating: bool = False
    loss: Tensor | None = None
    unseen_changes: UnseenChanges | None = None

    @property
    def has_come_to_its_loss(self) -> bool:
        """Whether its forward is over."""
        return self.differentiating or self.lane.finished


class Turns:
    """Gives the lanes of a step their turns, so that devices work side by side and no result depends on the order.

    Args:
        running: the lanes, in the order of microbatches.
        plan: what runs where.
        having_buffers: the packs whose layers have buffers, which they may change.
        fuses: whether the lane that comes to the fused packs goes through them to its loss and back.

    Attributes:
        running: the same lanes.
        has_several_devices: whether there are several, so that it counts when which one is free.
    """

    def __init__(
        self, running: Sequence[LaneProgress], plan: Plan, having_buffers: Collection[int], *, fuses: bool
    ) -> None:
        self.running = running
        self._plan = plan
        self.has_several_devices = plan.num_devices > 1
        self._having_buffers = having_buffers
        self._fuses = fuses
        self._groups = plan.groups
        self._last_position = len(plan.visits) - 1
        self._free_at = [0] * plan.num_devices

    def next(self, until: Phase, previous: LaneProgress | None) -> LaneProgress | None:
        """The lane whose turn it is; None if none may run.

        Args:
            until: lanes that ask for what comes after this phase wait.
            previous: the lane that parked last.
        """
        # To go on takes no change of threads, and the order of work is the same on each device.
        if (
            previous is not None
            and self.has_several_devices
            and self._groups
            and not previous.lane.finished
            and self._is_first_on_its_device(previous)
            and self._may_run(previous, until)
        ):
            return previous
        chosen: LaneProgress | None = None
        its_turn: tuple[Any, ...] = ()
        for progress in self.running:
            if progress.lane.finished:
                continue
            request = progress.lane.request
            place = _FIRST if request is None else request.place
            turn = self._turn(progress, place) if self.has_several_devices or not self._groups else place
            # Last: it looks at all lanes again.
            if (chosen is None or turn < its_turn) and self._may_run(progress, until):
                chosen, its_turn = progress, turn
        return chosen

    def device_of(self, progress: LaneProgress) -> int:
        """The number of the device of what a lane asks for: the backward of its loss, where the last pack is."""
        request = progress.lane.request
        if not self.has_several_devices or request is None:
            return 0
        packs = self._plan.visits[-1:] if request.pack is None else (request.pack,)
        return self._plan.device_of(packs[0], progress.lane.microbatch) if packs else 0

    def take(self, progress: LaneProgress, device: int) -> None:
        """A lane has its turn in a pack on a device."""
        progress.ready_at = self._free_at[device] = max(progress.ready_at, self._free_at[device]) + 1

    def expects_backward(self, pack: int) -> bool:
        """Whether a lane has still to run a backward of a pack."""
        return any(progress.pending.get(pack) for progress in self.running)

    def is_overtaking(self, progress: LaneProgress, pack: int) -> bool:
        """Whether an earlier microbatch still has gradients for a pack: sums are made in the order of microbatches."""
        return any(other.pending.get(pack) and not other.lane.finished for other in self._earlier(progress))

    def have_come_to_their_losses(self) -> bool:
        """Whether all forwards are over."""
        return all(progress.has_come_to_its_loss for progress in self.running)

    def _turn(self, progress: LaneProgress, place: tuple[bool, int, float]) -> tuple[int, int, tuple[bool, int, float]]:
        """What sorts lanes: the soonest, as far as devices and the lane's last turn allow, then by place.

        Where each goes through all packs by itself, the first one comes before all places.
        """
        number = 0 if self._groups else progress.lane.microbatch
        if not self.has_several_devices:
            return 0, number, place
        if progress.lane.request is None:
            # It waits for no device.
            return progress.ready_at, number, place
        return max(progress.ready_at, self._free_at[self.device_of(progress)]), number, place

    def _is_first_on_its_device(self, progress: LaneProgress) -> bool:
        """Whether no other lane asks for the same device at an earlier place, or may do so when it has begun."""
        number, place = self.device_of(progress), self._place(progress)
        return all(
            other is progress
            or other.lane.finished
            or (other.lane.request is not None and self.device_of(other) != number)
            or place < self._place(other)
            for other in self.running
        )

    @staticmethod
    def _place(progress: LaneProgress) -> tuple[tuple[bool, int, float], int]:
        request = progress.lane.request
        return _FIRST if request is None else request.place, progress.lane.microbatch

    def _may_run(self, progress: LaneProgress, until: Phase) -> bool:
        request = progress.lane.request
        if request is None:
            return True
        if request.phase is Phase.FORWARD:
            is_too_early = self._fuses and self._is_too_early(progress, request)
            return not is_too_early and not self.would_overtake(progress, request)
        if request.pack is None:
            return until is Phase.BACKWARD
        if not progress.differentiating:
            # The step itself asks for a gradient, as torch.autograd.grad of an activation.
            return True
        return until is Phase.BACKWARD and not self.is_overtaking(progress, request.pack)

    def _is_too_early(self, progress: LaneProgress, request: Request) -> bool:
        """Whether a lane asks for the fused packs while one before it has not yet been through: it would have to wait."""
        if request.pack not in self._plan.fused:
            return False
        return not all(other.has_come_to_its_loss for other in self._earlier(progress))

    def would_overtake(self, progress: LaneProgress, request: Request) -> bool:
        """Whether an earlier microbatch is still on its way to a pack that each comes to in its order.

        Those are the packs whose layers may change their buffers, and the last one: the code behind it keeps losses and sums.
        """
        if not self.has_several_devices:
            return False
        if request.pack not in self._having_buffers and request.position != self._last_position:
            return False
        return any(
            not other.has_come_to_its_loss and _is_before(other.lane.request, request)
            for other in self._earlier(progress)
        )

    def _earlier(self, progress: LaneProgress) -> Sequence[LaneProgress]:
        """The lanes of the microbatches before one."""
        return self.running[: progress.lane.microbatch]


def _is_before(request: Request | None, other: Request) -> bool:
    """Whether a lane with a request, or one that has not begun, has yet to come through the place of a forward."""
    return request is None or (request.phase is Phase.FORWARD and request.position <= other.position)
