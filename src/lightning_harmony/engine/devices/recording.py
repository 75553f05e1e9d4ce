"""Recordings: work of a device that is launched again as a whole, in the same memory, without the code that launched it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.devices.stream import CudaStream, current_cuda_stream

# What recorded work makes, None in the place of what it does not.
Made = list[Tensor | None]
Work = Callable[[], Sequence[Tensor | None]]


class Recording:
    """A CUDA graph of recorded work.

    Args:
        graph: the graph.
        made: what the work makes.

    Attributes:
        made: the same, in memory that each replay writes anew, and that other replays on the device may overwrite.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, made: Sequence[Tensor | None]) -> None:
        self._graph = graph
        self.made: Made = [None if tensor is None else _without_owning(tensor) for tensor in made]

    def replay(self) -> None:
        """Do the work again, with what is in the memory that it reads."""
        self._graph.replay()


class RecordingError(Exception):
    """Work cannot be recorded; the message says why."""


class OtherBitsError(RecordingError):
    """What was recorded makes other bits than its code. Kernels that add in any order do so, too, now and then."""


class RecordingChangedError(Exception):
    """A step has run what was recorded of code that has come to do something else."""


class CudaRecorder:
    """Records CUDA graphs. Those of one GPU share their memory: no two of them run at the same time.

    Args:
        device: which GPU.

    Attributes:
        has_failed: whether the driver has ended a recording early. What that leaves of its state nobody tells.
    """

    def __init__(self, device: torch.device) -> None:
        self.has_failed = False
        self._device = device
        self._stream = CudaStream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None

    def record(self, work: Work) -> Recording:
        """Record what work launches on the current stream, without running it.

        Raises:
            RecordingError: if it launches what a graph cannot hold, or asks for a result.
            torch.OutOfMemoryError: if there is no room for what it allocates.
        """
        if self._first is None:
            # Memory ends with the last graph that has it, and torch lets no other begin there again.
            self._first, _ = self._captured(lambda: [torch.zeros(1, device=self._device)])
        return Recording(*self._captured(work))

    def _captured(self, work: Work) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor | None]]:
        graph = torch.cuda.CUDAGraph()
        with self._stream.selected():
            current_cuda_stream().synchronize()
            try:
                # Other threads launch updates and copies meanwhile, and ask for events.
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                try:
                    made = work()
                finally:
                    self._end(graph)
            except (RecordingError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise RecordingError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        return graph, made

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._end_early(graph)
            raise

    def _end_early(self, graph: torch.cuda.CUDAGraph) -> None:
        """The driver has ended a recording: torch's allocator and generators are to go on as outside of one."""
        self.has_failed = True
        with suppress(RuntimeError):
            # Else that happens when the error goes that refers to it, perhaps within another recording.
            graph.reset()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        with suppress(RuntimeError):
            # The next launch reports what has failed once more.
            torch.ones(1, device=self._device)
        # Only a recording that ends well tells generators that it has ended. Until then they refuse to draw.
        whole = torch.cuda.CUDAGraph()
        whole.capture_begin(capture_error_mode="relaxed")
        torch.ones(1, device=self._device)
        whole.capture_end()


def _without_owning(tensor: Tensor) -> Tensor:
    """The same memory, which the graphs recorded next may use, too."""
    storage = tensor.untyped_storage()
    make: Any = torch._C._construct_storage_from_data_pointer
    alias = make(storage.data_ptr(), tensor.device, storage.nbytes())
    there = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return there.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
