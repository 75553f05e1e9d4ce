"""Stand-ins for buffers that layers have changed in a step: code between layers that reads one gets what is on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_harmony.engine.glue.glue import ANSWERED, one_element
from lightning_harmony.engine.structures.operations import changes_first


class BufferStandIn(Tensor):
    """What the code between layers sees in place of a buffer that is newer on the device than on the host.

    Attributes:
        host_buffer: the user's own.
    """

    host_buffer: Tensor
    _read: Callable[[], Tensor]
    _refuse: Callable[[], None]

    @staticmethod
    def of(host: Tensor, newest: Tensor, read: Callable[[], Tensor], refuse: Callable[[], None]) -> BufferStandIn:
        """A stand-in.

        Args:
            host: the user's own.
            newest: what the layer has left, whose shape, type and device it has.
            read: gives a copy of what the layer has left last.
            refuse: raises, as it is changed.
        """
        element = one_element(newest.shape, newest.dtype, newest.device)
        stand_in = Tensor._make_subclass(BufferStandIn, element)
        stand_in.host_buffer, stand_in._read, stand_in._refuse = host, read, refuse
        return stand_in

    # Nothing may be traced through what waits for a device.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what needs no element, and read the buffer for the rest."""
        kwargs = kwargs or {}
        if func in ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if changes_first(name) or name == "__set__":
            for changed in tree_leaves(args[:1]):
                if isinstance(changed, BufferStandIn):
                    changed._refuse()
        args, kwargs = tree_map_only(BufferStandIn, lambda stand_in: stand_in._read(), (args, kwargs))
        return func(*args, **kwargs)
