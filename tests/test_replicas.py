"""Several devices train a model that fits on one: microbatches are spread over copies of it, and the bits are those of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.replicas.replica import Replica
from support.same_training import placed

pytestmark = [
    pytest.mark.in_memory,
    pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches"),
]
WIDTH, BATCH, STEPS = 16, 8, 5
OPTIONS: dict[str, Any] = {
    "max_epochs": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
}


@pytest.fixture(autouse=True)
def several_devices_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let virtual devices be what GPUs are: others than the host."""
    monkeypatch.setattr(VirtualDevice, "computes_apart", True)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """How often code has run on a copy."""
    seen: list[Any] = []
    own = Replica.entered

    def entered(self: Replica, *, carries: bool) -> Any:
        seen.append(carries)
        return own(self, carries=carries)

    monkeypatch.setattr(Replica, "entered", entered)
    return seen


class Model(pl.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def predicted(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = ((self.predicted(x) - y) ** 2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Normalized(Model):
    """Statistics in buffers, which a forward changes without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


class Recurrent(Model):
    """Parameters that are in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def predicted(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x[:, None])[0][:, 0])


class Tied(Model):
    """A parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.net[0].weight

    def predicted(self, x: Tensor) -> Tensor:
        return self.net(self.again(x))


class Measuring(Model):
    """A metric, whose state is in attributes, and a list for the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanAbsoluteError()
        self.seen: list[Any] = []
        self.means: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        predicted = self.predicted(x)
        self.error(predicted, y)
        self.log("error", self.error)
        self.seen.append({"predicted": predicted.detach()})
        return ((predicted - y) ** 2).mean()

    def on_train_epoch_end(self) -> None:
        self.means.append(torch.cat([each["predicted"] for each in self.seen]).mean())
        self.seen.clear()


class Carrying(Model):
    """A buffer that is assigned anew, one that is changed in place, and a tensor in an attribute."""

    center: Tensor
    count: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def on_fit_start(self) -> None:
        self.scale = torch.ones(WIDTH, device=self.device)

    def predicted(self, x: Tensor) -> Tensor:
        self.center = 0.9 * self.center + 0.1 * x.mean(0)
        self.count += 1
        self.scale.mul_(0.99)
        return self.net((x - self.center) * self.scale + self.count / 100)


class Converged(Model):
    """Vectors of a power iteration, which write what they are until the weights have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 1))
        )


class Noisy(Model):
    """Random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))


class Recomputing(Normalized):
    """Code that runs in the backward reads what the forward has read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def predicted(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)


class Frozen(Normalized):
    """Normalizes by what is known until the second epoch, in which it takes statistics."""

    def on_train_epoch_start(self) -> None:
        self.net[1].train(self.current_epoch > 0)
        self.net[0].requires_grad_(self.current_epoch > 0)


class Punished(Model):
    """Reads all parameters of the module."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.01 * sum(p.square().sum() for p in self.parameters())


class Latent(Model):
    """A tensor that is trained and is no parameter."""

    latent: Tensor

    def predicted(self, x: Tensor) -> Tensor:
        return self.net(x + self.latent)

    def configure_optimizers(self) -> Any:
        self.latent = torch.zeros(WIDTH, device=self.device, requires_grad=True)
        return torch.optim.AdamW([*self.parameters(), self.latent], lr=0.01)


class Naming(Model):
    """Makes tensors where the module says that it is."""

    def predicted(self, x: Tensor) -> Tensor:
        return self.net(x + torch.ones(WIDTH, device=self.device) + torch.full((1,), 2.0).to(self.device))


class Keyed(Model):
    """Finds parameters by themselves, by their identities, in nested lists and in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        parameters = list(self.parameters())
        self.coefficients = dict(zip(parameters, (0.5, 0.0, 0.25, 0.125), strict=True))
        self.known = {id(parameters[0]): 0.5}
        self.groups = [[parameters[0]], [parameters[2]]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for parameter in self.parameters():
            loss = loss + self.coefficients.get(parameter, 0.0) * parameter.square().sum()
            loss = loss + self.known.get(id(parameter), 0.0) * parameter.square().mean()
        for group in (*self.groups, self.optimizers().param_groups[0]["params"]):
            loss = loss + 0.01 * sum(parameter.square().sum() for parameter in group)
        return loss


SPREAD = [
    Model,
    Normalized,
    Recurrent,
    Tied,
    Measuring,
    Carrying,
    Converged,
    Noisy,
    Recomputing,
    Frozen,
    Punished,
    Latent,
    Naming,
]


class ChangingParameters(Model):
    """Bounds a weight in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net[0].weight.data.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class Hooked(Model):
    """A hook on a parameter's gradient."""

    def on_fit_start(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)


class ReadingGradients(Model):
    """Weighs its loss by the gradients that are there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = sum(parameter.grad is not None for parameter in self.parameters())
        return super().training_step(batch, batch_idx) * (1 + found / 10)


class Sparse(Model):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH, sparse=True)

    def predicted(self, x: Tensor) -> Tensor:
        return self.net(x + self.embedding((x[:, 0] > 0).long()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Sharing(Model):
    """A buffer that is a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(2, WIDTH))
        self.register_buffer("part", self.whole[0])

    def predicted(self, x: Tensor) -> Tensor:
        self.part.add_(0.01)
        return self.net(x + self.whole.sum(0))


class Listing(Model):
    """Tensors in a list, which stay on one device."""

    def on_fit_start(self) -> None:
        self.anchors = [torch.ones(WIDTH, device=self.device), torch.zeros(WIDTH, device=self.device)]

    def predicted(self, x: Tensor) -> Tensor:
        return self.net(x + self.anchors[0] + self.anchors[1])


class Failing(Model):
    """Code that fails on any other device, when it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.known: list[int] = []

    def predicted(self, x: Tensor) -> Tensor:
        weight = self.net[0].weight.data_ptr()
        self.count += 1
        if weight not in self.known:
            self.known.append(weight)
            if len(self.known) > 1:
                raise RuntimeError("Expected all tensors to be on the same device")
        return self.net(x)


REFUSED: list[Any] = [
    (ChangingParameters, "the step changes parameters"),
    (Hooked, "a hook of its own"),
    (Sparse, "sparse gradients"),
    (ReadingGradients, "the step reads gradients"),
    # To move a module to a GPU makes two of them.
    pytest.param(Sharing, "share memory", marks=pytest.mark.cpu),
    (Failing, "Expected all tensors to be on the same device"),
]


def fit(kind: Callable[[], Model], devices: int, number: int | None, **arguments: Any) -> tuple[Model, pl.Trainer]:
    pl.seed_everything(0, verbose=False)
    model = kind()
    trainer = pl.Trainer(
        strategy=HarmonyStrategy(num_microbatches=number),
        **placed({"devices": devices}),
        **OPTIONS,
        **arguments,
    )
    x = torch.randn(BATCH * STEPS, WIDTH)
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH))
    return model, trainer


def assert_same(kind: Callable[[], Model], devices: int, number: int, **arguments: Any) -> Model:
    one, alone = fit(kind, 1, number, **arguments)
    several, spread = fit(kind, devices, number, **arguments)
    assert spread.strategy.step_report.update == "in-memory"
    assert spread.strategy.step_report.num_microbatches == number
    for (name, tensor), other in zip(one.state_dict().items(), several.state_dict().values(), strict=True):
        assert torch.equal(tensor.cpu(), other.cpu()), name
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (alone, spread)]
    for key, state in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in state.items()), key
    assert alone.callback_metrics.keys() == spread.callback_metrics.keys()
    assert all(torch.equal(value, spread.callback_metrics[name]) for name, value in alone.callback_metrics.items())
    return several


@pytest.mark.parametrize(("devices", "number"), [(2, 2), (2, 4), (3, 4)])
@pytest.mark.parametrize("kind", SPREAD)
def test_microbatches_are_spread_and_make_the_bits_of_one_device(
    kind: Callable[[], Model], devices: int, number: int, entered: list[Any]
) -> None:
    assert_same(kind, devices, number)
    # A forward and a backward on another device than the first, but in the steps that show what they change.
    num_watched = 2 if kind is Frozen else 1
    num_elsewhere = number - number // devices - (number % devices > 0)
    assert len(entered) == 2 * num_elsewhere * (2 * STEPS - num_watched)


@pytest.mark.parametrize(("kind", "why"), REFUSED)
def test_what_a_copy_would_not_do_the_same_runs_on_one_device_and_says_so_once(
    kind: Callable[[], Model], why: str, entered: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert_same(kind, 2, 2) if kind is not Failing else fit(kind, 2, 2)
    lines = [record.getMessage() for record in caplog.records if "alone, where the model fits" in record.getMessage()]
    assert len(lines) == 1
    assert why in lines[0]
    assert len(entered) == (1 if kind is Failing else 0)


def test_a_tensor_that_stays_on_one_device_is_found_by_no_other() -> None:
    assert_same(Listing, 2, 2)


def test_a_step_that_fails_on_another_device_is_undone() -> None:
    model, _ = fit(Failing, 2, 2)
    assert model.count == 2 * 2 * STEPS
    assert len(model.known) == 1


def test_a_failed_step_that_other_nodes_have_heard_of_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did on this node alone, and what the nodes exchange next would have been of different steps."""
    monkeypatch.setattr("lightning_harmony.microbatches.snapshot.num_collectives", itertools.count().__next__)
    with pytest.raises(RuntimeError, match="Expected all tensors"):
        fit(Failing, 2, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed", "enable_model_summary": False},
        {"detect_anomaly": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_of_the_trainer_do_what_they_do_on_one_device(arguments: dict[str, Any], entered: list[Any]) -> None:
    assert_same(Normalized, 2, 4, **arguments)
    assert entered


def test_a_batch_runs_in_one_microbatch_for_each_device_where_nothing_says_their_number(entered: list[Any]) -> None:
    _, trainer = fit(Model, 3, None)
    assert trainer.strategy.step_report.num_microbatches == 3
    assert entered


def test_the_model_has_its_own_parameters_again_after_a_fit_on_several_devices(entered: list[Any]) -> None:
    model, _ = fit(Measuring, 2, 2)
    assert entered
    assert {id(p) for p in model.net.parameters()} == {
        id(p) for p in model.trainer.optimizers[0].param_groups[0]["params"]
    }
    assert len(model.means) == 2


def test_a_change_that_no_step_had_made_before_ends_the_fit_with_the_way_out() -> None:
    class Late(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.current_epoch > 0:
                for parameter in self.parameters():
                    parameter.data.mul_(0.5)
            return loss

    with pytest.raises(UnsupportedModelError, match=r"Trainer\(devices=1\)"):
        fit(Late, 2, 2)


def test_other_memory_that_a_later_step_gives_a_parameter_ends_the_fit_with_the_way_out() -> None:
    class Assigning(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.current_epoch > 0:
                self.net[0].weight.data = self.net[0].weight.data * 0.5
            return super().training_step(batch, batch_idx)

    with pytest.raises(UnsupportedModelError, match=r"other memory, .*Trainer\(devices=1\)"):
        fit(Assigning, 2, 2)


class Wide(Model):
    """Weights that fit, with a batch that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(4))
        )


@pytest.mark.cpu
def test_a_batch_that_does_not_fit_beside_the_model_has_layers_swapped_on_all_devices(entered: list[Any]) -> None:
    pl.seed_everything(0, verbose=False)
    batches = DataLoader(TensorDataset(torch.randn(256, WIDTH), torch.randn(256, 1)), 128)
    found = []
    for memory in (None, "260KiB"):
        pl.seed_everything(0, verbose=False)
        model = Wide()
        strategy = HarmonyStrategy(num_microbatches=4, device_memory=memory, profile_cache=False)
        trainer = pl.Trainer(**OPTIONS, strategy=strategy, accelerator="cpu", devices=2)
        trainer.fit(model, batches)
        found.append((model.state_dict(), strategy.step_report))
    (weights, in_memory), (others, swapped) = found
    assert in_memory.num_packs == 0
    assert len(swapped.peak_device_bytes) == 2
    assert swapped.num_packs > 1
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
