"""Progress bars: one while a large host store is built, and lines above those of others, which would tear these."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_harmony.setup.lightning_tree import LightningTree


@contextmanager
def above_progress_bars(logger: logging.Logger) -> Iterator[None]:
    """The context in which lines are written above what tqdm and rich draw.

    Args:
        logger: through which lines may be written, too.
    """
    with ExitStack() as stack:
        if (tqdm := sys.modules.get("tqdm")) is not None:
            stack.enter_context(tqdm.tqdm.external_write_mode())
        # While a bar of rich's is drawn, it stands in for the stream, which handlers have kept.
        if (kept := getattr(sys.stderr, "rich_proxied_file", None)) is not None:
            for handler in _stream_handlers(logger):
                if handler.stream is kept:
                    stack.callback(handler.setStream, kept)
                    handler.setStream(sys.stderr)
        yield


def _stream_handlers(logger: logging.Logger) -> Iterator[logging.StreamHandler[Any]]:
    """Those that write what a logger is given."""
    each: logging.Logger | None = logger
    while each is not None:
        yield from (handler for handler in each.handlers if isinstance(handler, logging.StreamHandler))
        each = each.parent if each.propagate else None


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
