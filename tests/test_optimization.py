"""What users change about optimization gives what it gives with plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lightning_harmony.errors import UnsupportedModelError
from support import nets
from support.lightning_fits import (
    BATCH_SIZE,
    CAPACITY,
    NUM_MICROBATCHES,
    QUIET_MARKS,
    Manual,
    Model,
    assert_equal,
    assert_same,
    fit,
    fit_harmony,
    fit_plain,
    harmony,
    leave_half,
    loader,
    trainer_for,
    values,
)
from support.same_training import assert_within

pytestmark = QUIET_MARKS


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def assert_same_fits(make: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    plain, swapped = (fit(kind, make(), **options) for kind in ("plain", "harmony"))
    assert_same(plain, swapped)
    assert plain.global_step == swapped.global_step
    report = swapped.strategy.step_report
    if report is not None and options.get("num_microbatches") is None:
        assert_within([report], CAPACITY)
    return plain, swapped


# --- Manual optimization.


class Adversarial(pl.LightningModule):
    """A generator and a discriminator, each with an optimizer, which take turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.embed = nn.Embedding(nets.VOCABULARY, nets.WIDTH)
        self.generator = nn.ModuleList(nets.Block() for _ in range(3))
        self.discriminator = nn.ModuleList(nets.Block() for _ in range(3))
        self.judge = nn.Linear(nets.WIDTH, 1)
        self.seen: list[Tensor] = []

    def generate(self, noise: Tensor) -> Tensor:
        for block in self.generator:
            noise = block(noise)
        return noise

    def score(self, x: Tensor) -> Tensor:
        for block in self.discriminator:
            x = block(x)
        return self.judge(x).mean(1)

    def train_generator(self, optimizer: Any, scores: Tensor) -> None:
        loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        self.manual_backward(loss)
        assert all(p.grad is None for p in self.discriminator.parameters())
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        self.seen.append(loss.detach())

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for_generator, for_discriminator = self.optimizers()
        real = self.embed(batch).detach()
        noise = real.flip(0) * 0.5
        ones, zeros = (torch.full((len(batch), 1), label, device=batch.device) for label in (1.0, 0.0))

        self.toggle_optimizer(for_generator)
        self.train_generator(for_generator, self.score(self.generate(noise)))

        self.toggle_optimizer(for_discriminator)
        loss = F.binary_cross_entropy_with_logits(self.score(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(self.score(self.generate(noise).detach()), zeros)
        self.manual_backward(loss)
        self.clip_gradients(for_discriminator, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)
        self.seen.append(loss.detach())

    def configure_optimizers(self) -> Any:
        discriminator = [*self.discriminator.parameters(), *self.judge.parameters()]
        return [torch.optim.Adam(self.generator.parameters(), lr=0.01), torch.optim.Adam(discriminator, lr=0.02)], []


def test_two_optimizers_that_take_turns_give_equal_bits() -> None:
    plain, swapped = trainer_for("auto", max_epochs=2), trainer_for(harmony(device_memory="96KiB"), max_epochs=2)
    for trainer in (plain, swapped):
        trainer.fit(Adversarial(), loader())
    assert_same(plain, swapped)
    assert_equal(plain.lightning_module.seen, swapped.lightning_module.seen)


class FrozenBehindItsForward(Adversarial):
    """Torch adds no gradient to a parameter that is frozen when its backward comes."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for_generator, _ = self.optimizers()
        noise = self.embed(batch).detach() * 0.5
        scores = self.score(self.generate(noise))
        self.toggle_optimizer(for_generator)
        self.train_generator(for_generator, scores)


def test_what_is_frozen_behind_its_forward_has_no_gradient() -> None:
    """Its gradient had no place in the pack's sums, and the backward ended with a KeyError."""
    plain, swapped = trainer_for("auto"), trainer_for(harmony(device_memory="96KiB"))
    for trainer in (plain, swapped):
        trainer.fit(FrozenBehindItsForward(), loader())
    assert_same(plain, swapped)
    assert_equal(plain.lightning_module.seen, swapped.lightning_module.seen)


class Accumulating(Manual):
    """Sums the gradients of parts of the batch and of several batches, by hand, and steps its scheduler."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        for part in batch.chunk(2):
            self.manual_backward(self.loss(part) / 4)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_gradients_that_are_summed_by_hand_give_equal_bits() -> None:
    assert_same_fits(Accumulating, num_microbatches=1, max_epochs=2)


class Plainly(Manual):
    """Calls `backward` as in plain PyTorch. Its gradients used to stay on the device, and the optimizer had none to step."""

    def backward_of(self, loss: Tensor) -> None:
        loss.backward()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in batch.chunk(2):
            self.backward_of(self.loss(part))
            self.note_norm()
        optimizer.step()

    def note_norm(self) -> None:
        # On the host, where harmony has gradients: a GPU sums in another order.
        self.norms.append(torch.stack([p.grad.cpu().norm() for p in self.parameters() if p.grad is not None]).norm())


class Listening(Plainly):
    """Looks at gradients in the hook that follows each backward: they used to come after it."""

    def backward_of(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def on_after_backward(self) -> None:
        self.note_norm()


@pytest.mark.parametrize("kind", [Plainly, Listening])
def test_gradients_are_there_as_soon_as_a_backward_by_hand_returns(kind: type[Plainly]) -> None:
    plain, swapped = assert_same_fits(kind, num_microbatches=1, max_epochs=2)
    assert_equal(plain.lightning_module.norms, swapped.lightning_module.norms)


def biases(module: nn.Module) -> list[nn.Parameter]:
    """Some parameters of most layers."""
    return [parameter for name, parameter in module.named_parameters() if name.endswith("bias")]


class ForSome(Plainly):
    """Asks for the gradients of some parameters: nothing used to come, and later those of whole layers alone."""

    def backward_of(self, loss: Tensor) -> None:
        loss.backward(inputs=[self.scale, *biases(self)] if len(self.norms) % 2 else list(self.parameters()))


class ForOneAfterTheOther(Plainly):
    """Keeps the graph between two backwards."""

    def backward_of(self, loss: Tensor) -> None:
        loss.backward(torch.tensor(0.5), retain_graph=True, inputs=biases(self))
        self.manual_backward(loss, inputs=list(self.parameters()))


@pytest.mark.parametrize("kind", [ForSome, ForOneAfterTheOther])
def test_a_backward_by_hand_for_some_parameters_gives_equal_bits(kind: type[Plainly]) -> None:
    plain, swapped = assert_same_fits(kind, num_microbatches=1)
    assert_equal(plain.lightning_module.norms, swapped.lightning_module.norms)


class Attacking(Plainly):
    """Asks for gradients of inputs between its backwards: those add nothing to the parameters'."""

    def backward_of(self, loss: Tensor) -> None:
        x = self.net.embed(torch.arange(nets.WIDTH, device=self.device)[None]).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net.body(x).square().mean(), x)
        self.norms.append(gradient.cpu().norm())
        super().backward_of(loss)


def test_gradients_of_inputs_by_hand_add_nothing_to_those_of_parameters() -> None:
    plain, swapped = assert_same_fits(Attacking, num_microbatches=1)
    assert_equal(plain.lightning_module.norms, swapped.lightning_module.norms)


class WithOwnParameters(Plainly):
    """Its glue has parameters of its own, computes from them on the host, and changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(nets.WIDTH, nets.WIDTH) / nets.WIDTH)
        self.offset = nn.Parameter(torch.randn(nets.WIDTH))

    def forward(self, batch: Tensor) -> Tensor:
        x = F.linear(self.net.body(self.net.embed(batch)), self.mix) + self.offset * 2
        with torch.no_grad():
            # A GPU divides by a number otherwise than the host.
            self.offset += (x.mean((0, 1)) / 100).to(self.offset.device)
        return self.net.logits(x) * self.scale


def test_parameters_that_glue_uses_by_hand_give_equal_bits() -> None:
    """On GPUs, torch used to refuse them: glue has its parameters on the host there."""
    plain, swapped = assert_same_fits(WithOwnParameters, num_microbatches=1, max_epochs=2)
    assert_equal(plain.lightning_module.norms, swapped.lightning_module.norms)


class Samples(pl.Callback):
    """Calls layers between steps, with inputs where the parameters say that they are; keeps outputs and gradients."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        embed, block = module.net.embed, module.net.blocks[0]
        x = torch.ones(2, nets.WIDTH, nets.WIDTH).type_as(embed.weight).requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(block(x).square().mean(), x)
        assert gradient.device == x.device
        self.seen += [embed(torch.arange(4).to(embed.weight.device)).detach().cpu(), gradient.cpu()]


def test_layers_called_between_steps_take_inputs_of_the_host() -> None:
    samples = Samples(), Samples()
    for strategy, callback in zip(("auto", harmony(num_microbatches=1)), samples, strict=True):
        trainer_for(strategy, max_epochs=2, callbacks=[callback]).fit(Plainly(), loader())
    assert_equal(samples[0].seen, samples[1].seen)


class Normalized(nets.Block):
    """Keeps a mean, and multiplies with a number that others may change."""

    mean: Tensor
    share: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(nets.WIDTH))
        self.register_buffer("share", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        return (y - self.mean) * self.share


class ChangesBuffers(Manual):
    """By hand, before each forward or behind it."""

    def __init__(self, *changes: str) -> None:
        super().__init__()
        self.changes = changes
        for number in range(len(self.net.blocks)):
            self.net.blocks[number] = Normalized()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.change("before")
        losses = [self.loss(batch)]
        self.change("behind")
        if "twice" in self.changes:
            losses.append(self.loss(batch.flip(0)))
        self.manual_backward(sum(losses))
        optimizer.step()

    def change(self, when: str) -> None:
        block = self.net.blocks[1]
        if f"mean {when}" in self.changes:
            block.mean = torch.zeros_like(block.mean)
        if f"share {when}" in self.changes:
            block.share = block.share * 0.9
        if f"share in place {when}" in self.changes:
            block.share.mul_(0.9)


@pytest.mark.parametrize(
    "changes",
    [
        ("mean before", "share in place before"),
        ("mean before", "share before", "twice"),
        ("mean behind",),
        ("mean behind", "twice"),
    ],
)
def test_buffers_that_are_set_between_calls_by_hand_give_equal_bits(changes: tuple[str, ...]) -> None:
    """To set statistics anew, as SWA does for its last epoch, was refused once a layer had changed them."""
    plain, swapped = trainer_for("auto", max_epochs=2), trainer_for(harmony(num_microbatches=1), max_epochs=2)
    for trainer in (plain, swapped):
        trainer.fit(ChangesBuffers(*changes), loader())
    assert_same(plain, swapped)
    modules = plain.lightning_module, swapped.lightning_module
    buffers = [[buffer.cpu() for buffer in module.buffers()] for module in modules]
    assert_equal(*buffers)


@pytest.mark.parametrize("changes", [("share behind",), ("share behind", "twice"), ("share in place behind",)])
def test_a_buffer_that_is_changed_between_a_forward_by_hand_and_its_backward_is_refused(
    changes: tuple[str, ...],
) -> None:
    """The recompute found it as it had become, and nothing told of it."""
    module = ChangesBuffers(*changes)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(UnsupportedModelError, match=r"buffer 'share' of layer 'net\.blocks\.1' is changed"):
        trainer_for(harmony(num_microbatches=1)).fit(module, loader())
    assert_equal(before, [parameter.detach().cpu() for parameter in module.parameters()])


class ChangesWeights(Manual):
    """Past autograd, or where no operation has saved them: plain training goes on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.get_parameter(self.name).data.mul_(0.9)
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("name", ["net.blocks.1.up.weight", "net.blocks.0.down.bias"])
def test_so_is_a_parameter(name: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"a parameter of layer '{name.rsplit('.', 2)[0]}'.* is changed between"
    ):
        trainer_for(harmony(num_microbatches=1)).fit(ChangesWeights(name), loader())


class ManualClosure(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


@pytest.mark.parametrize("optimizer", [sgd, lbfgs])
def test_a_closure_by_hand_gives_equal_bits(optimizer: Any) -> None:
    assert_same_fits(lambda: ManualClosure(optimizer), num_microbatches=1)


# --- Optimizers and what they optimize, changed in mid-run.


class Growing(Model):
    """Trains its last block from the second epoch on."""

    def configure_optimizers(self) -> Any:
        self.net.blocks[3].requires_grad_(False)
        return sgd([p for p in self.parameters() if p.requires_grad])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.blocks[3].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.net.blocks[3].parameters()), "lr": 0.05})


@pytest.mark.devices(1, 2)
def test_parameters_that_are_added_in_mid_run_give_equal_bits() -> None:
    _, swapped = assert_same_fits(Growing, max_epochs=2)
    assert len(swapped.optimizers[0].param_groups) == 2
    assert swapped.strategy.step_report.update == "just-in-time"


class Toggling(Model):
    """Freezes and releases layers from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__(sgd)

    def on_train_epoch_start(self) -> None:
        self.net.embed.requires_grad_(self.current_epoch % 2 == 1)
        self.net.blocks[1].requires_grad_(self.current_epoch % 2 == 0)


@pytest.mark.parametrize("update", ["just-in-time", "deferred"])
@pytest.mark.devices(1, 2)
def test_layers_that_are_frozen_and_released_in_mid_run_give_equal_bits(update: Any) -> None:
    plain = fit("plain", Toggling(), max_epochs=2)
    swapped = trainer_for(harmony(update=update), max_epochs=2)
    swapped.fit(Toggling(), loader())
    assert_same(plain, swapped)


class Resting(Model):
    """Lets one layer rest in every second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.blocks[2].requires_grad_(self.trainer.global_step % 2 == 0)


def test_a_layer_that_rests_in_every_second_step_gives_equal_bits() -> None:
    assert_same_fits(Resting, max_epochs=2)


class Replacing(Model):
    """Takes another parameter for its own in mid-run."""

    def change(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change(self.net.blocks[1].up)


class Pruning(Replacing):
    def change(self, layer: nn.Module) -> None:
        prune.l1_unstructured(layer, "weight", amount=0.3)


class Renewing(Replacing):
    """Takes another layer for its own, which nobody optimizes."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(1)
            self.net.blocks[2] = nets.Block().to(next(self.parameters()).device)


class Calling(Replacing):
    """Calls a layer between its replacement and the next step. That was refused."""

    def change(self, layer: nn.Module) -> None:
        super().change(layer)
        layer.bias.data += self(nets.tokens(2).to(self.device)).mean().item()


@pytest.mark.parametrize("module", [Replacing, Pruning, Renewing, Calling])
@pytest.mark.devices(1, 2)
def test_parameters_that_are_replaced_in_mid_run_give_equal_bits(module: Any) -> None:
    assert_same_fits(module, max_epochs=2)


class Derives(Model):
    """Has weights that hooks compute in each call, looks at them between calls, and skips the rest of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        one, two, three = (block.up for block in list(self.net.blocks)[:3])
        self.derived = [
            nn.utils.weight_norm(one),
            nn.utils.spectral_norm(two),
            prune.l1_unstructured(three, "weight", 0.3),
        ]
        self.seen: list[Tensor] = []

    def look(self) -> None:
        self.seen += [layer.weight.detach().cpu().clone() for layer in self.derived]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.global_step == 1 and self.current_epoch == 0 else None

    def on_train_epoch_end(self) -> None:
        self.look()
        with torch.no_grad():
            self.derived[1](torch.ones(1, nets.WIDTH, device=self.device))
        self.look()


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("update", ["just-in-time", "deferred"])
@pytest.mark.devices(1, 2)
def test_between_steps_weights_that_hooks_compute_are_those_of_their_modules_last_call(update: Any) -> None:
    runs = fit_plain(Derives(), max_epochs=3), fit_harmony(Derives(), harmony(update=update), max_epochs=3)
    assert_same(*runs)
    assert_equal(*(run.lightning_module.seen for run in runs))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_manual_step_can_look_at_weights_that_hooks_compute_but_not_train_them_there() -> None:
    class Looks(Manual):
        def __init__(self, *, trains: bool) -> None:
            super().__init__()
            self.trains, self.layer, self.seen = trains, nn.utils.weight_norm(self.net.blocks[1].up), []

        def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.seen.append(self.layer.weight.detach().cpu().clone())
            super().manual_backward(loss + self.layer.weight.sum() if self.trains else loss, *args, **kwargs)

    runs = trainer_for("auto"), trainer_for(harmony())
    for trainer in runs:
        trainer.fit(Looks(trains=False), loader())
    assert_same(*runs)
    assert_equal(*(run.lightning_module.seen for run in runs))
    with pytest.raises(UnsupportedModelError, match=r"blocks\.1\.up\.weight' is used outside of its module's call"):
        fit("harmony", Looks(trains=True))


def test_a_parameter_of_another_type_is_refused() -> None:
    class Widens(Replacing):
        def change(self, layer: nn.Module) -> None:
            layer.weight.data = layer.weight.data.double()

    with pytest.raises(UnsupportedModelError, match=r"net\.blocks\.1\.up\.weight' was given another type or shape"):
        fit("harmony", Widens(), max_epochs=2)


# --- Hooks on parameters, which see the gradient of each backward. They used not to be called.


class Masking(Model):
    """Trains a part of its vocabulary, and clamps and scales what it trains."""

    def __init__(self) -> None:
        super().__init__(sgd)
        kept = (torch.arange(nets.VOCABULARY) % 2).unsqueeze(1)
        self.net.embed.weight.register_hook(lambda gradient: gradient * kept.to(gradient.device))
        self.net.blocks[1].up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        self.scale.register_hook(lambda gradient: gradient.mul_(0.5) and None)


@pytest.mark.devices(1, 2)
def test_hooks_of_parameters_change_their_gradients_in_automatic_and_in_manual_optimization() -> None:
    plain, _ = assert_same_fits(Masking, max_epochs=2)
    with pytest.raises(AssertionError):
        assert_same(plain, fit("plain", Model(sgd), max_epochs=2))

    class ByHand(Manual):
        def __init__(self) -> None:
            super().__init__(sgd)
            self.net.blocks[1].up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    assert_same_fits(ByHand, num_microbatches=1)


# --- Other data for parameters, assigned in hooks. Layers used to go on with what had been there before.


class Following(Model):
    """Half of it follows the other half and is never trained: the target network of BYOL, DINO or a Q-function."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.target = nets.Language()
        self.target.requires_grad_(False)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * (1 + self.target(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Plain Lightning counts each microbatch as a batch.
        if self.trainer.strategy.strategy_name == "harmony" or (batch_idx + 1) % NUM_MICROBATCHES == 0:
            for mine, other in zip(self.target.parameters(), self.net.parameters(), strict=True):
                mine.data = 0.9 * mine.data + 0.1 * other.data


class Averaging(Model):
    """Keeps averages of its weights, and validates with them: a recipe from before there was a callback for it."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.average = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.backup: dict[str, Tensor] = {}
        self.seen: list[Any] = []

    def on_validation_start(self) -> None:
        for name, p in self.named_parameters():
            self.average[name] = 0.5 * self.average[name].to(p.device) + 0.5 * p.data
            self.backup[name] = p.data
            p.data = self.average[name]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).detach())

    def on_validation_end(self) -> None:
        for name, p in self.named_parameters():
            p.data = self.backup.pop(name)


class Rewinding(Model):
    """Goes back to weights that it keeps, and trains those: two names for one memory."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.first = [p.detach().clone() for p in self.parameters()]

    def on_train_epoch_start(self) -> None:
        for p, first in zip(self.parameters(), self.first, strict=True):
            first.data = first.to(p.device)
            p.data = first


@pytest.mark.parametrize("module", [Following, Averaging, Rewinding], ids=lambda module: module.__name__)
@pytest.mark.devices(1, 2)
def test_data_that_hooks_assign_to_parameters_gives_equal_bits(module: Any) -> None:
    validate = module is Averaging
    plain, swapped = (
        fit(kind, module(), max_epochs=2, validate=validate, device_memory="96KiB") for kind in ("plain", "harmony")
    )
    assert_same(plain, swapped)
    for name in ("seen", "first"):
        assert_equal(getattr(plain.lightning_module, name, None), getattr(swapped.lightning_module, name, None))


# --- Schedulers.


def plateau(optimizer: Any) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    return {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"}


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "epoch": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "step": lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.9), "interval": "step"},
    "every-2-steps": lambda o: {
        "scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.9), "interval": "step", "frequency": 2,
    },
    "every-2-epochs": lambda o: {"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.5), "frequency": 2},
    "one-cycle": lambda o: {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=12), "interval": "step",
    },
    "plateau": plateau,
    "plateau-every-2-steps": lambda o: {
        **plateau(o), "monitor": "progress", "interval": "step", "frequency": 2,
    },
}  # fmt: skip


class Scheduled(Model):
    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        super().__init__(sgd)
        self.schedule = schedule
        self.rates: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("progress", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        self.rates.append((self.trainer.global_step, group["lr"], group["momentum"]))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_every_interval_give_equal_bits(name: str) -> None:
    # The frequency counts batches, of which plain Lightning would have one for each microbatch.
    number = {"num_microbatches": 1} if name.endswith("every-2-steps") else {}
    plain, swapped = assert_same_fits(
        lambda: Scheduled(SCHEDULERS[name]), max_epochs=3, validate="plateau" in name, **number
    )
    rates = plain.lightning_module.rates
    assert swapped.lightning_module.rates == rates
    assert len({rate for _, rate, _ in rates}) > 1
    assert swapped.strategy.step_report.update == "just-in-time"


class OwnSchedulerStep(Scheduled):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.trainer.global_step != 2:
            scheduler.step()


def test_an_overridden_scheduler_step_gives_equal_bits() -> None:
    plain, swapped = assert_same_fits(lambda: OwnSchedulerStep(SCHEDULERS["step"]), max_epochs=2)
    assert plain.lightning_module.rates == swapped.lightning_module.rates


# --- Overridden hooks.


class OwnBackward(Model):
    """Scales the loss, and adds to the gradients."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * 3.0)
        for parameter in self.net.head.parameters():
            parameter.grad.mul_(0.5)


class BackwardForSome(Model):
    """Trains no weights but those of the first block. Nothing used to be trained."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(torch.tensor(0.5), inputs=[self.scale, *self.net.blocks[0].parameters(), *biases(self)])


class PluginForSome(Precision):
    """Calls the backward in the place of the module."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        BackwardForSome.backward(model, tensor)


@pytest.mark.parametrize(
    ("module", "plugins", "accumulate"),
    [(BackwardForSome, (), 2), (Model, (PluginForSome,), 1)],
    ids=["hook", "plugin"],
)
@pytest.mark.devices(1, 2)
def test_a_backward_for_some_parameters_gives_equal_bits(module: Any, plugins: Any, accumulate: int) -> None:
    plain = fit_plain(module(sgd), accumulate=accumulate, plugins=[plugin() for plugin in plugins])
    strategy = harmony(device_memory=None if plugins else CAPACITY)
    options = {"accumulate_grad_batches": accumulate, "plugins": [plugin() for plugin in plugins]}
    swapped = fit_harmony(module(sgd), strategy, **options)
    assert_same(plain, swapped)
    untrained, trained = Model(), swapped.lightning_module
    assert torch.equal(untrained.net.blocks[1].up.weight, trained.net.blocks[1].up.weight)
    assert not torch.equal(untrained.net.blocks[1].up.bias, trained.net.blocks[1].up.bias)


class OwnStep(Model):
    """Warms up, and passes over a step: Lightning's recipe."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.trainer.global_step)
        if self.trainer.global_step != 2:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()


class OwnClipping(Model):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class OwnZeroGrad(Model):
    """Keeps a part of the gradient for the next step."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@pytest.mark.parametrize(("module", "memory"), [(OwnStep, CAPACITY), (OwnClipping, None)], ids=["step", "clipping"])
@pytest.mark.devices(1, 2)
def test_overridden_hooks_give_equal_bits(module: Any, memory: Any) -> None:
    plain = fit("plain", module(), max_epochs=2)
    swapped = trainer_for(harmony(device_memory=memory), max_epochs=2)
    swapped.fit(module(), loader())
    assert_same(plain, swapped)
    assert f"{module.__name__}." in swapped.strategy.step_report.update_reason


@pytest.mark.parametrize("module", [OwnBackward, OwnZeroGrad], ids=lambda module: module.__name__)
def test_hooks_that_plain_lightning_calls_for_each_microbatch_give_equal_bits(module: Any) -> None:
    assert_same_fits(module, num_microbatches=1, max_epochs=2)


class Sharpness(Model):
    """Runs its closure twice a step: once where it is, once uphill from there."""

    def __init__(self) -> None:
        super().__init__(sgd)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        trained = [p for p in self.parameters() if p.grad is not None]
        # A GPU would sum in another order.
        norms = [p.grad.cpu().norm().to(p.device) for p in trained]
        moves = [(p, 0.05 * p.grad / (norm + 1e-12)) for p, norm in zip(trained, norms, strict=True)]
        with torch.no_grad():
            for parameter, move in moves:
                parameter.add_(move)
        closure()
        with torch.no_grad():
            for parameter, move in moves:
                parameter.sub_(move)
        optimizer.step()


@pytest.mark.devices(1, 2)
def test_a_closure_that_runs_twice_a_step_gives_equal_bits() -> None:
    assert_same_fits(Sharpness, num_microbatches=1)


# --- What training_step returns.


class ReturnsDict(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return {"loss": loss, "logits": logits, "names": ["a"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["loss"].requires_grad is False
        self.seen.append(outputs)


@pytest.mark.devices(1, 2)
def test_a_step_that_returns_a_dict_gives_equal_bits_and_passes_its_outputs_on() -> None:
    plain, swapped = assert_same_fits(ReturnsDict)
    expected, found = plain.lightning_module.seen, swapped.lightning_module.seen
    for number, output in enumerate(found):
        parts = expected[NUM_MICROBATCHES * number :][:NUM_MICROBATCHES]
        assert_equal(output["logits"], torch.cat([part["logits"] for part in parts]))
        assert output.keys() == parts[0].keys()


class ReturnsShapedLoss(Model):
    """Returns its loss in a shape of one element, as a step that averages over samples but not over outputs does."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.seen: list[torch.Size] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).reshape(self.shape)

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(loss.shape)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["loss"].shape)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_hooks_find_a_loss_in_the_shape_in_which_the_step_returns_it(shape: tuple[int, ...]) -> None:
    plain, swapped = assert_same_fits(lambda: ReturnsShapedLoss(shape))
    assert set(plain.lightning_module.seen) == set(swapped.lightning_module.seen) == {shape}


class Skipping(Model):
    """Passes over the second batch, before or after it has run the network."""

    def __init__(self, runs: bool) -> None:
        super().__init__(sgd)
        self.runs = runs

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = None if batch_idx == 1 and not self.runs else self.loss(batch)
        return None if batch_idx == 1 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_skipped_batch_changes_what_it_changes_in_plain_lightning(num_microbatches: int, runs: bool) -> None:
    whole = trainer_for("auto", max_epochs=2)
    whole.fit(Skipping(runs), loader())
    swapped = fit("harmony", Skipping(runs), num_microbatches=num_microbatches, max_epochs=2)
    assert swapped.global_step == whole.global_step
    expected, found = (trainer.lightning_module.state_dict() for trainer in (whole, swapped))
    # A mean over microbatches is rounded otherwise.
    tolerance = {"rtol": 0, "atol": 0} if num_microbatches == 1 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **tolerance)


# --- Gradient checkpointing by the user.


class CheckpointedBlock(nets.Block):
    """Checkpoints within the layer."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(
            lambda y: self.down(F.gelu(self.up(self.norm(y)))), x, use_reentrant=self.reentrant
        )  # fmt: skip


class ReentrantBlock(CheckpointedBlock):
    reentrant = True


class CheckpointedWithin(Model):
    def __init__(self, block: type[nets.Block]) -> None:
        super().__init__(sgd)
        torch.manual_seed(1)
        self.net.blocks = nn.ModuleList(block() for _ in range(4))


class Checkpointed(Model):
    """Checkpoints around layers, two at a time."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(sgd)
        self.reentrant = reentrant

    def forward(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        for first, second in ((0, 1), (2, 3)):
            x = checkpoint(
                lambda y, a=first, b=second: self.net.blocks[b](self.net.blocks[a](y)), x, use_reentrant=self.reentrant
            )
        return self.net.logits(x) * self.scale


@pytest.mark.parametrize("block", [CheckpointedBlock, ReentrantBlock])
@pytest.mark.devices(1, 2)
def test_checkpointing_within_a_layer_gives_equal_bits(block: type[nets.Block]) -> None:
    assert_same_fits(lambda: CheckpointedWithin(block))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.devices(1, 2)
def test_checkpointing_around_layers_gives_equal_bits(reentrant: bool) -> None:
    plain = fit("plain", Checkpointed(reentrant=reentrant))
    swapped = trainer_for(harmony(update="deferred" if reentrant else "auto"))
    swapped.fit(Checkpointed(reentrant=reentrant), loader())
    assert_same(plain, swapped)


class RunsAgain(Checkpointed):
    """Has the layers called again in the backward, for what follows them saves their outputs."""

    def forward(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        for block in self.net.blocks:
            x = checkpoint(lambda y, block=block: F.gelu(block(y)), x, use_reentrant=False)
        return self.net.logits(x) * self.scale


@pytest.mark.parametrize("memory", [CAPACITY, None], ids=["some", "all"])
@pytest.mark.devices(1, 2)
def test_layers_that_are_called_again_in_the_backward_give_equal_bits(memory: Any) -> None:
    """With room for a pack whose backward follows its forward, the second step was refused: as if the first still ran."""
    plain = fit("plain", RunsAgain(reentrant=False))
    swapped = trainer_for(harmony(device_memory=memory))
    swapped.fit(RunsAgain(reentrant=False), loader())
    assert_same(plain, swapped)


class SkipsAgain(RunsAgain):
    """Each checkpoint takes its input in two places, which several devices have to bring together in the backward, too."""

    def forward(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        for block in self.net.blocks:
            x = checkpoint(lambda y, block=block: y + F.gelu(block(y)), x, use_reentrant=False)
        return self.net.logits(x) * self.scale


@pytest.mark.devices(1, 2)
def test_glue_that_runs_again_in_the_backward_differs_by_rounding_only() -> None:
    """Gradients of tensors with several consumers are added in another order. Two GPUs refused such a step."""
    plain = fit("plain", SkipsAgain(reentrant=False))
    swapped = trainer_for(harmony(device_memory="72KiB"))
    swapped.fit(SkipsAgain(reentrant=False), loader())
    expected, found = (trainer.lightning_module.state_dict() for trainer in (plain, swapped))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class RecomputesByHand(Model):
    """Calls layers' parts in the backward alone, in which the forward has left no trace of their parameters.

    Args:
        again: blocks that are called once more, as layers.
    """

    def __init__(self, *again: int) -> None:
        super().__init__(sgd)
        self.again = again

    def forward(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        for block in self.net.blocks:
            x = nets.ByHand.apply(x, block)
        for number in self.again:
            x = self.net.blocks[number](x)
        return self.net.logits(x) * self.scale


# A block comes whole, and its parts come apart.
TWICE = "128KiB"


@pytest.mark.devices(1, 2)
def test_layers_whose_parts_are_called_in_the_backward_alone_give_equal_bits() -> None:
    """The gradients of the first step were lost: who collected them had not heard of packs that came up in the backward."""
    plain = fit("plain", RecomputesByHand())
    swapped = trainer_for(harmony(device_memory=TWICE))
    swapped.fit(RecomputesByHand(), loader())
    assert_same(plain, swapped)


@pytest.mark.parametrize("again", [(3,), (3, 0)])
@pytest.mark.parametrize("memory", [TWICE, None], ids=["some", "all"])
def test_layers_that_are_also_called_by_their_parts_differ_by_rounding_only(
    again: tuple[int, ...], memory: Any
) -> None:
    """The sums of either kind of call are added in another order."""
    plain = fit("plain", RecomputesByHand(*again))
    swapped = trainer_for(harmony(device_memory=memory, update="deferred"))
    swapped.fit(RecomputesByHand(*again), loader())
    expected, found = (trainer.lightning_module.state_dict() for trainer in (plain, swapped))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_parts_of_a_layer_that_are_called_behind_its_backward_are_trained() -> None:
    """In the first step the layer had been updated by then, and it was refused: now updates follow that step."""
    plain = fit("plain", RecomputesByHand(3, 0))
    swapped = trainer_for(harmony(device_memory=TWICE), devices=1)
    swapped.fit(RecomputesByHand(3, 0), loader())
    expected, found = (trainer.lightning_module.state_dict() for trainer in (plain, swapped))
    # The sums of either kind of call are added in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# --- Shared parameters.


class Sharing(Model):
    """Two blocks with one matrix, one block under two names."""

    def __init__(self, *, whole_block: bool) -> None:
        super().__init__(sgd)
        if whole_block:
            self.net.blocks[3] = self.net.blocks[0]
        else:
            self.net.blocks[3].up.weight = self.net.blocks[0].up.weight


@pytest.mark.parametrize(("whole_block", "memory"), [(False, None), (True, CAPACITY)], ids=["weight", "block"])
@pytest.mark.devices(1, 2)
def test_parameters_that_layers_share_differ_by_rounding_only(whole_block: bool, memory: Any) -> None:
    plain = fit("plain", Sharing(whole_block=whole_block))
    swapped = trainer_for(harmony(device_memory=memory))
    swapped.fit(Sharing(whole_block=whole_block), loader())
    expected, found = (trainer.lightning_module.state_dict() for trainer in (plain, swapped))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    module = swapped.lightning_module
    assert module.net.blocks[3].up.weight is module.net.blocks[0].up.weight


# --- Accumulation that changes, and steps that fetch their batches.


class Accumulates(pl.callbacks.GradientAccumulationScheduler):
    """Over more batches from the second epoch on; plain Lightning counts microbatches."""

    def __init__(self, each: int) -> None:
        super().__init__({0: each, 1: 3 * each})

    def going_to_accumulate_grad_batches(self) -> bool:
        return True


@pytest.mark.devices(1, 2)
def test_accumulation_by_a_schedule_gives_equal_bits() -> None:
    plain = trainer_for("auto", max_epochs=3, callbacks=[Accumulates(NUM_MICROBATCHES)])
    plain.fit(Model(sgd), loader(BATCH_SIZE // NUM_MICROBATCHES))
    swapped = trainer_for(harmony(), max_epochs=3, callbacks=[Accumulates(1)])
    swapped.fit(Model(sgd), loader())
    assert_same(plain, swapped)
    assert plain.global_step == swapped.global_step == 5


class Fetching(Model):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch.to(self.device))


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_fetches_its_batches_gives_equal_bits() -> None:
    assert_same_fits(lambda: Fetching(sgd), num_microbatches=1)
    # It cannot be split: the batch is not known before the step.
    trainer = trainer_for(harmony(device_memory="72KiB"))
    trainer.fit(Fetching(sgd), loader())
    assert_same(fit("plain", Fetching(sgd), num_microbatches=1), trainer)


class SeesGradients(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append({name: p.grad.clone() for name, p in module.named_parameters()})


@pytest.mark.devices(1, 2)
def test_every_gradient_is_there_after_the_backward() -> None:
    plain, swapped = SeesGradients(), SeesGradients()
    fit("plain", callbacks=[plain], num_microbatches=1)
    fit("harmony", callbacks=[swapped], num_microbatches=1)
    assert_equal(swapped.seen, plain.seen)
    assert len(plain.seen) == 3


class Leaving(Model):
    """Leaves a half of each gradient to the next step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        leave_half(optimizer, self)
        return optimizer


class LeavingByHook(Model):
    """Leaves all gradients to every second step."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.global_step % 2 == 0:
            optimizer.zero_grad()


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("module", [Leaving, LeavingByHook])
def test_gradients_that_a_zero_grad_of_the_users_own_leaves_give_equal_bits(module: Any, num_microbatches: int) -> None:
    """They were gone: updates just in time use them up. Sums begin with what was left, also those of the last layers."""
    assert_same_fits(module, num_microbatches=num_microbatches, device_memory="256KiB")


# --- What optimizers do beside, and to, the module's own parameters.


class Latents(Model):
    """Has a tensor in its optimizer that is no parameter. Lightning zeroed its gradient after fused packs had made it."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.latent = torch.zeros((), requires_grad=True)

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * (1.0 + self.latent.to(batch.device))

    def configure_optimizers(self) -> Any:
        return sgd([*self.parameters(), self.latent])


@pytest.mark.parametrize("capacity", ["1GiB", CAPACITY])
def test_tensors_that_are_not_the_modules_get_their_gradients(capacity: Any) -> None:
    plain = fit_plain(Latents())
    swapped = fit_harmony(Latents(), harmony(device_memory=capacity))
    latents = [trainer.lightning_module.latent.detach() for trainer in (plain, swapped)]
    assert latents[0] != 0
    # The graph of each microbatch adds to it, as plain accumulation does.
    assert torch.equal(*latents)
    assert_equal(values(plain.lightning_module), values(swapped.lightning_module))


class Assigns(torch.optim.SGD):
    """Sharpness-aware: calls the step twice, and gives parameters other data between. The second ran on the old ones."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        before = {}
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                before[parameter] = parameter.data
                # By a power of two, which rounds alike on hosts and GPUs.
                parameter.data = parameter.data + 0.5 * parameter.grad
        with torch.enable_grad():
            loss = closure()
        # By hand: the class's own step would call hooks of this one's once more.
        for parameter, data in before.items():
            parameter.data = data
            with torch.no_grad():
                parameter.sub_(0.25 * parameter.grad)
        return loss


def test_an_optimizer_that_assigns_data_between_two_closures_gives_equal_bits() -> None:
    assert_same_fits(lambda: Model(lambda parameters: Assigns(parameters, lr=0.2)), num_microbatches=1)
