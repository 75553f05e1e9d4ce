"""For `lightning`: the strategy, the precision plugin and the monitor."""

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy

from lightning_harmony.monitor import MonitorMixin
from lightning_harmony.precision import PrecisionMixin
from lightning_harmony.strategy import StrategyMixin

__all__ = ["HarmonyMonitor", "HarmonyPrecision", "HarmonyStrategy"]


class HarmonyStrategy(StrategyMixin, ParallelStrategy):  # noqa: D101
    __doc__ = StrategyMixin.__doc__
    tree = "lightning.pytorch"


class HarmonyPrecision(PrecisionMixin, Precision):  # noqa: D101
    __doc__ = PrecisionMixin.__doc__
    tree = "lightning.pytorch"


class HarmonyMonitor(MonitorMixin, Callback):  # noqa: D101
    __doc__ = MonitorMixin.__doc__
    tree = "lightning.pytorch"


# Lightning compiles models only for strategies that it knows: this one, too, has one logical device.
SingleDeviceStrategy.register(HarmonyStrategy)
