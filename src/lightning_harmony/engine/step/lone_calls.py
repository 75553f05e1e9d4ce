"""Lone calls: those of layers outside of any step, or in manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_harmony.engine.devices.hidden_shortages import finding_shortages
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.model.derived import out_of_reach
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.step.gradient_sums import GradientSums
from lightning_harmony.engine.step.shortage import exceeded
from lightning_harmony.engine.step.swapped_model import SwappedModel
from lightning_harmony.plan.values.task import Phase, Task


@dataclass(eq=False, repr=False)
class LoneCalls:
    """Swaps a pack in for one call, on the root device: between two calls anyone may change weights.

    Args:
        model: follows its parameters.
        placement: of its packs.
        sums: of the gradients that come of such calls.
        recorder: notes tasks.
        discard_record: discards the record that predicted something else than what happens; returns a word on it.
    """

    _model: SwappedModel
    _placement: Placement
    _sums: GradientSums
    _recorder: StepRecorder
    _discard_record: Callable[[], str]

    def __post_init__(self) -> None:
        # The backward that will flush its gradients, as autograd numbers them.
        self._flushing: int | None = None

    @contextmanager
    def visit(self, index: int, phase: Phase) -> Iterator[Residency]:
        """The pack resides on the device within the context."""
        residents = self._placement.residents[0]
        pack = residents.packs[index]
        self._model.follow(pack.parameters)
        try:
            # Nothing else may take room: what devices have updated leaves.
            residents.swapper.await_update(pack)
            while residents.device.leaving.retire(wait=True):
                pass
            for layer in pack.layers:
                layer.follow_host_buffers()
            residents.swapper.swap_in(pack)
            assert pack.residency is not None
            pack.residency.ready.wait()
            self._recorder.enter(0, Task(index, phase, 0), pack)
            residents.weight_checks.begin(pack)
            with finding_shortages(), out_of_reach(self._model.derived, only_here=True):
                yield pack.residency
            residents.end_forward()
            residents.weight_checks.refuse_changed()
        except torch.OutOfMemoryError as error:
            what = f"layer {pack.name!r}, called outside of a step or in manual optimization,"
            raise exceeded(what, residents.device, error, self._discard_record(), smaller="batches") from error
        finally:
            self._recorder.leave()
            residents.swapper.finish_reading()
            residents.sums.park(pack)
            residents.evict(pack)
            residents.drain()

    def flush_after_this_backward(self) -> None:
        """Let a backward that is called here have its gradients delivered when it returns."""
        backward = torch._C._current_graph_task_id()
        if backward != self._flushing:
            self._flushing = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._sums.flush)
