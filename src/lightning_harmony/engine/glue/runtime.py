"""What the code between layers asks of the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_harmony.engine.glue.views import Views
from lightning_harmony.engine.memory.stash import Stashed
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer, buffer_of
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.plan.values.task import Phase


class Runtime(Protocol):
    """What glue asks of the engine.

    What is answered here is the answer of one device, the host, and one microbatch, whose gradients nobody takes.
    """

    def visit(self, layer: SwappedLayer, phase: Phase) -> AbstractContextManager[Residency]:
        """Wait for the turn of a layer; it resides on the device within the context."""

    def glue_layer(self, parameter: nn.Parameter) -> SwappedLayer:
        """The layer that a parameter is when glue uses it."""

    def tokens(self) -> dict[nn.Parameter, Tensor] | None:
        """What the uses of each parameter in the current microbatch are differentiated to, kept for further uses."""

    def views(self) -> Views | None:
        """Those of parameters that the current microbatch has been given; None where none runs."""
        return None

    def give(self, parameter: nn.Parameter) -> None:
        """An autograd function of the user's own is given a parameter."""
        return

    def set_gradient_flag(self, parameter: nn.Parameter, stand_in: Tensor, flag: bool) -> bool:
        """The current microbatch says whether a parameter needs gradients; whether one may."""

    def note_attribute(self, parameter: nn.Parameter) -> None:
        """The code between layers is about to set something on a parameter."""
        return

    def changing(self, parameter: nn.Parameter, *, in_place: bool) -> AbstractContextManager[Tensor] | None:
        """The context in which a parameter is on a device, to be changed there; None where others use it meanwhile.

        Args:
            parameter: which one.
            in_place: whether what has its memory is changed, too.
        """
        return None

    def resident_parameter(self, tensor: Tensor) -> tuple[SwappedLayer, Tensor] | None:
        """The layer of the glue whose parameter on the device ``tensor`` is a view of, and that parameter."""

    def stash_unchanged(self, tensor: Tensor) -> Stashed:
        """Keep a tensor that nobody may change, on the host or as an alias."""

    def expect_backward(self, layer: SwappedLayer) -> int:
        """Announce a backward of a layer; return which use of the layer in its microbatch this is."""
        return 0

    def accumulate(self, layer: SwappedLayer, use: int, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Take the gradients of one announced backward."""
        return

    def end_backward(self, layer: SwappedLayer) -> None:
        """An announced backward is over."""
        return

    def calling(self) -> AbstractContextManager[None]:
        """The context of the engine's own operations."""
        return nullcontext()

    def on_one_device(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation whose operands may be on several devices."""
        return func(*args, **kwargs)

    def hides_gradients(self) -> bool:
        """Whether a step runs whose code would not find the gradients of earlier ones."""

    def device_of(self, layer: SwappedLayer) -> torch.device:
        """Where a layer runs for the current lane."""
        return torch.device("cpu")

    def read_buffer(self, layer: SwappedLayer, key: BufferKey) -> Tensor:
        """A copy of what is in a layer's buffer, for the code between layers or for another layer."""
        return buffer_of(key)

    def filled_since(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        """What tells the content of a tensor that glue saves, in the backward: of a buffer that calls fill meanwhile."""
        return lambda: None
