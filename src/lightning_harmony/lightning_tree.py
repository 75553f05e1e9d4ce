"""A tree of Lightning, and the few questions that are put to its own helpers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class LightningTree:
    """One of the two trees of classes, whose parts are imported when they are needed.

    Attributes:
        name: "lightning.pytorch" or "pytorch_lightning".
    """

    name: str

    def part(self, name: str) -> Any:
        """A module of the tree."""
        return import_module(f"{self.name}.{name}")

    def overrides(self, owner: Any, hook: str) -> bool:
        """Whether a LightningModule, a data module or a callback has a hook of its own."""
        return bool(self.part("utilities.model_helpers").is_overridden(hook, owner))

    def takes_iterator(self, step: Any) -> bool:
        """Whether a step fetches its batches itself."""
        signature = self.part("utilities.signature_utils")
        return bool(signature.is_param_in_hook_signature(step, "dataloader_iter", explicit=True))

    def batch_size(self, batch: Any) -> int:
        """How many samples a batch has, as Lightning tells it; raises whatever it raises."""
        return int(self.part("utilities.data").extract_batch_size(batch))

    def info(self, message: str) -> None:
        """Say it where Lightning says what it does."""
        self.part("utilities.rank_zero").rank_zero_info(message)

    def warn(self, message: str) -> None:
        """Say it once."""
        self.part("utilities.rank_zero").rank_zero_warn(message)


def module_for(tree: str, own: str) -> str:
    """The module of ours from which a class is imported.

    Args:
        tree: the Lightning tree that the class is for.
        own: the module of the class for "lightning.pytorch".
    """
    return own if tree == "lightning.pytorch" else "lightning_harmony.pytorch_lightning"
