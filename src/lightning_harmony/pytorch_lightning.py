"""For `pytorch_lightning`, whose Trainer takes its own classes only, not those of `lightning`: the same names."""

from lightning_harmony.monitor import monitor_class
from lightning_harmony.precision import precision_class
from lightning_harmony.strategy import strategy_class

__all__ = ["HarmonyMonitor", "HarmonyPrecision", "HarmonyStrategy"]

HarmonyMonitor = monitor_class("pytorch_lightning")
HarmonyPrecision = precision_class("pytorch_lightning")
HarmonyStrategy = strategy_class("pytorch_lightning")
