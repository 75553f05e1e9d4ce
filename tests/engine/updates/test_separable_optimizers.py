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
    def test_optimizers_that_look_at_one_parameter_at_a_time_are(self, kind: type[Optimizer]) -> None:
        assert why_not_separable(kind(some_parameters(1))) is None

    def test_lbfgs_is_not(self) -> None:
        reason = why_not_separable(torch.optim.LBFGS(some_parameters(1)))
        assert reason == "LBFGS is not known to update each parameter on its own"

    def test_a_subclass_is_not(self) -> None:
        class Clipping(AdamW):
            pass

        assert "Clipping is not known" in str(why_not_separable(Clipping(some_parameters(1))))

    @pytest.mark.parametrize("method", ["step", "zero_grad"])
    def test_one_that_has_a_method_of_another_is_not(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_one_whose_scheduler_counts_its_steps_is(self) -> None:
        optimizer = SGD(some_parameters(1))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert "step" in vars(optimizer)
        assert why_not_separable(optimizer) is None

    def test_one_whose_step_passes_on_what_it_is_asked_for_is_not(self) -> None:
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
    def test_one_with_step_hooks_is_not(self, kind: str) -> None:
        optimizer = SGD(some_parameters(1))
        handle = getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: None)
        assert why_not_separable(optimizer) == "SGD has step hooks"
        handle.remove()
        assert why_not_separable(optimizer) is None

    @pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
    def test_none_is_where_all_have_step_hooks(
        self, register: Callable[..., torch.utils.hooks.RemovableHandle]
    ) -> None:
        optimizer = SGD(some_parameters(1))
        handle = register(lambda *_: None)
        try:
            assert why_not_separable(optimizer) == "step hooks are registered for all optimizers"
        finally:
            handle.remove()
        assert why_not_separable(optimizer) is None
