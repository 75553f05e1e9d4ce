"""What a user writes, for mypy to look at: the classes are ordinary ones, whose arguments are checked."""

import lightning.pytorch as pl

from lightning_harmony import HarmonyMonitor, HarmonyPrecision, HarmonyStrategy, Plan, StepReport


def first_example(model: pl.LightningModule, data: pl.LightningDataModule) -> None:
    """That of the README."""
    trainer = pl.Trainer(strategy="harmony", accelerator="gpu", devices=1, precision="bf16-mixed")
    trainer.fit(model, datamodule=data)


def trainer(plan: Plan | None = None) -> pl.Trainer:
    strategy = HarmonyStrategy(device_memory="16GiB", num_microbatches=8, plan=plan)
    return pl.Trainer(strategy=strategy, plugins=HarmonyPrecision("bf16-compute"), callbacks=[HarmonyMonitor()])


def seconds(strategy: HarmonyStrategy) -> float:
    report: StepReport | None = strategy.step_report
    return 0.0 if report is None else report.seconds


def mistakes() -> None:
    """mypy sees each of them: it reports comments that ignore no error."""
    HarmonyStrategy(devcie_memory="16GiB")  # type: ignore[call-arg]
    HarmonyStrategy(num_microbatches="many")  # type: ignore[arg-type]
    HarmonyMonitor(trace_steps=3)  # type: ignore[call-arg]
    HarmonyPrecision("bf16-computed")  # type: ignore[arg-type]
