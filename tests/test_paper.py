"""The benchmarks of the paper's models: what replay counts for each row is what the executor copies."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.machine import H200
from lightning_harmony.plan.values.plan import Plan
from support.sampling import combined

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*"),
]

FOLDER = Path(__file__).parents[1] / "benchmarks" / "paper"
# Room for all weights beside gradients and work, and for half of them.
AMPLE, TIGHT = 2_000_000, 1_400_000


@pytest.fixture(scope="module")
def paper() -> Any:
    """The modules of the benchmark, which lie in no package."""
    sys.path.insert(0, str(FOLDER))
    try:
        import ablation
        import compare
        import models
        import rows
        import train

        yield Namespace(ablation=ablation, compare=compare, models=models, rows=rows, train=train)
    finally:
        sys.path.remove(str(FOLDER))


def run(paper: Any, name: str, row: str, num_devices: int, parallel: Any, capacity: int) -> tuple[Any, Plan, Any]:
    """A row's measurements, its plan and what the formula says."""
    subject = paper.models.subject_of(name, is_small=True)
    costs = paper.rows.costs_of(subject.shape, subject.microbatch_size, H200, capacity)
    num_microbatches = subject.num_microbatches * num_devices
    plan = paper.rows.plan_of(row, costs, num_microbatches, num_devices, parallel)
    model = paper.models.build(subject.shape)
    paper.models.initialise(model, subject.shape)
    options = Namespace(capacity=str(capacity), accelerator="cpu", devices=num_devices, steps=1)
    measured = paper.train.measure(model, subject, plan, num_microbatches, parallel, options)
    return measured, plan, paper.rows.count(plan, costs)


def refuse_other_bytes(measured: Any, plan: Plan, counted: Any, *, far: float = 0.02) -> None:
    """Replay counts what is copied, to the byte, and the formula comes close."""
    report, devices = measured["report"], predict(plan).devices
    # Layers that come together come with what lies between them.
    rounding = 0.0 if all(len(pack) == 1 for pack in plan.packs) else 0.005
    for way in ("in", "out"):
        copied = report[f"swapped_{way}_bytes"]
        for kind in ("weights", "gradients", "stash"):
            predicted = sum(getattr(device, f"swapped_{way}_bytes").get(kind, 0) for device in devices)
            assert predicted == pytest.approx(copied[kind], rel=rounding, abs=0), (way, kind)
    assert counted.num_bytes == pytest.approx(counted.formula_bytes, rel=far)


@pytest.mark.parametrize("row", ["per microbatch", "grouping", "just in time", "packing", "prefetch"])
def test_replay_counts_what_one_device_copies_in_each_row(paper: Any, row: str) -> None:
    refuse_other_bytes(*run(paper, "gpt2-xl", row, 1, "pipeline", TIGHT))


@pytest.mark.parametrize(
    ("row", "parallel"), combined(["per microbatch", "grouping", "just in time"], [("data",), ("pipeline",)])
)
def test_replay_counts_what_two_devices_copy(paper: Any, row: str, parallel: str) -> None:
    measured, plan, counted = run(paper, "gpt2-xl", row, 2, parallel, AMPLE)
    refuse_other_bytes(measured, plan, counted)
    if parallel == "data":
        # Besides, microbatches go to their devices, and losses come back.
        assert 0 <= measured["report"]["transferred_bytes"] - counted.between_devices < 10_000


@pytest.mark.nightly
def test_replay_counts_what_convolutions_copy(paper: Any) -> None:
    rows = [run(paper, "vgg-416", row, 1, "pipeline", AMPLE) for row in ("per microbatch", "packing")]
    for row in rows:
        refuse_other_bytes(*row)
    assert any(len(pack) > 1 for pack in rows[1][1].packs)
    assert rows[0][0]["losses"] == rows[1][0]["losses"]


@pytest.mark.nightly
def test_replay_counts_all_but_the_statistics_that_norms_send_back(paper: Any) -> None:
    measured, plan, counted = run(paper, "resnet-1001", "per microbatch", 1, "pipeline", AMPLE)
    assert measured["report"]["swapped_out_bytes"].pop("weights") > 0
    measured["report"]["swapped_out_bytes"]["weights"] = 0
    # In layers as small as these, the statistics are more than a rounding.
    refuse_other_bytes(measured, plan, counted, far=0.03)


@pytest.mark.parametrize("name", ["bert-96", "resnet-1001"])
def test_in_memory_the_same_is_trained(paper: Any, name: str) -> None:
    measured, plan, _ = run(paper, name, "just in time", 1, "pipeline", AMPLE)
    subject = paper.models.subject_of(name, is_small=True)
    model = paper.models.build(subject.shape)
    paper.models.initialise(model, subject.shape)
    options = Namespace(accelerator="cpu", steps=1)
    in_memory = paper.train.measure_in_memory(model, subject, plan.num_microbatches, options)
    assert in_memory["losses"] == measured["losses"]
    assert len(in_memory["all_seconds"]) == len(measured["all_seconds"])


def test_models_have_the_published_sizes(paper: Any) -> None:
    sizes = {}
    for name, subject in paper.models.SUBJECTS.items():
        with torch.device("meta"):
            model = paper.models.Model(subject.shape)
        sizes[name] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e6)
    assert sizes == {"bert-96": 1242, "gpt2-xl": 1638, "vgg-416": 578, "resnet-1001": 497}


def test_a_formula_says_what_a_scheme_swaps(paper: Any) -> None:
    subject = paper.models.SUBJECTS["gpt2-xl"]
    costs = paper.rows.costs_of(subject.shape, 1, H200, 11 * 10**9)
    data, pipeline = (
        paper.rows.count(paper.rows.plan_of("per microbatch", costs, 16, 2, parallel), costs)
        for parallel in ("data", "pipeline")
    )
    weights = costs.weight_bytes
    # Each of two devices has 8 microbatches: weights come 16 times, gradients leave 8 times and come 7 times.
    assert data.formula_bytes == 2 * (16 + 8 + 7) * weights
    assert pipeline.formula_bytes == (32 + 16 + 15) * weights
    assert data.paper_bytes == 2 * (34 + 17 + 4) * weights
    assert data.num_bytes == pytest.approx(data.formula_bytes, rel=1e-3)
    assert pipeline.num_bytes == pytest.approx(pipeline.formula_bytes, rel=1e-3)


def test_schemes_are_compared_with_the_first_on_as_many_devices(paper: Any, tmp_path: Path) -> None:
    def line(row: str, parallel: str, num_devices: int, seconds: float, weights: int) -> str:
        swapped = {"weights": weights, "gradients": 10**9, "optimizer": 0, "stash": 5 * 10**9}
        values = {"model": "gpt2-xl", "row": row, "parallel": parallel, "devices": num_devices, "seconds": seconds}
        report = {"swapped_in_bytes": swapped, "swapped_out_bytes": dict.fromkeys(swapped, 0)}
        values |= {"samples_per_second": 8 / seconds, "report": report, "planned": {"paper_bytes": 60 * 10**9}}
        return json.dumps(values)

    file = tmp_path / "paper.jsonl"
    failed = {"model": "gpt2-xl", "row": "search", "parallel": "data", "devices": 2, "error": "no room"}
    lines = [
        "a summary that something printed",
        line("per microbatch", "pipeline", 1, 4.0, 19 * 10**9),
        line("search", "pipeline", 1, 2.0, 3 * 10**9),
        line("per microbatch", "data", 2, 3.0, 39 * 10**9),
        line("per microbatch", "pipeline", 2, 6.0, 39 * 10**9),
        line("search", "pipeline", 2, 1.0, 10**9),
        json.dumps(failed),
    ]
    file.write_text("\n".join(lines))
    rows = paper.compare.read([file])
    assert [(row.devices, row.scheme) for row in rows] == [(1, "b"), (1, "d"), (2, "a"), (2, "b"), (2, "d")]
    table = paper.compare.table(rows)
    assert "| 1 | c, d: Harmony | 2.000 s | 4.00 | 2.00 x | 4.0 GB | 1/5.0 | 5.0 GB |" in table
    assert "| 2 | d: Harmony PP | 1.000 s | 8.00 | 3.00 x | 2.0 GB | 1/20.0 | 5.0 GB |" in table
    claims = paper.compare.claims(rows)
    assert "up to 6.0 x (GPT2-XL, 2 x d against b); the paper: up to 7.6 x" in claims
    assert "over those counted here: up to 30 x" in claims
    assert paper.ablation.read_seconds(file, "gpt2-xl") == {"per microbatch": 4.0, "search": 2.0}
    paper.compare.draw(rows, tmp_path / "paper.png")
    assert (tmp_path / "paper.png").stat().st_size > 10_000
