"""Optimizers that the user's code asks for: their state is that after the last step, whatever was postponed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_harmony.fit.streamed_checkpoints import StreamedCheckpoints
from lightning_harmony.setup import compat

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lightning_harmony.fit.swapped import Swapped

# What these ask for optimizers for is no state of theirs, or the strategy is told of it otherwise.
_TELLS = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_harmony", "torch")


class _Told:
    """An attribute of a strategy, which is told when the user's code reads it.

    Args:
        name: of the attribute.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, strategy: Any, kind: Any = None) -> Any:
        if strategy is None:
            return self
        if _is_asked_by_user():
            strategy._complete_state()
        return vars(strategy)[self._name]

    def __set__(self, strategy: Any, value: Any) -> None:
        vars(strategy)[self._name] = value


def _is_asked_by_user() -> bool:
    """Whether the code that calls Lightning's is neither its own, nor torch's, nor ours."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in compat.MODULES_THAT_GIVE_OPTIMIZERS:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] not in _TELLS


class GivenOptimizers(StreamedCheckpoints):
    """A strategy that ends what updates are under way before it gives optimizers, or what holds them, to the user's code."""

    _swapped: Swapped | None = None
    lr_scheduler_configs: Any = _Told("lr_scheduler_configs")

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        """The fit's."""
        if _is_asked_by_user():
            self._complete_state()
        return super().optimizers

    @optimizers.setter
    @override
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        compat.set_as_inherited(GivenOptimizers, self, "optimizers", optimizers)

    def _complete_state(self) -> None:
        """The user's code asks for optimizers, whose state it may read."""
        if self._swapped is not None:
            self._swapped.training.give_optimizers()


setattr(GivenOptimizers, compat.WRAPPED_OPTIMIZERS, _Told(compat.WRAPPED_OPTIMIZERS))
