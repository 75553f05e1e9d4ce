"""Shortages of device memory that are told as errors of other kinds than that of torch's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_harmony.engine.devices.virtual_device import DeviceOutOfMemoryError
from lightning_harmony.errors import CapacityError

# What libraries say that allocate past torch's allocator: cuBLAS, cuDNN and others, and CUDA itself.
_FAILED_ALLOCATIONS = ("_ALLOC_FAILED", "CUDA error: out of memory")


def hidden_shortage(error: BaseException) -> torch.OutOfMemoryError | None:
    """The shortage of memory that is told as another error; None if it is none, or told as what it is.

    TorchScript repeats the words of an error. Of one of Python, as virtual devices raise it, it has none.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError | CapacityError):
        return None
    words, newest = str(error), DeviceOutOfMemoryError.newest
    is_of_script = words.startswith("The following operation failed in the TorchScript interpreter")
    if any(each in words for each in _FAILED_ALLOCATIONS) or (is_of_script and "out of memory" in words):
        return torch.OutOfMemoryError(words)
    is_without_words = is_of_script and words.rstrip().endswith("RuntimeError:")
    return DeviceOutOfMemoryError(newest) if is_without_words and newest is not None else None


@contextmanager
def finding_shortages() -> Iterator[None]:
    """The context of the user's code: a shortage in a library or in a function of TorchScript is told as any other.

    Raises:
        torch.OutOfMemoryError: if a device ran out of memory there.
    """
    DeviceOutOfMemoryError.newest = None
    try:
        yield
    except RuntimeError as error:
        if (shortage := hidden_shortage(error)) is not None:
            raise shortage from error
        raise
