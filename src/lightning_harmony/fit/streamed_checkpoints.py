"""Checkpoints of more than the host has room for: tensors go to their file, and come from there, as somebody reads them."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_harmony.fit.given_plugins import GivenPlugins


class StreamedCheckpoints(GivenPlugins):
    """A strategy whose optimizer state may live on disk. Lightning has the whole of a checkpoint in memory.

    Attributes:
        streams_checkpoints: whether local files of Lightning's own format are written and read by pieces.
    """

    streams_checkpoints = False

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint. A file of that name is as it was until the new one is whole."""
        if storage_options is not None or not self._streams(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        try:
            torch.save(checkpoint, partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, its tensors mapped: they take no memory before they are copied to where they live."""
        if not self._streams(checkpoint_path) or not zipfile.is_zipfile(checkpoint_path):
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            loaded = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only)
        return loaded

    def _streams(self, path: str | Path) -> bool:
        is_lightnings = type(self.checkpoint_io).__name__ == "TorchCheckpointIO"
        return self.streams_checkpoints and is_lightnings and "://" not in str(path)
