"""What of Lightning's own a strategy is given: an accelerator and plugins, which are refused where they cannot be served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_harmony.precision import refuse_unsupported
from lightning_harmony.setup import compat
from lightning_harmony.setup.checkpoints import refuse_sharded
from lightning_harmony.setup.nodes import Nodes
from lightning_harmony.setup.refusals import refuse_other_accelerators

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision


class GivenPlugins(Nodes):
    """A strategy that looks at its accelerator and its plugins when it is given them."""

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        """Lightning's accelerator."""
        return super().accelerator

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Accelerator | None) -> None:
        refuse_other_accelerators(accelerator)
        compat.set_as_inherited(GivenPlugins, self, "accelerator", accelerator)

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
        compat.set_as_inherited(GivenPlugins, self, "precision_plugin", plugin)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's plugin that writes and reads checkpoints."""
        return super().checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, plugin: CheckpointIO | None) -> None:
        refuse_sharded(plugin)
        compat.set_as_inherited(GivenPlugins, self, "checkpoint_io", plugin)
