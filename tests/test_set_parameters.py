"""What a layer sets in its forward: frozen parameters become buffers of it, and what it makes of others goes to the host."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.nets import WIDTH, Chain
from support.same_training import Between, Net, assert_same_training, room, train_harmony
from support.sampling import combined

CODES = 6

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Sets(nn.Module):
    """A layer with a frozen parameter that it sets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Codebook(Sets):
    """As the EMA quantizer of taming-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Module()
        self.codes.weight, self.codes.size = frozen(torch.randn(CODES, WIDTH)), frozen(torch.ones(CODES))
        self.codes.sums = frozen(self.codes.weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        indices = (
            z.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1) - 2 * z @ self.codes.weight.t()
        ).argmin(1)
        found = F.embedding(indices, self.codes.weight)
        if self.training:
            chosen = F.one_hot(indices, CODES).to(z)
            self.codes.size.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.sums.data.mul_(0.9).add_(chosen.t() @ z.detach(), alpha=0.1)
            self.codes.weight.data.copy_(self.codes.sums / self.codes.size.unsqueeze(1))
        return z + (found - z).detach() + 0.1 * z * self.codes.weight.mean(0)


class SpectralNorm(Sets):
    """As spectral normalizations that are older than torch's: each call assigns to the data of two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = frozen(torch.randn(WIDTH)), frozen(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        self.v.data = F.normalize(weight.data.t() @ self.u.data, dim=0)
        self.u.data = F.normalize(weight.data @ self.v.data, dim=0)
        return F.linear(x, weight / self.u.dot(weight @ self.v), self.linear.bias).tanh()


class Noisy(Sets):
    """Draws, counts, and has a buffer, all of which its first call does once."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.calls = frozen(torch.zeros(WIDTH)), 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(F.dropout(x, 0.5, self.training))
        with torch.no_grad():
            self.total += x.sum()
            self.mean.mul_(0.5).add_(x.mean(0))
        return x + self.mean / self.calls + 0.01 * self.total


@pytest.mark.parametrize(
    ("kind", "num_microbatches", "devices"), combined([Codebook, SpectralNorm, Noisy], [(1, 1), (4, 1), (2, 2)])
)
def test_a_layer_may_set_parameters_that_nothing_trains(kind: type[Sets], num_microbatches: int, devices: int) -> None:
    """That was refused."""
    module, samples = Net(Chain(kind)), torch.randn(40, WIDTH)
    memory = room("24KiB") if devices == 1 else None
    assert_same_training(
        module, samples, device_memory=memory, num_microbatches=num_microbatches, layers=[kind], devices=devices
    )


class ReadsBetween(Chain):
    """Code between layers reads what a layer sets, before it does so and behind it."""

    def __init__(self) -> None:
        super().__init__(Codebook)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + 0.1 * block.codes.weight.mean(0)) * block.codes.size.sum()
        return x.pow(2).mean()


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_code_between_layers_reads_what_they_have_set(num_microbatches: int) -> None:
    assert_same_training(
        Net(ReadsBetween()), torch.randn(40, WIDTH), num_microbatches=num_microbatches, layers=[Codebook]
    )


class RunsAgain(Chain):
    """From the second step on its microbatches cannot take turns, which is seen when layers have set parameters."""

    value = 1.0

    def __init__(self) -> None:
        super().__init__(Codebook)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        first, second, last = self.blocks
        x = first(x)
        if self.num_calls > 4:
            self.value = float(x.detach().mean())
            last.train()
        x = second(x)
        return (last(x) * self.value).pow(2).mean()


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.parametrize("is_late", [False, True])
def test_what_layers_have_set_in_a_step_that_runs_again_counts_once(
    is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It was left as the attempt had made it."""
    net = RunsAgain()
    if is_late:
        net.blocks[2].eval()
    with caplog.at_level("INFO"):
        assert_same_training(
            Net(net), torch.randn(40, WIDTH), num_microbatches=4, layers=[Codebook], updates=["just in time"]
        )
    assert "microbatches run one after the other" in caplog.text or "has run twice" in caplog.text


class Revives(pl.Callback):
    """Sets codes between steps."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            for block in module.net.blocks:
                block.codes.weight.data[1] = 0.5
                block.codes.size.data[1] = 1.0


def test_hooks_may_set_them_too() -> None:
    assert_same_training(
        Net(Chain(Codebook)),
        torch.randn(40, WIDTH),
        num_microbatches=1,
        layers=[Codebook],
        make_callbacks=lambda: [Revives()],
    )


def test_a_step_that_sets_what_its_layer_sets_is_refused() -> None:
    class Changes(Chain):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            self.blocks[0].codes.weight.data.mul_(0.5)
            return loss

    with pytest.raises(UnsupportedModelError, match=r"codes\.weight.*is changed inside the step"):
        train_harmony(
            Net(Changes(Codebook)), torch.randn(40, WIDTH), HarmonyStrategy(layers=[Codebook]), 8, with_gradients=False
        )


def test_what_a_layer_has_set_is_not_trained_later() -> None:
    class Unfreezes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.net.blocks[0].codes.weight.requires_grad_(True)

    with pytest.raises(UnsupportedModelError, match=r"'net\.blocks\.0' is to train a parameter that it has set"):
        train_harmony(
            Net(Chain(Codebook)),
            torch.randn(40, WIDTH),
            HarmonyStrategy(layers=[Codebook]),
            8,
            with_gradients=False,
            more_callbacks=[Unfreezes()],
        )


# ---- trained ones --------------------------------------------------------------------------------------------------------


class Masked(nn.Linear):
    """As the convolutions of PixelCNN: zeroes what the last update has made of a part of its weight."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x).tanh()


class ActNorm(nn.Module):
    """Its first call alone sets what is then trained."""

    is_set: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("is_set", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.shift.data.copy_(-x.mean(0))
            self.is_set.fill_(1)
        return x + self.linear((x + self.shift) * self.scale).tanh()


class Renormed(nn.Module):
    """Its embedding scales long rows down when it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = nn.Embedding(4, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.rows((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()))


class Perturbed(nn.Module):
    """Each call draws another change, which another call would not make again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_on = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on:
            with torch.no_grad():
                self.linear.weight.mul_(0.9).add_(torch.randn_like(self.linear.weight), alpha=0.01)
        return x + self.linear(F.dropout(x, 0.2, self.training)).tanh()


class Constrained(nn.Linear):
    """As EEGNet's layers, each call assigns to the data of the weight what the norm of its rows may be at most."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return x + super().forward(x).tanh()


class Initialized(nn.Module):
    """As Glow's, its first call alone assigns what is then trained; it keeps what it has assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = 1 / x.detach().std(0)
            self.scale.data = self.first
        return x * self.first.clamp(0, 2) + self.linear(x * self.scale).tanh()


@pytest.mark.parametrize(
    ("kind", "num_microbatches", "devices"),
    combined([Masked, ActNorm, Renormed, Perturbed, Constrained, Initialized], [(1, 1), (4, 1), (2, 2)]),
)
def test_a_layer_may_change_parameters_that_are_trained(
    kind: type[nn.Module], num_microbatches: int, devices: int
) -> None:
    """That was refused."""
    memory = room("24KiB") if devices == 1 else None
    assert_same_training(
        Net(Chain(kind)),
        torch.randn(40, WIDTH),
        device_memory=memory,
        num_microbatches=num_microbatches,
        layers=[kind],
        devices=devices,
    )


def test_a_layer_may_change_them_in_mixed_precision() -> None:
    assert_same_training(
        Net(Chain(Masked)), torch.randn(40, WIDTH), num_microbatches=2, layers=[Masked], precision="bf16-mixed"
    )


class Clips(pl.Callback):
    """Has layers change their weights from the third step on, when microbatches take turns."""

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        for block in module.net.blocks:
            block.is_on = trainer.global_step >= 2


def test_a_layer_may_first_change_them_in_a_later_step() -> None:
    reports = assert_same_training(
        Net(Chain(Perturbed)),
        torch.randn(40, WIDTH),
        num_microbatches=2,
        layers=[Perturbed],
        make_callbacks=lambda: [Clips()],
    )
    assert len(reports) == 5


class Validates(Net):
    """An evaluation calls the layers before the first step, and between steps."""

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, WIDTH), batch_size=4)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(self.net(batch).detach().clone())


@pytest.mark.parametrize("kind", [Masked, ActNorm, Renormed, Constrained, Initialized])
def test_an_evaluation_leaves_what_layers_make_of_them(kind: type[nn.Module]) -> None:
    options = {"val_check_interval": 1.0, "num_sanity_val_steps": 2}
    assert_same_training(Validates(Chain(kind)), torch.randn(40, WIDTH), num_microbatches=1, layers=[kind], **options)


def test_a_call_whose_weights_a_later_one_changes_before_its_backward_is_refused() -> None:
    class Twice(Chain):
        def forward(self, x: Tensor) -> Tensor:
            block: Any = self.blocks[0]
            return super().forward(x) + block(block(x)).pow(2).mean()

    class Quietly(Perturbed):
        """Past autograd, which would refuse it."""

        def forward(self, x: Tensor) -> Tensor:
            self.linear.weight.data.mul_(0.9)
            return x + self.linear(x).tanh()

    with pytest.raises(UnsupportedModelError, match="between another call of it and the backward of that"):
        train_harmony(
            Net(Twice(Quietly)), torch.randn(40, WIDTH), HarmonyStrategy(layers=[Quietly]), 8, with_gradients=False
        )


class EverySecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
        return x + self.linear(x).tanh()


def test_so_is_a_call_whose_graph_was_kept() -> None:
    """Where forwards come before backwards, one found the weights that a later call had made."""
    net = Chain(lambda: nn.Linear(WIDTH, WIDTH))
    net.blocks[1] = EverySecond()
    options: dict[str, Any] = {"num_microbatches": 2, "device_memory": room("40KiB"), "accumulate_grad_batches": 2}
    assert_same_training(Net(net), torch.randn(64, WIDTH), **options)
    with pytest.raises(UnsupportedModelError, match="between another call of it and the backward of that"):
        assert_same_training(Net(net), torch.randn(64, WIDTH), make_callbacks=lambda: [Between()], **options)


def test_a_change_of_what_code_between_layers_uses_is_refused() -> None:
    class Uses(Chain):
        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.blocks[0].weight
            return weight.pow(2).sum() + super().forward(x)

    with pytest.raises(UnsupportedModelError, match="is used by code between layers in the same microbatch"):
        train_harmony(
            Net(Uses(Masked)), torch.randn(40, WIDTH), HarmonyStrategy(layers=[Masked]), 8, with_gradients=False
        )
