"""Evaluation: a batch runs whole, and in microbatches once it has turned out to be too large for that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from lightning_harmony.engine.batches.merge import merge_evaluations
from lightning_harmony.engine.batches.split import Indivisible
from lightning_harmony.engine.lanes.rng import stream_seed
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.step.turns import Microbatch
from lightning_harmony.engine.structures.nested import map_tensors
from lightning_harmony.engine.structures.operations import version_of
from lightning_harmony.errors import CapacityError
from lightning_harmony.fit.unchanged import UnchangedBatch
from lightning_harmony.fit.user_steps import num_elements, run_without_backward
from lightning_harmony.microbatches.interleaving import Interleaving
from lightning_harmony.microbatches.snapshot import Snapshot
from lightning_harmony.microbatches.splitting import Samples, Splitting
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.settings import Settings


@dataclass
class Evaluation:
    """Runs validation_step, test_step and predict_step."""

    tree: LightningTree
    trainer: Any
    engine: Executor
    settings: Settings
    splitting: Splitting
    # Elements of the smallest batch that did not fit whole, by the name of the step.
    _too_large: dict[str, int] = field(default_factory=dict)
    _interleaving: dict[str, Interleaving] = field(default_factory=dict)

    def run(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a batch whole, which is exact whatever the step does with it; in microbatches if it is too large for that.

        Args:
            name: of the user's step.
            step: runs it.
            args: the batch, and perhaps its number and that of its data loader.
            kwargs: more of the same.
        """
        elements = num_elements(args)
        samples, sizes = self._samples_and_sizes(name, args[0])
        if samples is not None and elements >= self._too_large.get(name, sys.maxsize):
            return self._run_in_microbatches(name, step, samples, sizes, args, kwargs)
        before = None
        if samples is not None and self.engine.measures(elements, is_training=False):
            before = Snapshot(self.trainer, self.engine.devices, (args, kwargs))
        outputs: list[Any] = []
        weights = self._versions()
        whole = Microbatch(lambda: outputs.append(self._on_root(step(*args, **kwargs))), Fraction(1), None)
        try:
            # The code of layers may run twice here, too, as where it computes a gradient.
            with self._interleaving_of(name).alone():
                run_without_backward(self.engine, [whole], elements)
            if before is not None:
                before.let_go()
            return outputs[0]
        except CapacityError:
            # Weights that the step has put in the place of others would not be put back.
            if before is None or samples is None or weights != self._versions() or before.has_exchanged():
                raise
        left = before.restore()
        self.engine.forget_evaluations()
        self._too_large[name] = elements
        self.tree.warn(
            f"a batch of {sum(sizes)} samples exceeds the device's memory in {name}, which is run again in {len(sizes)} "
            f"microbatches: what it logs and returns is averaged and joined over them{left}"
        )
        return self._run_in_microbatches(name, step, samples, sizes, args, kwargs)

    def _interleaving_of(self, name: str) -> Interleaving:
        return self._interleaving.setdefault(name, Interleaving(self.tree, self.trainer, self.engine))

    def _versions(self) -> list[int | None]:
        """How often each parameter was changed in place."""
        return list(map(version_of, self.trainer.lightning_module.parameters()))

    def _samples_and_sizes(self, name: str, batch: Any) -> tuple[Samples | None, tuple[int, ...]]:
        """The samples of a batch, and those of the microbatches into which it can be split if it must; None if it cannot."""
        if self.tree.takes_iterator(getattr(self.trainer.lightning_module, name)):
            return None, (1,)
        try:
            samples = self.splitting.find_samples(batch)
        except Indivisible:
            return None, (1,)
        sizes = self.settings.evaluation_sizes(samples.number)
        return samples if len(sizes) > 1 else None, sizes

    def _on_root(self, output: Any) -> Any:
        """What a step returns, where the model's own code expects it."""
        return output if len(self.engine.devices) < 2 else map_tensors(self.engine.to_root, output)

    def _run_in_microbatches(
        self, name: str, step: Callable[..., Any], samples: Samples, sizes: Sequence[int], args: Any, kwargs: Any
    ) -> Any:
        batch, *rest = args
        parts = self.splitting.split(batch, samples, sizes)
        outputs: dict[int, Any] = {}

        def run(number: int) -> None:
            outputs[number] = self._on_root(step(parts[number], *rest, **kwargs))

        # No key of a training step: those are not negative. Not every step takes the number of its batch.
        batch_number = compat.active_loop(self.trainer).batch_progress.current.ready
        key = (torch.initial_seed(), -1, self.trainer.global_step, batch_number)
        microbatches = [
            Microbatch(partial(run, number), Fraction(1), stream_seed(*key, number)) for number in range(len(sizes))
        ]
        shared = UnchangedBatch(parts)
        largest = max(map(num_elements, parts))
        interleaving = self._interleaving_of(name)

        def run_all(interleave: bool) -> None:
            run_without_backward(self.engine, microbatches, largest, interleave=interleave)

        interleaving.run(run_all, sizes, parts, shared.shared)
        interleaving.finish()
        shared.check()
        try:
            ordered = [outputs[number] for number in range(len(sizes))]
            return merge_evaluations(ordered, sizes, averages=name != "predict_step")
        except ValueError as error:
            raise CapacityError(
                f"a batch of {sum(sizes)} samples exceeds the device's memory in {name}, and cannot be split either. {error}"
            ) from error
