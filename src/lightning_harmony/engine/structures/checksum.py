"""The checksum of a tensor: tells whether code has changed it where no version does."""

from __future__ import annotations

import torch
from torch import Tensor


def checksum(tensor: Tensor) -> Tensor:
    """The sum over the bits, in the widest words that they fill: those are summed as fast as memory is read.

    Args:
        tensor: of any shape and type.

    Returns:
        The sum, shape (), on the tensor's device.
    """
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for word in (torch.int64, torch.int32, torch.int16):
        if flat.numel() % word.itemsize == 0 and flat.storage_offset() % word.itemsize == 0:
            flat = flat.view(word)
            break
    return flat.sum()
