"""`HarmonyMonitor`: the callback that logs what each training step did, and records one to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_harmony.engine.measure.report import StepReport
from lightning_harmony.setup import compat
from lightning_harmony.setup.argument_names import suggests_names

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback as _Base
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    _Base = object


class MonitorMixin(_Base):
    """Logs the step report of `HarmonyStrategy` to the Trainer's loggers, every `log_every_n_steps`.

    What it logs are the fields of `StepReport` that are numbers, under names such as ``harmony/seconds`` and
    ``harmony/swapped_in_bytes/weights``. One of them, the share of its time in which each device computed, is measured for it
    alone. It holds up neither a step nor a deferred update; but what a step that it logs or records updates just in time is
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
        self._has_asked = False
        self._logged: StepReport | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to watch what it cannot see.

        Raises:
            MisconfigurationException: under another strategy, or if there is nothing to do.
        """
        if stage != "fit":
            return
        self._has_asked, self._logged = False, None
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
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ask for what is wanted of this step."""
        strategy: Any = trainer.strategy
        recorder = strategy.recorder
        if recorder is None:
            self._say_what_is_missing(trainer)
            return
        recorder.measures_busy = bool(trainer.loggers) and compat.logs_this_step(trainer)
        if self.trace_step is not None and _step(trainer) == self.trace_step and not self._has_asked:
            self._has_asked = recorder.records_next = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Log the report, and write the recording."""
        strategy: Any = trainer.strategy
        report, recorder = strategy.step_report, strategy.recorder
        # A batch that was skipped has none of its own.
        if report is not None and report is not self._logged and compat.logs_this_step(trainer):
            for logger in trainer.loggers:
                logger.log_metrics(_figures(report, logger.group_separator), step=_step(trainer))
        self._logged = report
        if recorder is None:
            return
        recording, recorder.recording = recorder.recording, None
        if recording is not None:
            self._write(trainer, recording.to_json())

    def _say_what_is_missing(self, trainer: Trainer) -> None:
        """The model fits: nothing is swapped that could be recorded."""
        if self.trace_step is not None and _step(trainer) == self.trace_step and not self._has_asked:
            self._has_asked = True
            import_module(f"{self.tree}.utilities.rank_zero").rank_zero_warn(
                f"HarmonyMonitor(trace_step={self.trace_step}) records nothing: the model fits on its device, where nothing "
                "is swapped; HarmonyStrategy(device_memory=...) with less than it takes has its layers swapped"
            )

    def _write(self, trainer: Trainer, text: str) -> None:
        file = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir) / f"step-{self.trace_step}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        import_module(f"{self.tree}.utilities.rank_zero").rank_zero_info(
            f"HarmonyMonitor recorded step {self.trace_step}. To draw it: lightning-harmony trace {file} --png step.png"
        )


def _step(trainer: Trainer) -> int:
    """The number under which loggers get what a batch logs."""
    return compat.logged_step(trainer)


def _figures(report: StepReport, separator: str) -> dict[str, float]:
    """The numbers of a report, with names for loggers."""
    several: dict[str, Mapping[Any, float]] = {
        "swapped_in_bytes": report.swapped_in_bytes,
        "swapped_out_bytes": report.swapped_out_bytes,
        "peak_device_bytes": dict(enumerate(report.peak_device_bytes)),
        "reserved_device_bytes": dict(enumerate(report.reserved_device_bytes)),
        "busy": dict(enumerate(report.busy)),
    }
    single = {
        "seconds": report.seconds,
        "predicted_seconds": report.predicted_seconds,
        "transferred_bytes": report.transferred_bytes,
        "host_bytes": report.host_bytes,
        "update_hidden": report.update_hidden,
    }
    figures: dict[str, float] = {name: value for name, value in single.items() if value is not None}
    figures |= {f"{name}{separator}{key}": value for name, values in several.items() for key, value in values.items()}
    return {f"harmony{separator}{name}": float(value) for name, value in figures.items()}
