"""The progress bar while a large host store is built, by the library that Lightning's own bars use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_harmony.setup.lightning_tree import LightningTree

# What is smaller is there in a moment.
LARGE_BYTES = 4 * 2**30


@contextmanager
def store_progress(tree: LightningTree, trainer: Any, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A context in which a host store of so many bytes is built; what it gives is to be told how many are done.

    There is a bar where the store is large and the Trainer shows bars.
    """
    shown = trainer.progress_bar_callback
    if num_bytes <= LARGE_BYTES or shown is None or not getattr(shown, "is_enabled", True):
        yield lambda done: None
        return
    kind = tree.part("callbacks.progress.tqdm_progress").Tqdm
    with kind(
        desc="Building the host store",
        total=num_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        leave=False,
        file=sys.stdout,
    ) as bar:
        yield lambda done: bar.update(done - bar.n)
