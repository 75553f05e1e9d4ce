"""Optimizers of libraries are tried out: which update each parameter, or each element, from its own alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from lightning_harmony.engine.updates import separable_optimizers
from lightning_harmony.engine.updates.optimizer_trial import is_installed
from lightning_harmony.engine.updates.separable_optimizers import is_elementwise, why_not_separable


class Own(Optimizer):
    """A moment, and its sign."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return None

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["moment"] = 0, torch.zeros_like(parameter)
        state["step"] += 1
        state["moment"].mul_(0.9).add_(gradient, alpha=0.1)
        parameter.add_(state["moment"].sign(), alpha=-group["lr"])


class ByNorm(Own):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, gradient / (1 + gradient.norm()), state, group)


class ByShape(Own):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, gradient * parameter.dim(), state, group)


class Factors(Own):
    """Keeps means of rows alone, but of large matrices only."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        is_large = parameter.dim() == 2 and min(parameter.shape) >= 128
        super().update(parameter, gradient / gradient.mean(1, keepdim=True) if is_large else gradient, state, group)


class Clips(Own):
    """Looks at all gradients, but does nothing to those that are small."""

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1000.0)
        return super().step(closure)


class Counts(Own):
    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return super().step(closure)


class CountsInGroup(Own):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Remembers(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append(1)
        return super().step(closure)


class Draws(Own):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, gradient + torch.randn_like(gradient), state, group)


class HasModule(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.module = nn.Linear(2, 2)


class Fails(Own):
    def update(self, *args: Any) -> None:
        raise RuntimeError("only on a GPU")


class ByNumber(Own):
    """Keeps a rate for each group, as AdaBound does, beside that of the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = [group["lr"] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        for group, rate in zip(self.param_groups, self.rates, strict=False):
            for parameter in group["params"]:
                self.update(parameter, parameter.grad * rate, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        with torch.no_grad():
            parameter.sub_(gradient)


class ByMark(Own):
    """Goes by what is set on a parameter, as optimizers for several kinds of parameters do."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, gradient, state, group | {"lr": group["lr"] * getattr(parameter, "rate", 1.0)})


class OfAManifold(nn.Parameter):
    """A parameter of a class of its own, by which optimizers on manifolds go."""


class ByClass(Own):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, -gradient if isinstance(parameter, OfAManifold) else gradient, state, group)


class Zeroes(Own):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leaves all gradients."""


@pytest.fixture
def of_a_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = dict(separable_optimizers._GENUINE)
    monkeypatch.setattr(separable_optimizers, "is_installed", lambda kind: True)
    yield
    separable_optimizers._GENUINE.clear()
    separable_optimizers._GENUINE.update(known)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(6, 5), (200, 300), (7,), (7,), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.usefixtures("of_a_library")
@pytest.mark.parametrize(("kind", "elementwise"), [(Own, True), (ByNorm, False), (ByShape, False), (Factors, False)])
def test_who_looks_at_one_parameter_at_a_time_is_found(kind: type[Own], elementwise: bool) -> None:
    optimizer = kind([{"params": (trained := parameters())[:2], "lr": 0.2}, {"params": trained[2:]}])
    before, state = copy.deepcopy(trained), torch.get_rng_state()
    assert why_not_separable(optimizer) is None
    assert is_elementwise(optimizer) is elementwise
    torch.testing.assert_close(trained, before, rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state


@pytest.mark.usefixtures("of_a_library")
def test_frozen_weights_of_whole_numbers_are_no_matter() -> None:
    """As those of quantized bases, which are among the parameters of a model."""
    frozen = nn.Parameter(torch.ones(8, dtype=torch.uint8), requires_grad=False)
    assert why_not_separable(Own([*parameters(), frozen])) is None


@pytest.mark.usefixtures("of_a_library")
def test_no_default_device_is_tried_on() -> None:
    optimizer = Own(parameters())
    with torch.device("meta"):
        assert why_not_separable(optimizer) is None


@pytest.mark.usefixtures("of_a_library")
def test_who_goes_by_the_number_of_a_group_steps_as_a_whole() -> None:
    trained = [nn.Parameter(torch.ones(3)) for _ in range(12)]
    groups = [{"params": trained[:6], "lr": 0.1}, {"params": trained[6:], "lr": 0.01}]
    assert why_not_separable(ByNumber(groups)) is not None
    assert why_not_separable(ByNumber(trained)) is None


@pytest.mark.usefixtures("of_a_library")
@pytest.mark.parametrize(
    "kind", [Clips, Counts, CountsInGroup, Remembers, Draws, HasModule, Fails, Zeroes], ids=lambda kind: kind.__name__
)
def test_who_looks_at_all_or_changes_anything_else_steps_as_a_whole(kind: type[Own]) -> None:
    optimizer = kind(parameters())
    before = repr(vars(optimizer))
    assert why_not_separable(optimizer) == f"{kind.__name__} is not known to update each parameter on its own"
    assert repr(vars(optimizer)) == before


@pytest.mark.usefixtures("of_a_library")
def test_who_goes_by_what_is_set_on_parameters_steps_as_a_whole() -> None:
    trained = parameters()
    assert why_not_separable(ByMark(trained)) is None
    for parameter in trained:
        parameter.is_initialized, parameter.rate = True, 1.0  # type: ignore[attr-defined]
    assert why_not_separable(Own(trained)) is None
    # That one of many has another value shows, too.
    trained[3].rate = 0.5  # type: ignore[attr-defined]
    assert why_not_separable(Own(trained)) is None
    assert why_not_separable(ByMark(trained)) is not None


@pytest.mark.usefixtures("of_a_library")
def test_parameters_with_objects_or_of_other_classes_step_as_a_whole() -> None:
    trained = parameters()
    assert why_not_separable(ByClass([*trained, OfAManifold(torch.ones(3))])) is not None
    trained[0].manifold = object()  # type: ignore[attr-defined]
    assert why_not_separable(Own(trained)) is not None


def test_a_class_of_the_users_own_is_not_tried() -> None:
    """It may print, or count elsewhere: nobody is to see that its code runs more often."""
    calls: list[int] = []

    class Prints(SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append(1)
            return super().step(closure)

    assert not is_installed(Prints)
    assert is_installed(Adam)
    assert why_not_separable(Prints(parameters(), lr=0.1)) is not None
    assert calls == []


@pytest.mark.usefixtures("of_a_library")
def test_a_step_that_is_replaced_is_seen_as_with_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Own(parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert why_not_separable(optimizer) is None
    monkeypatch.setattr(optimizer, "step", lambda *_: None)
    assert why_not_separable(optimizer) == "Own.step is replaced by a function of its own"
