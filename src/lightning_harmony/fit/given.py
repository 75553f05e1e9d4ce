"""What a strategy is given, and gives to the user's code: an accelerator, plugins and optimizers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_harmony.engine.structures.packages import LIGHTNING
from lightning_harmony.precision import refuse_unsupported
from lightning_harmony.setup import compat
from lightning_harmony.setup.nodes import Nodes
from lightning_harmony.setup.refusals import refuse_other_accelerators

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision
    from torch.optim import Optimizer

    from lightning_harmony.fit.swapped import Swapped


_SHARDED = ("XLACheckpointIO", "DistributedCheckpointIO")


def refuse_sharded(plugin: Any) -> None:
    """Refuse plugins that write one part of the state for each of several processes.

    Raises:
        ValueError: naming the plugin and the way out.
    """
    while plugin is not None:
        if any(base.__name__ in _SHARDED for base in type(plugin).__mro__):
            raise ValueError(
                f"{type(plugin).__name__} writes a part of the state for each of several processes, but "
                "strategy='harmony' is one process with all of it: leave it out of Trainer(plugins=...), or use "
                "TorchCheckpointIO or AsyncCheckpointIO"
            )
        # What a plugin such as AsyncCheckpointIO wraps.
        plugin = getattr(plugin, "checkpoint_io", None)


def refuse_beside_shards(plugin: Any) -> None:
    """Refuse plugins that would write a checkpoint where the strategy writes a sharded one itself.

    Raises:
        ValueError: naming the plugin and the way out.
    """
    if plugin is not None and type(plugin).__name__ != "TorchCheckpointIO":
        raise ValueError(
            f"{type(plugin).__name__} would not be used: HarmonyStrategy(state_dict_type='sharded') writes checkpoints "
            "itself. Leave it out of Trainer(plugins=...), or take state_dict_type='full'"
        )


# What these ask for optimizers for is no state of theirs, or the strategy is told of it otherwise.
_TELLS = LIGHTNING | {"torch"}


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


class Given(Nodes):
    """A strategy that looks at its accelerator and its plugins when it is given them.

    It ends what updates are under way before it gives optimizers, or what holds them, to the user's code.
    """

    _swapped: Swapped | None = None
    lr_scheduler_configs: Any = _Told("lr_scheduler_configs")

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        """Lightning's accelerator."""
        return super().accelerator

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Accelerator | None) -> None:
        refuse_other_accelerators(accelerator)
        compat.set_as_inherited(Given, self, "accelerator", accelerator)

    @property
    @override
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin."""
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            refuse_unsupported(plugin)
        compat.set_as_inherited(Given, self, "precision_plugin", plugin)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's plugin that writes and reads checkpoints."""
        return super().checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, plugin: CheckpointIO | None) -> None:
        refuse_sharded(plugin)
        if self._settings.state_dict_type == "sharded":
            refuse_beside_shards(plugin)
        compat.set_as_inherited(Given, self, "checkpoint_io", plugin)

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
        compat.set_as_inherited(Given, self, "optimizers", optimizers)

    def _complete_state(self) -> None:
        """The user's code asks for optimizers, whose state it may read."""
        if self._swapped is not None:
            self._swapped.training.give_optimizers()


setattr(Given, compat.WRAPPED_OPTIMIZERS, _Told(compat.WRAPPED_OPTIMIZERS))
