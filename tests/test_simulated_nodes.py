"""What a step takes on several machines is simulated from that of one, and from what the network carries."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.nodes.division import Division
from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.estimating.result import Estimate
from lightning_harmony.plan.outlook.nodes import Nodes, Pack, packs_of, seconds_on
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.machine import H200

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")]


class Deep(pl.LightningModule):
    """Layers of which the first is as large as all others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = self.wide(batch)
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@cache
def estimated(**options: Any) -> Estimate:
    """An estimate of the model, made once for each set of options: nothing changes it."""
    batch = torch.empty(16, 64, device="meta")
    return estimate(Deep, batch, machine=H200, device_memory="8GiB", num_microbatches=4, **options)


def test_each_node_has_its_part_of_optimizer_state() -> None:
    one, two, many = (estimated(num_nodes=number).outlook for number in (1, 2, 64))
    assert two.host.optimizer_bytes * 2 == one.host.optimizer_bytes
    # No parameter is divided: the node that owns the largest has all of its state.
    assert many.host.optimizer_bytes == 2 * 4 * 64 * 128
    assert two.host.weight_bytes == one.host.weight_bytes
    # Gradients may wait for those of a slower node.
    assert two.host.gradient_bytes == two.host.weight_bytes
    assert two.busy_seconds["update"] == pytest.approx(one.busy_seconds["update"] / 2)


def test_owners_are_estimated_as_a_fit_assigns_them() -> None:
    module = Deep()
    divisions = [Division(SimpleNamespace(rank=rank, size=3)) for rank in range(3)]  # type: ignore[arg-type]
    for division in divisions:
        division.divide(module.parameters(), [])
    most = max(sum(p.nbytes for p in module.parameters() if division.is_own(p)) for division in divisions)
    assert estimated(num_nodes=3).outlook.host.optimizer_bytes == 2 * most


def test_an_optimizer_that_needs_all_parameters_is_not_divided() -> None:
    one, two = (estimated(num_nodes=number, optimizer="LBFGS") for number in (1, 2))
    assert two.outlook.host.optimizer_bytes == one.outlook.host.optimizer_bytes
    assert "to save a checkpoint" not in str(two)


def test_a_network_bounds_the_estimated_step() -> None:
    one, fast, slow = estimated(), estimated(num_nodes=2), estimated(num_nodes=2, network_gigabits=0.001)
    # As many gradients go to the other node as weights come back.
    assert one.outlook.sent_bytes == 0
    assert fast.outlook.sent_bytes == slow.outlook.sent_bytes == one.outlook.host.weight_bytes
    assert slow.outlook.seconds == pytest.approx(slow.outlook.sent_bytes / (0.001e9 / 8), rel=0.1)
    assert fast.outlook.seconds < slow.outlook.seconds
    assert "network" not in fast.outlook.busy_seconds
    assert slow.outlook.bound == "network"
    assert slow.to_dict()["num_nodes"] == 2
    assert slow.to_dict()["chosen"]["node_sent_bytes"] == slow.outlook.sent_bytes


def test_an_estimate_says_what_is_of_each_machine() -> None:
    page = str(estimated(num_nodes=2, network_gigabits=25))
    assert "of 4, on each of 2 machines" in page
    assert "optimizer (50% of that of all 2 machines)" in page
    assert "to save a checkpoint, the host of the first machine takes up to 128 KiB more" in page
    assert "sends   128 KiB to other machines" in page
    assert "--network-gigabits" not in page
    assert "say how fast it is with --network-gigabits" in str(estimated(num_nodes=2))
    assert "machines" not in str(estimated())


def test_nodes_and_networks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_nodes must be at least 1, not 0"):
        estimated(num_nodes=0)
    with pytest.raises(ValueError, match="network_gigabits must be above 0, not -1"):
        estimated(num_nodes=2, network_gigabits=-1)


def test_what_is_sent_beside_the_backward_costs_nothing() -> None:
    packs = [Pack(begins=1.0, final=3.0, num_bytes=100), Pack(begins=0.0, final=4.0, num_bytes=100)]
    assert seconds_on(Nodes(2, 0.5, 1e9), 4.0, packs) == pytest.approx(4.0, abs=1e-6)
    # The first pack is sent while the second runs; the next step, which begins with that, waits for it alone.
    assert seconds_on(Nodes(2, 0.5, 100.0), 4.0, packs) == pytest.approx(5.0)
    # With more machines, each sends more of what it has.
    assert seconds_on(Nodes(4, 0.25, 100.0), 4.0, packs) == pytest.approx(3.0 + 1.5 + 1.5)


def test_a_slow_network_bounds_the_step() -> None:
    packs = [Pack(begins=0.0, final=1.0, num_bytes=100)]
    assert seconds_on(Nodes(2, 0.5, 1.0), 2.0, packs) == pytest.approx(101.0)
    # Where its pack begins late, what is sent ends under the next step, but no faster than the network carries it.
    packs = [Pack(begins=90.0, final=91.0, num_bytes=100)]
    assert seconds_on(Nodes(2, 0.5, 1.0), 92.0, packs) == pytest.approx(101.0)


def test_packs_of_a_plan_are_final_from_the_last_to_the_first() -> None:
    result = estimated()
    plan = result.outlook.plan
    assert plan.profile is not None
    packs = packs_of(predict(plan), plan.profile.pack_costs(plan.packs))
    assert [pack.begins for pack in packs] == sorted((pack.begins for pack in packs), reverse=True)
    assert sum(pack.num_bytes for pack in packs) == 4 * result.num_trained
