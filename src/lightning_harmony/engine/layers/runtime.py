"""What calls of layers ask of the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.glue.runtime import Runtime as OfGlue
from lightning_harmony.engine.layers.narrow import CastWatch
from lightning_harmony.engine.layers.open_call import OpenCall
from lightning_harmony.engine.layers.surroundings import Surroundings
from lightning_harmony.engine.memory.stash import Stashed
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer
from lightning_harmony.engine.model.pack import HasGraph, Residency

if TYPE_CHECKING:
    from lightning_harmony.engine.layers.call_arguments import CallArguments
    from lightning_harmony.engine.layers.recordings import Recordings


class ObjectsOfCall(NamedTuple):
    """The objects that a layer's own code may look at, which is about to run, and will run again.

    Attributes:
        given: what it is called with, and may change.
        again: the same objects of that, of which there are no copies, are given to it when it runs again.
        held: those among its attributes.
        stash: keeps a tensor for when it runs again.
        staying: the memory of buffers that are then what they are now, by identity.
        own: the modules of the layer, by identity: its attributes are then what they are now.
    """

    given: Sequence[Any]
    again: Sequence[Any]
    held: Sequence[Any]
    stash: Callable[[Tensor], Stashed]
    staying: Collection[int]
    own: Collection[int]


class FoundAtCall(NamedTuple):
    """What a layer's code finds when it is called, on other objects than its modules.

    Attributes:
        restore: makes all of it so while the call is running; the name of what cannot be, None if all can.
        again: the context in which the code runs again, and finds it so. What that changes is taken back.
    """

    restore: Callable[[], str | None] = lambda: None
    again: Callable[[], AbstractContextManager[None]] = nullcontext


class StepWatch(Protocol):
    """Watches microbatches that run one after the other."""

    def begin(self, microbatch: int) -> None:
        """A microbatch begins."""

    def at_call(self, layer: str) -> None:
        """It calls a layer."""

    def end(self) -> None:
        """It has ended."""


# Asked before code runs, it gives what tells afterwards the name of something elsewhere that has changed; None if nothing has.
Elsewhere = Callable[[], Callable[[], str | None]]
OnCall = Callable[[ObjectsOfCall], FoundAtCall]


@dataclass(frozen=True)
class Listeners:
    """Who is told of steps.

    Attributes:
        on_switch: told which microbatch has its turn.
        on_set: told what attributes the own code of a layer has set: those of a module, and the names of the new ones.
        watch: told of microbatches that run one after the other, if there are several.
        on_given: told the tensors with which a layer is called, before it waits for its turn.
        on_call: called before a layer's own code runs that will run again.
        elsewhere: tells what changes while a layer's code runs that may be recorded.
    """

    on_switch: Callable[[int], None] = lambda microbatch: None
    on_set: Callable[[dict[str, Any], set[str]], None] = lambda attributes, names: None
    watch: StepWatch | None = None
    on_given: Callable[[Sequence[Tensor]], None] = lambda given: None
    on_call: OnCall = lambda objects: FoundAtCall()
    elsewhere: Elsewhere = lambda: lambda: None


_NOBODY = Listeners()


class Runtime(OfGlue, Protocol):
    """What an intercepted call asks of the engine, beside what glue asks, too.

    What is answered here is the answer of one device without a limit, and one microbatch, of whose code nothing is recorded.

    Attributes:
        open_call: the call that a backward is in.
        surroundings: of layers' own code.
    """

    open_call: OpenCall
    surroundings: Surroundings

    @property
    def listeners(self) -> Listeners:
        """Who is told of calls."""
        return _NOBODY

    def stash(self, tensor: Tensor) -> Stashed:
        """Keep a tensor for the backward, on the host or as an alias."""

    def brought(self, tensor: Tensor, residency: Residency, *, at_once: bool) -> Tensor:
        """A tensor for a layer: one on its device, or one that needs a gradient where it is, with a copy for the layer."""
        return tensor

    def note_given(self, layer: SwappedLayer, arguments: CallArguments) -> None:
        """A layer is called with these, and waits for its turn."""
        self.listeners.on_given(arguments.tensors)

    def note_made(self, result: Any) -> None:
        """A layer's code has returned something."""
        return

    def at_layer(self, tensor: Tensor, residency: Residency) -> Tensor:
        """A tensor on a layer's device, without its graph."""
        return tensor

    def make_room(self, num_bytes: int, device: Device) -> None:
        """A layer is about to allocate more than it was seen to."""
        return

    def show_changed_buffers(self, layer: SwappedLayer, buffers: Mapping[BufferKey, Tensor], again: bool) -> None:
        """The code between layers is to see what a layer has left in some of its buffers.

        Args:
            layer: which one.
            buffers: what is in them.
            again: whether a part of its code has changed them that ran again in the backward.

        Raises:
            UnsupportedModelError: if it did, and another microbatch was to find that in its forward.
        """
        return

    def last_filled(self) -> dict[BufferKey, Tensor | None]:
        """The buffers that layers have filled through `.data` in the current microbatch, as the last call left them.

        None stands for one that one call has filled so far.
        """
        return {}

    def watch(self, layer: SwappedLayer, residency: Residency) -> CastWatch | None:
        """What a layer does with its weights, if that isn't known yet: the watch, to be active during its call."""

    def keep_graph(self, layer: SwappedLayer, call: HasGraph) -> bool:
        """Whether a call may keep its graph, for its backward comes at once. It is told to `forget` if it doesn't."""

    def measuring_graph(self, layer: SwappedLayer) -> AbstractContextManager[None]:
        """The context in which a layer's inputs are loaded and its saved tensors are made again."""

    def recomputing(self) -> AbstractContextManager[Sequence[str]]:
        """The context of a layer's own code when it runs again; with the names of what it logs."""
        return nullcontext(())

    def recordings(self) -> Recordings | None:
        """What may be recorded, and run in the place of layers' code; None where neither is."""
        return None

    def keep_changed(
        self, changed: Mapping[nn.Parameter, Tensor], residency: Residency
    ) -> Mapping[nn.Parameter, Tensor] | None:
        """Give the host what a layer's code has made of its parameters, and return what they were there.

        None where others use them meanwhile: other microbatches, or the code between layers.
        """
        return None

    def is_spread(self, layer: SwappedLayer) -> bool:
        """Whether the gradients of a layer come from several devices."""
        return False

    def is_last_backward(self) -> bool:
        """Whether no other backward of the current microbatch will follow."""
        return True
