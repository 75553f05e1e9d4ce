"""What a step takes on several machines is simulated from that of one, and from what the network carries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu
FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        import nodes

        yield nodes
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("nodes", None)


def test_what_is_sent_beside_the_backward_costs_nothing(nodes: Any) -> None:
    packs = [nodes.Pack(begins=1.0, final=3.0, num_bytes=100), nodes.Pack(begins=0.0, final=4.0, num_bytes=100)]
    assert nodes.seconds_on(2, 1e9, 4.0, packs) == pytest.approx(4.0, abs=1e-6)
    # The first pack is sent while the second runs; the next step, which begins with that, waits for it alone.
    assert nodes.seconds_on(2, 100.0, 4.0, packs) == pytest.approx(5.0)
    # With more machines, each sends more of what it has.
    assert nodes.seconds_on(4, 100.0, 4.0, packs) == pytest.approx(3.0 + 1.5 + 1.5)


def test_a_slow_network_bounds_the_step(nodes: Any) -> None:
    packs = [nodes.Pack(begins=0.0, final=1.0, num_bytes=100)]
    assert nodes.seconds_on(2, 1.0, 2.0, packs) == pytest.approx(101.0)
    # Where its pack begins late, what is sent ends under the next step, but no faster than the network carries it.
    packs = [nodes.Pack(begins=90.0, final=91.0, num_bytes=100)]
    assert nodes.seconds_on(2, 1.0, 92.0, packs) == pytest.approx(101.0)


def test_packs_of_a_plan_are_final_from_the_last_to_the_first(nodes: Any) -> None:
    import torch

    from lightning_harmony.estimating.estimation import estimate

    result = estimate(
        lambda: nodes.GPT(
            nodes.Shape(hidden=64, layers=4, heads=4, vocabulary=512, length=64), recompute=False, fused=None
        ),
        torch.empty(8, 65, dtype=torch.int64, device="meta"),
        machine="l40s",
        num_microbatches=4,
    )
    seconds, packs = nodes.packs_of(result.outlook.plan)
    assert seconds > 0
    assert [pack.begins for pack in packs] == sorted((pack.begins for pack in packs), reverse=True)
    assert sum(pack.num_bytes for pack in packs) >= 4 * result.num_trained
