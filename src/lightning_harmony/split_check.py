"""What changes where a batch is split, said once: statistics of the batch, and a loss that is no mean over samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_harmony.engine.batch import numbers_of_rows, split_batch
from lightning_harmony.engine.executor import Executor
from lightning_harmony.engine.opaque import without_caches
from lightning_harmony.engine.turns import Microbatch
from lightning_harmony.errors import CapacityError, PlanError, UnsupportedModelError
from lightning_harmony.lightning_tree import LightningTree
from lightning_harmony.microbatches import TrainingStep, run_without_backward
from lightning_harmony.separability import explain_difference
from lightning_harmony.settings import Settings
from lightning_harmony.snapshot import Snapshot

# What torch says of a single sample that is to be normalized with its own statistics.
_TOO_FEW = "more than 1 value per channel"


@dataclass
class SplitCheck:
    """Looks at the first batch, and at its loss once its backward is over."""

    tree: LightningTree
    trainer: Any
    engine: Executor
    settings: Settings
    _has_seen: bool = False
    _is_over: bool = False
    _step: tuple[Any, Sequence[Any], dict[str, Any], Sequence[int]] | None = None

    def note(self, batch: Any, rest: Sequence[Any], kwargs: dict[str, Any], sizes: Sequence[int]) -> None:
        """Remember a step that is about to run on microbatches of these sizes.

        Raises:
            ValueError: if the first batch has fewer samples than microbatches were asked for.
        """
        if not self._has_seen:
            self._has_seen = True
            self._refuse_few_samples(sizes)
            self._warn_of_batch_statistics(sizes)
        if len(sizes) == 1:
            return
        if self.settings.checks_reduction and not self._is_over:
            self._step = batch, rest, kwargs, sizes

    @contextmanager
    def explaining(self, batch: Any, sizes: Sequence[int]) -> Iterator[None]:
        """The context in which microbatches of these sizes run. An error that the splitting may have caused says so.

        Raises:
            ValueError: if the statistics of a microbatch of one sample are asked for.
        """
        try:
            yield
        except Exception as error:
            if len(sizes) == 1:
                raise
            if min(sizes) == 1 and isinstance(error, ValueError) and _TOO_FEW in str(error):
                raise self._too_few(error, sizes) from error
            _note_other_rows(error, batch, sizes)
            raise

    def _too_few(self, error: ValueError, sizes: Sequence[int]) -> ValueError:
        """Why a single sample is all there is."""
        names = list(batch_norms(self.trainer.lightning_module))
        return ValueError(
            f"a batch of {sum(sizes)} samples is split into {len(sizes)} microbatches, some of a single one, of which "
            f"{f'{names[0]!r} needs' if names else 'the step asks for'} the statistics. Let each have two at least, with "
            "a smaller HarmonyStrategy(num_microbatches=...) or a larger microbatch_size; where the last batch of an "
            f"epoch alone is so short, with DataLoader(drop_last=True). ({error})"
        )

    def after_backward(self) -> None:
        """Look at the loss of the step that was noted, if none was looked at before."""
        step, self._step = self._step, None
        if step is not None:
            self._is_over = True
            self._compare(*step)

    def _refuse_few_samples(self, sizes: Sequence[int]) -> None:
        """A short last batch is split into its samples; that all batches were so short, nobody meant."""
        wanted = self.settings.num_microbatches
        if wanted is not None and len(sizes) < wanted:
            raise ValueError(
                f"a batch of {sum(sizes)} samples cannot be split into {wanted} microbatches: use a smaller "
                "HarmonyStrategy(num_microbatches=...), or a DataLoader with larger batches"
            )

    def _warn_of_batch_statistics(self, sizes: Sequence[int]) -> None:
        """Say what a split batch changes: it is what accumulation over microbatches gives, not one whole batch."""
        norms = batch_norms(self.trainer.lightning_module)
        names = [name for name, child in norms.items() if child.training]
        if names and len(sizes) > 1:
            self.tree.warn(
                f"{names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''} normalize with the statistics of "
                f"microbatches of {sizes[0]} samples, not with those of the batch of {sum(sizes)}, as they do under "
                "accumulate_grad_batches; HarmonyStrategy(num_microbatches=1) keeps the batch whole"
            )

    def _compare(self, batch: Any, rest: Sequence[Any], kwargs: dict[str, Any], sizes: Sequence[int]) -> None:
        """See whether the loss of a microbatch follows from those of its halves, in evaluation mode and leaving no trace.

        Says nothing where it cannot tell: if the step draws random numbers, or fails when it is run so. Where microbatches
        have one sample, two are taken.
        """
        module, trainer, precision = self.trainer.lightning_module, self.trainer, self.trainer.precision_plugin
        if _is_compiled(module):
            return
        size = max(sizes[0], 2)
        whole_batch = (size, sum(sizes) - size) if size < sum(sizes) else (size,)
        microbatch = split_batch(batch, sum(sizes), whole_batch)[0]
        halves = (size - size // 2, size // 2)
        parts = [microbatch, *split_batch(microbatch, size, halves)]
        steps = [TrainingStep(self.engine, precision, module.training_step, (part, *rest), kwargs) for part in parts]
        before = Snapshot(trainer, self.engine.devices)
        silent = self.tree.part("loggers.logger").DummyLogger()
        loggers, trainer.loggers = trainer.loggers, [silent] * len(trainer.loggers)
        try:
            # Not `eval()`: modules that override it do more, such as to merge adapters into weights.
            for child in module.modules():
                child.training = False
            module._current_fx_name = "training_step"
            with torch.no_grad(), without_caches(module):
                runs = [Microbatch(step, 1.0, None) for step in steps]
                self.engine.on_switch = self.engine.on_set = self.engine.watch = None
                run_without_backward(self.engine, runs, steps[0].num_elements())
            whole, *losses = [math.nan if step.loss is None else float(step.loss) for step in steps]
            has_drawn = before.has_drawn()
        except Exception:
            return
        finally:
            trainer.loggers = loggers
            before.restore()
        is_narrow = "16" in str(precision.precision)
        found = explain_difference(whole, losses, halves, reduction=self.settings.reduction, is_narrow=is_narrow)
        if found is not None and not has_drawn and math.isfinite(whole + sum(losses)):
            self.tree.warn(found)


def _note_other_rows(error: Exception, batch: Any, sizes: Sequence[int]) -> None:
    """What the rows of the batch's tensors are is guessed. Where the guess may be wrong, an error of the step says so."""
    if isinstance(error, CapacityError | PlanError | UnsupportedModelError) or not hasattr(error, "add_note"):
        return
    others = sorted(numbers_of_rows(batch) - {sum(sizes)})
    if others:
        error.add_note(
            f"the batch was split into {len(sizes)} microbatches: as Lightning tells it, by its first tensor, it has "
            f"{sum(sizes)} samples. Tensors of {', '.join(map(str, others))} rows went whole into each microbatch. If these "
            "belong to samples, as edges of graphs do, use HarmonyStrategy(num_microbatches=1)"
        )


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that normalize with statistics of their batch, by name: these need two samples at least."""
    return {name: each for name, each in module.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}


def _is_compiled(module: nn.Module) -> bool:
    """Whether other batch sizes may make something be compiled again."""
    return getattr(module, "_compiler_ctx", None) is not None or any(
        child._compiled_call_impl is not None or type(child).__name__ == "OptimizedModule" for child in module.modules()
    )
