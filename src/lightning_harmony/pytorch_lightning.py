"""For `pytorch_lightning`, whose Trainer takes its own classes only, not those of `lightning`: the same names."""

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy

from lightning_harmony.monitor import MonitorMixin
from lightning_harmony.precision import PrecisionMixin
from lightning_harmony.strategy import StrategyMixin

__all__ = ["HarmonyMonitor", "HarmonyPrecision", "HarmonyStrategy"]


class HarmonyStrategy(StrategyMixin, ParallelStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = StrategyMixin.__doc__
    tree = "pytorch_lightning"


class HarmonyPrecision(PrecisionMixin, Precision):  # type: ignore[misc]  # noqa: D101
    __doc__ = PrecisionMixin.__doc__
    tree = "pytorch_lightning"


class HarmonyMonitor(MonitorMixin, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = MonitorMixin.__doc__
    tree = "pytorch_lightning"


# Lightning compiles models only for strategies that it knows: this one, too, has one logical device.
SingleDeviceStrategy.register(HarmonyStrategy)
