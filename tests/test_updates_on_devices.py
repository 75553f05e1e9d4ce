"""Packs that are updated where their gradients are train as all others do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, StepReport
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.updates.optimizer_twin import Share
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.plan.values.plan import Plan
from support import nets
from support.same_training import SEED, Net, Training, _fit, _result, compare, train_harmony, train_plain, trainer_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

STEPS, CAPACITY = 6, "160KiB"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
}


class Seen(pl.Callback):
    """Keeps the reports of steps, from a hook that runs in the next step: none that updates have to be over for."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.step_report is not None:
            self.reports.append(trainer.strategy.step_report)


class Count(nn.Module):
    """Frozen numbers among those that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((nets.WIDTH,), 0.5), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def build(optimizer: str = "AdamW", net: nn.Module | None = None) -> Net:
    torch.manual_seed(SEED)
    return Net(net or nets.Language(), OPTIMIZERS[optimizer])


def samples() -> Any:
    return nets.tokens(8 * STEPS)


def plan_in_use(module: Net, **options: Any) -> Plan:
    """The plan of the last step."""
    strategy = HarmonyStrategy(device_memory=CAPACITY, num_microbatches=4, profile_cache=False)
    plans: list[Plan] = []
    keeping = pl.Callback()
    keeping.on_train_epoch_end = lambda trainer, module: plans.append(trainer.strategy.plan)  # type: ignore[method-assign]
    callbacks = [keeping]
    train_harmony(
        copy.deepcopy(module), samples(), strategy, 8, with_gradients=False, more_callbacks=callbacks, **options
    )
    return plans[0]


def planned(module: Net, **options: Any) -> Plan:
    """A plan with all packs updated where their gradients are."""
    plan = plan_in_use(module, **options)
    return replace(plan, device_updated=frozenset(plan.visits), predicted=None)


@cache
def usually_planned() -> Plan:
    """Such a plan for the network and the optimizer that most tests have."""
    return planned(build())


def train(module: Net, plan: Plan, *more: pl.Callback, **options: Any) -> tuple[Training, list[StepReport]]:
    """Train with a plan, and no hook that would have each step wait for its update."""
    seen = Seen()
    capacity = options.pop("device_memory", CAPACITY)
    strategy = HarmonyStrategy(device_memory=capacity, num_microbatches=4, plan=plan, profile_cache=False)
    training = _train(copy.deepcopy(module), strategy, [seen, *more], **options)
    return training, seen.reports


def _train(module: Net, strategy: Any, callbacks: list[pl.Callback], **options: Any) -> Training:
    trainer = trainer_for(strategy, STEPS, callbacks, **options)
    _fit(trainer, module, DataLoader(samples(), batch_size=8))
    return _result(trainer, module, [])


def stay(module: Net, reports: list[StepReport]) -> bool:
    """Whether gradients stayed on the device in the last step."""
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    return reports[-1].swapped_out_bytes["gradients"] < trained


def plain(module: Net, **options: Any) -> Training:
    return train_plain(copy.deepcopy(module), samples(), 4, 8, **options)


@pytest.mark.cpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_they_train_as_plain_lightning_does(optimizer: str) -> None:
    module = build(optimizer)
    training, reports = train(module, planned(module))
    compare(plain(module), training)
    # What is used up between steps is not taken for what the next one finds taken, and has no room for.
    assert all(report.predicted_seconds is not None for report in reports[3:])
    assert stay(module, reports)


@pytest.mark.cpu
@pytest.mark.parametrize("apart", [False, True])
def test_they_are_chosen_where_the_device_has_a_processor_of_its_own(
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
def test_in_every_precision(precision: Any) -> None:
    module = build(net=nets.Language(dropout=0.3))
    training, reports = train(module, planned(module, precision=precision), precision=precision)
    compare(plain(module, precision=precision), training)
    assert stay(module, reports)


@pytest.mark.cpu
def test_parameters_that_are_not_trained_come_from_the_host() -> None:
    module = build()
    module.net.embed = nn.Sequential(module.net.embed, Count())
    training, reports = train(module, planned(module))
    compare(plain(module), training)
    assert stay(module, reports)


@pytest.mark.cpu
@pytest.mark.parametrize("devices", [2, 3])
def test_on_several_devices(devices: int) -> None:
    module = build()
    training, reports = train(module, planned(module, devices=devices), devices=devices)
    compare(plain(module), training)
    assert stay(module, reports)


@pytest.mark.cpu
@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW", "Adafactor"])
def test_large_parameters_are_stepped_in_ranges_there_too(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step makes meanwhile is as large as what it is made of, and finds no room on a device that is full."""
    monkeypatch.setattr("lightning_harmony.engine.updates.streamed_update._MOST_BYTES", 8192)
    module = build(optimizer)
    training, reports = train(module, planned(module))
    compare(plain(module), training)
    assert stay(module, reports)


@pytest.mark.cpu
def test_gradients_are_clipped_by_value_before() -> None:
    options = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    module = build()
    training, reports = train(module, planned(module, **options), **options)
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
        num_updates += all(self.devices[0].owns(gradient) for gradient in share.gradients.values())
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
