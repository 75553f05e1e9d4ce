"""Optimizers that may step pack by pack, and those that may not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_harmony.engine.updates.separable_optimizers import SEPARABLE, why_not_separable


def some_parameters(number: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(5, 3 + index)) for index in range(number)]


class TestWhyNotSeparable:
    @pytest.mark.parametrize("kind", sorted(SEPARABLE, key=lambda kind: kind.__name__))
    def test_optimizers_that_look_at_one_parameter_at_a_time_are_separable(self, kind: type[Optimizer]) -> None:
        assert why_not_separable(kind(some_parameters(1))) is None

    def test_lbfgs_is_not_separable(self) -> None:
        reason = why_not_separable(torch.optim.LBFGS(some_parameters(1)))
        assert reason == "LBFGS is not known to update each parameter on its own"

    def test_a_subclass_of_a_separable_optimizer_is_not_separable(self) -> None:
        class Clipping(AdamW):
            pass

        assert "Clipping is not known" in str(why_not_separable(Clipping(some_parameters(1))))

    @pytest.mark.parametrize("method", ["step", "zero_grad"])
    def test_an_optimizer_with_a_replaced_method_is_not_separable(
        self, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was asked of the class, which may be replaced, too; gradients that a zero_grad left were gone."""
        optimizer = SGD(some_parameters(1))
        reason = f"SGD.{method} is replaced by a function of its own"
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, method, lambda *_: None, raising=False)
            assert why_not_separable(optimizer) == reason
        with monkeypatch.context() as patch:
            patch.setattr(SGD, method, lambda self, *_: None)
            assert why_not_separable(optimizer) == reason
        assert why_not_separable(optimizer) is None

    def test_an_optimizer_whose_scheduler_counts_its_steps_is_separable(self) -> None:
        optimizer = SGD(some_parameters(1))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert "step" in vars(optimizer)
        assert why_not_separable(optimizer) is None

    def test_an_optimizer_whose_step_is_wrapped_in_an_object_is_not_separable(self) -> None:
        """It has the mark of the scheduler whose step it calls."""

        class Counted:
            def __init__(self, step: Any) -> None:
                self.step = step

            def __getattr__(self, name: str) -> Any:
                return getattr(self.step, name)

        optimizer: Any = SGD(some_parameters(1))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step = Counted(optimizer.step)
        assert why_not_separable(optimizer) == "SGD.step is replaced by a function of its own"

    @pytest.mark.parametrize("kind", ["pre", "post"])
    def test_an_optimizer_with_step_hooks_is_not_separable(self, kind: str) -> None:
        optimizer = SGD(some_parameters(1))
        handle = getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: None)
        assert why_not_separable(optimizer) == "SGD has step hooks"
        handle.remove()
        assert why_not_separable(optimizer) is None

    @pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
    def test_no_optimizer_is_separable_where_all_have_step_hooks(
        self, register: Callable[..., torch.utils.hooks.RemovableHandle]
    ) -> None:
        optimizer = SGD(some_parameters(1))
        handle = register(lambda *_: None)
        try:
            assert why_not_separable(optimizer) == "step hooks are registered for all optimizers"
        finally:
            handle.remove()
        assert why_not_separable(optimizer) is None
