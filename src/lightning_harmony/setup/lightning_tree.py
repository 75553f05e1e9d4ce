"""A tree of Lightning, and the few questions that are put to its own helpers."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_harmony.setup.progress import above_progress_bars


@dataclass(frozen=True)
class LightningTree:
    """One of the two trees of classes, whose parts are imported when they are needed.

    Attributes:
        name: "lightning.pytorch" or "pytorch_lightning".
    """

    name: str

    def part(self, name: str) -> Any:
        """A module of the tree."""
        whole = f"{self.name}.{name}"
        # What Python looks at to import a module again takes longer than what most ask for it.
        return sys.modules.get(whole) or import_module(whole)

    def overrides(self, owner: Any, hook: str) -> bool:
        """Whether a LightningModule, a data module or a callback has a hook of its own.

        To Lightning's own helper, what wraps the hook of the base class is that hook: it only asks what there is to call.
        Here it is asked who looks, and a wrapper on the instance may.
        """
        core, callbacks = self.part("core"), self.part("callbacks")
        bases = (core.LightningModule, core.LightningDataModule, callbacks.Callback)
        own = getattr(owner, hook, None)
        return own is not None and getattr(own, "__func__", own) not in [getattr(base, hook, None) for base in bases]

    def calls_hooks(self, module: str) -> bool:
        """Whether a module of Python, given its name, is one of Lightning's that call hooks of others."""
        return module.startswith((f"{self.name}.trainer.", f"{self.name}.loops."))

    def is_known(self, maker: Any, part: str = "plugins") -> bool:
        """Whether a class or a function is of some part of Lightning's, or of this package, and not the user's."""
        return str(getattr(maker, "__module__", None)).startswith((f"{self.name}.{part}.", "lightning_harmony."))

    def runs_alone(self, module: Any) -> bool:
        """Whether a training_step steps its optimizers or fetches its batches itself, so that it runs as it is."""
        return not module.automatic_optimization or self.takes_iterator(module.training_step)

    def calls_backward(self, trainer: Any) -> bool:
        """Whether Lightning's own code calls the backward of a loss, and not the user's."""
        plugin, base = type(trainer.precision_plugin), self.part("plugins.precision").Precision
        return plugin.backward is base.backward and not self.overrides(trainer.lightning_module, "backward")

    def takes_iterator(self, step: Any) -> bool:
        """Whether a step fetches its batches itself."""
        signature = self.part("utilities.signature_utils")
        return bool(signature.is_param_in_hook_signature(step, "dataloader_iter", explicit=True))

    def batch_size(self, batch: Any) -> int:
        """How many samples a batch has, as Lightning tells it; raises whatever it raises."""
        return int(self.part("utilities.data").extract_batch_size(batch))

    def shows_summary(self, trainer: Any) -> bool:
        """Whether Lightning shows its model summary: not with `Trainer(enable_model_summary=False)`."""
        kind = self.part("callbacks").ModelSummary
        return any(isinstance(callback, kind) for callback in trainer.callbacks)

    def show(self, message: str) -> None:
        """Print it where Lightning prints its model summary."""
        with self._above_progress_bars():
            print(message)

    def info(self, message: str) -> None:
        """Say it where Lightning says what it does."""
        with self._above_progress_bars():
            self.part("utilities.rank_zero").rank_zero_info(message)

    def warn(self, message: str) -> None:
        """Say it once."""
        with self._above_progress_bars():
            self.part("utilities.rank_zero").rank_zero_warn(message)

    def _above_progress_bars(self) -> AbstractContextManager[None]:
        return above_progress_bars(logging.getLogger(f"{self.name}.utilities.rank_zero"))


def classes_of(tree: str) -> Any:
    """The module with `HarmonyStrategy`, `HarmonyPrecision` and `HarmonyMonitor` for a tree.

    Args:
        tree: "lightning.pytorch" or "pytorch_lightning".
    """
    return import_module(f"lightning_harmony.{tree.replace('.', '_')}")
