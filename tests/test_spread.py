"""Packs of a pipeline that are spread over its devices: the bits of one device, whichever computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.plan.values.plan import Plan
from support import nets
from support.cases import NETS, OPTIMIZERS, SUMMED_IN_ANOTHER_ORDER
from support.nets import Explodes, Mixing
from support.same_training import (
    SEED,
    Net,
    Reports,
    Training,
    assert_same_training,
    assert_within,
    compare,
    train_harmony,
    train_plain,
    trainer_for,
)
from support.sampling import combined
from support.spreading import spread_packs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

NUM_MICROBATCHES, BATCH_SIZE, NUM_STEPS = 4, 8, 3
LOGITS = 256


class HeavyHead(nets.Language):
    """Most of what it computes, and most of its weights, is in its last layer."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(dropout=dropout)
        self.head = nn.Linear(nets.WIDTH, LOGITS)


HEAD_BYTES = (nets.WIDTH + 1) * LOGITS * 4
PACKS = (("net.embed",), *((f"net.blocks.{number}",) for number in range(4)), ("net.head",))


def build(net: Callable[[], nn.Module] = HeavyHead, optimizer: str = "adamw") -> Net:
    torch.manual_seed(0)
    return Net(net(), OPTIMIZERS[optimizer])


def plan_for(devices: int, spread: frozenset[int] = frozenset({5})) -> Plan:
    """Each layer a pack, the head fused and spread."""
    return Plan(PACKS, tuple(range(6)), 5, spread=spread, num_devices=devices, num_microbatches=NUM_MICROBATCHES)


def in_order(losses: list[Tensor], num_microbatches: int) -> list[Tensor]:
    """Those of each step by size: where microbatches go other ways, they may end in another order."""
    steps = range(0, len(losses), num_microbatches)
    return [loss for at in steps for loss in sorted(losses[at : at + num_microbatches])]


def train(
    module: Net, devices: int, plan: Plan | None = None, *, with_gradients: bool = False, **options: Any
) -> Training:
    """Train with harmony; with a plan, by that."""
    memory, samples = options.pop("device_memory", None), options.pop("samples", nets.tokens(NUM_STEPS * BATCH_SIZE))
    callbacks = options.pop("callbacks", [])
    strategy = HarmonyStrategy(num_microbatches=NUM_MICROBATCHES, device_memory=memory, plan=plan)
    used: list[Plan] = []
    watch = pl.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, _: used.append(trainer.strategy.plan))
    training = train_harmony(
        copy.deepcopy(module),
        samples,
        strategy,
        BATCH_SIZE,
        with_gradients=with_gradients,
        more_callbacks=[watch, *callbacks],
        devices=devices,
        **options,
    )
    training.losses = in_order(training.losses, NUM_MICROBATCHES)
    if plan is not None:
        assert used[-1].spread == plan.spread
    return training


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_spread_head_trains_as_on_one_device_and_as_plain_lightning_does(with_gradients: bool) -> None:
    """Losses, gradients, weights and the optimizer's state, with dropout; updated just in time, and after the backward."""
    module = build()
    plain = train_plain(copy.deepcopy(module), nets.tokens(NUM_STEPS * BATCH_SIZE), NUM_MICROBATCHES, BATCH_SIZE)
    plain.losses = in_order(plain.losses, NUM_MICROBATCHES)
    one = train(module, 1, with_gradients=with_gradients)
    compare(plain, one)
    for devices in (2, 3):
        several = train(module, devices, plan_for(devices), with_gradients=with_gradients)
        compare(one, several)
        assert len(several.gradients) == (NUM_STEPS if with_gradients else 0)


OPTIONS: dict[str, dict[str, Any]] = {
    "tight": {"device_memory": "128KiB"},
    "clipped": {"gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "accumulated": {"accumulate_grad_batches": 2},
}


@pytest.mark.parametrize(("name", "devices"), combined(OPTIONS, [(2,), (3,)]))
def test_a_spread_head_changes_no_bit(name: str, devices: int) -> None:
    module, options = build(), OPTIONS[name]
    one, several = train(module, 1, **options), train(module, devices, plan_for(devices), **options)
    compare(one, several)
    if memory := options.get("device_memory"):
        assert_within(several.reports, memory)


@pytest.mark.cpu
def test_room_is_made_for_sums_and_what_comes_before_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the allocator asks nobody for room."""
    admit, gather = Residents.admit, Sums.gather
    admitted: dict[Device, int] = {}
    taken: list[int] = []

    def admit_noted(residents: Residents, num_bytes: int) -> None:
        admitted[residents.device] = num_bytes
        admit(residents, num_bytes)

    def gather_noted(sums: Sums, *args: Any, **named: Any) -> None:
        device = sums._device
        before, most = device.allocated_bytes(), device.watch_peak()
        gather(sums, *args, **named)
        taken.append(most() - before)
        assert taken[-1] <= admitted.pop(device)

    monkeypatch.setattr(Residents, "admit", admit_noted)
    monkeypatch.setattr(Sums, "gather", gather_noted)
    train(build(), 3, plan_for(3))
    assert set(taken) == {0, HEAD_BYTES}


@pytest.mark.cpu
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_the_bytes_that_a_spread_head_takes_are_reported(devices: int) -> None:
    """Each device brings the head, its gradients leave once, and those of each microbatch come to its home."""
    module = build()
    alone, spread = (train(module, devices, plan_for(devices, packs)).reports[-1] for packs in (frozenset(), {5}))
    brought = spread.swapped_in_bytes["weights"] - alone.swapped_in_bytes["weights"]
    assert brought == (devices - 1) * HEAD_BYTES
    # Updates that outlast their step are counted where they are made.
    out = [{**report.swapped_out_bytes, "optimizer": 0} for report in (spread, alone)]
    assert out[0] == out[1]
    # The head's home is not where its input comes from, which some microbatches now stay on: they spare both ways of it.
    home, before = 5 % devices, 4 % devices
    where = [(home + microbatch) % devices for microbatch in range(NUM_MICROBATCHES)]
    gathered = sum(device != home for device in where) * HEAD_BYTES
    spared = where.count(before) * 2 * (2 * 6 * nets.WIDTH * 4)
    # Beside the labels and the losses, which are some bytes.
    assert abs(spread.transferred_bytes - alone.transferred_bytes - gathered + spared) < 0.1 * HEAD_BYTES


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_gradients_cross_over_as_they_are(precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As narrow as the weights, and are added to sums in float32."""
    crossed: list[torch.dtype] = []
    gather = Sums.gather

    def noting(home: Sums, pack: Any, layer: Any, use: int, gradients: Any, source: Any, **options: Any) -> None:
        gather(home, pack, layer, use, gradients, source, **options)
        if source is not home._device:
            crossed.extend(gradient.dtype for _, gradient in gradients)
            assert {total.dtype for total in pack.accumulators[use].sums.values()} == {torch.float32}

    monkeypatch.setattr(Sums, "gather", noting)
    train(build(), 2, plan_for(2), precision=precision)
    # In the first step, which is measured, no pack is spread yet, or weights are still wide.
    assert set(crossed) == {dtype}


# What capacities change nothing of.
ON_ONE_DEVICE: dict[str, Training] = {}


@pytest.mark.parametrize(
    ("net", "which", "memory"),
    combined([*NETS, "tied-by-code", "used-twice"], [("last", None), ("some", "96KiB"), ("all", "72KiB")]),
)
def test_whatever_is_spread_changes_no_bit(
    net: str, which: str, memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks, parameters that glue uses, layers that are used twice, frozen or skipped, or whose graphs are kept."""
    module = build({**NETS, **SUMMED_IN_ANOTHER_ORDER}[net], "sgd")
    if net not in ON_ONE_DEVICE:
        ON_ONE_DEVICE[net] = train(module, 1, samples=nets.tokens())
    made = spread_packs(monkeypatch, which)
    several = train(module, 3, samples=nets.tokens(), device_memory=memory)
    assert any(plan.spread for plan in made)
    compare(ON_ONE_DEVICE[net], several)
    if memory is not None:
        assert_within(several.reports, memory)


@pytest.mark.parametrize("device_memory", ["64KiB", None])
def test_statistics_of_spread_norms_are_made_in_the_order_of_microbatches(
    device_memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device has a copy of them: a microbatch finds those that the one before it has left, on another one."""
    made = spread_packs(monkeypatch, "all")
    module = build(nets.Convolutions, "sgd")
    assert_same_training(module, nets.images(), device_memory=device_memory, devices=3)
    assert any(plan.spread for plan in made)


def test_glue_may_mix_what_spread_packs_return(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(Mixing, "sgd")
    one = train(module, 1)
    spread_packs(monkeypatch, "all")
    compare(one, train(module, 3, device_memory="256KiB"))


class DoublesTheLoss(pl.Callback):
    """The gradient of the loss is not the one that was predicted."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        loss.register_hook(lambda gradient: gradient * 2)


def test_sums_that_began_from_a_wrong_prediction_are_put_right() -> None:
    """The head has been through its backward when the gradient of the loss comes."""
    module = build()
    one, several = (
        train(module, devices, plan, callbacks=[DoublesTheLoss()]) for devices, plan in ((1, None), (3, plan_for(3)))
    )
    compare(one, several)


def test_a_plan_that_knows_no_number_of_microbatches_spreads_as_many_as_there_are() -> None:
    """Which graphs are kept is decided anew."""
    module = build()
    compare(train(module, 1), train(module, 3, replace(plan_for(3), first_fused=6, num_microbatches=None)))


def test_a_short_last_batch_has_fewer_microbatches_than_devices() -> None:
    found = []
    for devices, plan in ((1, None), (4, plan_for(4))):
        module, reports = build(), Reports()
        trainer = trainer_for(HarmonyStrategy(num_microbatches=4, plan=plan), 4, [reports], devices=devices)
        torch.manual_seed(SEED)
        trainer.fit(module, DataLoader(nets.tokens(3 * BATCH_SIZE + 3), batch_size=BATCH_SIZE))
        assert [report.num_microbatches for report in reports.reports] == [4, 4, 4, 3]
        found.append((in_order(module.losses, 4), module.state_dict()))
    (losses, state), (others, other) = found
    assert all(torch.equal(a, b) for a, b in zip(losses, others, strict=True))
    assert all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.timeout(60, method="thread")
def test_what_fails_while_gradients_are_gathered_ends_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    spread_packs(monkeypatch, "all")
    module = build(nets.Language, "sgd")
    block = module.net.blocks[2] = Explodes()
    calls: list[int] = []

    def fault() -> None:
        calls.append(0)
        # In a backward of the second step, when other microbatches have been through theirs.
        if len(calls) >= 4 + 4 + 4 + 3:
            raise RuntimeError("boom")

    block.fault = fault
    one = train(build(nets.Language, "sgd"), 1)
    trainer = trainer_for(HarmonyStrategy(num_microbatches=NUM_MICROBATCHES), 6, [], devices=2)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(module, DataLoader(nets.tokens(48), batch_size=BATCH_SIZE))
    compare(one, train(build(nets.Language, "sgd"), 2))
