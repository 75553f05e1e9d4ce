"""Parameters that the code between layers uses: what autograd saves of them is looked up again where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.nets import WIDTH
from support.same_training import Net, assert_same_training, room, train_harmony

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


class Parameters(nn.Module):
    """Parameters of several types, which share a pack."""

    def __init__(self, num_first: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.rand(num_first))
        self.precise = nn.Parameter(torch.rand(WIDTH, WIDTH).double() / WIDTH)
        self.rotation = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.blocks = nn.Parameter(torch.rand(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scales.mean()
        x = (x.double() @ self.precise).float()
        # As rotations are applied: a view of the complex numbers is saved, and elements of it.
        x = x * torch.view_as_real(self.rotation)[:, 1] + (x * self.rotation).real
        x = x * self.blocks[2] + self.blocks[:, 0].sum() * x
        loss: Tensor = self.last(x).pow(2).mean()
        return loss


@pytest.mark.parametrize("memory", [None, "32KiB"])
@pytest.mark.parametrize("num_first", [8, 1000])
def test_each_saved_parameter_is_looked_up_in_its_own_place(num_first: int, memory: str | None) -> None:
    # All in a pack are views of one buffer, and the place of the first was taken for that of each.
    torch.manual_seed(0)
    samples = torch.randn(24, WIDTH)
    assert_same_training(
        Net(Parameters(num_first)), samples, layers=[nn.Linear], device_memory=room(memory), tolerance=1e-5
    )


class InPlace(nn.Module):
    """Adds parameters to what layers return, and scales it by them, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias, self.scale = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += self.bias
            x.mul_(self.scale)
            x[:, 0] *= 2
        return x.pow(2).mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_parameter_may_be_added_in_place(devices: int) -> None:
    # It was refused, as if the parameter itself were changed. A parameter that is used three times has three gradients.
    torch.manual_seed(0)
    assert_same_training(Net(InPlace()), torch.randn(24, WIDTH), layers=[nn.Linear], devices=devices, tolerance=1e-6)


class Holder:
    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self.itself = self


class Slotted:
    __slots__ = ("parameter",)

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


WAYS: Mapping[str, tuple[Callable[[nn.Parameter], Any], Callable[[Any], Tensor]]] = {
    "a tuple": (lambda w: (w,), lambda held: held[0]),
    "an object": (Holder, lambda held: held.parameter),
    "objects in each other": (
        lambda w: Holder([{"one": Holder((w,))}]),
        lambda held: held.parameter[0]["one"].parameter[0],
    ),
    "slots": (Slotted, lambda held: held.parameter),
    "a partial": (lambda w: partial(torch.mul, 1.0, w), lambda held: held()),
    "a nested dict": (lambda w: {"all": [w]}, lambda held: held["all"][0]),
    "a list": (lambda w: [w], lambda held: held[0]),
    "a dict": (lambda w: {"one": w}, lambda held: held["one"]),
}


class Penalized(nn.Module):
    """A loss with a parameter that is reached past its module."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.way = way
        self.held: Any = WAYS[way][0](self.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.first(x) @ self.weight)
        loss: Tensor = x.pow(2).mean() + 0.1 * WAYS[self.way][1](self.held).pow(2).sum()
        return loss


@pytest.mark.cpu
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_swapping_does_not_see_is_refused(way: str) -> None:
    # Its gradient went to the parameter by itself, and the update never saw it.
    torch.manual_seed(0)
    samples = torch.randn(24, WIDTH)
    if way not in ("slots", "a partial"):
        assert_same_training(Net(Penalized(way)), samples, layers=[nn.Linear], tolerance=1e-5)
        return
    module = Net(Penalized(way))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strategy = HarmonyStrategy(layers=[nn.Linear])
    with pytest.raises(UnsupportedModelError, match=r"parameter 'net\.weight'.*attribute of its module"):
        train_harmony(module, samples, strategy, 8, with_gradients=False)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class ThroughAnObject(nn.Module):
    """Its weight is what an object has of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.held = Holder(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) @ self.held.parameter).tanh()


class LetsGo(ThroughAnObject):
    """Its object has the weight only while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.held.parameter = self.weight
        result = super().forward(x)
        self.held.parameter = None
        return result


class InTurn(ThroughAnObject):
    """Its object has one weight after the other."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.other, self.weight, self.other):
            self.held.parameter = weight
            x = (x @ self.held.parameter).tanh()
        return self.first(x)


class Scaled(ThroughAnObject):
    """Its object has no weight any more when it runs, but what is made of one."""

    def forward(self, x: Tensor) -> Tensor:
        self.held.parameter = self.other * 2
        return super().forward(x)


@pytest.mark.parametrize("is_layer", [True, False])
@pytest.mark.parametrize("kind", [ThroughAnObject, LetsGo, InTurn, Scaled])
def test_objects_that_have_weights_may_change_them(kind: type[ThroughAnObject], is_layer: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), kind(), nn.Linear(WIDTH, WIDTH), Squared())
    layers = [nn.Linear, kind] if is_layer else [nn.Linear]
    assert_same_training(Net(net), torch.randn(24, WIDTH), layers=layers, tolerance=1e-6 if kind is InTurn else 0)


def test_objects_have_the_users_parameters_when_a_fit_is_over() -> None:
    module = Net(nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for kind in (ThroughAnObject, InTurn)), Squared()))
    train_harmony(module, torch.randn(24, WIDTH), HarmonyStrategy(layers=[nn.Linear]), 8, with_gradients=False)
    _, one, last, _ = module.net
    assert one.held.parameter is one.weight
    assert last.held.parameter is last.other


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


class Inner(nn.Module):
    """Moves its input along the gradient of what it makes of it, as a class below asks for that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale

    def gradient(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        gradient = self.gradient(x.clone().requires_grad_())
        return self.run(x + 0.1 * gradient.detach()).pow(2).mean()


class OfWhatIsNotUsed(Inner):
    def gradient(self, x: Tensor) -> Tensor:
        unused = torch.zeros(3, requires_grad=True)
        gradient, zeros = torch.autograd.grad(self.run(x).sum(), [x, unused], materialize_grads=True)
        _, none = torch.autograd.grad(self.run(x).sum(), [x, unused], allow_unused=True)
        assert none is None
        assert torch.equal(zeros, torch.zeros(3))
        return gradient


class OfAnInnerTensor(Inner):
    def gradient(self, x: Tensor) -> Tensor:
        inner = x * 2
        torch.autograd.backward(self.run(inner).sum(), inputs=[inner])
        assert inner.grad is not None
        return inner.grad


class OfAnEdge(Inner):
    def gradient(self, x: Tensor) -> Tensor:
        inner = x * 2
        start, end = map(get_gradient_edge, (self.run(inner).sum(), inner))
        (gradient,) = torch.autograd.grad([start], [end], [torch.ones((), device=x.device)])
        return gradient


class OfAComparison(Inner):
    """Compares a parameter with itself, which it finds in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.found = (self.scale,)

    def gradient(self, x: Tensor) -> Tensor:
        assert self.scale in set(self.found)
        return x * (self.found[0] == self.scale)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", [OfWhatIsNotUsed, OfAnInnerTensor, OfAnEdge, OfAComparison])
def test_a_step_may_differentiate_and_compare_by_itself(kind: type[Inner], devices: int) -> None:
    torch.manual_seed(0)
    assert_same_training(Net(kind()), torch.randn(24, WIDTH), devices=devices)


class OfAllOutputsAtOnce(Inner):
    """The backward of a Jacobian, vectorized over its rows."""

    def gradient(self, x: Tensor) -> Tensor:
        outputs = self.run(x).sum(0)

        def row(direction: Tensor) -> Tensor:
            return torch.autograd.grad(outputs, x, direction, retain_graph=True)[0]

        jacobian: Tensor = torch.vmap(row)(torch.eye(WIDTH, device=x.device))
        return jacobian.mean(0)


def test_a_backward_within_a_step_may_be_vectorized() -> None:
    torch.manual_seed(0)
    assert_same_training(Net(OfAllOutputsAtOnce()), torch.randn(24, WIDTH), devices=1)


class Normalizes(nn.Module):
    """Between layers, with statistics that are frozen parameters."""

    def __init__(self, normalize: Callable[..., Tensor]) -> None:
        super().__init__()
        self.normalize, self.linear = normalize, nn.Linear(WIDTH, WIDTH)
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(self.linear(x), self.mean, self.variance).pow(2).mean()


def of_torch(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return torch.batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5, False)


def of_instances(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.instance_norm(
        x.view(len(x), WIDTH, 1).expand(-1, -1, 3) * torch.arange(3, device=x.device), mean, variance
    )


@pytest.mark.parametrize("normalize", [partial(F.batch_norm, training=True), of_torch, of_instances])
def test_statistics_of_which_no_version_tells_are_refused_as_parameters(normalize: Callable[..., Tensor]) -> None:
    """What was written there was lost, and nobody said so."""
    with pytest.raises(UnsupportedModelError, match=r"parameter 'net\.mean' is changed inside the step"):
        train_harmony(
            Net(Normalizes(normalize)),
            torch.randn(40, WIDTH),
            HarmonyStrategy(num_microbatches=2, layers=[nn.Linear]),
            8,
            with_gradients=False,
        )


def test_statistics_that_are_not_updated_may_be_parameters() -> None:
    assert_same_training(Net(Normalizes(F.batch_norm)), torch.randn(40, WIDTH), num_microbatches=2, layers=[nn.Linear])


# ---- operations of which torch tells no class ----------------------------------------------------------------------------


class OfAClass(Tensor):
    pass


def scripted(tensor: Tensor) -> Tensor:
    return torch.jit.trace(lambda each: each.exp(), torch.zeros(2, 2), check_trace=False)(tensor)


def below_functions(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor * 2


UNTOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.tensor": torch.tensor,
    "a class": lambda tensor: tensor.as_subclass(OfAClass).exp().as_subclass(Tensor),
    "a script": scripted,
    "no functions": below_functions,
    "vmap": torch.vmap(lambda row: row.exp() / row.sum()),
    "vmap beside": lambda tensor: torch.vmap(lambda row: tensor @ row)(torch.eye(WIDTH, device=tensor.device)),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor[:2]]).to_padded_tensor(0.0),
    "memory": lambda tensor: torch.empty(0, device=tensor.device).set_(tensor),
    "checkpoint": lambda tensor: torch.utils.checkpoint.checkpoint(torch.exp, tensor, use_reentrant=False),
}


class ComputesUntold(nn.Module):
    """Scales what its layers return by what it computes from a weight, a frozen one and a buffer of theirs."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.layers[2].register_buffer("scales", torch.rand(WIDTH, WIDTH))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for tensor in (self.layers[0].weight.detach(), self.layers[1].weight, self.layers[2].scales):
            x = x * self.compute(tensor).clamp(-1, 1).mean()
        return x.pow(2).mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("way", UNTOLD)
def test_operations_of_which_no_class_is_told_find_weights_and_buffers(way: str, num_microbatches: int) -> None:
    """They computed with the one element of a stand-in, which is no number."""
    torch.manual_seed(0)
    net = ComputesUntold(UNTOLD[way])
    assert_same_training(Net(net), torch.randn(24, WIDTH), layers=[nn.Linear], num_microbatches=num_microbatches)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("way", "message"),
    [
        (lambda weight: torch.utils.dlpack.to_dlpack(weight.detach()), "Cannot access data pointer"),
        (nn.Parameter, r"an nn.Parameter in the memory of parameter 'net\.layers\.0\.weight'"),
        (scripted, r"a gradient of parameter 'net\.layers\.0\.weight' comes to what stands for it"),
    ],
)
def test_what_a_stand_in_cannot_do_is_refused(way: Callable[[Tensor], Any], message: str) -> None:
    class Does(ComputesUntold):
        def forward(self, x: Tensor) -> Tensor:
            found = way(self.layers[0].weight)
            return super().forward(x) + (found.mean() if isinstance(found, Tensor) else 0)

    module = Net(Does(torch.exp))
    with pytest.raises((RuntimeError, UnsupportedModelError), match=message):
        train_harmony(module, torch.randn(8, WIDTH), HarmonyStrategy(layers=[nn.Linear]), 8, with_gradients=False)
