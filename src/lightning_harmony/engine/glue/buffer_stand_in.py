"""Stand-ins for buffers of layers in a step: code between layers gets what is in one, where that code computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_harmony.engine.glue.glue import ANSWERED, one_element
from lightning_harmony.engine.structures.operations import changes_first


class BufferStandIn(Tensor):
    """What the code between layers sees in place of a layer's buffer, which the layer has where it computes.

    Attributes:
        host_buffer: the user's own.
    """

    host_buffer: Tensor
    _read: Callable[[], Tensor]
    _to_change: Callable[[], Tensor]

    @staticmethod
    def of(
        host: Tensor, newest: Tensor, device: torch.device, read: Callable[[], Tensor], to_change: Callable[[], Tensor]
    ) -> BufferStandIn:
        """A stand-in.

        Args:
            host: the user's own.
            newest: what is in it, whose shape and type it has.
            device: where the code between layers computes.
            read: gives a copy of what is in it.
            to_change: gives the tensor to change in its place, or raises.
        """
        element = one_element(newest.shape, newest.dtype, device)
        stand_in = Tensor._make_subclass(BufferStandIn, element)
        stand_in.host_buffer, stand_in._read, stand_in._to_change = host, read, to_change
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
            args = (*tree_map_only(BufferStandIn, lambda stand_in: stand_in._to_change(), args[:1]), *args[1:])
        args, kwargs = tree_map_only(BufferStandIn, lambda stand_in: stand_in._read(), (args, kwargs))
        return func(*args, **kwargs)
