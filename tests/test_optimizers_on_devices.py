"""Each update is made on the device by the user's own optimizer: training is that of plain Lightning there, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.updates import separable_optimizers, streamed_update, update_stage, whole_step
from support import nets, same_training
from support.same_training import SEED, Net, assert_same_training, compare, train_harmony, train_plain, trainer_for
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

CAPACITY = "160KiB"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad one by one": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=same_training.accelerator == "gpu"),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of 4 KiB are cut, on GPUs as on virtual devices."""
    monkeypatch.setattr(update_stage, "_MOST_BYTES", 8 << 10)


def build(optimizer: str, net: Callable[[], Any] = nets.Language) -> Net:
    torch.manual_seed(SEED)
    return Net(net(), (OPTIMIZERS | WHOLE)[optimizer])


@pytest.mark.parametrize(("optimizer", "is_clipped"), combined(OPTIMIZERS, [(True,), (False,)]))
def test_training_is_that_of_plain_lightning_on_the_same_device(optimizer: str, is_clipped: bool) -> None:
    clip = {"gradient_clip_val": 0.05} if is_clipped else {}
    assert_same_training(build(optimizer), nets.tokens(), device_memory=CAPACITY, updates=("just in time",), **clip)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    combined(["AdamW", "momentum", "Adafactor"], [("bf16-true",), ("bf16-mixed",), ("64-true",)]),
)
def test_training_is_that_of_plain_lightning_in_each_precision(optimizer: str, precision: str) -> None:
    assert_same_training(
        build(optimizer, nets.Frozen),
        nets.tokens(),
        device_memory=CAPACITY,
        updates=("just in time",),
        precision=precision,
    )


def go_on(module: Net, writer: str, reader: str, path: Path) -> tuple[dict[str, Any], list[Any]]:
    """What one trainer leaves that goes on with another's checkpoint."""
    path = path / f"from {writer} to {reader}"
    for kind, steps in ((writer, 2), (reader, 4)):
        strategy: Any = HarmonyStrategy(device_memory=CAPACITY, num_microbatches=1) if kind == "harmony" else "auto"
        trained, trainer = copy.deepcopy(module), trainer_for(strategy, steps, [])
        trainer.fit(trained, DataLoader(nets.tokens(32), batch_size=8), ckpt_path=path if steps == 4 else None)
        trainer.save_checkpoint(path)
    states = [state for each in trainer.optimizers for state in each.state_dict()["state"].values()]
    tensors = [value.cpu() for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return {name: value.cpu() for name, value in trained.state_dict().items()}, tensors


@pytest.mark.parametrize("optimizer", ["AdamW", "fused", "momentum", "Adafactor", "NAdam", "of one's own"])
def test_state_of_one_goes_on_in_the_other(optimizer: str, tmp_path: Path) -> None:
    """What a first step makes on the device is saved as plain Lightning saves it."""
    module = build(optimizer)
    expected = go_on(module, "auto", "auto", tmp_path)
    for writer, reader in (("auto", "harmony"), ("harmony", "auto")):
        torch.testing.assert_close(go_on(module, writer, reader, tmp_path), expected, rtol=0, atol=0)


@pytest.mark.parametrize("devices", [2, 3])
def test_the_devices_that_pieces_take_turns_on_change_no_bit(devices: int) -> None:
    module = build("AdamW")
    strategy = HarmonyStrategy(device_memory=CAPACITY, num_microbatches=4)
    found = train_harmony(copy.deepcopy(module), nets.tokens(), strategy, 8, with_gradients=False, devices=devices)
    expected = train_plain(module, nets.tokens(), 4, 8)
    found.losses = [loss for at in range(0, 12, 4) for loss in sorted(found.losses[at : at + 4])]
    expected.losses = [loss for at in range(0, 12, 4) for loss in sorted(expected.losses[at : at + 4])]
    compare(expected, found)


class ByHand(pl.LightningModule):
    """Steps two optimizers itself, one of them past Lightning, clips by norm, and steps a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.automatic_optimization = False
        self.net = nets.Language()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.net(batch)
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        second.optimizer.step()
        self.lr_schedulers().step()
        for optimizer in (first, second):
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        blocks, others = self.net.blocks.parameters(), [self.net.embed.weight, self.net.head.weight]
        first, second = torch.optim.AdamW(blocks, lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.5)]


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kind of each optimizer a share of which was updated on the device."""
    found: list[str] = []
    update = streamed_update.StreamedUpdate.update

    def watched(self: Any, share: Any, *args: Any, **options: Any) -> None:
        found.append(type(share.optimizer).__name__)
        update(self, share, *args, **options)

    monkeypatch.setattr(streamed_update.StreamedUpdate, "update", watched)
    return found


class HooksLate(ByHand):
    """Registers a hook of an optimizer's steps within a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers()[0].optimizer.register_step_pre_hook(self.decay)
        super().training_step(batch, batch_idx)

    def decay(self, *_: Any) -> None:
        with torch.no_grad():
            for block in self.net.blocks.parameters():
                block.mul_(0.5)


@pytest.mark.parametrize("kind", [ByHand, HooksLate])
def test_optimizers_that_are_stepped_by_hand_step_on_the_device(kind: type[ByHand], updated: list[str]) -> None:
    found = []
    for strategy in ("auto", HarmonyStrategy(device_memory=CAPACITY, num_microbatches=1)):
        module = kind()
        trainer = trainer_for(strategy, 6, [])
        trainer.fit(module, DataLoader(nets.tokens(), batch_size=8))
        states = [each.state_dict() for each in trainer.optimizers]
        found.append(([loss.cpu() for loss in module.losses], module.cpu().state_dict(), states))
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=0, atol=0)
    for ours, theirs in zip(found[1][2], found[0][2], strict=True):
        assert ours["param_groups"] == theirs["param_groups"]
        tensors = [[v.cpu() for s in each["state"].values() for v in s.values()] for each in (ours, theirs)]
        torch.testing.assert_close(*tensors, rtol=0, atol=0)
    assert set(updated) == {"AdamW", "SGD"}


class HooksInAClosure(Net):
    """Registers a hook, of one optimizer or all, while a step has begun: what comes before that step is past."""

    is_global = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            optimizer = self.trainer.optimizers[0]
            register = register_optimizer_step_pre_hook if self.is_global else optimizer.register_step_pre_hook
            self.handle = register(self.decay)
        return super().training_step(batch, batch_idx)

    def decay(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)


@pytest.mark.cpu
@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_that_comes_within_a_step_is_called_before_the_next(is_global: bool) -> None:
    """It was called in the step that had begun."""
    found = []
    for strategy in ("auto", HarmonyStrategy(device_memory=CAPACITY, num_microbatches=1)):
        torch.manual_seed(SEED)
        module = HooksInAClosure(nets.Language(), OPTIMIZERS["AdamW"])
        module.is_global = is_global
        trainer_for(strategy, 4, [], gradient_clip_val=0.05).fit(module, DataLoader(nets.tokens(), batch_size=8))
        module.handle.remove()
        found.append(module.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Looks(pl.Callback):
    """Looks at weights when a batch ends, so that its update is made at once."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.05, "precision": "bf16-true"},
    ],
    ids=["clipped", "accumulated", "clipped in 16 bits"],
)
def test_an_update_that_is_made_at_once_is_made_on_the_device(options: dict[str, Any], updated: list[str]) -> None:
    module = build("AdamW")
    strategy = HarmonyStrategy(device_memory=CAPACITY, num_microbatches=1)
    expected = trainer_for("auto", 2, [], **options)
    found = trainer_for(strategy, 2, [Looks()], **options)
    modules = copy.deepcopy(module), copy.deepcopy(module)
    for trainer, each in zip((expected, found), modules, strict=True):
        trainer.fit(each, DataLoader(nets.tokens(32), batch_size=8))
    torch.testing.assert_close(modules[1].cpu().state_dict(), modules[0].cpu().state_dict(), rtol=0, atol=0)
    assert updated


class Lion(torch.optim.Optimizer):
    """As its users write it: its state is one moment, and nobody knows that it looks at one parameter at a time."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                moment, (first, second) = self.state[p]["exp_avg"], group["betas"]
                p.data.add_((moment * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                moment.mul_(second).add_(p.grad, alpha=1 - second)
        return loss


class Sharpened(torch.optim.Optimizer):
    """Looks at all parameters, steps to where the loss is larger, and back: its closure comes between."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base = torch.optim.AdamW(self.param_groups, lr=0.01)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in trained]))
        for p in trained:
            self.state[p]["old"] = p.data
            p.data = p.data + p.grad * (0.05 / (norm + 1e-12))
        with torch.enable_grad():
            closure()
        for p in trained:
            # Each other's memory.
            self.state[p]["old"].data, p.data = p.data, self.state[p]["old"].data
        self.base.step()
        return loss


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "of one's own": lambda p: Lion(p, lr=0.001),
    "with one of torch's": Sharpened,
}


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("optimizer", WHOLE)
def test_an_optimizer_that_nobody_knows_steps_as_a_whole_on_the_device(
    optimizer: str, has_room: bool, updated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to step on the host, where the last bit can differ. It still does where the device has no room for all of it."""
    came: list[bool] = []
    begin = whole_step.WholeStep._begin
    monkeypatch.setattr(whole_step.WholeStep, "_begin", lambda *args: came.append(begin(*args)) or came[-1])
    if not has_room:
        monkeypatch.setattr(whole_step, "_PASSING_COPIES", 1e9)
    assert_same_training(
        Net(nets.Language(), WHOLE[optimizer]),
        nets.tokens(16),
        num_microbatches=1,
        device_memory="1MiB",
        updates=("just in time",),
        tolerance=1e-5 if same_training.accelerator == "gpu" and not has_room else 0.0,
    )
    assert updated == []
    assert set(came) == {has_room}


@pytest.mark.cpu
@pytest.mark.parametrize("has_room", [True, False])
def test_a_step_for_which_a_gpu_has_no_room_is_told_once(
    has_room: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(streamed_update.StreamedUpdate, "spares_the_bus", True)
    if not has_room:
        monkeypatch.setattr(whole_step, "_PASSING_COPIES", 1e9)
    trainer = trainer_for(HarmonyStrategy(device_memory="1MiB", num_microbatches=1), 4, [])
    trainer.fit(build("LBFGS"), DataLoader(nets.tokens(), batch_size=8))
    said = [str(each.message) for each in recwarn if "steps as a whole" in str(each.message)]
    assert len(said) == (0 if has_room else 1)


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.05}], ids=["", "clipped"])
def test_an_optimizer_of_a_library_that_updates_each_element_by_itself_does_so_in_pieces(
    clip: dict[str, Any], updated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to step as a whole, on the host where that has no room on the device."""
    monkeypatch.setattr(separable_optimizers, "is_installed", lambda kind: True)
    monkeypatch.delitem(separable_optimizers._GENUINE, Lion, raising=False)
    assert_same_training(
        build("of one's own"), nets.tokens(), device_memory=CAPACITY, updates=("just in time",), **clip
    )
    assert set(updated) == {"Lion"}


@pytest.mark.parametrize("hooked", ["before", "behind", "of all"])
def test_hooks_of_steps_are_called_around_an_update_on_the_device(hooked: str, updated: list[str]) -> None:
    """An optimizer that has some used to step on the host. They see what they see in plain training: all of the step."""
    found = []
    for strategy in ("auto", HarmonyStrategy(device_memory=CAPACITY, num_microbatches=1)):
        module = build("AdamW")
        seen: list[Any] = []

        def look(optimizer: Any, args: Any, kwargs: Any, module: Any = module, seen: list[Any] = seen) -> None:
            state = [value.sum().cpu() for each in optimizer.state.values() for value in each.values()]
            sums = [p.detach().double().sum().cpu() for p in module.parameters()]
            gradients = [None if p.grad is None else p.grad.double().sum().cpu() for p in module.parameters()]
            seen.append((len(args), "closure" in kwargs, len(state), sums, gradients if hooked == "behind" else None))

        class Hooks(pl.Callback):
            def on_train_start(self, trainer: Any, module: Any, look: Any = look) -> None:
                optimizer = trainer.optimizers[0]
                register = {
                    "before": optimizer.register_step_pre_hook,
                    "behind": optimizer.register_step_post_hook,
                    "of all": register_optimizer_step_post_hook,
                }[hooked]
                self.handle = register(look)

            def on_train_end(self, trainer: Any, module: Any) -> None:
                self.handle.remove()

        trainer = trainer_for(strategy, 4, [Hooks()])
        trainer.fit(module, DataLoader(nets.tokens(), batch_size=8))
        found.append((seen, {name: value.cpu() for name, value in module.state_dict().items()}))
    assert len(found[0][0]) == 4
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert set(updated) == {"AdamW"}


@pytest.mark.cpu
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.05}], ids=["", "clipped"])
def test_on_the_host_no_optimizer_state_comes_to_a_device(
    clip: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, the bus carries gradients and weights alone."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a piece comes to a device")

    monkeypatch.setattr(update_stage.Stage, "launch", refuse)
    plain = train_plain(build("AdamW"), nets.tokens(), 4, 8, **clip)
    strategy = HarmonyStrategy(num_microbatches=4, device_memory=CAPACITY, update_on="host")
    harmony = train_harmony(build("AdamW"), nets.tokens(), strategy, 8, with_gradients=False, **clip)
    compare(plain, harmony)
    assert {report.swapped_in_bytes["optimizer"] for report in harmony.reports} == {0}
