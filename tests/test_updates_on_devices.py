"""Packs that are updated where their gradients are train as all others do."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.updates.optimizer_twin import Share
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.plan.values.plan import Plan
from support import nets
from support.device_updates import (
    CAPACITY,
    OPTIMIZERS,
    STEPS,
    _train,
    build,
    plan_by_hand,
    plan_in_use,
    planned,
    samples,
    stay,
    train,
)
from support.same_training import Net, Training, compare, train_plain
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


# Weights come once more for the backward, and stay for the update.
TIGHT = "64KiB"


class Count(nn.Module):
    """Frozen numbers among those that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((nets.WIDTH,), 0.5), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


@cache
def usually_planned() -> Plan:
    """Such a plan for the network and the optimizer that most tests have."""
    return planned(build())


def plain(module: Net, **options: Any) -> Training:
    return train_plain(copy.deepcopy(module), samples(), 4, 8, **options)


@pytest.mark.cpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_packs_that_devices_update_train_as_plain_lightning_does(optimizer: str) -> None:
    module = build(optimizer)
    plan = usually_planned() if optimizer == "AdamW" else plan_by_hand()
    training, reports = train(module, plan)
    compare(plain(module), training)
    # What is used up between steps is not taken for what the next one finds taken, and has no room for.
    assert all(report.predicted_seconds is not None for report in reports[3:])
    assert stay(module, reports)


@pytest.mark.cpu
@pytest.mark.parametrize("apart", [False, True])
def test_updates_on_devices_are_chosen_where_the_device_has_a_processor_of_its_own(
    monkeypatch: pytest.MonkeyPatch, *, apart: bool
) -> None:
    """On the host's own, a step that was slow by chance was planned so, and swapped other bytes than an estimate had said."""
    monkeypatch.setattr(VirtualDevice, "computes_apart", apart)
    assert bool(plan_in_use(build()).device_updated) == apart


class Looks(pl.Callback):
    """Reads the weights of a pack that the device updates, in one hook, and changes them where that is allowed."""

    def __init__(self, hook: str) -> None:
        self.found: list[Tensor] = []
        setattr(self, hook, partial(self._look, changes=hook in CHANGING))

    def _look(self, trainer: Any, module: Any, *args: Any, changes: bool) -> None:
        weight = module.net.embed.weight
        self.found += [weight.detach().clone(), *(s["exp_avg"].clone() for s in trainer.optimizers[0].state.values())]
        if changes:
            weight.data.mul_(0.9)


CHANGING = ("on_train_batch_end", "on_train_batch_start")


@pytest.mark.cpu
@pytest.mark.parametrize("hook", [*CHANGING, "on_before_zero_grad", "on_before_backward", "on_after_backward"])
def test_a_hook_finds_finished_weights_and_what_it_makes_of_them_is_trained(hook: str) -> None:
    """Weights that stayed on the device would be those from before."""
    module = build()
    plan = usually_planned()
    here, there = Looks(hook), Looks(hook)
    training, _ = train(module, plan, here)
    compare(train(module, replace(plan, device_updated=frozenset()), there)[0], training)
    assert len(here.found) == len(there.found) > STEPS
    assert all(torch.equal(a, b) for a, b in zip(here.found, there.found, strict=True))


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_packs_that_devices_update_train_as_plain_lightning_in_every_precision(precision: Any) -> None:
    module = build(net=nets.Language(dropout=0.3))
    training, reports = train(module, plan_by_hand(), precision=precision)
    compare(plain(module, precision=precision), training)
    assert stay(module, reports)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("precision", "optimizer"), combined(["bf16-mixed", "32-true", "bf16-true"], [("AdamW",), ("Adafactor",)])
)
def test_weights_that_stay_for_their_update_are_those_of_the_host(
    optimizer: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are there, also where layers compute with what autocast would make of them."""
    stayed: list[int] = []
    update = StreamedUpdate.update

    def noting(self: StreamedUpdate, share: Share, *args: Any, **options: Any) -> None:
        stayed.append(len(share.masters))
        update(self, share, *args, **options)

    monkeypatch.setattr(StreamedUpdate, "update", noting)
    module = build(optimizer)
    training, _ = train(module, plan_by_hand(), precision=precision, device_memory=TIGHT)
    compare(plain(module, precision=precision), training)
    assert any(stayed)


class Elsewhere(pl.Callback):
    """Lets a weight lie in memory of its own, as code that averages weights does, and keeps that."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        weight = next(parameter for parameter in module.net.blocks[1].parameters() if parameter.dim() == 2)
        self.kept = weight.data * 0.9
        weight.data = self.kept


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_weights_that_lie_elsewhere_are_updated_there(precision: Any) -> None:
    """What was kept on the device for the update was read from where they had been."""
    module = build()
    plan = plan_by_hand()
    options = {"precision": precision, "device_memory": TIGHT}
    training, _ = train(module, plan, Elsewhere(), **options)
    expected, _ = train(module, replace(plan, device_updated=frozenset()), Elsewhere(), **options)
    compare(expected, training)


@pytest.mark.cpu
def test_parameters_that_are_not_trained_come_from_the_host() -> None:
    module = build()
    module.net.embed = nn.Sequential(module.net.embed, Count())
    training, reports = train(module, planned(module))
    compare(plain(module), training)
    assert stay(module, reports)


@pytest.mark.cpu
@pytest.mark.parametrize("devices", [2, 3])
def test_packs_that_several_devices_update_train_as_plain_lightning_does(devices: int) -> None:
    module = build()
    training, reports = train(module, plan_by_hand(devices), devices=devices)
    compare(plain(module), training)
    assert stay(module, reports)


@pytest.mark.cpu
@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW", "Adafactor"])
def test_devices_step_large_parameters_in_ranges(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step makes meanwhile is as large as what it is made of, and finds no room on a device that is full."""
    monkeypatch.setattr("lightning_harmony.engine.updates.update_stage._MOST_BYTES", 8192)
    module = build(optimizer)
    training, reports = train(module, plan_by_hand())
    compare(plain(module), training)
    assert stay(module, reports)


@pytest.mark.cpu
def test_gradients_are_clipped_by_value_before() -> None:
    options = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    module = build()
    training, reports = train(module, plan_by_hand(), **options)
    compare(plain(module, **options), training)
    assert stay(module, reports)


@pytest.mark.cpu
def test_where_there_is_little_room_packs_wait_for_updates() -> None:
    """Gradients that stay are waited for until they are used up."""
    module = build()
    plan = replace(usually_planned(), profile=None)
    training, reports = train(module, plan, device_memory="60KiB")
    compare(plain(module), training)
    assert all(max(report.peak_device_bytes) <= 60 * 1024 for report in reports)


@pytest.mark.cpu
@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.02}, {"accumulate_grad_batches": 2}])
def test_where_all_gradients_are_needed_they_go_to_the_host_first(options: dict[str, Any]) -> None:
    module = build()
    plan = usually_planned()
    training, reports = train(module, plan, **options)
    compare(train(module, replace(plan, device_updated=frozenset()), **options)[0], training)
    assert not stay(module, reports)


@pytest.mark.cpu
def test_an_error_in_the_middle_of_a_step_leaves_what_was_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build()
    plan = usually_planned()
    update, num_updates = StreamedUpdate.update, 0

    def failing(self: StreamedUpdate, share: Share, clip: Any = None, **options: Any) -> None:
        nonlocal num_updates
        num_updates += all(self.device.owns(gradient) for gradient in share.gradients.values())
        if num_updates == 5:
            raise RuntimeError("in the middle")
        update(self, share, clip, **options)

    monkeypatch.setattr(StreamedUpdate, "update", failing)
    broken = copy.deepcopy(module)
    strategy = HarmonyStrategy(device_memory=CAPACITY, num_microbatches=4, plan=plan, profile_cache=False)
    with pytest.raises(RuntimeError, match="in the middle"):
        _train(broken, strategy, [])
    assert all(torch.isfinite(parameter).all() for parameter in broken.parameters())
    monkeypatch.undo()
    compare(plain(module), train(module, plan)[0])
