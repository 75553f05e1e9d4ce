"""Optimizers that may step pack by pack, and those that may not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_harmony.engine.updates.separable_optimizers import SEPARABLE, watcher_of, why_not_separable


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

    def test_an_optimizer_with_a_replaced_step_is_not_separable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It was asked of the class, which may be replaced, too."""
        optimizer = SGD(some_parameters(1))
        reason = "SGD.step is replaced by a function of its own"
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "step", lambda *_: None, raising=False)
            assert why_not_separable(optimizer) == reason
        with monkeypatch.context() as patch:
            patch.setattr(SGD, "step", lambda self, *_: None)
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


class TestWatcherOf:
    def test_a_zero_grad_of_ones_own_may_leave_gradients_to_the_next_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        optimizer = SGD(some_parameters(1))
        reason = "SGD.zero_grad is replaced by a function of its own"
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "zero_grad", lambda *_: None, raising=False)
            assert watcher_of(optimizer) == reason
        with monkeypatch.context() as patch:
            patch.setattr(SGD, "zero_grad", lambda self, *_: None)
            assert watcher_of(optimizer) == reason
        assert watcher_of(optimizer) is None

    @pytest.mark.parametrize("kind", ["pre", "post"])
    def test_step_hooks_see_all_parameters(self, kind: str) -> None:
        optimizer = SGD(some_parameters(1))
        handle = getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: None)
        assert watcher_of(optimizer) == "SGD has step hooks"
        assert why_not_separable(optimizer) is None
        handle.remove()
        assert watcher_of(optimizer) is None

    @pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
    def test_so_do_step_hooks_of_all_optimizers(
        self, register: Callable[..., torch.utils.hooks.RemovableHandle]
    ) -> None:
        optimizer = SGD(some_parameters(1))
        handle = register(lambda *_: None)
        try:
            assert watcher_of(optimizer) == "step hooks are registered for all optimizers"
        finally:
            handle.remove()
        assert watcher_of(optimizer) is None

    def test_an_optimizer_that_wraps_another_may_have_no_hooks(self) -> None:
        """Lookahead's does not call the constructor of its base: it ended with an AttributeError."""

        class Wrapper(Optimizer):
            def __init__(self, inner: Optimizer) -> None:
                self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

        assert watcher_of(Wrapper(SGD(some_parameters(1)))) is None
