"""Stand-ins for buffers of layers in a step: code between layers gets what is in one, where that code computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_harmony.engine.glue.glue import ANSWERED
from lightning_harmony.engine.glue.runtime import Runtime
from lightning_harmony.engine.glue.untold import Untold
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer
from lightning_harmony.engine.structures.operations import changes_first
from lightning_harmony.engine.structures.strides import one_element


class BufferStandIn(Untold):
    """What the code between layers sees in place of a layer's buffer, which the layer has where it computes.

    Attributes:
        host_buffer: the user's own.
    """

    host_buffer: Tensor
    _layer: SwappedLayer
    _key: BufferKey
    _runtime: Runtime
    _kept: Tensor | None = None

    @staticmethod
    def of(
        host: Tensor, newest: Tensor, device: torch.device, layer: SwappedLayer, key: BufferKey, runtime: Runtime
    ) -> BufferStandIn:
        """A stand-in.

        Args:
            host: the user's own.
            newest: what is in it, whose shape and type it has.
            device: where the code between layers computes.
            layer: whose it is.
            key: which of its buffers.
            runtime: reads it.
        """
        element = one_element(newest.shape, newest.dtype, device)
        stand_in = Tensor._make_subclass(BufferStandIn, element)
        stand_in.host_buffer, stand_in._layer, stand_in._key, stand_in._runtime = host, layer, key, runtime
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
            args = (
                *tree_map_only(BufferStandIn, lambda each: each.content(to_change=True), args[:1]),
                *args[1:],
            )
        stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, BufferStandIn)]
        args, kwargs = tree_map_only(BufferStandIn, lambda each: each.content(to_change=False), (args, kwargs))
        return stand_ins[0]._runtime.on_one_device(func, args, kwargs) if stand_ins else func(*args, **kwargs)

    def keep(self, content: Tensor) -> None:
        """The layer has another tensor from now on, and another stand-in: this one is for what the layer had before."""
        self._kept = content

    @property
    def is_kept(self) -> bool:
        """Whether it is for what its layer has no longer."""
        return self._kept is not None

    @override
    def content(self, *, to_change: bool) -> Tensor:
        if self._kept is not None:
            return self._kept
        if to_change:
            return self._layer.buffer_to_change(self._key)
        return self._runtime.read_buffer(self._layer, self._key)
