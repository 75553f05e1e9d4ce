"""Train a GPT on a device that is too small for it; compare weights, time and memory with plain Lightning; draw a step."""

import argparse
import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from gpt import GPT, GPTConfig
from text import Manual, manual_vocabulary
from torch import Tensor, equal

from lightning_harmony import HarmonyMonitor, HarmonyStrategy, StepReport
from lightning_harmony.cli import main as lightning_harmony
from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes

BATCH_SIZE = 16
CONFIG = GPTConfig()
# What AdamW's division makes of a last bit in a few steps.
LARGEST_ROUNDING = 1e-4
NUM_COMPARED_STEPS = 6
SEED = 1
STATE_BYTES_PER_PARAMETER = 16  # FP32 weight and gradient, and the two moments of AdamW
PROMPT = "The following"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    device_memory: str
    max_steps: int
    accelerator: str
    num_microbatches: int
    picture: Path


@dataclass(frozen=True)
class Training:
    """What a training did.

    Attributes:
        losses: of each step.
        seconds: from the end of each step to the end of the next.
        peak_bytes: the most that was allocated on the device; 0 where nothing counts it.
        report: of the last step; None without harmony.
        weights: at the end, by their names.
    """

    losses: list[float]
    seconds: list[float]
    peak_bytes: int
    report: StepReport | None
    weights: Mapping[str, Tensor]

    @property
    def fastest_seconds(self) -> float:
        """The fastest step. The first ones measure, and libraries start; others may share the machine."""
        return min(self.seconds)


class History(pl.Callback):
    """Keeps the loss and the end of every training step, and the largest peak that was reported."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends: list[float] = []
        self.peak_bytes = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Remember the step, if it ended with this batch: under accumulation, a step has several."""
        if trainer.global_step > len(self.ends):
            self.losses.append(float(trainer.callback_metrics["train_loss"]))
            self.ends.append(time.perf_counter())
            report = getattr(trainer.strategy, "step_report", None)
            if report is not None:
                self.peak_bytes = max(self.peak_bytes, *report.peak_device_bytes)


def parse_options(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device-memory", default="22MiB", help="capacity of the device")
    parser.add_argument("--max-steps", type=int, default=60, help="training steps of the main run")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--num-microbatches", type=int, default=4, help=f"must divide the batch of {BATCH_SIZE}")
    parser.add_argument("--picture", type=Path, default=Path("step.png"), help="file for the picture of a step")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.max_steps < 4:
        parser.error("--max-steps must be at least 4: the first steps measure, and the last one is drawn")
    if options.num_microbatches < 1 or BATCH_SIZE % options.num_microbatches:
        # Plain Lightning takes the microbatches as batches of its own, which must all have one size.
        parser.error(f"--num-microbatches must divide the batch of {BATCH_SIZE}")
    return options


def harmony(options: Options, device_memory: str | None = None) -> HarmonyStrategy:
    """Return a strategy; each serves one Trainer."""
    return HarmonyStrategy(
        device_memory=device_memory or options.device_memory, num_microbatches=options.num_microbatches
    )


def new_model() -> GPT:
    """Return the model with the same initial weights at every call."""
    pl.seed_everything(SEED, verbose=False)
    return GPT(CONFIG)


def print_header(model: GPT, options: Options) -> None:
    """Say how large the training state is, and how small the device."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    state_bytes = STATE_BYTES_PER_PARAMETER * num_parameters
    print(
        f"GPT with {num_parameters / 1e6:.2f} M parameters: {format_bytes(state_bytes)} of weights, gradients and "
        f"optimizer state.\nThe device may use {format_bytes(parse_bytes(options.device_memory))}.\n"
    )


def train(
    model: GPT,
    options: Options,
    num_steps: int,
    *,
    callbacks: list[pl.Callback] | None = None,
    accumulate_grad_batches: int = 1,
    **arguments: Any,
) -> Training:
    """Train the model.

    Args:
        model: what to train.
        options: say where.
        num_steps: steps of the optimizer.
        callbacks: of the Trainer.
        accumulate_grad_batches: into how many batches of plain Lightning each batch is cut.
        arguments: more of the Trainer.
    """
    history = History()
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=1,
        max_epochs=1,
        callbacks=[history, *(callbacks or [])],
        accumulate_grad_batches=accumulate_grad_batches,
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        **arguments,
    )
    num_batches, batch_size = num_steps * accumulate_grad_batches, BATCH_SIZE // accumulate_grad_batches
    data = Manual(num_batches, batch_size, CONFIG.context)
    trainer.fit(model, datamodule=data)
    return Training(
        history.losses,
        [end - start for start, end in pairwise(history.ends)],
        history.peak_bytes,
        getattr(trainer.strategy, "step_report", None),
        {name: parameter.detach().cpu() for name, parameter in model.named_parameters()},
    )


def train_briefly(options: Options, num_steps: int = NUM_COMPARED_STEPS, **arguments: Any) -> Training:
    """Train a new model for a few quiet steps."""
    return train(
        new_model(),
        options,
        num_steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        # Some CUDA kernels add in any order unless told otherwise.
        deterministic=options.accelerator == "gpu",
        **arguments,
    )


def print_losses(losses: list[float], num_rows: int = 7) -> None:
    """Print the mean loss of each stretch of steps: single batches are small, so their losses jump."""
    length = math.ceil(len(losses) / num_rows)
    print("\n     steps  mean loss")
    for start in range(0, len(losses), length):
        stretch = losses[start : start + length]
        print(f"{f'{start + 1}-{start + len(stretch)}':>10}{sum(stretch) / len(stretch):>11.3f}")


def print_text(model: GPT) -> None:
    """Print a text that the model writes: at the end of fit it is an ordinary module in host memory."""
    vocabulary = manual_vocabulary()
    print(f"\nThe model continues {PROMPT!r}:\n")
    print(vocabulary.decode(model.generate(vocabulary.encode(PROMPT), num_tokens=100, temperature=0.6)))


def compare_with_plain(options: Options) -> bool:
    """Train a few steps both ways from equal weights, and print what each takes.

    Returns:
        Whether weights are equal to those of plain Lightning: bit for bit on the CPU, but for rounding on a GPU.
    """
    print(f"\nTraining {NUM_COMPARED_STEPS} steps with harmony, and {NUM_COMPARED_STEPS} with plain Lightning ...")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # said before: which accelerators there are
    ours = train_briefly(options, strategy=harmony(options))
    plain = train_briefly(options, accumulate_grad_batches=options.num_microbatches)
    # On the CPU nothing counts what plain Lightning allocates. Given ample room, harmony trains as that does, and counts.
    peak_bytes = train_briefly(options, 2, strategy=harmony(options, "8GiB")).peak_bytes
    print(f"\n{'':<18}{'fastest step':>14}{'device memory':>16}")
    rows = [("plain Lightning", plain.fastest_seconds, peak_bytes), ("harmony", ours.fastest_seconds, ours.peak_bytes)]
    for name, seconds, num_bytes in rows:
        print(f"{name:<18}{f'{seconds:.2f} s':>14}{format_bytes(num_bytes):>16}")
    print(
        f"\nHarmony: {ours.fastest_seconds / plain.fastest_seconds:.2f} times the time, "
        f"{ours.peak_bytes / peak_bytes:.2f} times the memory."
    )
    return report_difference(ours.weights, plain.weights, options)


def report_difference(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], options: Options) -> bool:
    """Print whether weights are equal to those of plain Lightning, and return it."""
    unequal = [name for name in plain if not equal(ours[name], plain[name])]
    if not unequal:
        print(f"All {len(plain)} parameters equal those of plain Lightning, bit for bit.")
        return True
    difference = max(float((ours[name] - plain[name]).abs().max()) for name in unequal)
    print(f"{len(unequal)} of {len(plain)} parameters differ from plain Lightning by up to {difference:.2e}:")
    print("\n".join(f"  {name}" for name in unequal))
    return options.accelerator == "gpu" and difference < LARGEST_ROUNDING


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    options = parse_options(arguments)
    folder = options.picture.parent
    folder.mkdir(parents=True, exist_ok=True)
    last = options.max_steps - 1
    model = new_model()
    print_header(model, options)
    monitor = HarmonyMonitor(trace_step=last, dirpath=folder)
    ours = train(model, options, options.max_steps, strategy=harmony(options), callbacks=[monitor])
    assert ours.report is not None, "training steps have ended"
    print_losses(ours.losses)
    print_text(model)
    print(f"\nThe last step:\n{ours.report}")
    is_equal = compare_with_plain(options)
    recording = folder / f"step-{last}.json"
    if ours.report.update == "in-memory":
        print("\nThe model fits: nothing was swapped, and there is nothing to draw. Try a smaller --device-memory.")
    else:
        print("\nThe last step, measured and as it was predicted:")
        lightning_harmony(["trace", str(recording), "--png", str(options.picture)])
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
