"""How long the search for a plan takes.

pytest benchmarks/test_search.py --benchmark-enable --benchmark-only --benchmark-columns=median,min,max,rounds
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from lightning_harmony.plan.search.search import MOST_TASKS, Space
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel
from lightning_harmony.plan.values.profile import DeviceLimits, Profile

MIB, GIB = 2**20, 2**30
NUM_LAYERS, NUM_MICROBATCHES, NUM_DEVICES = 1000, 64, 8


def profile(capacity_bytes: int | None) -> Profile:
    """Layers of 10 to 70 M parameters whose times do not follow from their sizes."""
    layers = tuple(
        Cost(
            f"layer {index}",
            weight_bytes=(20 + 20 * (index % 7)) * MIB,
            gradient_bytes=(40 + 40 * (index % 7)) * MIB,
            forward_work_bytes=30 * MIB,
            backward_work_bytes=60 * MIB,
            graph_bytes=20 * MIB,
            copied_bytes=(20 + 20 * (index % 7)) * MIB,
            input_bytes=2 * MIB,
            stash_bytes=2 * MIB,
            forward_seconds=1e-3 * (1 + index % 3),
            backward_seconds=1e-3 * (3 + index % 5),
            recompute_seconds=1e-3 * (1 + index % 3),
        )
        for index in range(NUM_LAYERS)
    )
    return Profile(layers, DeviceLimits(capacity_bytes, 55e9, 55e9, 200e9, 19e9))


@pytest.mark.parametrize("capacity_bytes", [4 * GIB, 16 * GIB, None])
@pytest.mark.parametrize("parallel", ["pipeline", "data"])
def test_a_thousand_layers_on_eight_devices(benchmark: Any, parallel: Parallel, capacity_bytes: int | None) -> None:
    given = profile(capacity_bytes)

    def find() -> None:
        Space(given, range(NUM_LAYERS), NUM_MICROBATCHES, NUM_DEVICES, parallel).best(MOST_TASKS, inf, 0.0)

    benchmark.pedantic(find, rounds=1)
