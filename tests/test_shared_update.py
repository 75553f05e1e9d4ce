"""Of a postponed update, devices make some as packs come for their forward: no bit differs, and whoever looks waits."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import nets
import pytest
import torch
from same_training import SEED, Net, Training, _fit, _result, compare, train_plain, trainer_for
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, StepReport
from lightning_harmony.engine.devices.stream import HostStream
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.step import shared_update
from lightning_harmony.engine.updates.device_update import DeviceUpdates
from lightning_harmony.plan.search.device_updates import Postponed

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*"),
]
STEPS, CAPACITY, CLIP = 5, "160KiB", 0.05
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "two groups": lambda parameters: torch.optim.NAdam(
        [{"params": part, "lr": 0.01 * number} for number, part in enumerate(halves(list(parameters)), 1)]
    ),
}


def halves(parameters: list[Any]) -> tuple[list[Any], list[Any]]:
    middle = len(parameters) // 2
    return parameters[middle:], parameters[:middle]


def all_that_may(packs: Sequence[Postponed], *rates: float) -> frozenset[int]:
    return frozenset(place for place, pack in enumerate(packs) if pack.update_bytes is not None)


def every_second(packs: Sequence[Postponed], *rates: float) -> frozenset[int]:
    return frozenset(sorted(all_that_may(packs))[::2])


class Seen(pl.Callback):
    """Keeps the reports of steps, and the gradients that they leave, from a hook that runs in the next step."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.gradients: list[Tensor] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients += [p.grad.detach().cpu().clone() for p in module.parameters() if p.grad is not None]
        report = getattr(trainer.strategy, "step_report", None)
        if report is not None:
            self.reports.append(report)

    @property
    def in_bytes(self) -> int:
        """What came for updates, in the last step that could share one."""
        return self.reports[-1].swapped_in_bytes["optimizer"]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices make what they can of each postponed update."""
    monkeypatch.setattr(VirtualDevice, "computes_apart", True)
    monkeypatch.setattr(shared_update, "left_to_devices", all_that_may)


def build(optimizer: str = "AdamW", net: Callable[[], Any] = nets.Language) -> Net:
    torch.manual_seed(SEED)
    return Net(net(), OPTIMIZERS[optimizer])


def train(
    module: Net, *more: pl.Callback, device_memory: str | None = CAPACITY, clip: float = CLIP, **options: Any
) -> tuple[Training, Seen]:
    module, seen = copy.deepcopy(module), Seen()
    strategy = HarmonyStrategy(device_memory=device_memory, num_microbatches=4, profile_cache=False)
    trainer = trainer_for(strategy, STEPS, [seen, *more], gradient_clip_val=clip, **options)
    _fit(trainer, module, DataLoader(nets.tokens(8 * STEPS), batch_size=8))
    return _result(trainer, module, []), seen


def plain(module: Net, clip: float = CLIP) -> Training:
    return train_plain(copy.deepcopy(module), nets.tokens(8 * STEPS), 4, 8, gradient_clip_val=clip)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_they_train_as_plain_lightning_does(optimizer: str, shared: None) -> None:
    module = build(optimizer)
    found, seen = train(module)
    compare(plain(module), found)
    # An update is shared when the host has been timed: the second is.
    assert [report.swapped_in_bytes["optimizer"] > 0 for report in seen.reports[:3]] == [False, False, True]
    # Weights come with the update, and not once more.
    assert seen.reports[-1].swapped_in_bytes["weights"] == 0


@pytest.mark.parametrize(
    "net",
    [nets.Frozen, nets.Tied, nets.Rich, lambda: nets.Language(dropout=0.3)],
    ids=["frozen", "tied", "rich", "dropout"],
)
def test_whatever_the_network(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(net=net)
    expected, _ = train(module)
    monkeypatch.setattr(VirtualDevice, "computes_apart", True)
    monkeypatch.setattr(shared_update, "left_to_devices", every_second)
    found, seen = train(module)
    compare(expected, found)
    assert seen.in_bytes > 0


def test_a_clip_that_changes_no_gradient_is_not_made(shared: None) -> None:
    module = build()
    found, seen = train(module, clip=1e9)
    compare(plain(module, 1e9), found)
    report = seen.reports[-1]
    # What comes are gradients, too, and they don't go back.
    assert 0 < report.swapped_out_bytes["optimizer"] < report.swapped_in_bytes["optimizer"]


def test_gradients_are_left_as_the_clip_leaves_them(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen = train(build())
    monkeypatch.setattr(VirtualDevice, "computes_apart", False)
    _, expected = train(build())
    assert seen.in_bytes > 0 == expected.in_bytes
    for ours, theirs in zip(seen.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Looks(Net):
    """Looks at the optimizer's state when a step begins, before its forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].state_dict()
        return super().training_step(batch, batch_idx)


def test_the_host_makes_what_somebody_waits_for(shared: None) -> None:
    module = build()
    found, seen = train(Looks(module.net, module.make_optimizer))
    compare(plain(module), found)
    assert seen.in_bytes == 0


def test_the_host_makes_what_there_is_no_room_for(shared: None) -> None:
    """And where there was none, it is not left to the device again."""
    module = build()
    given_up: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        give_up = DeviceUpdates.give_up
        patch.setattr(DeviceUpdates, "give_up", lambda s, pack: (given_up.append(pack.index), give_up(s, pack))[1])
        found, _ = train(module, device_memory="56KiB")
    compare(plain(module), found)
    assert 0 < len(given_up) == len(set(given_up))


def test_the_host_makes_what_the_system_locks_no_memory_for(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU copies at full speed where the host's memory is page-locked, of which some systems allow little."""

    def locked(device: VirtualDevice, num_bytes: int) -> Tensor:
        raise RuntimeError("cudaHostRegister failed with status 2")

    asked: list[int] = []
    make_fast = DeviceUpdates._make_fast

    def refused(self: DeviceUpdates, pack: Any, states: Any) -> bool:
        asked.append(pack.index)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VirtualDevice, "copies_fast", lambda *_: False)
            patch.setattr(VirtualDevice, "host_buffer", locked)
            return make_fast(self, pack, states)

    module = build()
    monkeypatch.setattr(DeviceUpdates, "_make_fast", refused)
    found, seen = train(module)
    compare(plain(module), found)
    assert seen.in_bytes == 0
    # Not again in each step.
    assert 0 < len(asked) == len(set(asked))


class Fetching(Net):
    """Fetches its batches itself, so that they cannot be split: each layer is called for a batch at once."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_call_outside_of_a_step_has_all_room_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device brought for an update took room that the call needed."""

    def left(optimizer: Any, placement: Any, *rest: Any) -> frozenset[int]:
        return frozenset(placement.residents[0].swapper.updates.postpone(optimizer, placement.packs))

    monkeypatch.setattr(shared_update, "_left_to_devices", left)
    module = build()
    found, _ = train(Fetching(copy.deepcopy(module.net), module.make_optimizer), device_memory="64KiB")
    compare(train_plain(copy.deepcopy(module), nets.tokens(8 * STEPS), 1, 8, gradient_clip_val=CLIP), found)


class Failing(Net):
    """Its last forward fails behind the first layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == STEPS - 1:
            self.net.embed(batch)
            raise RuntimeError("no further")
        return super().training_step(batch, batch_idx)


def test_a_step_that_fails_loses_no_update(shared: None) -> None:
    """Of the update before, the device has made a part when that happens."""
    module = build()
    failing = Failing(copy.deepcopy(module.net), module.make_optimizer)
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        take_over = DeviceUpdates.take_over

        def noting(self: DeviceUpdates, pack: Any) -> bool:
            made.append(pack.index)
            return take_over(self, pack)

        patch.setattr(DeviceUpdates, "take_over", noting)
        strategy = HarmonyStrategy(device_memory=CAPACITY, num_microbatches=4, profile_cache=False)
        trainer = trainer_for(strategy, STEPS, [], gradient_clip_val=CLIP)
        with pytest.raises(RuntimeError, match="no further"):
            _fit(trainer, failing, DataLoader(nets.tokens(8 * STEPS), batch_size=8))
    expected = train_plain(
        copy.deepcopy(module), nets.tokens(8 * STEPS)[: 8 * (STEPS - 1)], 4, 8, gradient_clip_val=CLIP
    )
    assert made
    for name, value in failing.state_dict().items():
        assert torch.equal(value, expected.state[name]), name


@pytest.mark.parametrize("slowed", ["swap-in", "swap-out", "update"])
def test_slow_streams_change_no_bit(slowed: str, shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_update, "left_to_devices", every_second)
    run = HostStream.submit

    def slow(self: HostStream, work: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
        if slowed not in self._pool._thread_name_prefix:
            return run(self, work, *args, **kwargs)
        return run(self, lambda: (time.sleep(0.003), work())[1], *args, **kwargs)

    module = build()
    expected, _ = train(module)
    monkeypatch.setattr(HostStream, "submit", slow)
    found, seen = train(module)
    compare(expected, found)
    assert seen.in_bytes > 0
