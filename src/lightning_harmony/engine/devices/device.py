"""A device with a capacity: what a GPU and a virtual device have in common."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_harmony.engine.devices.leaving import Leaving
from lightning_harmony.engine.devices.recording import Recording, RecordingError, Work
from lightning_harmony.engine.devices.stream import Event, Moment, Stream
from lightning_harmony.plan.values.machine import shared_stash_bytes
from lightning_harmony.plan.values.task import STREAM_OF, Errand, Task

# One for all: nothing is to be made in each turn.
NO_CONTEXT = nullcontext()
# To copy so much on the host takes less than to wake the thread that copies: 10 microseconds instead of 50.
BRIEFLY_COPIED_BYTES = 64 * 1024


class Recorder(Protocol):
    """What keeps when devices worked."""

    def copying(
        self, device: Device, kind: Errand, what: str, num_bytes: int, work: Callable[[], None], pack: int | None
    ) -> Callable[[], None]:
        """The work of a copy between host and device, with a note of when it runs."""

    def transferring(
        self, source: Device, target: Device, num_bytes: int, task: Task | None
    ) -> AbstractContextManager[None]:
        """The context in which a tensor is copied from device to device."""

    def waiting(self) -> AbstractContextManager[None]:
        """The context in which what computes waits for a copy."""


class Device(ABC):
    """Where packs run: its memory, its capacity and its streams.

    Attributes:
        torch_device: where its tensors live.
        capacity_bytes: what may be allocated on it; None for no limit.
        swap_in: the stream of host-to-device copies. Separate, so that a copy runs under compute.
        swap_out: the stream of device-to-host copies: both directions of the bus work at once.
        stash_in: the stream on which the stash comes back, which a lane needs at once: it is not to queue behind a pack.
        gather: the stream on which gradients of packs that are spread are added, where they come from other devices: whatever
            computes here does not wait for these.
        computes_apart: whether it computes with another processor than the host updates parameters with.
        uncounted_bytes: what is allocated in a step besides all that is counted: for libraries, and by rounding up.
        is_one_of_several: whether one thread launches the work of others, too, and lanes go from device to device.
        records: whether work that computes on it can be recorded.
        library_bytes: what libraries take besides, where something is recorded.
        set_aside_bytes: what plans leave of it for what is recorded.
        recorded_bytes: what is taken of that.
        pools_apart: whether what lasts longer than a turn, weights and sums, has memory of its own.
        lasting_limit_bytes: how much of that there may be before it takes the memory of what passes; None for no limit.
        recorder: keeps when this device works, while somebody wants to know.
        leaving: what is on its way off it.
    """

    torch_device: torch.device
    capacity_bytes: int | None
    swap_in: Stream
    swap_out: Stream
    stash_in: Stream
    gather: Stream
    computes_apart: bool = False
    uncounted_bytes: int = 0
    is_one_of_several: bool = False
    records: bool = False
    library_bytes: int = 0
    set_aside_bytes: int = 0
    recorded_bytes: int = 0
    pools_apart: bool = False
    lasting_limit_bytes: int | None = None

    def __init__(self, torch_device: torch.device, capacity_bytes: int | None) -> None:
        self.torch_device = torch_device
        self.capacity_bytes = capacity_bytes
        self.recorder: Recorder | None = None
        self.leaving = Leaving()
        self._lasting_bytes = 0

    @abstractmethod
    def empty(self, num_bytes: int, stream: Stream | None = None) -> Tensor:
        """A flat uint8 buffer, to be filled by a stream, `swap_in` if none is given."""

    @abstractmethod
    def scratch(self, num_bytes: int) -> Tensor:
        """A flat uint8 buffer, to be filled by compute."""

    @abstractmethod
    def sums(self, num_bytes: int) -> Tensor:
        """A flat uint8 buffer, to be filled by compute, of the memory that `swap_in` fills, too.

        What lasts longer than a turn has one pool: what weights have left is for gradients, and the other way round.
        """

    @abstractmethod
    def side_stream(self, *, is_urgent: bool = False) -> Stream:
        """A stream beside all others, for updates.

        Args:
            is_urgent: whether its kernels go before those of other streams.
        """

    def staging(self, num_bytes: int, stream: Stream) -> Tensor:
        """A flat uint8 buffer for updates, to be filled by such a stream."""
        return self.empty(num_bytes, stream)

    @abstractmethod
    def allocated_bytes(self) -> int:
        """What is allocated now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that was allocated since the device was opened."""

    def peak_reserved_bytes(self) -> int:
        """The most that was taken of the device for what is allocated on it."""
        return self.peak_bytes()

    def note_kernels(self) -> bool:
        """Kernels of all kinds have run: see what these have left of the capacity. Whether it is less than before."""
        return False

    @abstractmethod
    def prepare_thread(self) -> None:
        """Let libraries take what they keep of the device for the calling thread, before it is counted what they leave."""

    def note_shortage(self) -> bool:
        """There was too little memory for turns that a plan had found room for: whether plans get less from now on.

        They do where memory in pieces, or work that takes more than was seen, may have been the cause, and one that is made
        with less may fit.
        """
        return False

    @abstractmethod
    def watch_peak(self) -> Callable[[], int]:
        """Start to watch a peak; calling the result gives the most that was allocated since."""

    @abstractmethod
    def record(self) -> Event:
        """The event of all that the caller has computed so far on this device."""

    @abstractmethod
    def moment(self) -> Moment:
        """The moment at which all that the caller has computed so far on this device is done."""

    @abstractmethod
    def lane_moment(self) -> Moment:
        """The moment at which the running lane's own work on this device is done so far."""

    @abstractmethod
    def free(self, buffer: Tensor, uses: Sequence[Event], *, is_kept: bool = False) -> None:
        """Called before our last reference to a buffer of `swap_in`'s memory goes: it is reused only after its uses.

        Who drops one when all its uses are over need not call it.

        Args:
            buffer: what is not needed any more.
            uses: what has used it so far.
            is_kept: whether others refer to its memory, and will use it before they let it go.
        """

    @abstractmethod
    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this device's memory."""

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """The context of all code that computes on this device: in order, whichever lane it is for."""

    def differentiating(self) -> AbstractContextManager[None]:
        """The context in which autograd runs the nodes of what was computed here, one after the other."""
        return nullcontext()

    def scheduling(self) -> AbstractContextManager[None]:
        """The context of what goes on between the turns of lanes: it is ordered with computing, after no lane's own work."""
        return NO_CONTEXT

    def selected(self) -> AbstractContextManager[None]:
        """The context of a lane's own work on this device, between the layers."""
        return self.computing()

    def lane(self) -> AbstractContextManager[None]:
        """The context of all that a lane does: it is computed in the order in which it is launched, with what layers do.

        On a stream of its own it would have a pool of its own: of 16 lanes' losses, torch's allocator could give the memory
        of none to the next without waiting for the device.
        """
        return self.computing()

    def send(self, copy: Callable[[], Tensor], source: Tensor, after: Event | None) -> tuple[Tensor, Event | None]:
        """Copy a tensor to another device.

        Args:
            copy: does.
            source: the tensor, which is here.
            after: what the copy waits for; None for all that was launched here so far.

        Returns:
            The copy, and the event after which the tensor may be changed; None for at once.
        """
        return copy(), None

    def sending(self) -> AbstractContextManager[None]:
        """The context of a copy to another device, in the work of a stream of that one: beside all that computes here."""
        return nullcontext()

    def on_host(self) -> AbstractContextManager[None]:
        """The context of host work in the middle of code that computes on this device."""
        return nullcontext()

    def run_compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call compiled code that computes on this device."""
        return function(*args, **kwargs)

    def recorded(self, work: Work) -> Recording:
        """Record work that computes on this device.

        Raises:
            RecordingError: if that cannot be; it says why.
        """
        raise RecordingError("this device records nothing")

    def forget_recorded(self) -> None:
        """Nothing that was recorded will be replayed any more: its memory is free. To be told before the recordings go."""
        self.recorded_bytes = 0

    def release_cached(self) -> None:
        """Give back what is free, but kept for who asks for memory next. It waits for the device; the host keeps nothing."""
        return

    def host_buffer(self, num_bytes: int) -> Tensor:
        """A flat uint8 buffer on the host that this device copies from and to at full speed."""
        return flat_buffer(num_bytes, torch.device("cpu"))

    def copies_fast(self, tensor: Tensor) -> bool:
        """Whether this device copies from a host tensor, and to it, at full speed, while the host goes on."""
        return True

    def register_host(self, buffer: Tensor) -> Callable[[], None]:
        """Make an existing host buffer fast to copy; calling the result undoes it."""
        return lambda: None

    def start_copy(
        self,
        kind: Errand,
        what: str,
        num_bytes: int,
        copy: Callable[[], None],
        after: Sequence[Event] = (),
        pack: int | None = None,
    ) -> Event:
        """Start a copy that has a stream of its own, and let it be known when it runs, if somebody records that.

        Args:
            kind: the kind of its task, which has a stream.
            what: the kind of what is copied.
            num_bytes: how much of that.
            copy: copies.
            after: the events that have to happen before.
            pack: which one's; None for what belongs to the running lane.
        """
        if self.recorder is not None:
            copy = self.recorder.copying(self, kind, what, num_bytes, copy, pack)
        stream = self.stream_of(kind)
        submit = stream.submit_brief if num_bytes <= BRIEFLY_COPIED_BYTES else stream.submit
        return submit(copy, after)

    def stream_of(self, kind: Errand) -> Stream:
        """Where a kind of copy runs."""
        streams = {
            "swap-in": self.swap_in,
            "stash-in": self.stash_in,
            "swap-out": self.swap_out,
            "gather": self.gather,
        }
        return streams[STREAM_OF[kind]]

    def receiving(self, source: Device, num_bytes: int, task: Task | None) -> AbstractContextManager[None]:
        """The context of a copy from another device; the task is None for what belongs to the running lane."""
        return nullcontext() if self.recorder is None else self.recorder.transferring(source, self, num_bytes, task)

    def waiting(self) -> AbstractContextManager[None]:
        """The context in which what computes on this device waits for a copy."""
        return nullcontext() if self.recorder is None else self.recorder.waiting()

    def unplanned_bytes(self) -> int:
        """What plans have to leave of it beside all that they count."""
        return self.uncounted_bytes + max(self.set_aside_bytes - self.recorded_bytes, 0) + self.shared_stash_bytes

    @property
    def shared_stash_bytes(self) -> int:
        """How much of the stash may stay here: tensors that several layers take, such as the positions of tokens.

        To bring them back for each layer takes the bus of a GPU little, and the host as long as large ones.
        """
        return shared_stash_bytes(self.capacity_bytes, computes_apart=self.computes_apart)

    def occupied_bytes(self) -> int:
        """What is allocated now, but for what updates will have used up."""
        while True:
            passing = self.leaving.updating_bytes()
            num_bytes = self.allocated_bytes() - passing
            # An update that has ended meanwhile may count in one of them alone.
            if passing == self.leaving.updating_bytes():
                return num_bytes

    def room_for(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more stay within the capacity."""
        return self.capacity_bytes is None or self.allocated_bytes() + num_bytes <= self.capacity_bytes

    def has_lasting_room(self, num_bytes: int) -> bool:
        """Whether so much more of weights and sums leaves what passes its memory."""
        return self.lasting_limit_bytes is None or self._lasting_bytes + num_bytes <= self.lasting_limit_bytes

    def _count_lasting(self, buffer: Tensor) -> Tensor:
        """Count a buffer for weights or sums for as long as it lasts."""
        self._lasting_bytes += buffer.numel()
        weakref.finalize(buffer.untyped_storage(), self._uncount_lasting, buffer.numel())
        return buffer

    def _uncount_lasting(self, num_bytes: int) -> None:
        self._lasting_bytes -= num_bytes

    def close(self) -> None:
        """Finish all copies and release the streams."""
        for stream in (self.swap_in, self.swap_out, self.stash_in, self.gather):
            stream.close()


def flat_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """An uninitialised buffer of bytes.

    Not even deterministic algorithms write it: `torch.empty` does then, on the stream whose pool the memory is of, and that
    may be after another stream has written what the buffer is for.
    """
    # Buffers are used again: one made in inference mode could never be written outside of it.
    with torch.inference_mode(False):
        if torch.are_deterministic_algorithms_enabled():
            buffer = torch.empty(0, dtype=torch.uint8, device=device)
            # What stands for a tensor has no memory.
            if type(buffer) is Tensor:
                return buffer.set_(torch.UntypedStorage(num_bytes, device=device))
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
