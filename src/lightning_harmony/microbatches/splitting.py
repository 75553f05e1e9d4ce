"""Splitting: into which microbatches a batch goes, by rules that are certain, by the user's own function, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_collate

from lightning_harmony.engine.batches.split import Indivisible, Loaded, count_samples, is_square, split_batch
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.settings import Settings


class Samples(NamedTuple):
    """How a batch can be split.

    Attributes:
        number: of its samples.
        loaded: what its data loader tells of it.
    """

    number: int
    loaded: Loaded


@dataclass
class Splitting:
    """Splits the batches of a fit, or of an evaluation."""

    tree: LightningTree
    trainer: Any
    settings: Settings
    _has_said_why: bool = field(default=False, init=False)
    _has_rows: bool = field(default=False, init=False)

    def samples(self, batch: Any) -> Samples | None:
        """The samples of a batch; None for one that cannot be split with certainty, which is said once."""
        try:
            return self.find_samples(batch)
        except Indivisible as reason:
            self._say(reason)
            return None

    def find_samples(self, batch: Any) -> Samples:
        """The samples of a batch.

        Raises:
            Indivisible: if they cannot be told with certainty, and no function of the user's splits the batch.
        """
        loaded = self._loaded()._replace(has_rows=self._has_rows)
        try:
            number = count_samples(batch, loaded)
        except Indivisible:
            if self.settings.split_batch is None:
                raise
        else:
            self._has_rows = self._has_rows or not is_square(batch, number)
            return Samples(number, loaded)
        return Samples(self._assumed(batch, loaded), loaded)

    def number(self, batch: Any) -> int | None:
        """How many samples a batch has; None if that cannot be told with certainty."""
        try:
            return count_samples(batch, self._loaded()._replace(has_rows=self._has_rows))
        except Indivisible:
            return None

    def split(self, batch: Any, samples: Samples, sizes: Sequence[int]) -> list[Any]:
        """The microbatches of a batch.

        Args:
            batch: what the data loader yielded.
            samples: as `samples` returned it.
            sizes: samples in each microbatch.

        Raises:
            ValueError: if the user's own function returns anything else than a microbatch for each size.
        """
        if len(sizes) == 1:
            return [batch]
        split = self.settings.split_batch
        if split is None:
            return split_batch(batch, samples.number, sizes, is_stacked=samples.loaded.is_stacked)
        parts = split(batch, tuple(sizes))
        if not isinstance(parts, list | tuple) or len(parts) != len(sizes):
            found = f"{len(parts)} entries" if isinstance(parts, list | tuple) else f"a {type(parts).__name__}"
            raise ValueError(
                f"HarmonyStrategy(split_batch=...) was called with sizes={tuple(sizes)} and returned {found}: return a list "
                f"of {len(sizes)} microbatches, with as many samples as the sizes say"
            )
        return list(parts)

    def _assumed(self, batch: Any, loaded: Loaded) -> int:
        """The samples that the user's function is told of where no rule tells their number with certainty."""
        if loaded.samples is not None:
            return loaded.samples[-1]
        try:
            return self.tree.batch_size(batch)
        except Exception:
            # A single object, such as a graph: as many parts as microbatches were asked for.
            return self.settings.num_microbatches or 1

    def _loaded(self) -> Loaded:
        """What is known of the batch that the running loop has fetched."""
        loop = compat.active_loop(self.trainer)
        loaders = compat.data_loaders(loop)
        if not loaders or not all(isinstance(loader, DataLoader) for loader in loaders):
            return Loaded()
        is_stacked = all(loader.collate_fn is default_collate for loader in loaders)
        sizes = {loader.batch_size for loader in loaders}
        # A loader of ready batches has none, or one of a single item.
        if len(sizes) > 1 or sizes & {None, 1}:
            return Loaded(None, is_stacked)
        (size,) = sizes
        is_alone = len(loaders) == 1 and self.trainer.fit_loop is loop
        number = _num_samples(loaders[0], loop) if is_alone else None
        return Loaded(range(1, size + 1) if number is None else range(number, number + 1), is_stacked)

    def _say(self, reason: Indivisible) -> None:
        if self._has_said_why:
            return
        self._has_said_why = True
        self.tree.warn(
            f"a batch runs whole, not in microbatches, as its samples cannot be told with certainty: {reason}. Take it apart "
            "yourself with HarmonyStrategy(split_batch=...), a function of the batch and of the samples of each microbatch "
            "that returns the microbatches; HarmonyStrategy(num_microbatches=1) keeps batches whole without this warning"
        )


def _num_samples(loader: DataLoader[Any], loop: Any) -> int | None:
    """How many samples the batch of a fit has that its loader yielded last; None if it does not say."""
    size = loader.batch_size
    assert size is not None
    try:
        rest = len(loader.sampler) - loop.batch_idx * size  # type: ignore[arg-type]
    except TypeError:
        # Of an IterableDataset, each worker may have a short last batch.
        return None
    if rest >= size or not loop.epoch_loop.batch_progress.is_last_batch:
        return size
    # After a resumption in mid-epoch, the loader may have begun anew.
    return rest if rest > 0 else None
