"""The report of each training step."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from torch.optim import Optimizer

from lightning_harmony.engine.measure.report import StepReport, Traffic
from lightning_harmony.engine.nodes.exchange import take_sent_bytes
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.updating.optimizer_state import StateSize


class StepReports:
    """Writes the report of the step that has ended.

    Attributes:
        last: the newest; None before the first.
    """

    def __init__(self) -> None:
        self.last: StepReport | None = None
        self._state_bytes, self._state_size = 0, StateSize()
        self._start = 0.0

    def begin(self, engine: Executor | None) -> None:
        """A step begins: what is counted from now on is its own. There is no engine where nothing is swapped."""
        if engine is not None:
            engine.begin_step()
        self._start = perf_counter()

    def write(
        self,
        engine: Executor,
        optimizers: Sequence[Optimizer],
        num_microbatches: int,
        num_samples: int | None,
        update: str,
        reason: str,
    ) -> None:
        """A step has ended."""
        # In the first step, buffers go as the optimizer's state comes: what they took together is no more than either end.
        seconds = perf_counter() - self._start
        disk = engine.updater.streamed.disk
        read_bytes, written_bytes = disk.take_moved_bytes()
        before, self._state_bytes = self._state_bytes, self._state_size.num_bytes(optimizers) - disk.used_bytes
        most = max(engine.pool.take_peak_bytes() + before, engine.pool.num_bytes + self._state_bytes)
        engine.planner.note_seconds(seconds)
        is_alone = engine.step.is_sequential and num_microbatches > 1
        predicted = None if is_alone else engine.step_plan.predicted
        self.last = StepReport(
            seconds=seconds,
            swapped_in_bytes=dict(engine.traffic.swapped_in),
            swapped_out_bytes=dict(engine.traffic.swapped_out),
            transferred_bytes=engine.traffic.transferred,
            peak_device_bytes=[device.peak_bytes() for device in engine.devices],
            host_bytes=engine.store.num_bytes + most,
            num_microbatches=num_microbatches,
            num_packs=len(engine.plan.packs),
            update=update,
            update_reason=reason,
            update_hidden=engine.updater.overlap.take_hidden(),
            predicted_seconds=None if predicted is None else predicted.seconds,
            busy=engine.recorder.end(seconds, num_microbatches, f"{update}: {reason}"),
            reserved_device_bytes=[device.peak_reserved_bytes() for device in engine.devices],
            disk_read_bytes=read_bytes,
            disk_written_bytes=written_bytes,
            node_sent_bytes=take_sent_bytes(),
            num_samples=num_samples,
        )

    def write_in_memory(self, num_microbatches: int, num_samples: int | None, peak_bytes: int | None) -> None:
        """A step has ended in which nothing was swapped.

        Args:
            num_microbatches: that it had.
            num_samples: of its batch; None where they cannot be told.
            peak_bytes: the most that was seen to be on the device; None where nobody counts.
        """
        self.last = StepReport(
            seconds=perf_counter() - self._start,
            swapped_in_bytes=Traffic().swapped_in,
            swapped_out_bytes=Traffic().swapped_out,
            transferred_bytes=0,
            peak_device_bytes=[] if peak_bytes is None else [peak_bytes],
            host_bytes=0,
            num_microbatches=num_microbatches,
            num_packs=0,
            update="in-memory",
            update_reason="the model fits on its device, where its optimizer steps as in plain Lightning",
            update_hidden=0.0,
            node_sent_bytes=take_sent_bytes(),
            num_samples=num_samples,
        )
