"""A GPU as a device with a capacity."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from lightning_harmony.engine.devices.cuda_memory import CudaBudget, bound_reserved_memory, use_expandable_segments
from lightning_harmony.engine.devices.device import Device, flat_buffer
from lightning_harmony.engine.devices.hidden_shortages import hidden_shortage
from lightning_harmony.engine.devices.recording import CudaRecorder, Recording, Work
from lightning_harmony.engine.devices.stream import (
    CudaEvent,
    CudaMoment,
    CudaStream,
    Event,
    Moment,
    OnCudaStream,
    Stream,
    current_cuda_stream,
)
from lightning_harmony.engine.devices.touched_memory import touched_buffer

# So often plans that turn out to take too much are made with less, before microbatches run one after the other.
_MOST_SHORTAGES = 2


class CudaDevice(Device):
    """One GPU.

    Args:
        torch_device: which one.
        capacity_bytes: what may be allocated on it.
        budget: what may be taken of it, as it was found; None where that is not bounded.
        is_one_of_several: whether lanes go from device to device, so that another one may be current.
    """

    computes_apart = pools_apart = records = True
    # Of GPTs of 1 and 5 B parameters 1.06 and 0.04 MB, whatever the capacity.
    uncounted_bytes = 2 << 20
    # cuBLAS and cuBLASLt have 32 MiB each for a stream on Hopper, and the allocator takes pieces of 20 MiB.
    library_bytes = 104 << 20

    def __init__(
        self,
        torch_device: torch.device,
        capacity_bytes: int | None,
        *,
        budget: CudaBudget | None = None,
        is_one_of_several: bool = False,
    ) -> None:
        super().__init__(torch_device, capacity_bytes)
        self._budget = None if budget is None or budget.reserved_bytes is None else budget
        if self._budget is not None:
            bound_reserved_memory(torch_device, self._budget.reserved_bytes)
        self.is_one_of_several = is_one_of_several
        if is_one_of_several and hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
            # Gradients come from other devices, whose streams autograd waits for: there is nothing to warn of.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        self._compute = current_cuda_stream(self._index)
        self._uses = _Uses()
        self.swap_in = CudaStream(torch_device)
        self.swap_out = CudaStream(torch_device)
        self.stash_in = CudaStream(torch_device)
        self.gather = CudaStream(torch_device)
        self._outgoing = CudaStream(torch_device)
        self._peak_bytes = self._peak_reserved_bytes = self._pool_bytes = 0
        self._recorder: CudaRecorder | None = None
        self._num_shortages = 0

    @classmethod
    def within(cls, torch_device: torch.device, limit_bytes: int | None, *, is_one_of_several: bool) -> CudaDevice:
        """A GPU of which a fit takes no more than a limit, whatever of it torch's allocator leaves unused.

        Args:
            torch_device: which one.
            limit_bytes: of the card, the context included; None for all that is free.
            is_one_of_several: as for the class.
        """
        use_expandable_segments()
        budget = CudaBudget.of(torch_device, limit_bytes)
        return cls(torch_device, budget.capacity_bytes, budget=budget, is_one_of_several=is_one_of_several)

    def note_kernels(self) -> bool:
        """Bound the allocator by what the driver has left."""
        if self._budget is None:
            return False
        found = self._budget.behind_kernels(self.torch_device)
        if self.capacity_bytes is None or found.capacity_bytes >= self.capacity_bytes:
            return False
        self.capacity_bytes = found.capacity_bytes
        bound_reserved_memory(self.torch_device, found.reserved_bytes)
        return True

    def prepare_thread(self) -> None:
        """Let cuBLAS make the thread's handle, for which it takes 64 MiB of an H200 and torch 32 MiB of work space."""
        with torch.cuda.device(self.torch_device):
            number = torch.zeros(1, 1, device=self.torch_device)
            try:
                number.mm(number)
            except RuntimeError as error:
                if hidden_shortage(error) is None:
                    raise
                # torch's allocator keeps what it does not use.
                torch.cuda.empty_cache()
                number.mm(number)

    def note_shortage(self) -> bool:
        """Plans get a sixteenth less of what the driver has left now, twice at most."""
        if self.capacity_bytes is None or self._num_shortages == _MOST_SHORTAGES:
            return False
        self._num_shortages += 1
        self.note_kernels()
        self.capacity_bytes -= self.capacity_bytes // 16
        return True

    def close(self) -> None:
        """Let torch's allocator have the whole GPU again."""
        super().close()
        if self._budget is not None:
            bound_reserved_memory(self.torch_device, None)

    @property
    def _index(self) -> int:
        # Torch's functions take a number at once, and a device after a long look at it.
        return self.torch_device.index

    def empty(self, num_bytes: int, stream: Stream | None = None) -> Tensor:
        """Allocate in the pool of the stream, so that the copies into it need no further event."""
        pool = stream or self.swap_in
        assert isinstance(pool, CudaStream)
        with pool.selected():
            buffer = flat_buffer(num_bytes, self.torch_device)
        return self._count_lasting(buffer) if stream is None else buffer

    def scratch(self, num_bytes: int) -> Tensor:
        """Allocate in the pool of the compute stream."""
        return flat_buffer(num_bytes, self.torch_device)

    def sums(self, num_bytes: int) -> Tensor:
        """Allocate in the pool of the swap-in stream, and let what computes here wait for what that memory was used for."""
        buffer = self.empty(num_bytes)
        self._uses.wait_for(buffer)
        return buffer

    def side_stream(self, *, is_urgent: bool = False) -> Stream:
        """Another stream of this GPU."""
        return CudaStream(self.torch_device, is_urgent=is_urgent)

    def staging(self, num_bytes: int, stream: Stream) -> Tensor:
        """Memory of that stream's pool. What a step makes meanwhile of its parameters counts beside."""
        self.uncounted_bytes = max(self.uncounted_bytes, CudaDevice.uncounted_bytes + num_bytes // 2)
        return self.empty(num_bytes, stream)

    def allocated_bytes(self) -> int:
        """Bytes that torch's allocator has allocated, and those of recorded work."""
        return self._statistic("allocated_bytes") + self._pool_bytes

    def _statistic(self, name: str) -> int:
        # Asked for at every visit: to flatten all statistics, as memory_allocated does, takes ten times as long.
        statistics = torch.cuda.memory_stats_as_nested_dict(self._index)
        return int(statistics[name]["all"]["current"]) if statistics else 0

    def peak_bytes(self) -> int:
        """The most bytes that torch's allocator has had allocated."""
        return max(self._peak_bytes, torch.cuda.max_memory_allocated(self.torch_device))

    def peak_reserved_bytes(self) -> int:
        """The most that torch's allocator had of the driver."""
        return max(self._peak_reserved_bytes, torch.cuda.max_memory_reserved(self.torch_device))

    def watch_peak(self) -> Callable[[], int]:
        """Watch through the allocator's own peak, which has to be reset for it."""
        self._peak_bytes, self._peak_reserved_bytes = self.peak_bytes(), self.peak_reserved_bytes()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return lambda: torch.cuda.max_memory_allocated(self.torch_device)

    def record(self) -> Event:
        """An event on the current stream."""
        return CudaEvent(current_cuda_stream(self._index))

    def moment(self) -> Moment:
        """A timed event on the compute stream."""
        return CudaMoment(self._compute)

    def lane_moment(self) -> Moment:
        """A timed event on the current stream."""
        return CudaMoment(current_cuda_stream(self._index))

    def free(self, buffer: Tensor, uses: Sequence[Event], *, is_kept: bool = False) -> None:
        """Order later copies, which may reuse the memory, after its uses."""
        if is_kept:
            # When they let it go, the allocator waits for what is computed until then.
            buffer.record_stream(self._compute)
        self.swap_in.submit(lambda: None, after=uses)
        self._uses.add(buffer, uses)

    def owns(self, tensor: Tensor) -> bool:
        """Whether it is on this GPU."""
        return tensor.device == self.torch_device

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Make this device current; the lane hands over to the compute stream, and takes over from it."""
        lane = current_cuda_stream(self._index)
        if lane == self._compute:
            with torch.cuda.device(self._index):
                yield
            return
        self._compute.wait_stream(lane)
        with OnCudaStream(self._compute):
            yield
        lane.wait_stream(self._compute)

    def scheduling(self) -> AbstractContextManager[None]:
        """On the compute stream, whichever device is current."""
        return OnCudaStream(self._compute) if self.is_one_of_several else nullcontext()

    def selected(self) -> AbstractContextManager[None]:
        """Make this device current."""
        return torch.cuda.device(self._index)

    def send(self, copy: Callable[[], Tensor], source: Tensor, after: Event | None) -> tuple[Tensor, Event | None]:
        """Copy on a stream of its own: on the compute stream, it would wait for all that other microbatches have launched.

        Torch makes a copy on the current stream of the device that it comes from, as a barrier between that and the current
        one of the other device.
        """
        after = self.record() if after is None else after
        with self._outgoing.selected():
            after.wait()
            copied, event = copy(), self.record()
        self.leaving.keep(event, source)
        return copied, event

    def sending(self) -> AbstractContextManager[None]:
        """Torch makes such a copy on the current stream of the device that it comes from, as a barrier between both."""
        assert isinstance(self.gather, CudaStream)
        return self.gather.selected()

    def recorded(self, work: Work) -> Recording:
        """Record a CUDA graph. Its memory is its own until the device is closed, and counts as allocated."""
        recorder = self._recorder = CudaRecorder(self.torch_device) if self._recorder is None else self._recorder
        before = self._statistic("reserved_bytes")
        try:
            return recorder.record(work)
        finally:
            self.records = not recorder.has_failed
            taken = max(self._statistic("reserved_bytes") - before, 0)
            self._pool_bytes += taken
            self.recorded_bytes += taken

    def forget_recorded(self) -> None:
        """Let the graphs' memory go when their last work has run."""
        # The allocator, which takes memory from the driver's hands, would wait for the stream that recorded, and not for this.
        self._compute.synchronize()
        super().forget_recorded()
        self._recorder, self._pool_bytes = None, 0

    def release_cached(self) -> None:
        """Empty the cache of torch's allocator: memory of graphs has a cache of its own, which has to grow."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """A registered buffer of exact size: torch's pinned allocator rounds up to powers of two."""
        buffer = touched_buffer(num_bytes)
        weakref.finalize(buffer.untyped_storage(), self.register_host(buffer))
        return buffer

    def copies_fast(self, tensor: Tensor) -> bool:
        """Whether it is page-locked."""
        return tensor.is_pinned()

    def register_host(self, buffer: Tensor) -> Callable[[], None]:
        """Page-lock the buffer."""
        if buffer.numel() == 0:
            return lambda: None
        runtime = torch.cuda.cudart()
        address = buffer.data_ptr()
        status = int(runtime.cudaHostRegister(address, buffer.numel(), 0))
        if status != 0:
            self._forget_error()
            raise RuntimeError(
                f"cudaHostRegister failed with status {status} for {buffer.numel()} bytes of host memory"
            )
        return lambda: runtime.cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """Let the next launch not report what has failed: the caller may do without it."""
        with suppress(RuntimeError), torch.no_grad():
            torch.full((1,), 0.0, device=self.torch_device)


class _Uses:
    """The uses of freed memory, which its next user waits for on any stream but the one that waits anyway."""

    def __init__(self) -> None:
        self._of_ranges: list[tuple[range, Sequence[Event]]] = []

    def add(self, buffer: Tensor, uses: Sequence[Event]) -> None:
        """A buffer is freed."""
        self._of_ranges = [each for each in self._of_ranges if not _are_over(each[1])]
        self._of_ranges.append((_addresses(buffer), uses))

    def wait_for(self, buffer: Tensor) -> None:
        """Let the current stream wait until a buffer's memory is not used for anything else."""
        own = _addresses(buffer)
        for addresses, uses in self._of_ranges:
            if addresses.start < own.stop and own.start < addresses.stop:
                for event in uses:
                    event.wait()


def _addresses(buffer: Tensor) -> range:
    return range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel())


def _are_over(uses: Sequence[Event]) -> bool:
    return all(event.done() for event in uses)
