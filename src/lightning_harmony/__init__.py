"""Train PyTorch Lightning modules that do not fit in device memory, as if they did.

Importing this registers ``Trainer(strategy="harmony")``. It is imported by every ``import torch`` of its environment, so
it imports nothing itself until one of its names is used.
"""

from typing import TYPE_CHECKING, Any

from lightning_harmony import autoload
from lightning_harmony.errors import CapacityError, PlanError, UnsupportedModelError

if TYPE_CHECKING:
    from lightning_harmony.engine.measure.report import StepReport
    from lightning_harmony.estimating.estimation import estimate
    from lightning_harmony.estimating.result import Estimate
    from lightning_harmony.lightning_pytorch import HarmonyMonitor, HarmonyPrecision, HarmonyStrategy
    from lightning_harmony.plan.values.machine import Machine
    from lightning_harmony.plan.values.plan import Plan

    __version__: str

__all__ = [
    "CapacityError",
    "Estimate",
    "HarmonyMonitor",
    "HarmonyPrecision",
    "HarmonyStrategy",
    "Machine",
    "Plan",
    "PlanError",
    "StepReport",
    "UnsupportedModelError",
    "__version__",
    "estimate",
]

autoload.install()


def __getattr__(name: str) -> Any:
    if name in ("HarmonyMonitor", "HarmonyPrecision", "HarmonyStrategy"):
        from lightning_harmony import lightning_pytorch

        return getattr(lightning_pytorch, name)
    if name == "Plan":
        from lightning_harmony.plan.values.plan import Plan

        return Plan
    if name == "StepReport":
        from lightning_harmony.engine.measure.report import StepReport

        return StepReport
    if name in ("Estimate", "estimate"):
        from lightning_harmony.estimating import estimation

        return getattr(estimation, name)
    if name == "Machine":
        from lightning_harmony.plan.values.machine import Machine

        return Machine
    if name == "__version__":
        from importlib.metadata import version

        return version("lightning-harmony")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
