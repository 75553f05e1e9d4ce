"""The paper's comparison on the paper's machine, as replay foresees it: nothing is trained, and no GPU is needed.

python benchmarks/paper/foresee.py

Four GTX 1080 Ti share one link of PCIe 3 to the host, so each has its part of it when all of them swap. Products of FP32
reach what such a card does. Between cards, data goes as fast as to the host.
"""

from __future__ import annotations

from dataclasses import replace

from compare import CLAIMED_BYTES, CLAIMED_SPEED, SCHEMES
from models import SUBJECTS
from rows import Costs, costs_of, count, plan_of
from train import arguments, chosen

from lightning_harmony.plan.values.machine import Machine
from lightning_harmony.plan.values.memory_size import parse_bytes

GTX_1080_TI = Machine(
    name="NVIDIA GTX 1080 Ti, PCIe 3",
    flops_per_second={"float32": 9e12},
    memory_bytes_per_second=0.4e12,
    swap_in_bytes_per_second=12e9,
    swap_out_bytes_per_second=12e9,
    updated_parameters_per_second=2e9,
    operation_seconds=8e-6,
    call_seconds=3.5e-4,
)


def shared_by(costs: Costs, num_devices: int) -> Costs:
    """Costs on a machine whose devices have one link together."""
    machine = costs.profile.machine
    speed = GTX_1080_TI.swap_in_bytes_per_second / num_devices
    machine = replace(
        machine,
        swap_in_bytes_per_second=speed,
        swap_out_bytes_per_second=speed,
        transfer_bytes_per_second=GTX_1080_TI.swap_in_bytes_per_second,
    )
    return replace(costs, profile=replace(costs.profile, machine=machine))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2, 4])
    options = parser.parse_args()
    print(
        f"The paper: up to {CLAIMED_SPEED} x the throughput, up to {CLAIMED_BYTES} x fewer bytes.\n\n"
        "| model | devices | scheme | step | speed of (a) | weights and gradients | bytes of (a) |\n"
        "|---|--:|---|--:|--:|--:|--:|"
    )
    for name in options.models:
        subject = chosen(name, options)
        alone = costs_of(subject.shape, subject.microbatch_size, GTX_1080_TI, parse_bytes(options.capacity))
        for number in options.devices:
            costs, first = shared_by(alone, number), None
            for title, row, parallel in SCHEMES.values():
                counted = count(plan_of(row, costs, subject.num_microbatches * number, number, parallel), costs)
                first = first or counted
                print(
                    f"| {subject.title} | {number} | {title} | {counted.seconds:.2f} s | "
                    f"{first.seconds / counted.seconds:.2f} x | {counted.num_bytes / 1e9:.1f} GB | "
                    f"1/{first.num_bytes / counted.num_bytes:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
