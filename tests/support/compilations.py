"""What a fit compiles."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch._dynamo.utils import counters


class Compilations(pl.Callback):
    """How many frames had been compiled after each step, and which layers had narrow weights."""

    def __init__(self) -> None:
        self.frames: list[int] = []
        self.narrow: set[str] = set()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.frames.append(counters["frames"]["total"])
        self.narrow = {layer.name for layer in trainer.strategy._swapped.engine._model.layers if layer.narrow}
