"""What a user writes, for mypy to look at: the classes are ordinary ones, whose arguments are checked."""

import lightning.pytorch as pl

from lightning_harmony import HarmonyMonitor, HarmonyPrecision, HarmonyStrategy, Plan, StepReport


def trainer(plan: Plan | None = None) -> pl.Trainer:
    strategy = HarmonyStrategy(device_memory="16GiB", num_microbatches=8, plan=plan)
    return pl.Trainer(strategy=strategy, plugins=HarmonyPrecision("bf16-compute"), callbacks=[HarmonyMonitor()])


def seconds(strategy: HarmonyStrategy) -> float:
    report: StepReport | None = strategy.step_report
    return 0.0 if report is None else report.seconds
