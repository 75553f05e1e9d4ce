"""Lines above progress bars, which would tear these."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


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
