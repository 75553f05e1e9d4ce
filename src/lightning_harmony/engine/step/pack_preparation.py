"""Makes the pack that a lane comes to resident, and reserves the work space of its turn there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from lightning_harmony.engine.layers.narrow import autocast_dtype
from lightning_harmony.engine.measure.profile import Profiler
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.agenda import Place
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Residency, SwappedPack
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.step import Step
from lightning_harmony.engine.step.turns import LaneProgress, Request
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.task import Phase, Task

_NONE: frozenset[int] = frozenset()


class _Stay:
    """The context in which a layer resides on the device, for a lane that comes to it in a phase."""

    __slots__ = ("_layer", "_phase", "_preparation", "_progress", "_residency", "_stashed")

    def __init__(self, preparation: PackPreparation, progress: LaneProgress, layer: SwappedLayer, phase: Phase) -> None:
        self._preparation, self._progress, self._layer, self._phase = preparation, progress, layer, phase

    def __enter__(self) -> Residency:
        residency = self._residency = self._preparation.come(self._progress, self._layer, self._phase)
        self._stashed = self._preparation.stashed_bytes
        return residency

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._preparation.go(self._layer, self._phase, self._residency, self._stashed)


@dataclass(eq=False, repr=False)
class PackPreparation:
    """Brings packs to the lanes that visit them.

    Args:
        step: the step that runs.
        placement: of its packs.
        observer: knows what layers allocate.
        profiler: times copies.
        traffic: counts what is stashed.
        recorder: notes tasks.
        compute_dtype: the type in which layers compute, whatever autocast does; None to go by autocast.
    """

    _step: Step
    _placement: Placement
    _observer: Observer
    _profiler: Profiler
    _traffic: Traffic
    _recorder: StepRecorder
    _compute_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        self._root = self._placement.residents[0].device.torch_device
        self._plan = self._placement.plan
        self._requests: dict[tuple[Phase, int, int], Request] = {}

    def _refuse_forward_mode(self, layer: SwappedLayer) -> None:
        """The tangents of forward-mode derivatives are the process's: who ends a level ends it for all microbatches."""
        if not self._step.is_sequential:
            raise UnsupportedModelError(
                f"{layer.name!r} is swapped in within a forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad), "
                "whose state all microbatches share: take a copy of the parameter before, parameter.clone(), or use "
                "num_microbatches=1"
            )

    def visit(self, progress: LaneProgress, layer: SwappedLayer, phase: Phase) -> AbstractContextManager[Residency]:
        """Wait for a layer's turn; within the context it resides on the device."""
        return _Stay(self, progress, layer, phase)

    @property
    def looks_at_inputs(self) -> bool:
        """Whether the step is to show how code between layers changes what they take."""
        return self._observer.is_training and (self._observer.is_measuring or not self._step.has_trained)

    @property
    def stashed_bytes(self) -> int:
        """What was stashed so far in the step, where it is measured how much each layer stashes."""
        return self._traffic.swapped_out["stash"] if self._observer.is_profiling else 0

    def go(self, layer: SwappedLayer, phase: Phase, residency: Residency, stashed: int) -> None:
        """A lane leaves a layer, to which it came when so much was stashed."""
        if self._observer.is_profiling and phase is Phase.FORWARD:
            # The code behind the layer stashes, too.
            self._profiler.note_input(layer, self.stashed_bytes - stashed)
        if layer.module is not None:
            residency.last_use = residency.device.record()

    def come(self, progress: LaneProgress, layer: SwappedLayer, phase: Phase) -> Residency:
        """Wait for a layer's turn: from then on it resides on the device."""
        placement, step = self._placement, self._step
        index = placement.pack_of[layer.index]
        number = placement.device_of(index)
        residents = placement.residents[number]
        pack = residents.packs[index]
        if phase is Phase.FORWARD:
            progress.calls.append(layer.index)
            if step.watch is not None and not progress.differentiating:
                step.watch.at_call(layer.name)
        if progress.task != (phase, index) or pack.residency is None:
            request = self._request(phase, index, progress.position[phase])
            if self._may_go_on(progress, request):
                if step.granted is not None:
                    step.granted.pack, step.granted.phase = pack, phase
                with Unseen(), residents.device.scheduling():
                    self._recorder.leave()
                    self.enter(progress, Place(pack, phase, request.position))
                    self.note_task(number, progress, phase, pack)
                    self._observer.go_on(residents.device, phase, pack)
            else:
                if torch.autograd.forward_ad._current_level >= 0:
                    self._refuse_forward_mode(layer)
                progress.lane.park(request)
        else:
            # Between the layers of a pack, what the last one left to be swapped out may still be there.
            place = Place(pack, phase, progress.position[phase])
            with residents.device.scheduling():
                residents.ensure_room(self._needed_bytes(residents, pack, phase, [layer]), place)
        progress.transfers.launched.begin(number)
        if phase is Phase.FORWARD and pack.layout.casts and not self._casts_as_known(pack):
            self._widen(residents, Place(pack, phase, progress.position[phase]))
        residency = pack.residency
        assert residency is not None
        if phase is Phase.FORWARD and residency.checksum is None:
            with residents.device.scheduling():
                residents.weight_checks.begin(pack)
        # Not known while it lasts. Nor afterwards, where an error ended it, or where glue uses its parameters later on.
        residency.last_use = None
        if layer.module is None:
            # Glue reads its parameters in the lane's own work, which has only heard of the layers it came through.
            with residents.device.selected():
                residency.ready.wait()
        return residency

    def _request(self, phase: Phase, pack: int, start: int) -> Request:
        """What a lane asks for that comes to a pack, having come as far as a position. All lanes ask for the same."""
        plan, key = self._placement.plan, (phase, pack, start)
        if plan is not self._plan:
            self._plan, self._requests = plan, {}
        found = self._requests.get(key)
        if found is None:
            found = self._requests[key] = Request(phase, pack, plan.position(phase, pack, start))
        return found

    def turn_on(self, progress: LaneProgress, number: int) -> Request | None:
        """What a lane asks for next in its backward; None unless that is a turn of its own, on a device with a number."""
        plan, task = self._placement.plan, progress.task
        if self._step.is_sequential or task is None or task[0] is Phase.FORWARD:
            return None
        position = progress.position[Phase.BACKWARD]
        pack = next(plan.upcoming(Phase.BACKWARD, position), None)
        if pack is None or not progress.pending[pack] or self._placement.device_of(pack) != number:
            return None
        request = self._request(Phase.BACKWARD, pack, position)
        return None if self._may_go_on(progress, request) else request

    def _may_go_on(self, progress: LaneProgress, request: Request) -> bool:
        """Whether a lane enters a pack without parking: in one turn of the forward, or within the fused packs."""
        step, plan, pack, task = self._step, self._placement.plan, request.pack, progress.task
        if pack is None or task is None:
            return False
        if request.phase is Phase.FORWARD and request.position in plan.joined:
            # Where work space isn't known, a lane goes from pack to pack.
            return (
                not (self._observer.is_measuring or progress.differentiating)
                and task == (Phase.FORWARD, plan.visits[request.position - 1])
                and not step.turns.would_overtake(progress, request)
            )
        if not step.fuses or step.in_backward or pack not in plan.fused or task[1] not in plan.fused:
            return False
        if request.phase is Phase.FORWARD:
            return not progress.differentiating
        return not step.turns.is_overtaking(progress, pack)

    def _casts_as_known(self, pack: SwappedPack) -> bool:
        """Whether autocast does now what it did when the pack's layers were watched."""
        if self._compute_dtype is not None:
            return True
        return pack.layout.types == {autocast_dtype(self._root)}

    def _widen(self, residents: Residents, place: Place) -> None:
        """Give a pack its weights as they are."""
        with Unseen(), residents.device.scheduling():
            residents.evict(place.pack)
            for pack in self._placement.copies(place.pack.index):
                pack.widen()
            work_bytes = self._needed_bytes(residents, place.pack, place.phase)
            residents.begin_visit(place, work_bytes, alone=self._observer.is_measuring)

    def narrow(self) -> None:
        """A microbatch has run, and may have shown which weights may be narrow: let the others bring them so."""
        observer = self._observer
        if not (observer.is_profiling and observer.has_seen_casts) or observer.has_seen_narrow:
            return
        for residents in self._placement.residents:
            with residents.device.scheduling():
                for pack in residents.packs:
                    residents.evict(pack)
                    pack.lay_out_anew()
        observer.begin_narrow()

    # ---- coming to a pack ----------------------------------------------------------------------------------------------

    def enter(self, progress: LaneProgress, place: Place) -> None:
        """A lane comes to a pack: make it ready."""
        progress.position[place.phase] = place.position
        progress.task = place.phase, place.pack.index
        placement, is_profiling = self._placement, self._observer.is_profiling
        residents = placement.residents[placement.plan.device_of(place.pack.index, progress.lane.microbatch)]
        residents.pinned = self._pinned(place)
        work_bytes = self._needed_bytes(residents, place.pack, place.phase)
        sharing = placement.others_with_buffers_of(place.pack)
        for others, pack in sharing:
            # A microbatch finds buffers as the one before it left them, wherever that was.
            if pack.has_changed_buffers:
                with others.device.scheduling():
                    others.swapper.write_back(pack)
        if is_profiling and place.pack.residency is None and len(place.pack.layers) == 1:
            self._time_swap_in(residents, place, work_bytes)
            self._observer.note_found(residents, place)
        else:
            residents.enter(place, work_bytes, alone=self._observer.is_measuring)
            if self._observer.is_measuring and not self._observer.is_training:
                self._observer.note_found(residents, place)
        # In the backward, too, for a checkpoint within a layer runs a part of that again.
        if sharing or (place.phase is Phase.FORWARD and not place.pack.layers[0].is_training):
            residents.swapper.read_again(place.pack)
        if self._observer.is_measuring and place.phase is Phase.BACKWARD:
            # They count as gradients, and not as what the turn allocates.
            residents.sums.unpark(place.pack)

    @property
    def comes_back_at_once(self) -> bool:
        """Whether a lane goes on to its loss and back through the last layer in one turn, for all of which room was made."""
        visits = self._placement.plan.visits
        return not visits or self._is_fused(visits[-1], Phase.FORWARD)

    def enter_loss(self, progress: LaneProgress) -> None:
        """A lane comes to the backward of its loss, which counts to the last layer's: make room for it."""
        plan = self._placement.plan
        if self.comes_back_at_once:
            return
        index = plan.visits[-1]
        residents = self._placement.residents[plan.device_of(index, progress.lane.microbatch)]
        with Unseen(), residents.device.scheduling():
            if self._observer.is_measuring:
                residents.await_leaving()
                return
            pack = residents.packs[index]
            work_bytes = self._observer.work.bytes(pack.layers[-1:], Phase.BACKWARD)
            # The lane is still in its forward: sums that the pack has are not needed yet.
            residents.ensure_room(work_bytes, Place(pack, Phase.FORWARD, progress.position[Phase.FORWARD]))

    def note_task(self, number: int, progress: LaneProgress, phase: Phase, pack: SwappedPack | None) -> None:
        """Record what a lane does: before the first layer, and from its loss to the last, something to that layer's pack."""
        if not self._recorder.is_recording:
            return
        ends = self._placement.plan.visits or (0,)
        index = pack.index if pack is not None else ends[0 if phase is Phase.FORWARD else -1]
        self._recorder.enter(number, Task(index, phase, progress.lane.microbatch), pack)

    def _pinned(self, place: Place) -> frozenset[int]:
        """The packs that the lanes behind come through: the fused ones, and those of the same turn of the forward."""
        step, plan = self._step, self._placement.plan
        fused = plan.fused if step.fuses and not step.turns.have_come_to_their_losses() else _NONE
        if place.phase is Phase.BACKWARD or not plan.joined:
            return fused
        return fused | plan.packs_of_turn(place.position)

    def _time_swap_in(self, residents: Residents, place: Place, work_bytes: int) -> None:
        """Bring a layer to an empty device, and time its copy."""
        pack = place.pack
        # What that waits for, an update of the step before, is no part of the copy.
        with self._observer.copying():
            residents.evict_all_but(pack)
            with self._profiler.swapping_in(pack.layers[0], residents.device):
                residents.enter(place, work_bytes, alone=True)
                assert pack.residency is not None
                pack.residency.ready.synchronize()

    # ---- memory --------------------------------------------------------------------------------------------------------

    def keeps_graphs_in(self, task: tuple[Phase, int] | None) -> bool:
        """Whether a task keeps graphs on the device, and with them what would go to the stash."""
        if task is None or task[0] is not Phase.FORWARD or self._observer.is_measuring:
            return False
        return task[1] in self._placement.plan.kept or self._is_fused(task[1], Phase.FORWARD)

    def _is_fused(self, pack: int, phase: Phase) -> bool:
        """Whether a lane that comes to a pack goes on to its loss and comes back through it, all in one turn."""
        return self._step.fuses and phase is Phase.FORWARD and pack in self._placement.plan.fused

    def _needed_bytes(
        self, residents: Residents, pack: SwappedPack, phase: Phase, layers: Sequence[SwappedLayer] | None = None
    ) -> int:
        """What a pack will allocate in a phase: work, kept graphs, and sums of gradients; of the former, for some layers."""
        layers, plan, seen = layers or pack.layers, self._placement.plan, self._observer.work
        fused = self._is_fused(pack.index, phase)
        work = seen.bytes(layers, phase)
        if phase is Phase.BACKWARD:
            sums_here = pack.index not in plan.spread or residents is self._placement.home_of(pack.index)
            gradients = pack.gradient_layout()[1] if sums_here and not pack.accumulators else 0
            if pack.residency is not None and pack.residency.graphs:
                # What was measured made each graph anew.
                work = max(max(seen.bytes([layer], phase) - seen.graph_bytes([layer]), 0) for layer in layers)
            return gradients + work
        if fused and pack.index == plan.visits[-1] and layers[-1] is pack.layers[-1]:
            # The backward of the loss counts to the last layer's. It is a part of this turn, and finds graphs there.
            work = max(work, seen.bytes(layers[-1:], Phase.BACKWARD))
        if fused or pack.index in plan.kept:
            work += seen.graph_bytes(layers)
        return work
