"""A host that is really small: what a fit takes beside its weights stays within what is free there, or is refused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import CapacityError, HarmonyStrategy, StepReport
from lightning_harmony.engine.devices.free_memory import HostMemory
from lightning_harmony.plan.values.host_need import RING
from lightning_harmony.updating.host_budget import room_on_host
from lightning_harmony.updating.optimizer_state import state_bytes
from support.same_training import Net, compare, train_harmony, train_plain

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
NUM_LAYERS, WIDTH, NUM_MICROBATCHES = 16, 128, 4
SAMPLES = 64


class Wide(nn.Module):
    """Layers of the same size, whose input is worth a place in the stash."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        return batch.square().mean()


def wide() -> Net:
    torch.manual_seed(1)
    return Net(Wide(), torch.optim.AdamW)


OF_WEIGHTS = sum(p.numel() * p.element_size() for p in wide().parameters())
OF_LAYER = OF_WEIGHTS // NUM_LAYERS


class Host(pl.Callback):
    """A host with so much room beside the weights of a fit, whatever that takes of it by then."""

    def __init__(self, room: float, patch: pytest.MonkeyPatch, **arguments: Any) -> None:
        self.room = int(room)
        self.strategy: Any = HarmonyStrategy(
            **{"device_memory": "560KiB", **arguments}, num_microbatches=NUM_MICROBATCHES, profile_cache=False
        )
        patch.setattr("lightning_harmony.updating.host_budget.room_on_host", lambda: self.room - self.taken())

    def taken(self) -> int:
        optimizers = self.strategy.lightning_module.trainer.optimizers
        return int(self.strategy._swapped.engine.pool.num_bytes) + state_bytes(optimizers)

    def train(self, batch_size: int, **options: Any) -> list[StepReport]:
        """Train to what plain Lightning comes to, and to no more than there is room for."""
        samples = torch.randn(3 * batch_size, WIDTH, generator=torch.Generator().manual_seed(2))
        harmony = train_harmony(
            wide(), samples, self.strategy, batch_size, with_gradients=False, more_callbacks=[self], **options
        )
        compare(train_plain(wide(), samples, NUM_MICROBATCHES, batch_size, **options), harmony)
        assert max(report.host_bytes for report in harmony.reports) - OF_WEIGHTS <= self.room
        return harmony.reports


@pytest.mark.parametrize("ring", [RING, 3, 1])
def test_fewer_gradients_wait_where_the_host_has_less_room(monkeypatch: pytest.MonkeyPatch, ring: int) -> None:
    """A model of 8 B parameters was killed by the kernel: 12 packs' gradients waited, whatever else the host had to hold."""
    # What is too small for the stash, and stays on the device, is counted.
    small = 16 * WIDTH * 4 * NUM_LAYERS
    host = Host(2.001 * OF_WEIGHTS + small + (ring + 0.5) * OF_LAYER, monkeypatch)
    reports = host.train(16)
    assert {report.update for report in reports[1:]} == {"just-in-time"}


def test_casts_are_not_measured_alone_where_the_host_has_no_room_for_all_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second step had all gradients beside the state: the kernel killed a model of 8 B parameters in it."""
    small = 16 * WIDTH * 4 * NUM_LAYERS
    reports = Host(2.5 * OF_WEIGHTS + small, monkeypatch).train(16, precision="bf16-mixed")
    assert {report.update for report in reports[1:]} == {"just-in-time"}


def test_what_waits_for_all_gradients_has_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(3.4 * OF_WEIGHTS, monkeypatch)
    assert {report.update for report in host.train(16, gradient_clip_val=0.1)} == {"deferred"}


# Of a microbatch of 64 samples, each layer's input takes half of what its weights do; so the stash of all takes twice as much.
WITH_STASH = 64 * NUM_MICROBATCHES


@pytest.mark.parametrize(
    ("room", "options"), [(3.7, {}), (4.7, {"gradient_clip_val": 0.1})], ids=["just-in-time", "deferred"]
)
def test_a_stash_beyond_the_host_has_microbatches_run_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: float, options: dict[str, Any]
) -> None:
    with caplog.at_level("INFO"):
        Host(room * OF_WEIGHTS, monkeypatch).train(WITH_STASH, **options)
    (line,) = [record.message for record in caplog.records if "one after the other" in record.message]
    assert "they do not fit together (pack" in line
    assert "of the stash stay there, for which the host has no room" in line
    assert "use smaller batches, or more memory" in line


def test_what_the_host_has_no_room_for_stays_on_a_device_that_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of 8 B parameters with 65,536 tokens a step was refused for half a GiB of the host."""
    with caplog.at_level("INFO"):
        host = Host(3.7 * OF_WEIGHTS, monkeypatch, device_memory="1.2MiB")
        reports = host.train(WITH_STASH)
    assert not [record.message for record in caplog.records if "one after the other" in record.message]
    assert reports[-1].swapped_out_bytes["stash"] < reports[0].swapped_out_bytes["stash"]


def test_microbatches_take_turns_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        Host(4.2 * OF_WEIGHTS, monkeypatch).train(WITH_STASH)
    assert not [record.message for record in caplog.records if "one after the other" in record.message]


def test_what_does_not_fit_one_after_the_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has no state yet, and is what tells how much is stashed."""
    with pytest.raises(CapacityError, match="of the stash stay there, for which the host has no room"):
        Host(3.2 * OF_WEIGHTS, monkeypatch).train(WITH_STASH)


def test_only_what_the_host_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that wait for all others take more: those of few packs used to be refused as if they did."""
    most = 2 * OF_WEIGHTS + OF_LAYER
    for arguments, options in (({}, {"gradient_clip_val": 1.0}), ({"update": "deferred"}, {})):
        with pytest.raises(CapacityError, match=r"host is .* short: beside the weights, optimizer state takes"):
            Host(most, monkeypatch, **arguments).train(16, **options)
    with pytest.raises(CapacityError, match="host is 1 KiB short"):
        Host(most - 1024, monkeypatch).train(16)


def test_the_system_keeps_a_share_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory, room in ((HostMemory(100, 50), 46), (HostMemory(100, 3), 0)):
        monkeypatch.setattr("lightning_harmony.updating.host_budget.host_memory", lambda memory=memory: memory)
        assert room_on_host() == room
