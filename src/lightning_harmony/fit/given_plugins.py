"""What of Lightning's own a strategy is given: an accelerator and plugins, which are refused where they cannot be served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_harmony.precision import refuse_unsupported
from lightning_harmony.setup import compat
from lightning_harmony.setup.checkpoints import refuse_sharded
from lightning_harmony.setup.nodes import Nodes
from lightning_harmony.setup.refusals import refuse_other_accelerators


def _looked_at(name: str, refuse: Callable[[Any], None]) -> Any:
    """A property of Lightning's strategy whose values are looked at when they are set."""

    def read(strategy: Any) -> Any:
        return getattr(super(GivenPlugins, strategy), name)

    def write(strategy: Any, value: Any) -> None:
        refuse(value)
        compat.set_as_inherited(GivenPlugins, strategy, name, value)

    return property(read, write)


class GivenPlugins(Nodes):
    """A strategy that looks at its accelerator and its plugins when it is given them."""

    accelerator: Any = _looked_at("accelerator", refuse_other_accelerators)
    precision_plugin: Any = _looked_at("precision_plugin", refuse_unsupported)
    checkpoint_io: Any = _looked_at("checkpoint_io", refuse_sharded)
