"""The command `lightning-harmony`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_harmony.errors import PlanError, UnsupportedModelError

# Help and refused options are there at once: each command imports what it takes when it runs.
if TYPE_CHECKING:
    from lightning_harmony.plan.values.plan import Plan
    from lightning_harmony.plan.values.prediction import Prediction

_ESTIMATE = """Say what training a model takes, before any memory is taken: bytes on device and host, packs, the time of a
step and what bounds it, for several sizes of the microbatches, and what to change if it does not fit."""
_EXAMPLES = """examples:
  lightning-harmony estimate my_project.Model --batch "int64[8, 128], int64[8, 128]" --device-memory 8GiB
  lightning-harmony estimate transformers.GPT2Config n_layer=48 n_embd=1600 n_head=25 --machine h200
  lightning-harmony estimate --config config.yaml --machine machine.json"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 1 where training does not fit, 2 for wrong input."""
    parser = argparse.ArgumentParser(
        prog="lightning-harmony", description="Plan, estimate and look at training with Trainer(strategy='harmony')."
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_machine(commands)
    _add_estimate(commands)
    _add_plan(commands)
    _add_trace(commands)
    _add_bench(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (PlanError, UnsupportedModelError, ImportError, OSError, ValueError) as error:
        parser.exit(2, f"lightning-harmony {options.command}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130)
    return code


class _Version(argparse.Action):
    """Looks the version up when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import version

        print(version("lightning-harmony"))
        parser.exit()


# ---- machine -----------------------------------------------------------------------------------------------------------


def _add_machine(commands: Any) -> None:
    parser = commands.add_parser(
        "machine", help="show what this machine offers: versions, and memory of host and devices"
    )
    parser.add_argument("--measure", action="store_true", help="measure it, and print what `estimate --machine` reads")
    parser.set_defaults(run=_machine)


def _machine(options: argparse.Namespace) -> int:
    from lightning_harmony.engine.measure.this_machine import describe_machine, measure_machine

    print(measure_machine().to_json() if options.measure else "\n".join(describe_machine()))
    return 0


# ---- plan and trace ----------------------------------------------------------------------------------------------------


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="show a plan, and what a step by it will do")
    parser.add_argument("plan", type=Path, help="a file with the JSON of a plan: trainer.strategy.plan.to_json()")
    parser.add_argument("--grid", action="store_true", help="print all tasks of each device, in order")
    _add_outputs(parser)
    parser.set_defaults(run=_plan)


def _add_trace(commands: Any) -> None:
    parser = commands.add_parser("trace", help="show a step that was recorded beside what its plan predicted")
    parser.add_argument("recording", type=Path, help="a file that HarmonyMonitor(trace_step=...) wrote")
    _add_outputs(parser)
    parser.set_defaults(run=_trace)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--png", type=Path, help="draw what streams do over time, and the memory (or .svg, .pdf)")
    parser.add_argument("--html", type=Path, help="the same as a page that tells what you point at")
    parser.add_argument("--trace", type=Path, help="write a trace for https://ui.perfetto.dev or chrome://tracing")


def _plan(options: argparse.Namespace) -> int:
    from lightning_harmony.plan.drawing.page import summary
    from lightning_harmony.plan.search.given import read_plan
    from lightning_harmony.plan.simulate.lowering import lower
    from lightning_harmony.plan.simulate.replay import predict

    _refuse_format(options.png)
    plan = read_plan(options.plan)
    print(plan)
    if plan.profile is None and not (options.grid or options.png or options.html or options.trace):
        return 0
    prediction = predict(plan)
    print("\n".join(summary(plan, prediction)))
    if options.grid and plan.profile is not None:
        machine = plan.profile.machine
        packs = plan.profile.pack_costs(plan.packs)
        print(lower(plan, packs, machine))
    _write(plan, {"predicted": prediction}, "Plan of a step", options)
    return 0


def _trace(options: argparse.Namespace) -> int:
    from lightning_harmony.plan.drawing.page import summaries
    from lightning_harmony.plan.drawing.recording import read_recording

    _refuse_format(options.png)
    recording = read_recording(options.recording)
    steps = {"measured": recording.measured}
    predicted = recording.predicted()
    if predicted is not None:
        steps["predicted"] = predicted
    print("\n".join(summaries(recording.plan, steps)))
    if predicted is None:
        print(f"predicted: nothing, for {recording.why_unpredicted()}")
    in_time = "; predicted just in time" if predicted is not None and recording.update.startswith("deferred") else ""
    print(f"update: {recording.update}{in_time}")
    _write(recording.plan, steps, "A recorded step", options)
    return 0


def _refuse_format(png: Path | None) -> None:
    if png is not None:
        from lightning_harmony.reporting.figures import refuse_format

        refuse_format(png)


def _write(plan: Plan, steps: Mapping[str, Prediction], title: str, options: argparse.Namespace) -> None:
    if options.png is not None:
        from lightning_harmony.reporting.picture import draw

        draw(plan, steps, options.png)
    if options.html is not None:
        from lightning_harmony.plan.drawing.page import to_html

        options.html.write_text(to_html(plan, steps, title), encoding="utf-8")
    if options.trace is not None:
        from lightning_harmony.plan.drawing.trace import to_trace

        options.trace.write_text(to_trace(plan, steps), encoding="utf-8")
    for file in (options.png, options.html, options.trace):
        if file is not None:
            print(f"wrote {file}")


# ---- estimate ----------------------------------------------------------------------------------------------------------


def _add_estimate(commands: Any) -> None:
    parser = commands.add_parser(
        "estimate",
        help="say what training a model takes, before any memory is taken",
        description=_ESTIMATE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(parser)
    parser.add_argument(
        "--config", help="configuration of a LightningCLI application; what is given besides goes first"
    )
    parser.add_argument("--batch-size", type=int, help="samples of a step of a Hugging Face model (default: 8)")
    parser.add_argument("--device-memory", help="as for HarmonyStrategy, such as 24GiB (default: all of the device's)")
    parser.add_argument(
        "--host-memory", help="what the host has, such as 128GiB (default: what is known of the machine)"
    )
    parser.add_argument("--num-microbatches", type=int, help="as for HarmonyStrategy")
    parser.add_argument("--microbatch-size", type=int, help="as for HarmonyStrategy")
    parser.add_argument("--precision", help="as for Lightning's Trainer (default: 32-true)")
    parser.add_argument("--optimizer", help="class of the optimizer (default: the module's own, else AdamW)")
    parser.add_argument("--update", choices=("just-in-time", "deferred"), help="deferred, where gradients are clipped")
    parser.add_argument(
        "--machine",
        help="rtx3090, rtx4090, rtx5090, l40s, a100, h100, h200, or a file that `machine --measure` wrote (default: measure "
        "this machine)",
    )
    parser.add_argument(
        "--nodes", type=int, dest="num_nodes", metavar="N", help="num_nodes of the Trainer: such machines (default: 1)"
    )
    parser.add_argument(
        "--network-gigabits",
        type=float,
        metavar="GBIT",
        help="what each of these sends in a second (default: fast enough)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_estimate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="import path of a LightningModule, of a function that returns one, or of a Hugging Face configuration; or a "
        "file or folder with such a configuration, or a model's name on the Hugging Face Hub",
    )
    parser.add_argument("arguments", nargs="*", metavar="name=value", help="its arguments")
    parser.add_argument("--batch", help='types and shapes of a batch, such as "int64[8, 128], int64[8, 128]"')
    parser.add_argument(
        "--sequence-length", type=int, help="tokens of a sample of a Hugging Face model (default: up to 1024)"
    )


def _estimate(options: argparse.Namespace) -> int:
    from lightning_harmony.estimating.application import find_model, parse_arguments, parse_batch, read_config
    from lightning_harmony.estimating.estimation import estimate

    given: dict[str, Any] = {}
    model, arguments = options.model, options.arguments
    if model is not None and "=" in model:
        model, arguments = None, [model, *arguments]
    if options.config is not None:
        if arguments:
            raise ValueError("the model's arguments stand in the configuration: leave out name=value, or --config")
        given = read_config(options.config, model)
    elif not model:
        raise ValueError("name a model, or give --config")
    else:
        given["model"] = find_model(model, parse_arguments(arguments))
    if options.batch is not None:
        given["batch"] = parse_batch(options.batch)
    names = (
        "batch_size", "sequence_length", "device_memory", "host_memory", "num_microbatches", "microbatch_size", "precision",
        "optimizer", "update", "machine", "num_nodes", "network_gigabits",
    )  # fmt: skip
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "num_microbatches" in chosen or "microbatch_size" in chosen:
        given = {name: value for name, value in given.items() if name not in ("num_microbatches", "microbatch_size")}
    result = estimate(**{**given, **chosen})
    print(json.dumps(result.to_dict(), indent=2) if options.json else result)
    return 0 if result.fits else 1


# ---- bench -------------------------------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="train a model with more and less device memory, and draw the speed",
        description="Train a transformer, or a model with random weights on random batches, on this machine with plain "
        "Lightning in memory, and with harmony in more and less device memory. Print the seconds of a step, and draw speed "
        "against memory.",
    )
    _add_model(parser)
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), help="default: the GPU if there is one")
    parser.add_argument("--precision", help="as for Lightning's Trainer (default: bf16-mixed on a GPU, else 32-true)")
    parser.add_argument("--budgets", type=int, help="how many limits of device memory (default: 4 on a GPU, else 3)")
    parser.add_argument("--steps", type=int, help="steps to measure in each training (default: 6 on a GPU, else 3)")
    sizes = parser.add_argument_group(
        "the transformer", "where no model is named; its size follows from the memory of this machine, where not given"
    )
    for name, meaning in _SIZES.items():
        sizes.add_argument(f"--{name.replace('_', '-')}", type=int, help=meaning)
    parser.add_argument("--picture", type=Path, default=Path("bench.png"), help="default: bench.png (or .svg, .pdf)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.set_defaults(run=_bench)


_SIZES = {
    "hidden": "numbers for each token between the layers",
    "layers": "of the transformer",
    "length": "tokens of a sample",
    "batch_size": "samples of a step",
    "num_microbatches": "into which a step is split",
}


def _bench(options: argparse.Namespace) -> int:
    from lightning_harmony import bench
    from lightning_harmony.estimating.application import find_model, parse_arguments, parse_batch

    rows = bench.run(
        model=None if options.model is None else find_model(options.model, parse_arguments(options.arguments)),
        batch=None if options.batch is None else parse_batch(options.batch),
        sequence_length=options.sequence_length,
        accelerator=options.accelerator,
        precision=options.precision,
        steps=options.steps,
        budgets=options.budgets,
        picture=options.picture,
        json_file=options.json,
        **{name: number for name in _SIZES if (number := getattr(options, name)) is not None},
    )
    return 1 if any(row.failure for row in rows) else 0
