"""States that are saved and loaded: each is whole, as a step has left it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_harmony.fit.given_optimizers import GivenOptimizers
from lightning_harmony.setup.checkpoints import refuse_directory, refuse_torn

if TYPE_CHECKING:
    from torch.optim import Optimizer


class WholeStates(GivenOptimizers):
    """A strategy that completes the last step before it gives a state, and gives none of a step that is not complete."""

    # What has left the state of a failed step as that of no one step: until another fit.
    _torn: str | None = None

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of one file.

        Raises:
            ValueError: if it is the directory of a sharded one.
        """
        refuse_directory(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state where the parameters are: on the host."""
        # As plain Lightning does: a checkpoint may have states of fewer optimizers, or of none.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def _finish_update(self) -> None:
        """See to it that all parameters and the optimizer's state are those after the last step."""
        if self._swapped is not None:
            self._swapped.finish_update()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state after the last step."""
        self._refuse_torn()
        self._finish_update()
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state after the last step; it is whole between steps only.

        Raises:
            RuntimeError: in the middle of a step, or after one that failed when a part of its updates had been made.
        """
        if self._swapped is not None and self._swapped.engine.is_running:
            raise RuntimeError(
                "the state of the module was asked for in the middle of a step, in which layers are swapped and updated: "
                "save checkpoints in a hook such as on_train_batch_end, not in the step"
            )
        self._refuse_torn()
        self._finish_update()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def _refuse_torn(self) -> None:
        refuse_torn(self._torn if self._swapped is None else self._swapped.engine.updater.torn)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Lose no update that was asked for."""
        if self._swapped is not None:
            self._swapped.engine.updater.postponed.drain()
        super().on_exception(exception)
