"""Sums of gradients: what the backwards of all microbatches add up to, from the devices to the update of their pack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_harmony.engine.measure.profile import Profiler
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.transfer import Transfers
from lightning_harmony.engine.model.host_store import lay_out
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SummedGradients, SwappedPack
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.step import Step
from lightning_harmony.engine.step.swapped_model import SwappedModel
from lightning_harmony.engine.updates.update import StepUpdate, Updater
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.task import Errand, Task

_SPARSE = frozenset((torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


@dataclass(eq=False, repr=False)
class GradientSums:
    """Adds gradients up, and hands a pack's sums over to its update when no further backward is expected.

    Args:
        model: whose parameters they are of.
        step: the step that runs.
        placement: of its packs.
        transfers: bring together what several devices have summed.
        updater: takes them.
        observer: knows whether copies are timed.
        profiler: times them.
    """

    _model: SwappedModel
    _step: Step
    _placement: Placement
    _transfers: Transfers
    _updater: Updater
    _observer: Observer
    _profiler: Profiler

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """No step runs."""
        self._factor = 1.0
        self._requested: frozenset[nn.Parameter] | None = None
        self._delivered: set[int] = set()

    def begin_backward(self, factor: float, requested: frozenset[nn.Parameter] | None) -> None:
        """The backward of a step begins.

        Args:
            factor: its gradients are multiplied with it before they are handed over.
            requested: the parameters whose gradients are summed; None for all.
        """
        self._factor, self._requested = factor, requested

    # ---- adding up -----------------------------------------------------------------------------------------------------

    def add(self, layer: SwappedLayer, use: int, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Add the gradients of one backward of a layer.

        Args:
            layer: the layer.
            use: which call of the layer in its microbatch they are of.
            gradients: of each parameter that has one.
        """
        if self._requested is not None:
            gradients = [(p, gradient) for p, gradient in gradients if p in self._requested]
            if not gradients:
                return
        for parameter, gradient in gradients:
            if gradient.layout in _SPARSE:
                raise UnsupportedModelError(
                    f"parameter {self._model.names[parameter]!r} has a sparse gradient, which would be summed as a dense one "
                    "here: make dense ones, as with sparse=False"
                )
        if [parameter for parameter, _ in gradients if parameter._backward_hooks]:
            gradients = [(p, self._after_hooks(layer, use, p, gradient)) for p, gradient in gradients]
        index = self._placement.pack_of[layer.index]
        residents = self._placement.residents_of(index)
        # Those of glue come in a lane's own work; all lanes' sums are made in one order.
        with residents.device.computing():
            if index in self._placement.plan.spread and self._step.current() is not None:
                self._gather(layer, use, gradients, residents)
                return
            # Before the backward proper, which a fused pack runs ahead of, Lightning has not zeroed gradients yet. Where
            # several devices have sums of a pack, those of earlier batches are added once, on the host.
            plan = self._placement.plan
            add_to_earlier = self._step.adds_now and (plan.num_devices == 1 or plan.parallel == "pipeline")
            residents.sums.accumulate(residents.packs[index], layer, use, gradients, add_to_earlier=add_to_earlier)

    def _gather(
        self, layer: SwappedLayer, use: int, gradients: Sequence[tuple[nn.Parameter, Tensor]], source: Residents
    ) -> None:
        """Add the gradients of a layer whose pack is spread to the sums at its home, wherever they were made."""
        index = self._placement.pack_of[layer.index]
        home = self._placement.home_of(index)
        pack = home.packs[index]
        num_bytes = 0 if use in pack.accumulators else pack.gradient_layout()[1]
        if home is not source:
            num_bytes += lay_out([gradient for _, gradient in gradients])[1]
        home.admit(num_bytes)
        home.sums.gather(pack, layer, use, gradients, source.device, add_to_earlier=self._step.adds_now)

    def _after_hooks(self, layer: SwappedLayer, use: int, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """What the user's hooks of a parameter make of the gradient of one microbatch."""
        hooks = list((parameter._backward_hooks or {}).values())
        if hooks and (use > 0 or not self._model.is_only_user(layer, parameter)):
            raise UnsupportedModelError(
                f"parameter {self._model.names[parameter]!r} has a hook (register_hook) and is used several times in a step: "
                "the hook would see the gradient of each use apart; change the gradients in on_after_backward instead"
            )
        if hooks:
            gradient = gradient.to(parameter.dtype)
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def expect(self, layer: SwappedLayer) -> None:
        """A layer has come up that is a pack of its own."""
        self._updater.expect(layer.parameters)

    def refuse_late_call(self, layer: SwappedLayer) -> None:
        """A layer that is called in backward (reentrant checkpointing) has gradients of which nobody knows the last.

        Raises:
            UnsupportedModelError: if its gradients have been handed over to an update.
        """
        self._step.is_reentrant = True
        if not self._updater.uses_gradients_at_once:
            return
        # Also in another pack, as where a function of its own recomputes what a layer has computed.
        own = set(layer.parameters)
        packs = (self._placement.packs[index] for index in self._delivered)
        if any(not own.isdisjoint(pack.parameters) for pack in packs):
            raise UnsupportedModelError(
                f"layer {layer.name!r} is called again during the backward, after its update, or after its gradients were "
                "averaged over nodes; use checkpoint(..., use_reentrant=False), or on one machine "
                'HarmonyStrategy(update="deferred")'
            )

    # ---- handing over --------------------------------------------------------------------------------------------------

    def deliver_final(self, packs: Iterable[int]) -> None:
        """Hand over the gradients of those packs of which no further backward is expected."""
        if self._step.is_reentrant or not self._placement.plan.just_in_time:
            return
        for index in packs:
            if index in self._delivered or self._step.turns.expects_backward(index):
                continue
            if any(pack.accumulators or pack.parked for pack in self._placement.copies(index)):
                self._deliver((index,))

    def deliver_rest(self) -> None:
        """Hand over all that is left."""
        self._deliver(pack.index for pack in self._placement.packs if pack.index not in self._delivered)

    def _deliver(self, packs: Iterable[int]) -> None:
        placement = self._placement
        for index in packs:
            if not self._delivered:
                placement.refuse_changed_weights()
            self._delivered.add(index)
            summing = self._summing(index)
            if self._updates_there(index, summing):
                continue
            self._await_room(index, summing)
            if placement.plan.just_in_time:
                self._add_up(index, summing)
            gradients: list[SummedGradients] = []
            for residents in (placement.residents[number] for number in summing):
                pack = residents.packs[index]
                with residents.device.scheduling():
                    if self._factor != 1.0:
                        residents.sums.scale(pack, self._factor)
                    gradients += self._swap_out(residents, pack)
            self._updater.deliver(placement.packs[index].parameters, gradients)

    def _updates_there(self, index: int, summing: Sequence[int]) -> bool:
        """Have a pack updated where its sums are, if the plan tells so and they are all of its gradients; whether it is."""
        if index not in self._placement.plan.device_updated or not self._updater.updates_in_place:
            return False
        if len(summing) != 1 or self._factor != 1.0:
            return False
        residents = self._placement.residents[summing[0]]
        pack = residents.packs[index]
        if not residents.sums.may_stay(pack):
            return False
        with residents.device.scheduling():
            gradients = residents.sums.leave(pack)
        num_bytes = gradients.num_bytes
        updated = self._updater.deliver(pack.parameters, [gradients])
        if updated is not None:
            residents.device.leaving.note_update(updated, num_bytes)
        return True

    def _await_room(self, index: int, summing: Sequence[int]) -> None:
        """Wait until the host has room for the sums of a pack."""
        sums = [self._placement.residents[number].packs[index].accumulators.values() for number in summing]
        self._updater.await_room(sum(each.buffer.numel() for several in sums for each in several))

    def _swap_out(self, residents: Residents, pack: SwappedPack) -> list[SummedGradients]:
        with_norms = self._updater.wants_norms
        if not self._observer.is_profiling:
            return residents.sums.swap_out(pack, with_norms=with_norms)
        # To register a buffer takes longer than the copy, and is done once.
        residents.sums.provide_buffers(pack)
        with self._profiler.swapping_out(residents.device):
            gradients = residents.sums.swap_out(pack, with_norms=with_norms)
            for copy in gradients:
                copy.event.synchronize()
        return gradients

    def _summing(self, index: int) -> list[int]:
        """The devices that have sums of a pack, in the order in which these are added.

        The first one takes the others'. It is another one for each pack, so that the swaps of the sums are spread.
        """
        copies = self._placement.copies(index)
        having = [number for number, pack in enumerate(copies) if pack.accumulators or pack.parked]
        if not having:
            return []
        first = having[index % len(having)]
        return [first, *(number for number in having if number != first)]

    def _add_up(self, index: int, summing: Sequence[int]) -> None:
        """Add the sums that several devices have of a pack on the first of them."""
        for number in summing[1:]:
            target, source = summing[0], self._placement.residents[number]
            residents = self._placement.residents[target]
            accumulators, source.packs[index].accumulators = source.packs[index].accumulators, {}
            for use, accumulator in accumulators.items():
                with source.device.scheduling(), residents.device.scheduling():
                    buffer = self._transfers.copy(accumulator.buffer, target, Task(index, Errand.REDUCE, number))
                    residents.sums.add(residents.packs[index], use, accumulator, buffer)
                    source.sums.free(accumulator)

    def flush(self) -> None:
        """Bring gradients that calls outside of a step left on the device into the parameters' ``grad``."""
        packs = self._placement.packs
        self._updater.begin([pack.parameters for pack in packs], StepUpdate())
        for pack in packs:
            self._updater.deliver(pack.parameters, self._placement.residents[0].sums.swap_out(pack))
        self._updater.finish()
        self._updater.buffers.reclaim()
