"""What cannot be done is refused before anything is trained, with the cause and the way out, and the way out works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader

from lightning_harmony import CapacityError, HarmonyStrategy, UnsupportedModelError
from support import nets
from support.same_training import Net, assert_same_training, room, train_harmony, trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


def fit(
    module: pl.LightningModule, strategy: Any = None, *, collate: Any = None, steps: int = 2, **options: Any
) -> Any:
    trainer = trainer_for(strategy or HarmonyStrategy(), steps, [], **options)
    trainer.fit(module, DataLoader(nets.tokens(16), batch_size=8, collate_fn=collate))
    return trainer


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_refused(
    module: pl.LightningModule, error: type[Exception], words: Iterable[str], train: Callable[[], Any]
) -> None:
    """The message says the words; the module is as before and an ordinary one; no thread is left."""
    before = values(module)
    with pytest.raises(error) as raised:
        train()
    message = str(raised.value)
    assert [word for word in words if word not in message] == [], message
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert not [child for child in module.modules() if "forward" in vars(child)]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]


def assert_trains(module: pl.LightningModule, train: Callable[[], Any]) -> None:
    before = values(module)
    assert train().global_step == 2
    assert any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


# --- The machine is too small.


def test_a_capacity_below_the_largest_layer_names_it_and_the_missing_bytes() -> None:
    module = Net(nets.Language())
    # A linear layer of a block: (64 * 16 + 64) * 4 = 4352 bytes of weights, and again of gradients.
    words = ["net.blocks.0.up", "2.5 KiB more", "6 KiB", "device_memory"]
    assert_refused(module, CapacityError, words, lambda: fit(module, HarmonyStrategy(device_memory="6KiB")))
    assert_trains(module, lambda: fit(module, HarmonyStrategy(device_memory="64KiB")))


@pytest.mark.cpu
def test_a_capacity_without_room_for_a_layers_work_is_refused_in_the_first_step() -> None:
    module = Net(nets.Language())
    # Weights and gradients of a block take 20 KiB; its activations for 2 * 6 tokens take some more.
    words = ["net.blocks.", "21 KiB", "B", "num_microbatches", "device_memory"]
    assert_refused(module, CapacityError, words, lambda: fit(module, HarmonyStrategy(device_memory="21KiB")))
    assert len(module.losses) <= 4, "a second step was begun"
    assert_trains(module, lambda: fit(module, HarmonyStrategy(device_memory="64KiB")))


@pytest.mark.cpu
def test_a_capacity_without_room_for_the_glue_is_refused_in_the_first_step() -> None:
    class Wasteful(nets.Language):
        def body(self, x: Tensor) -> Tensor:
            return super().body(x + torch.zeros(16, *x.shape).sum(0))

    module = Net(Wasteful())

    def train(num_microbatches: int) -> Any:
        return fit(module, HarmonyStrategy(device_memory="48KiB", num_microbatches=num_microbatches))

    # 16 * 8 samples * 6 tokens * 16 floats: the glue alone takes 48 KiB.
    words = ["exceeds the capacity of 48 KiB", "num_microbatches", "device_memory"]
    assert_refused(module, CapacityError, words, lambda: train(1))
    assert_trains(module, lambda: train(8))


def test_too_little_host_memory_says_how_much_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net(nets.Language(), torch.optim.AdamW)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    with monkeypatch.context() as patch:
        patch.setattr("lightning_harmony.updating.host_budget.room_on_host", lambda: 2 * num_bytes)
        assert_refused(
            module, CapacityError, ["the host is", "short", "Add host memory", "optimizer"], lambda: fit(module)
        )
    assert_trains(module, lambda: fit(module))


# --- Arguments.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_microbatches": 2, "microbatch_size": 2}, ["num_microbatches=2", "microbatch_size=2", "at most one"]),
        ({"num_microbatches": 0}, ["num_microbatches=0", "at least 1"]),
        ({"microbatch_size": -1}, ["microbatch_size=-1", "at least 1"]),
        ({"num_microbatches": "4"}, ["num_microbatches='4'", "whole number"]),
        ({"device_memory": "lots"}, ["'lots'", "device_memory", "16GiB"]),
        ({"device_memory": "-1GiB"}, ["'-1GiB'", "positive"]),
        ({"device_memory": 0}, ["0 is not", "device_memory"]),
        ({"device_memory": 1.5}, ["1.5", "device_memory"]),
        ({"update": "later"}, ["update='later'", "'auto'", "'just-in-time'", "'deferred'"]),
        ({"loss_reduction": "median"}, ["loss_reduction='median'", "'mean'", "'sum'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_nonsense_arguments_are_refused_when_the_strategy_is_made(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="HarmonyStrategy") as raised:
        HarmonyStrategy(**arguments)
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize("layers", ["Block", nets.Block, [nets.Block()], 5], ids=["name", "class", "module", "number"])
def test_layers_that_are_no_classes_are_refused(layers: Any) -> None:
    module = Net(nets.Language())
    assert_refused(
        module,
        TypeError,
        ["layers", "collection of module classes"],
        lambda: fit(module, HarmonyStrategy(layers=layers)),
    )
    assert_trains(module, lambda: fit(module, HarmonyStrategy(layers=[nets.Block])))


# --- The batch.


def test_more_microbatches_than_samples_are_refused() -> None:
    module = Net(nets.Language())
    words = ["batch of 8 samples", "16 microbatches", "HarmonyStrategy(num_microbatches=...)"]
    assert_refused(module, ValueError, words, lambda: fit(module, HarmonyStrategy(num_microbatches=16)))
    assert_trains(module, lambda: fit(module, HarmonyStrategy(num_microbatches=8)))


# --- The system, the accelerator, the launcher, plugins.


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("platform.system", lambda: "Windows")
        with pytest.raises(RuntimeError, match=r"does not run on Windows.*WSL 2"):
            HarmonyStrategy()
    HarmonyStrategy()


class Abacus(CPUAccelerator):
    """An accelerator that nobody has heard of, though it computes where CPUs do."""


def test_an_accelerator_that_cannot_be_served_is_refused() -> None:
    module = Net(nets.Language())
    words = ["Abacus", "accelerator='gpu'", "accelerator='cpu'"]
    assert_refused(module, ValueError, words, lambda: fit(module, accelerator=Abacus()))
    assert_trains(module, lambda: fit(module, accelerator="cpu"))


def test_several_processes_on_a_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net(nets.Language())
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        words = ["LOCAL_WORLD_SIZE=2", "one process", "--nproc-per-node=1"]
        assert_refused(module, ValueError, words, lambda: fit(module))
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        assert_trains(module, lambda: fit(module))


@pytest.mark.parametrize(
    "plugin", [lambda: FSDPPrecision("bf16-mixed"), lambda: DeepSpeedPrecision("bf16-mixed")], ids=["fsdp", "deepspeed"]
)
def test_precision_plugins_that_manage_parameters_are_refused(plugin: Callable[[], Any]) -> None:
    module = Net(nets.Language())
    words = [type(plugin()).__name__, "strategy='harmony'", "'bf16-mixed'"]
    assert_refused(module, ValueError, words, lambda: fit(module, plugins=[plugin()]))
    assert_refused(module, ValueError, words, lambda: fit(module, HarmonyStrategy(precision_plugin=plugin())))
    assert_trains(module, lambda: fit(module, precision="bf16-mixed"))


# --- The model. Each is its own remedy: with `bad` off it trains.


class Switch(nn.Module):
    """A block that can be told to behave."""

    bad = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(nets.WIDTH, nets.WIDTH)


class AssignsTheDataOfItsWeight(Switch):
    """In plain PyTorch, the graph keeps what the weight was."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.bad:
            self.linear.weight.data = self.linear.weight.data * 0.5
        return x


CHANGES_DATA = ["changes the data of a parameter", "on_train_batch_start"]
BAD_LAYERS: dict[type[Switch], list[str]] = {
    AssignsTheDataOfItsWeight: ["net.blocks.", *CHANGES_DATA],
}


def with_blocks(block: Callable[[], nn.Module]) -> Net:
    net = nets.Language()
    net.blocks = nn.ModuleList(block() for _ in range(3))
    return Net(net)


@pytest.mark.parametrize("capacity", [None, "48KiB"], ids=["all", "some"])
@pytest.mark.parametrize("block", BAD_LAYERS, ids=lambda block: block.__name__)
def test_a_layer_that_swapping_would_get_wrong_is_named(
    block: type[Switch], capacity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = with_blocks(block)
    strategy = HarmonyStrategy(device_memory=capacity)
    assert_refused(module, UnsupportedModelError, BAD_LAYERS[block], lambda: fit(module, strategy))
    monkeypatch.setattr(block, "bad", False)
    assert_trains(module, lambda: fit(module, HarmonyStrategy(device_memory=capacity)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_weight_that_a_hook_computes_is_refused_to_all_but_its_module() -> None:
    module = with_blocks(lambda: torch.nn.utils.weight_norm(nn.Linear(nets.WIDTH, nets.WIDTH)))
    assert_trains(module, lambda: fit(module))

    class Reads(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.net.blocks[1].weight.sum()

    module = Reads(module.net)
    assert_refused(module, UnsupportedModelError, ["net.blocks.1.weight", "call the module"], lambda: fit(module))


def test_sparse_gradients_are_refused() -> None:
    module = Net(nets.Language())
    module.net.embed = nn.Embedding(nets.VOCABULARY, nets.WIDTH, sparse=True)
    assert_refused(module, UnsupportedModelError, ["'net.embed'", "sparse=False"], lambda: fit(module))
    module.net.embed.sparse = False
    assert_trains(module, lambda: fit(module))


class HasEdges(nn.Linear):
    """A layer on a graph, whose edges are its own, or given."""

    def __init__(self, edges: Tensor | None) -> None:
        super().__init__(nets.WIDTH, nets.WIDTH)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        return super().forward(x) @ (self.edges if edges is None else edges)


@pytest.mark.parametrize(
    "made_of",
    [
        Tensor.to_sparse,
        lambda eye: torch.nested.nested_tensor(list(eye), layout=torch.jagged),
        lambda eye: torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "nested", "quantized"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_buffer_that_a_layer_is_not_swapped_with_is_refused(made_of: Callable[[Tensor], Tensor]) -> None:
    """An error of a copy, or of a quantizer, said nothing of the buffer."""
    module = with_blocks(lambda: HasEdges(made_of(torch.eye(nets.WIDTH))))
    said = ["layer 'net.blocks.0'", "quantized buffer, 'edges'", "pass it to the layer as an argument"]
    assert_refused(module, UnsupportedModelError, said, lambda: fit(module))


def test_a_layer_may_be_given_a_sparse_buffer_of_the_module_around_it() -> None:
    """The way out of the refusal."""

    class GivesEdges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = HasEdges(None)
            self.register_buffer("edges", torch.eye(nets.WIDTH).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x, self.edges)
            return y

    module = with_blocks(GivesEdges)
    assert_trains(module, lambda: fit(module, HarmonyStrategy(layers=[HasEdges])))


class Looked(nn.Module):
    """An embedding of one's own, with an attribute by which an unrelated flag was taken for torch's."""

    def __init__(self, *, makes_sparse: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nets.VOCABULARY, nets.WIDTH))
        self.sparse, self.makes_sparse = True, makes_sparse

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight, sparse=self.makes_sparse)


def test_sparse_gradients_are_refused_by_what_comes_and_not_by_a_name() -> None:
    module = Net(nets.Language())
    module.net.embed = Looked(makes_sparse=False)  # type: ignore[assignment]
    assert_trains(module, lambda: fit(module))
    module.net.embed = Looked(makes_sparse=True)  # type: ignore[assignment]
    assert_refused(module, UnsupportedModelError, ["'net.embed.weight'", "sparse gradient"], lambda: fit(module))


class Lazy(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LazyLinear(4), nn.LazyLinear(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch.float())
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_lazy_parameters_are_refused_until_they_have_a_shape() -> None:
    module = Lazy()
    with pytest.raises(UnsupportedModelError, match=r"'layers\.0\.weight'.*configure_model"):
        fit(module)
    module.training_step(nets.tokens(), 0)
    assert_trains(module, lambda: fit(module))


def test_trained_parameters_made_of_other_tensors_are_refused_where_layers_are_swapped() -> None:
    module = Net(nets.Language())
    weight = torch.randn(4, 4)
    module.net.extra = nn.Parameter(TwoTensor(weight, weight.clone()))
    with pytest.raises(
        UnsupportedModelError, match=r"'net\.extra' is a TwoTensor.*requires_grad_\(False\).*device_memory"
    ):
        fit(module)
    module.net.extra.requires_grad_(False)
    assert_trains(module, lambda: fit(module))


class OnlyParameters(pl.LightningModule):
    def __init__(self, held: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net = held(torch.randn(nets.VOCABULARY, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one_hot = F.one_hot(batch, nets.VOCABULARY).float()
        scores = self.net(one_hot) if callable(self.net) else one_hot @ self.net
        return scores.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_model_without_layers_is_refused() -> None:
    module = OnlyParameters(nn.Parameter)
    words = ["OnlyParameters", "no submodule with parameters", "submodule", "strategy='auto'"]
    assert_refused(module, UnsupportedModelError, words, lambda: fit(module))
    mended = OnlyParameters(lambda value: nn.Linear(nets.VOCABULARY, 1))
    assert_trains(mended, lambda: fit(mended))
    assert_trains(module, lambda: fit(module, "auto"))


class Penalised(Net):
    """A penalty on the gradient of the loss with respect to the embeddings."""

    create_graph = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net.embed(batch[:, :-1])
        y = self.net.logits(self.net.body(x)).square().mean()
        (gradient,) = torch.autograd.grad(y, x, create_graph=self.create_graph, retain_graph=True)
        return y + gradient.square().sum()


def test_double_backward_through_a_layer_is_refused() -> None:
    module = Penalised(nets.Language())
    assert_refused(
        module,
        UnsupportedModelError,
        [
            "double backward",
            "create_graph=True",
            "'net.",
            "the forward of a module that has the layer",
            "strategy='auto'",
        ],
        lambda: fit(module),
    )
    module.create_graph = False
    assert_trains(module, lambda: fit(module))


class Slopes(nn.Module):
    """Differentiates what another module has put into a dict, and has no layer itself."""

    def forward(self, found: dict[str, Tensor]) -> None:
        (found["slope"],) = torch.autograd.grad(found["y"].sum(), found["x"], create_graph=True)


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.slopes = nn.Sequential(*(nets.Block() for _ in range(3))), Slopes()

    def forward(self, x: Tensor) -> Tensor:
        found = {"x": x.requires_grad_()}
        found["y"] = self.body(found["x"])
        self.slopes(found)
        return found["y"].square().mean() + found["slope"].square().mean()


def test_the_refusal_of_a_double_backward_names_the_module_that_is_a_way_out() -> None:
    module, samples = Net(Potential()), torch.randn(16, nets.WIDTH)
    refused = HarmonyStrategy(device_memory=room("30KiB"))
    with pytest.raises(UnsupportedModelError, match=r"a layer of 'net' \(Potential\), in whose forward"):
        train_harmony(module, samples, refused, 8, with_gradients=False)
    assert_same_training(module, samples, layers=[Potential])


class BackwardWithGraph(Net):
    create_graph = True

    def backward(self, loss: Tensor) -> None:
        loss.backward(create_graph=self.create_graph)


@pytest.mark.filterwarnings("ignore:.*create_graph=True will create a reference cycle")
def test_double_backward_through_the_loss_is_refused() -> None:
    module = BackwardWithGraph(nets.Language())
    words = ["double backward", "create_graph=True", "num_microbatches=1"]
    assert_refused(module, UnsupportedModelError, words, lambda: fit(module))
    module.create_graph = False
    assert_trains(module, lambda: fit(module))


class AsksForGradients(Net):
    """Looks at gradients of parameters within the step: they used to be told as not used."""

    bad = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.bad:
            torch.autograd.grad(loss, list(self.parameters()), retain_graph=True, allow_unused=True)
        return loss


def test_gradients_of_parameters_that_the_step_asks_for_are_refused() -> None:
    module = AsksForGradients(nets.Language())
    words = ["torch.autograd.grad", "on_after_backward", "automatic_optimization"]
    assert_refused(module, UnsupportedModelError, words, lambda: fit(module))
    module.bad = False
    assert_trains(module, lambda: fit(module))


class AsksInBackward(Net):
    """Asks for gradients of parameters where Lightning lets it call the backward: there was nothing to differentiate."""

    bad = True

    def backward(self, loss: Tensor) -> None:
        if self.bad:
            torch.autograd.grad(loss, list(self.net.head.parameters()))
        loss.backward()


def test_gradients_of_parameters_that_the_backward_asks_for_are_refused() -> None:
    module = AsksInBackward(nets.Language())
    words = ["parameters of the module", "torch.autograd.grad", "backward(inputs=parameters)", "p.grad"]
    assert_refused(module, UnsupportedModelError, words, lambda: fit(module))
    module.bad = False
    assert_trains(module, lambda: fit(module))


class BackwardWithin(Net):
    """Looks for the input that is worst, by a backward of its own: its gradients of parameters were added."""

    bad = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net.embed(batch[:, :-1]).detach().requires_grad_()
        loss = self.net.logits(self.net.body(x)).square().mean()
        if self.bad:
            loss.backward()
            gradient = x.grad
        else:
            (gradient,) = torch.autograd.grad(loss, x)
        assert gradient is not None
        return self.net.logits(self.net.body(x.detach() + gradient.sign())).square().mean()


def test_a_backward_within_the_step_is_refused() -> None:
    module = BackwardWithin(nets.Language())
    words = ["backward of its own", "torch.autograd.grad", "automatic_optimization"]
    assert_refused(module, UnsupportedModelError, words, lambda: fit(module))
    module.bad = False
    assert_trains(module, lambda: fit(module))


class Twice(Net):
    """Differentiates the loss of the batch twice. The second time used to do nothing."""

    bad = True

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=self.bad)
        if self.bad:
            (loss * 0.5).backward()


def test_a_second_backward_of_the_loss_is_refused() -> None:
    module = Twice(nets.Language())
    words = ["second time", "backward once", "automatic_optimization"]
    assert_refused(module, UnsupportedModelError, words, lambda: fit(module))
    module.bad = False
    assert_trains(module, lambda: fit(module))


@pytest.mark.parametrize("tied", [True, False])
def test_hooks_of_parameters_that_would_see_other_gradients_are_refused(tied: bool) -> None:
    module = Net(nets.Tied() if tied else nets.Language())
    weight = module.net.embed.weight
    if tied:
        handle, words = weight.register_hook(lambda gradient: 2 * gradient), ["'net.embed.weight'", "on_after_backward"]
    else:
        handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
        words = ["'net.embed.weight'", "register_post_accumulate_grad_hook", "on_after_backward"]
    assert_refused(module, UnsupportedModelError, words, lambda: fit(module))
    handle.remove()
    assert_trains(module, lambda: fit(module))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nets.Block()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - self.center)


class MovesCenters(Net):
    """Changes buffers of layers in a later step than the first: the recompute in the backward saw them changed."""

    bad = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.net.blocks if self.bad and batch_idx > 0 else ():
            block.center.add_(0.1)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for block in self.net.blocks:
            block.center.add_(0.1)


def test_a_buffer_of_a_layer_that_a_later_step_first_changes_is_refused() -> None:
    module = MovesCenters(with_blocks(Centred).net)
    with pytest.raises(UnsupportedModelError, match=r"'center' of layer 'net.blocks.0' .* on_train_batch_end"):
        fit(module, steps=3)
    module = MovesCenters(with_blocks(Centred).net)
    module.bad = False
    assert_trains(module, lambda: fit(module))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    module = with_blocks(lambda: torch.jit.script(nn.Linear(nets.WIDTH, nets.WIDTH)))
    words = ["'net.blocks.0'", "torch.jit", "compile_layers=True"]
    with pytest.raises(UnsupportedModelError) as caught:
        fit(module)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


class HasScripted(nets.Block):
    """A part without parameters is scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.jit.script(nn.Sequential(nn.Tanh(), nn.Hardtanh()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(super().forward(x))
        return y


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_without_parameters_train() -> None:
    module = with_blocks(HasScripted)
    assert_trains(module, lambda: fit(module))


BECOMES: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "too large": (lambda: nn.Linear(nets.WIDTH, 4096), CapacityError, r"layer 'net\.blocks\.1' needs 272 KiB"),
    "lazy": (lambda: nn.LazyLinear(nets.WIDTH), UnsupportedModelError, r"'net\.blocks\.1\.weight' has no shape yet"),
    "sparse": (lambda: nn.Embedding(4, nets.WIDTH, sparse=True), UnsupportedModelError, "'net.blocks.1' has sparse"),
    "scripted": (lambda: torch.jit.script(nets.Block()), UnsupportedModelError, "'net.blocks.1' is scripted"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", BECOMES)
@pytest.mark.devices(1, 2)
def test_a_layer_that_is_refused_in_mid_run_is_named(kind: str) -> None:
    """An AttributeError was raised in its place: the layers were given their own forward methods back a second time."""
    make, error, message = BECOMES[kind]

    class Becomes(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.net.blocks[1] = make()

    module = Becomes(nets.Language())
    with pytest.raises(error, match=message):
        fit(module, HarmonyStrategy(device_memory=room("64KiB"), num_microbatches=4, profile_cache=False))
    assert not [child for child in module.net.blocks if "forward" in vars(child) and child is not module.net.blocks[1]]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]


# --- Parameters that the glue changes.


class Glue(Net):
    """Its training_step does something to parameters before it uses them."""

    def __init__(self) -> None:
        super().__init__(nets.Language())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.change: Callable[[Any], Any] | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.change is not None:
            self.change(self)
        return self.net(batch) * self.scale + self.shift


def under_no_grad(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return torch.no_grad()(change)


def replace_parameter(module: Any) -> None:
    module.scale = nn.Parameter(torch.tensor(0.25))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "out": under_no_grad(lambda module: torch.mul(module.shift, 0.5, out=module.scale)),
    "a-view": under_no_grad(lambda module: module.net.head.weight[:1].mul_(0.5)),
    "a-view-of-data": lambda module: module.net.head.weight.data.view(-1).clamp_(-0.1, 0.1),
    "a-view-in-a-list": lambda module: torch._foreach_mul_([module.net.head.weight.data.view(-1)], 0.5),
    "a-row": under_no_grad(lambda module: next(iter(module.net.head.weight)).zero_()),
    "hooked": lambda module: module.scale.register_hook(lambda gradient: gradient * 2),
    "replaced": replace_parameter,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_changed_within_the_step_is_refused(change: str) -> None:
    module = Glue()
    module.change = CHANGES[change]
    words = [
        "parameter '",
        "changed inside the step",
        "on_train_batch_start",
        "on_validation_start",
        "automatic_optimization",
        # Some set parameters by their first batch, as variational Gaussian processes do.
        "run the model once before the fit",
    ]
    assert_refused(module, UnsupportedModelError, words, lambda: fit(module))
    module.change = None
    assert_trains(module, lambda: fit(module))


NO_CHANGES: dict[str, Callable[[Any], Any]] = {
    "moved to where it is": lambda module: module.to(module.device),
    "of its type": lambda module: module.net.float(),
    "both": lambda module: module.net.head.to(module.device, torch.float32),
    "trained as before": lambda module: module.requires_grad_(True),
    "by attribute": lambda module: setattr(module.scale, "requires_grad", True),
    "its own data": lambda module: setattr(module.scale, "data", module.scale.data),
    "returned as it is": lambda module: module.scale.to(module.shift) is module.scale or 1 / 0,
}


@pytest.mark.parametrize("change", NO_CHANGES)
def test_a_parameter_that_a_step_makes_what_it_is_already_trains(change: str) -> None:
    """Nothing is refused, and nothing is swapped in for it."""
    module, plain = Glue(), Glue()
    plain.load_state_dict(module.state_dict())
    module.change = NO_CHANGES[change]
    assert_trains(module, lambda: fit(module))
    assert_trains(plain, lambda: fit(plain))
    assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))


@pytest.mark.cpu
def test_an_array_that_shares_a_parameters_memory_is_for_reading_within_the_step() -> None:
    module, seen = Glue(), []

    def change(module: Any) -> None:
        weight = module.net.head.weight.detach().numpy()
        seen.append(weight.sum())
        weight *= 0.5

    module.change = change
    assert_refused(module, ValueError, ["read-only"], lambda: fit(module))
    assert seen


class ClampsInHook(Glue):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.scale.data.clamp_(0.0, 0.1)


def test_a_parameter_may_be_changed_in_a_hook() -> None:
    module = ClampsInHook()
    assert_trains(module, lambda: fit(module))
    assert module.scale < 0.2


class Unrolled(nn.Module):
    """Calls a parametrized layer several times, with its weight computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(nets.VOCABULARY, nets.WIDTH)
        self.cell = parametrizations.weight_norm(nn.Linear(nets.WIDTH, nets.WIDTH))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        with parametrize.cached():
            for _ in range(3):
                x = torch.tanh(self.cell(x))
        return x.square().mean()


def test_a_weight_that_is_cached_for_several_calls_is_refused_around_them_and_not_in_a_layer() -> None:
    module = Net(Unrolled())
    small = {nn.Linear, nn.Embedding}
    assert_refused(
        module,
        UnsupportedModelError,
        ["layer 'net.cell'", "parametrize.cached()", "layers="],
        lambda: fit(module, HarmonyStrategy(layers=small)),
    )
    assert_trains(module, lambda: fit(module, HarmonyStrategy(layers={Unrolled})))


class TiedByData(nets.Language):
    """Two parameters in one memory. They came apart in silence."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(nets.WIDTH, nets.WIDTH), nn.Linear(nets.WIDTH, nets.WIDTH)
        self.other.weight.data = self.one.weight.data
        if frozen:
            self.one.weight.requires_grad_(False)
            self.other.weight.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.other(self.one(x)))


class Mirrored(TiedByData):
    """A buffer in the memory of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.other.weight = nn.Parameter(torch.randn(nets.WIDTH, nets.WIDTH))
        self.one.register_buffer("mirror", self.one.weight.data[1:])


# Of a buffer, plain Lightning has a copy on another device, and so have we.
@pytest.mark.parametrize("net", [TiedByData, pytest.param(Mirrored, marks=pytest.mark.cpu)])
def test_parameters_in_the_memory_of_others_are_refused(net: Callable[[], nn.Module]) -> None:
    module = Net(net())
    with pytest.raises(UnsupportedModelError, match=r"net\.one\.\S+ and 'net\.\S+ lie in the same memory.*share the"):
        fit(module)


def test_frozen_parameters_and_columns_of_one_matrix_may_share_it() -> None:
    assert fit(Net(TiedByData(frozen=True))).global_step == 2
    net = TiedByData()
    both = torch.randn(nets.WIDTH, 2 * nets.WIDTH) / nets.WIDTH
    net.one.weight.data, net.other.weight.data = both[:, : nets.WIDTH], both[:, nets.WIDTH :]
    assert fit(Net(net)).global_step == 2


class Losses(nets.Language):
    """A loss for each sample. Their sum trained in silence, where autograd refuses."""

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * torch.ones(3, device=batch.device)


def test_a_loss_of_several_elements_is_refused() -> None:
    module = Net(Losses())
    words = ["only for scalar outputs", "shape (3,)", "mean"]
    assert_refused(module, RuntimeError, words, lambda: fit(module))


class Locked(nets.Language):
    """Holds a lock around layers, where the next microbatch waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, batch: Tensor) -> Tensor:
        with self.lock:
            return super().forward(batch)


def test_a_lock_around_layers_has_microbatches_run_one_after_the_other() -> None:
    """It was refused when another microbatch had waited for it for 30 s."""
    module = Net(Locked())
    assert_trains(module, lambda: fit(module))
