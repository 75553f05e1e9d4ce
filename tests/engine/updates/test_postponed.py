"""Norms that are known early have the bits of torch's; a postponed update takes what it needs when it is asked for."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.updates.norms import Norms, norms_of
from lightning_harmony.engine.updates.optimizer_twin import by_norm, by_value
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.engine.updates.queue import Overlap, UpdateQueue
from support.queues import queues_of

CPU = torch.device("cpu")


@pytest.fixture
def queue() -> Iterator[UpdateQueue]:
    (queue,) = queues_of([VirtualDevice(None)])
    yield queue
    queue.close()


@pytest.fixture
def update(queue: UpdateQueue) -> PostponedUpdate:
    return PostponedUpdate([queue], Overlap())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def some_parameters(num: int = 5) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(50, 40 + number)) for number in range(num)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn_like(parameter) * 10.0**number
    return parameters


def copies(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    result = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for copy, parameter in zip(result, parameters, strict=True):
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    return result


def note(norms: Norms, parameters: list[nn.Parameter]) -> None:
    """As they leave their device."""
    for parameter, norm in zip(parameters, norms_of([p.grad for p in parameters if p.grad is not None]), strict=True):
        norms.note(parameter, norm)


class TestNorms:
    def test_have_the_bits_of_torchs_norm(self) -> None:
        parameters = some_parameters()
        norms = Norms(CPU)
        # As packs come: the last one first, some not at all.
        note(norms, parameters[3:])
        note(norms, parameters[:2])
        expected = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert torch.equal(norms.total(parameters), expected)

    @pytest.mark.parametrize("change", [lambda p: p.grad.mul_(2), lambda p: setattr(p, "grad", p.grad * 2)])
    def test_of_a_gradient_that_changed_since_are_computed_anew(self, change: Callable[[nn.Parameter], object]) -> None:
        parameters = some_parameters()
        norms = Norms(CPU)
        note(norms, parameters)
        with torch.no_grad():
            change(parameters[4])
        expected = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert torch.equal(norms.total(parameters), expected)

    def test_of_several_types_and_of_nothing_are_torchs(self) -> None:
        parameters = some_parameters(2)
        parameters.append(nn.Parameter(torch.randn(3, dtype=torch.float64)))
        parameters[2].grad = torch.randn(3, dtype=torch.float64)
        grads = [p.grad for p in parameters if p.grad is not None]
        assert torch.equal(Norms(CPU).total(parameters), torch.nn.utils.get_total_norm(grads))
        assert float(Norms(CPU).total([nn.Parameter(torch.ones(1))])) == 0.0


@pytest.mark.parametrize("max_norm", [1.0, 1e9, float("nan")])
def test_clipping_by_norm_in_parts_has_the_bits_of_torchs(max_norm: float) -> None:
    parameters = some_parameters()
    whole = copies(parameters)
    torch.nn.utils.clip_grad_norm_(whole, max_norm)
    clip = by_norm(max_norm, Norms(CPU).total(parameters))
    # Not to read and write all gradients where that changes none.
    assert (clip is None) is (max_norm == 1e9)
    for part in (parameters[2:], parameters[:2]):
        if clip is not None:
            clip(part)
    for ours, theirs in zip(parameters, whole, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}], amsgrad=True)


@pytest.mark.parametrize("make", [adamw, lambda p: SGD(p, lr=0.1), lambda p: AdamW(p, lr=torch.tensor(0.1))])
def test_a_postponed_update_is_the_step_that_was_asked_for(
    make: Callable[[list[nn.Parameter]], Optimizer], update: PostponedUpdate, queue: UpdateQueue
) -> None:
    parameters = some_parameters()
    parameters[1].grad = None
    expected = copies(parameters)
    optimizer, plain = make(parameters), make(expected)
    for number in range(3):
        torch.nn.utils.clip_grad_value_(expected, 0.5)
        plain.step()
        gate = threading.Event()
        queue.submit(lambda gate=gate: (gate.wait(30), None)[1])
        # A share that names a parameter again, and one that none has.
        update.start(
            optimizer, [[parameters[3]], [parameters[3], parameters[0], nn.Parameter(torch.ones(1))]], by_value(0.5)
        )
        # A scheduler and Lightning's zero_grad don't wait.
        grads = [parameter.grad for parameter in parameters]
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(1e6)
            else:
                group["lr"] = 1e6
        optimizer.zero_grad()
        assert update.is_under_way([parameters[0]])
        assert not update.is_under_way([parameters[1]])
        gate.set()
        update.wait_for([parameters[3]])
        assert torch.equal(parameters[3], expected[3])
        update.finish()
        assert not update.is_under_way(parameters)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(rate, torch.Tensor):
                rate.fill_(0.1)
            group["lr"] = rate
        for parameter, grad, other in zip(parameters, grads, expected, strict=True):
            assert torch.equal(parameter, other), number
            # Clipped in place, as Lightning would have.
            parameter.grad = grad
            assert (grad is None) == (other.grad is None)
            assert grad is None or torch.equal(grad, other.grad)
    torch.testing.assert_close(optimizer.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert list(optimizer.state) == [p for p in parameters if p in optimizer.state]


def test_the_state_is_complete_for_who_asks_for_it_or_replaces_it(update: PostponedUpdate, queue: UpdateQueue) -> None:
    parameters = some_parameters()
    optimizer = AdamW(parameters)
    for ask in (optimizer.state_dict, lambda: optimizer.load_state_dict(AdamW(parameters).state_dict())):
        gate = threading.Event()
        queue.submit(lambda gate=gate: (gate.wait(30), None)[1])
        update.start(optimizer, [], None)
        threading.Timer(0.02, gate.set).start()
        ask()
        assert not update.is_under_way(parameters)
    assert optimizer.state == {}
    assert not optimizer._optimizer_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_an_error_is_raised_once_and_the_other_shares_are_done(
    update: PostponedUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = some_parameters(2)
    before = parameters[1].detach().clone()

    def clip(members: list[nn.Parameter]) -> None:
        if members[0].shape == parameters[0].shape:
            raise ZeroDivisionError

    update.start(SGD(parameters, lr=1.0), [[parameter] for parameter in parameters], clip)
    with pytest.raises(ZeroDivisionError):
        update.finish()
    update.finish()
    assert not torch.equal(parameters[1], before)


def test_what_was_waited_for_is_not_hidden() -> None:
    overlap = Overlap()
    assert overlap.take_hidden() == 0.0
    overlap.busy_seconds, overlap.waited_seconds = 2.0, 0.5
    assert overlap.take_hidden() == 0.75
    overlap.busy_seconds, overlap.waited_seconds = 1.0, 3.0
    assert overlap.take_hidden() == 0.0
    assert overlap.take_hidden() == 0.0
