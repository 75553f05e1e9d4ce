"""What changes where a batch is split: statistics of the batch, said once; and its loss, checked where that is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.errors import CapacityError
from lightning_harmony.microbatches.fewest import Fewest
from lightning_harmony.microbatches.snapshot import Snapshot
from lightning_harmony.microbatches.splitting import Samples, Splitting
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.settings import Settings

# What torch says of a single sample that is to be normalized with its own statistics.
_TOO_FEW = "more than 1 value per channel"
# Relative differences that no rounding explains, by whether values are rounded to 16 bits on the way.
_TOLERANCE = {False: 1e-3, True: 3e-2}


def found(number: int) -> str:
    """What to say when so many microbatches have turned out to fit."""
    return (
        f"Harmony: a batch runs in {number} microbatches, as it does not fit in fewer. "
        f"HarmonyStrategy(num_microbatches={number}) says so from the start."
    )


class _Step(NamedTuple):
    batch: Any
    samples: Samples
    sizes: Sequence[int]
    rest: Sequence[Any]
    kwargs: dict[str, Any]


@dataclass
class SplitCheck:
    """Splits batches, and looks at the first one, and at its loss once its backward is over.

    Attributes:
        num_samples: of the last batch; None where they cannot be told.
        least_samples: that each microbatch needs.
        splitting: splits them.
    """

    tree: LightningTree
    trainer: Any
    settings: Settings
    num_samples: int | None = None
    least_samples: int = 1
    _has_seen: bool = False
    _is_over: bool = False
    _step: _Step | None = None

    def __post_init__(self) -> None:
        self.splitting = Splitting(self.tree, self.trainer, self.settings)

    def look_at_model(self) -> None:
        """The model is set up."""
        self.least_samples = 2 if batch_norms(self.trainer.lightning_module) else 1

    def fewest(self, batch: Any, number: int, lasting_bytes: int = 0, capacity: int = 0) -> Fewest | None:
        """What finds the fewest microbatches of a batch that fit, from some that do not; None if their number is given.

        Args:
            batch: which one.
            number: of the microbatches that it was split into.
            lasting_bytes: what the device holds whatever their number.
            capacity: bytes that a step may take.
        """
        samples = self.splitting.samples(batch) if self.settings.leaves_number else None
        if samples is None:
            return None
        return Fewest(number, samples.number // self.least_samples, samples.number, lasting_bytes, capacity)

    def split(self, args: Any, kwargs: Any, number: int) -> tuple[tuple[int, ...], list[Any]]:
        """The samples of each microbatch of a batch that is about to run, and the microbatches.

        Args:
            args: of the user's step, the batch first.
            kwargs: more of them.
            number: of microbatches at the most, where nothing else says it.

        Raises:
            ValueError: if the first batch has fewer samples than microbatches were asked for.
        """
        (batch, *rest), settings = args, self.settings
        runs_whole = settings.num_microbatches == 1 or (settings.leaves_number and number == 1)
        samples = None if runs_whole else self.splitting.samples(batch)
        self.num_samples = self.splitting.number(batch)
        if samples is None:
            return (1,), [batch]
        sizes = settings.sizes(samples.number, min(number, max(samples.number // self.least_samples, 1)))
        if not self._has_seen:
            self._has_seen = True
            self._refuse_few_samples(sizes)
            self._warn_of_batch_statistics(sizes)
        if len(sizes) > 1 and settings.check_loss and not self._is_over:
            self._step = _Step(batch, samples, sizes, rest, kwargs)
        return sizes, self.splitting.split(batch, samples, sizes)

    @contextmanager
    def explaining(self, sizes: Sequence[int]) -> Iterator[None]:
        """The context in which microbatches of these sizes run. An error of the step says how its batch was split.

        Raises:
            ValueError: if the statistics of a microbatch of one sample are asked for.
        """
        try:
            yield
        except Exception as error:
            # What does not fit names its own way out.
            if len(sizes) == 1 or isinstance(error, CapacityError):
                raise
            if min(sizes) == 1 and isinstance(error, ValueError) and _TOO_FEW in str(error):
                raise self._too_few(error, sizes) from error
            # Python 3.10 has no notes.
            if hasattr(error, "add_note"):
                error.add_note(
                    f"the batch of {sum(sizes)} samples was split into {len(sizes)} microbatches of {_few(sizes)}; a step "
                    "that needs all samples at once runs with HarmonyStrategy(num_microbatches=1)"
                )
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

    def after_backward(
        self, losses_of: Callable[[Sequence[Any], _Step], Sequence[Tensor | None]], devices: Sequence[Device]
    ) -> None:
        """Look at the loss of the step that was noted, if none was looked at before.

        Args:
            losses_of: runs the training_step on some batches without a backward; the step has its other arguments.
            devices: those that it computes on.
        """
        step, self._step = self._step, None
        if step is not None:
            self._is_over = True
            self._compare(step, losses_of, devices)

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

    def _compare(
        self,
        step: _Step,
        losses_of: Callable[[Sequence[Any], _Step], Sequence[Tensor | None]],
        devices: Sequence[Device],
    ) -> None:
        """See whether the loss of a microbatch follows from those of its halves, in evaluation mode and leaving no trace.

        Says nothing where it cannot tell: if the step draws random numbers, or fails when it is run so. Where microbatches
        have one sample, two are taken.
        """
        trainer, splitting = self.trainer, self.splitting
        module, precision = trainer.lightning_module, trainer.precision_plugin
        if _is_compiled(module):
            return
        number = step.samples.number
        size = max(step.sizes[0], 2)
        whole_batch = (size, number - size) if size < number else (size,)
        microbatch = splitting.split(step.batch, step.samples, whole_batch)[0]
        halves = (size - size // 2, size // 2)
        parts = splitting.split(microbatch, step.samples._replace(number=size), halves)
        before = Snapshot(trainer, devices)
        silent = self.tree.part("loggers.logger").DummyLogger()
        loggers, trainer.loggers = trainer.loggers, [silent] * len(trainer.loggers)
        try:
            # Not `eval()`: modules that override it do more, such as to merge adapters into weights.
            for child in module.modules():
                child.training = False
            compat.set_running_hook(module, "training_step")
            with torch.no_grad():
                whole, *losses = (
                    math.nan if loss is None else float(loss) for loss in losses_of([microbatch, *parts], step)
                )
            has_drawn = before.has_drawn()
        except Exception:
            return
        finally:
            trainer.loggers = loggers
            left = before.restore()
            before.let_go()
            if left:
                self.tree.warn(f"the check of the loss has run the step{left}: HarmonyStrategy(check_loss=False)")
        is_narrow = "16" in str(precision.precision)
        found = explain_difference(whole, losses, halves, reduction=self.settings.reduction, is_narrow=is_narrow)
        if found is not None and not has_drawn and math.isfinite(whole + sum(losses)):
            self.tree.warn(found)


def _few(sizes: Sequence[int]) -> str:
    """The sizes of microbatches, in few words."""
    if max(sizes) == min(sizes):
        return f"{max(sizes)}"
    return ", ".join(map(str, sizes)) if len(sizes) <= 8 else f"{min(sizes)} or {max(sizes)}"


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that normalize with statistics of their batch, by name: these need two samples at least."""
    return {name: each for name, each in module.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}


def _is_compiled(module: nn.Module) -> bool:
    """Whether other batch sizes may make something be compiled again."""
    return compat.is_compiled_by_lightning(module) or any(
        child._compiled_call_impl is not None or type(child).__name__ == "OptimizedModule" for child in module.modules()
    )


def explain_difference(
    whole: float, parts: Sequence[float], sizes: Sequence[int], *, reduction: str, is_narrow: bool
) -> str | None:
    """Say how a loss differs from what its parts give, and what to do.

    Args:
        whole: the loss of some samples.
        parts: the losses of parts of them.
        sizes: samples in each part.
        reduction: "mean" or "sum", by which losses are merged.
        is_narrow: whether values are rounded to 16 bits.

    Returns:
        None if there is no difference.
    """
    merged = {
        "mean": sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes),
        "sum": sum(parts),
    }
    if _is_close(whole, merged[reduction], is_narrow):
        return None
    other = "sum" if reduction == "mean" else "mean"
    found = (
        f"the loss of {sum(sizes)} samples is {whole:.6g}, but the {reduction} of its microbatches' losses is "
        f"{merged[reduction]:.6g} ({_difference(whole, merged[reduction]):.2g} of it)"
    )
    if _is_close(whole, merged[other], is_narrow):
        return f"{found}: their {other} is the same, so use HarmonyStrategy(loss_reduction={other!r})"
    return (
        f"{found}. It is no {reduction} over samples (negatives within the batch, a mean over tokens that are not padding "
        "or the like), so a batch in microbatches trains as under accumulate_grad_batches, not as one batch; "
        f"HarmonyStrategy(num_microbatches=1) keeps it whole, HarmonyStrategy(loss_reduction={reduction!r}) accepts it"
    )


def _difference(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def _is_close(one: float, other: float, is_narrow: bool) -> bool:
    # Losses near zero are differences of larger numbers, with their rounding.
    return abs(one - other) <= _TOLERANCE[is_narrow] * max(abs(one), abs(other), 1e-3)
