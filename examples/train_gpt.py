"""Train a GPT on a device that is too small for it, and check the result against plain Lightning."""

import argparse
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from gpt import GPT
from text import StandardLibrary
from torch import Tensor

from lightning_harmony import HarmonyStrategy, StepReport
from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes

BATCH_SIZE = 8
# What AdamW's division makes of a last bit in three steps.
LARGEST_ROUNDING = 1e-4
NUM_COMPARED_STEPS = 3
SEED = 1
STATE_BYTES_PER_PARAMETER = 16  # FP32 weight and gradient, and the two moments of AdamW
PROMPT = "def "
KINDS = ("weights", "gradients", "optimizer", "stash")


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    device_memory: str
    max_steps: int
    accelerator: str
    num_microbatches: int


class History(pl.Callback):
    """Keeps the loss and the report of every training step."""

    def __init__(self, strategy: HarmonyStrategy) -> None:
        self.strategy = strategy
        self.losses: list[float] = []
        self.reports: list[StepReport] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Remember what the step that just ended reports."""
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        report = self.strategy.step_report
        assert report is not None, "a training step has just ended"
        self.reports.append(report)


def parse_options(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device-memory", default="32MiB", help="capacity of the device")
    parser.add_argument("--max-steps", type=int, default=50, help="training steps of the main run")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--num-microbatches", type=int, default=4, help=f"must divide the batch of {BATCH_SIZE}")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.max_steps < 1:
        parser.error("--max-steps must be at least 1")
    if options.num_microbatches < 1 or BATCH_SIZE % options.num_microbatches:
        # Plain Lightning takes the microbatches as batches of its own, which must all have one size.
        parser.error(f"--num-microbatches must divide the batch of {BATCH_SIZE}")
    return options


def harmony(options: Options) -> HarmonyStrategy:
    """Return the strategy under test; a strategy serves one Trainer."""
    return HarmonyStrategy(device_memory=options.device_memory, num_microbatches=options.num_microbatches)


def new_model() -> GPT:
    """Return the model with the same initial weights at every call."""
    pl.seed_everything(SEED, verbose=False)
    return GPT()


def print_header(model: GPT, options: Options) -> None:
    """Say how large the training state is, and how small the device."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    state_bytes = STATE_BYTES_PER_PARAMETER * num_parameters
    print(
        f"GPT with {num_parameters / 1e6:.2f} M parameters: {format_bytes(state_bytes)} of weights, gradients and "
        f"optimizer state.\nThe device may use {format_bytes(parse_bytes(options.device_memory))}.\n"
    )


def train(model: GPT, options: Options) -> History:
    """Train the model on the small device."""
    strategy = harmony(options)
    history = History(strategy)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=1,
        max_epochs=1,
        callbacks=[history],
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, datamodule=StandardLibrary(options.max_steps, BATCH_SIZE))
    return history


def print_losses(losses: list[float], num_rows: int = 7) -> None:
    """Print the mean loss of each stretch of steps: single batches are small, so their losses jump."""
    length = math.ceil(len(losses) / num_rows)
    print("\n     steps  mean loss")
    for start in range(0, len(losses), length):
        stretch = losses[start : start + length]
        print(f"{f'{start + 1}-{start + len(stretch)}':>10}{sum(stretch) / len(stretch):>11.3f}")


def print_text(model: GPT) -> None:
    """Print a text that the model writes: at the end of fit it is an ordinary module in host memory."""
    print(f"\nThe model continues {PROMPT!r}:\n")
    print(model.generate(PROMPT, num_tokens=160))


def per_microbatch_bytes(swapped_in: Mapping[str, int], swapped_out: Mapping[str, int], num_microbatches: int) -> int:
    """Return the bytes that a step would swap if it ran one microbatch after the other.

    Each microbatch would then bring in all weights again and take out gradients of its own. Everything else moves as
    often as it did.
    """
    measured = sum(swapped_in.values()) + sum(swapped_out.values())
    repeated = swapped_in.get("weights", 0) + swapped_out.get("gradients", 0)
    return measured + (num_microbatches - 1) * repeated


def print_report(reports: list[StepReport], options: Options) -> None:
    """Print what the last step swapped, and the peak of all steps."""
    report = reports[-1]
    swapped_in, swapped_out = report.swapped_in_bytes, report.swapped_out_bytes
    print(f"\nThe last step: {report.seconds:.2f} s, {report.num_microbatches} microbatches, {report.num_packs} packs.")
    print(f"Update: {report.update} ({report.update_reason}).\n")
    print(f"{'swapped':<12}{'in':>14}{'out':>14}")
    for kind in KINDS:
        print(f"{kind:<12}{format_bytes(swapped_in.get(kind, 0)):>14}{format_bytes(swapped_out.get(kind, 0)):>14}")
    measured = sum(swapped_in.values()) + sum(swapped_out.values())
    alone = per_microbatch_bytes(swapped_in, swapped_out, report.num_microbatches)
    print(
        f"\nAll of it: {format_bytes(measured)}. One microbatch after the other would bring in the weights, and take\n"
        f"out gradients, {report.num_microbatches} times as often: {format_bytes(alone)}, "
        f"which is {alone / max(1, measured):.1f} times as much."
    )
    capacity = parse_bytes(options.device_memory)
    peak_bytes = max(max(report.peak_device_bytes) for report in reports)
    print(f"Peak on the device: {format_bytes(peak_bytes)} of {format_bytes(capacity)}.")


def train_briefly(options: Options, num_steps: int, **trainer_arguments: Any) -> dict[str, Tensor]:
    """Train a new model for a few quiet steps and return its weights."""
    num_loaded = num_steps * trainer_arguments.get("accumulate_grad_batches", 1)
    data = StandardLibrary(num_loaded, BATCH_SIZE * num_steps // num_loaded)
    model = new_model()
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # Some CUDA kernels add in any order unless told otherwise.
        deterministic=options.accelerator == "gpu",
        **trainer_arguments,
    )
    trainer.fit(model, datamodule=data)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def largest_difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the largest absolute difference of any two elements."""
    return max(float((left - right).abs().max()) for left, right in pairs)


def compare_with_plain(options: Options) -> bool:
    """Train a few steps both ways from equal weights; say whether all weights are equal, bit for bit."""
    print(f"\nTraining {NUM_COMPARED_STEPS} steps with harmony, and {NUM_COMPARED_STEPS} with plain Lightning ...")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # said before: which accelerators there are
    ours = train_briefly(options, NUM_COMPARED_STEPS, strategy=harmony(options))
    plain = train_briefly(options, NUM_COMPARED_STEPS, accumulate_grad_batches=options.num_microbatches)
    unequal = [name for name in plain if not torch.equal(ours[name], plain[name])]
    if not unequal:
        print(f"All {len(plain)} parameters equal those of plain Lightning, bit for bit.")
        return True
    difference = largest_difference((ours[name], plain[name]) for name in unequal)
    if options.accelerator == "gpu" and difference < LARGEST_ROUNDING:
        print(
            f"The {len(plain)} parameters differ from plain Lightning by up to {difference:.2e}: there the GPU "
            "updates them, here the host, which rounds otherwise."
        )
        return True
    print(f"{len(unequal)} of {len(plain)} parameters differ from plain Lightning by up to {difference:.2e}:")
    print("\n".join(f"  {name}" for name in unequal))
    return False


def main() -> int:
    """Run the demo; return the exit code."""
    options = parse_options()
    model = new_model()
    print_header(model, options)
    history = train(model, options)
    print_losses(history.losses)
    print_text(model)
    print_report(history.reports, options)
    return 0 if compare_with_plain(options) else 1


if __name__ == "__main__":
    sys.exit(main())
