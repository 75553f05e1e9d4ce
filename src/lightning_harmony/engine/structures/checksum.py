"""The checksum of a tensor: tells whether code has changed it where no version does."""

from __future__ import annotations

import torch
from torch import Tensor

# Each word counts in the sum of one column, so that elements that change places change sums. Rows of a matrix that change
# places keep their columns only where these are rows that lie a multiple of the prime apart. Four words fill a register.
_COLUMNS = 4 * 1021


def checksum(tensor: Tensor) -> Tensor:
    """The sums over the bits, in columns of the widest words that they fill; of a small tensor, the words themselves.

    Args:
        tensor: of any shape and type.

    Returns:
        The sums, int64, shape (at most 2 * 4,084,), on the tensor's device.
    """
    words = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for word in (torch.int64, torch.int32, torch.int16):
        if words.numel() % word.itemsize == 0 and words.storage_offset() % word.itemsize == 0:
            words = words.view(word)
            break
    num_summed = words.numel() // _COLUMNS * _COLUMNS
    rest = words[num_summed:].to(torch.int64, copy=True)
    if num_summed == 0:
        return rest
    return torch.cat([words[:num_summed].view(-1, _COLUMNS).sum(0, dtype=torch.int64), rest])
