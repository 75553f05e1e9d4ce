"""`HarmonyMonitor`: the callback that logs what each training step did, and records one to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_harmony.engine.measure.report import StepReport
from lightning_harmony.setup import compat
from lightning_harmony.setup.argument_names import suggests_names
from lightning_harmony.setup.lightning_tree import LightningTree

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback as _Base
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    _Base = object


class MonitorMixin(_Base):
    """Logs the step report of `HarmonyStrategy` to the Trainer's loggers, every `log_every_n_steps`.

    What it logs are the fields of `StepReport` that are numbers, under names such as ``harmony/seconds`` and
    ``harmony/swapped_in_gib/weights``, and ``harmony/samples_per_second`` in the steps since it logged last. A number that has
    been 0 in all steps is not logged. One, the share of its time in which each device computed, is measured for it alone. It
    holds up neither a step nor a deferred update; but what a step that it logs or records updates just in time is
    updated when that step ends.

    It can also record a step: when each task ran on which device, for `lightning-harmony trace`.

    Args:
        trace_step: the step to record, as loggers count them from 0; None for none. The first one or two measure layer by
            layer, and those after them run by the plan. Of batches that accumulate, the first is recorded.
        dirpath: where the recording goes, as ``step-<trace_step>.json``; None for the directory of the first logger, or
            the Trainer's `default_root_dir`.
    """

    tree: str

    @suggests_names("HarmonyMonitor")
    def __init__(self, trace_step: int | None = None, dirpath: str | Path | None = None) -> None:
        super().__init__()
        if trace_step is not None and (not isinstance(trace_step, int) or trace_step < 0):
            raise ValueError(f"HarmonyMonitor(trace_step={trace_step!r}): the number of a step, from 0, is needed")
        self.trace_step = trace_step
        self.dirpath = dirpath
        self._is_done = False
        self._first_step = 0
        self._logged: StepReport | None = None
        self._names: set[tuple[str, ...]] = set()
        self._num_samples, self._seconds, self._start = 0, 0.0, 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to watch what it cannot see.

        Raises:
            MisconfigurationException: under another strategy, or if there is nothing to do.
        """
        if stage != "fit":
            return
        self._is_done = False
        self._logged = None
        self._names.clear()
        self._num_samples, self._seconds = 0, 0.0
        if getattr(trainer.strategy, "strategy_name", None) != "harmony":
            raise self._wrong(
                "HarmonyMonitor tells what Trainer(strategy='harmony') swaps and when it computes, but the strategy is "
                f"{type(trainer.strategy).__name__}: use Trainer(strategy='harmony'), or leave HarmonyMonitor out"
            )
        if not trainer.loggers and self.trace_step is None:
            raise self._wrong(
                "HarmonyMonitor has nothing to do with Trainer(logger=False): give the Trainer a logger, or record a step "
                "with HarmonyMonitor(trace_step=...)"
            )

    def _wrong(self, message: str) -> Exception:
        error: Exception = import_module(f"{self.tree}.utilities.exceptions").MisconfigurationException(message)
        return error

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where the fit begins: it may go on from a checkpoint."""
        self._first_step = compat.logged_step(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ask for what is wanted of this step."""
        self._start = perf_counter()
        strategy: Any = trainer.strategy
        recorder = strategy.recorder
        if recorder is None:
            self._say_what_is_missing(trainer)
            return
        recorder.measures_busy = bool(trainer.loggers) and compat.logs_this_step(trainer)
        recorder.records_next = self._is_to_record(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Log the report, and write the recording."""
        strategy: Any = trainer.strategy
        report, recorder = strategy.step_report, strategy.recorder
        # A batch that was skipped has none of its own.
        if report is not None and report is not self._logged:
            self._num_samples += report.num_samples or 0
            self._seconds += perf_counter() - self._start
            if compat.logs_this_step(trainer):
                self._log(trainer, report)
        self._logged = report
        if recorder is None:
            return
        recording, recorder.recording = recorder.recording, None
        if recording is not None:
            self._write(trainer, recording.to_json())

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say why the step to record was not."""
        if self.trace_step is None or self._is_done:
            return
        last = compat.logged_step(trainer) - 1
        if self.trace_step > last:
            why = f"the fit ended before that step. Its last was step {last}, as steps count from 0"
        elif self.trace_step < self._first_step:
            why = f"the fit began after that step, with step {self._first_step}"
        else:
            why = "that step was skipped, as training_step returned None"
        LightningTree(self.tree).warn(f"HarmonyMonitor(trace_step={self.trace_step}) recorded nothing: {why}")

    def _is_to_record(self, trainer: Trainer) -> bool:
        return not self._is_done and self.trace_step == compat.logged_step(trainer)

    def _log(self, trainer: Trainer, report: StepReport) -> None:
        figures = _figures(report)
        if self._num_samples:
            figures["samples_per_second",] = self._num_samples / self._seconds
        self._num_samples, self._seconds = 0, 0.0
        self._names |= {name for name, value in figures.items() if value}
        for logger in trainer.loggers:
            named = {
                logger.group_separator.join(("harmony", *name)): figures[name]
                for name in figures
                if name in self._names
            }
            logger.log_metrics(named, step=compat.logged_step(trainer))

    def _say_what_is_missing(self, trainer: Trainer) -> None:
        """The model fits: nothing is swapped that could be recorded."""
        if self._is_to_record(trainer):
            self._is_done = True
            LightningTree(self.tree).warn(
                f"HarmonyMonitor(trace_step={self.trace_step}) records nothing: the model fits on its device, where nothing "
                "is swapped; HarmonyStrategy(device_memory=...) with less than it takes has its layers swapped"
            )

    def _write(self, trainer: Trainer, text: str) -> None:
        self._is_done = True
        file = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir) / f"step-{self.trace_step}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        LightningTree(self.tree).info(
            f"HarmonyMonitor recorded step {self.trace_step}. To draw it: lightning-harmony trace {file} --png step.png"
        )


def _figures(report: StepReport) -> dict[tuple[str, ...], float]:
    """The numbers of a report, with names in parts; amounts of memory in GiB."""
    shares: dict[str, Mapping[Any, float]] = {"busy": dict(enumerate(report.busy))}
    amounts: dict[str, Mapping[Any, int]] = {
        "swapped_in_gib": report.swapped_in_bytes,
        "swapped_out_gib": report.swapped_out_bytes,
        "peak_device_gib": dict(enumerate(report.peak_device_bytes)),
        "reserved_device_gib": dict(enumerate(report.reserved_device_bytes)),
    }
    single = {
        "seconds": report.seconds,
        "predicted_seconds": report.predicted_seconds,
        "transferred_gib": report.transferred_bytes / 2**30,
        "host_gib": report.host_bytes / 2**30,
        "update_hidden": report.update_hidden,
    }
    several = shares | {name: {key: n / 2**30 for key, n in each.items()} for name, each in amounts.items()}
    figures: dict[tuple[str, ...], float] = {(name,): value for name, value in single.items() if value is not None}
    return figures | {(name, str(key)): value for name, values in several.items() for key, value in values.items()}
