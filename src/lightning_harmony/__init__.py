"""Train PyTorch Lightning modules that do not fit in device memory, as if they did.

Importing this registers ``Trainer(strategy="harmony")``. It is imported by every ``import torch`` of its environment, so
it imports nothing itself until something is asked of it.
"""

from typing import TYPE_CHECKING, Any

from lightning_harmony import autoload
from lightning_harmony.errors import CapacityError, PlanError, UnsupportedModelError

if TYPE_CHECKING:
    from lightning_harmony.engine.report import StepReport
    from lightning_harmony.strategy import HarmonyStrategy

__all__ = ["CapacityError", "HarmonyStrategy", "PlanError", "StepReport", "UnsupportedModelError"]

autoload.install()


def __getattr__(name: str) -> Any:
    if name == "HarmonyStrategy":
        from lightning_harmony.strategy import HarmonyStrategy

        return HarmonyStrategy
    if name == "StepReport":
        from lightning_harmony.engine.report import StepReport

        return StepReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
