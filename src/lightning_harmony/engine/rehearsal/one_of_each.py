"""One of each: what layers and glue ask for has short answers where there is one device, one microbatch and no limit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.memory.stash import Stashed
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer, buffer_of
from lightning_harmony.engine.model.pack import HasGraph, Residency

CPU = torch.device("cpu")


class OneOfEach:
    """A runtime with one device, which has all tensors, and one microbatch, whose code runs in the caller's thread."""

    def brought(self, tensor: Tensor, residency: Residency, *, at_once: bool) -> Tensor:
        """It is there."""
        return tensor

    def note_made(self, result: Any) -> None:
        """There is one device."""

    def at_layer(self, tensor: Tensor, residency: Residency) -> Tensor:
        """It is there."""
        return tensor

    def make_room(self, num_bytes: int, device: Device) -> None:
        """There is no limit."""

    def calling(self) -> AbstractContextManager[None]:
        """One device: glue needs no help."""
        return nullcontext()

    def on_one_device(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """All operands are."""
        return func(*args, **kwargs)

    def device_of(self, layer: SwappedLayer) -> torch.device:
        """The one device."""
        return CPU

    def expect_backward(self, layer: SwappedLayer) -> int:
        """Announce a backward of a layer."""
        return 0

    def keep_graph(self, layer: SwappedLayer, call: HasGraph) -> bool:
        """Never: what recompute takes is to be seen."""
        return False

    def note_call(self, stash: Callable[[Tensor], Stashed]) -> Callable[[], AbstractContextManager[None]]:
        """It finds what it finds."""
        return nullcontext

    def changes_elsewhere(self) -> Callable[[], str | None]:
        """Nobody asks: nothing is recorded."""
        return lambda: None

    def recomputing(self) -> AbstractContextManager[Sequence[str]]:
        """Nobody hears it."""
        return nullcontext(())

    def show_changed_buffers(self, layer: SwappedLayer, residency: Residency, keys: Collection[BufferKey]) -> None:
        """Nobody reads them: nothing has values."""

    def read_buffer(self, layer: SwappedLayer, key: BufferKey) -> Tensor:
        """What is in it: nothing stands in for it."""
        return buffer_of(key)

    def note_set(self, attributes: dict[str, Any], names: set[str]) -> None:
        """There is one microbatch."""

    def last_filled(self) -> dict[BufferKey, Tensor | None]:
        """No call comes behind another."""
        return {}

    def recordings(self) -> None:
        """Nothing is recorded: the code of each layer is to be seen."""

    def is_spread(self, layer: SwappedLayer) -> bool:
        """It has one device."""
        return False

    def is_last_backward(self) -> bool:
        """There is one."""
        return True

    def accumulate(self, layer: SwappedLayer, use: int, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Sums count as gradients, not as work."""

    def end_backward(self, layer: SwappedLayer) -> None:
        """Nobody waits for it."""

    def views(self) -> None:
        """Nothing has values to change."""

    def set_gradient_flag(self, parameter: nn.Parameter, stand_in: Tensor, flag: bool) -> bool:
        """No other microbatch finds it."""
        with torch._C.DisableTorchFunction():
            for tensor in (parameter, stand_in):
                tensor.requires_grad_(flag)
        return True

    def changing(self, parameter: nn.Parameter, *, in_place: bool) -> None:
        """Nothing has values to change."""

    def give(self, parameter: nn.Parameter) -> None:
        """Nobody asks what a function was given."""

    def hides_gradients(self) -> bool:
        """No step was before, and this one is refused where a real one would be."""
        return True
