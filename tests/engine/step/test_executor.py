"""An executor without Lightning: steps of a model, conducted by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.layers.runtime import Listeners
from lightning_harmony.engine.model.decompose import find_layers
from lightning_harmony.engine.step.assembly import assemble
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.step.turns import Microbatch
from lightning_harmony.engine.updates.update import StepUpdate

WIDTH, NUM_LAYERS = 16, 4
WEIGHT_BYTES = 4 * WIDTH * (WIDTH + 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def parts() -> Sequence[Tensor]:
    return torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def microbatches(model: Model, parts: Sequence[Tensor]) -> list[Microbatch]:
    return [Microbatch(lambda part=part: model(part), Fraction(1, 2), seed) for seed, part in enumerate(parts)]  # type: ignore[misc]


def step(executor: Executor, model: Model, parts: Sequence[Tensor], *, interleave: bool = True) -> None:
    executor.forward(microbatches(model, parts), num_elements=1, predicted_gradient=None, interleave=interleave)
    executor.backward(torch.ones(()), StepUpdate())


def plain(model: Model, parts: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients that plain training makes of the same microbatches."""
    for part in parts:
        (0.5 * model(part)).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters()]


def gradients(model: Model) -> list[Tensor | None]:
    found = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@contextmanager
def executor_of(model: Model, num_devices: int = 1, **options: object) -> Iterator[Executor]:
    # Room for two layers with their gradients.
    devices = [VirtualDevice(5 * WEIGHT_BYTES + 4096) for _ in range(num_devices)]
    layers = find_layers(model, max_layer_bytes=None, layers=[nn.Linear])
    assert len(layers) == NUM_LAYERS
    executor = assemble(model, layers, *devices, **options)  # type: ignore[arg-type]
    try:
        yield executor
    finally:
        executor.close()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("interleave", [False, True])
def test_gradients_are_those_of_plain_training_in_each_step(
    model: Model, parts: Sequence[Tensor], num_devices: int, interleave: bool
) -> None:
    expected = plain(copy.deepcopy(model), parts)
    with executor_of(model, num_devices) as executor:
        for number in range(3):
            step(executor, model, parts, interleave=interleave)
            assert executor.step.is_sequential == (number == 0 or not interleave)
            assert same(gradients(model), expected)
            assert not executor.step.is_driven


def test_listeners_are_told_whose_turn_it_is_until_others_take_their_place(
    model: Model, parts: Sequence[Tensor]
) -> None:
    turns: list[int] = []
    with executor_of(model) as executor:
        executor.notify(Listeners(turns.append))
        step(executor, model, parts)
        assert list(dict.fromkeys(turns)) == [0, 1, 2]
        turns.clear()
        executor.notify()
        step(executor, model, parts)
        assert turns == []


def test_microbatches_that_run_one_after_the_other_are_watched(model: Model, parts: Sequence[Tensor]) -> None:
    class Watch:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def begin(self, microbatch: int) -> None:
            self.seen.append(f"begin {microbatch}")

        def at_call(self, layer: str) -> None:
            self.seen.append(layer)

        def end(self) -> None:
            self.seen.append("end")

    watch = Watch()
    calls = [f"layers.{number}" for number in range(NUM_LAYERS)]
    with executor_of(model) as executor:
        executor.notify(Listeners(watch=watch))
        step(executor, model, parts)
        assert watch.seen == [word for number in range(3) for word in [f"begin {number}", *calls, "end"]]
        step(executor, model, parts)
        assert len(watch.seen) == 3 * (NUM_LAYERS + 2)


@pytest.mark.parametrize("interleave", [False, True])
def test_another_gradient_than_the_predicted_one_is_made_up_for_and_none_is_predicted_again(
    model: Model, parts: Sequence[Tensor], interleave: bool
) -> None:
    expected = [None if gradient is None else 4 * gradient for gradient in plain(copy.deepcopy(model), parts)]
    with executor_of(model) as executor:
        # Where one is predicted, the backward of a microbatch, or of its last packs, precedes the next microbatch.
        for predicted in (1.0, 1.0, 4.0):
            options = {"num_elements": 1, "predicted_gradient": predicted, "interleave": interleave}
            executor.forward(microbatches(model, parts), **options)  # type: ignore[arg-type]
            executor.backward(torch.full((), 4.0), StepUpdate())
            assert same(gradients(model), expected)


def test_layers_run_again_in_the_context_that_was_given_for_that(model: Model, parts: Sequence[Tensor]) -> None:
    entered: list[None] = []

    @contextmanager
    def recomputing() -> Iterator[None]:
        entered.append(None)
        yield

    with executor_of(model, recomputing=recomputing) as executor:
        executor.forward(microbatches(model, parts), num_elements=1, predicted_gradient=None)
        assert not entered
        executor.backward(torch.ones(()), StepUpdate())
        assert len(entered) == 3 * NUM_LAYERS


@pytest.mark.parametrize("first", [True, False])
def test_an_error_in_a_microbatch_ends_the_step_and_not_the_next_one(
    model: Model, parts: Sequence[Tensor], first: bool
) -> None:
    def fail() -> Tensor:
        model(parts[0])
        raise ZeroDivisionError

    with executor_of(model) as executor:
        if not first:
            step(executor, model, parts)
            gradients(model)
        broken = [*microbatches(model, parts[:1]), Microbatch(fail, Fraction(1, 2), 1)]
        with pytest.raises(ZeroDivisionError):
            executor.forward(broken, num_elements=1, predicted_gradient=None)
        assert not executor.step.is_driven
        step(executor, model, parts)
        assert same(gradients(model), plain(copy.deepcopy(model), parts))


def test_a_closed_executor_leaves_the_model_as_it_was(model: Model, parts: Sequence[Tensor]) -> None:
    with executor_of(model) as executor:
        step(executor, model, parts)
        gradients(model)
    assert all("forward" not in vars(layer) for layer in model.layers)
    assert same(plain(model, parts), plain(copy.deepcopy(model), parts))
