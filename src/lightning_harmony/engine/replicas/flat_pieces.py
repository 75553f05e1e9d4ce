"""Flat pieces: many tensors go to another device in few copies, for each copy takes the host as long as a launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from lightning_harmony.engine.model.host_store import Slot, lay_out, views_in

# Of each piece, unless a tensor is larger: they are gathered in memory of their own before they go.
PIECE_BYTES = 256 * 1024 * 1024


class FlatPieces:
    """How tensors lie in flat buffers, a buffer for each piece.

    Args:
        tensors: such tensors, of any types, on one device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._pieces: list[tuple[dict[int, Slot], int]] = []
        for together in in_pieces(tensors, PIECE_BYTES):
            slots, num_bytes = lay_out(together)
            self._pieces.append((dict(enumerate(slots)), num_bytes))

    def buffers(self, device: torch.device) -> list[Tensor]:
        """Memory for all pieces."""
        return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _, num_bytes in self._pieces]

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that lie in buffers."""
        return [
            view
            for (slots, _), each in zip(self._pieces, buffers, strict=True)
            for view in views_in(each, slots).values()
        ]

    def fill(self, buffers: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy tensors, which are on another device, to buffers. On the current streams of both."""
        for ours, (slots, num_bytes), buffer in zip(self._split(tensors), self._pieces, buffers, strict=True):
            gathered = torch.empty(num_bytes, dtype=torch.uint8, device=ours[0].device)
            torch._foreach_copy_(list(views_in(gathered, slots).values()), ours)
            buffer.copy_(gathered, non_blocking=True)

    def _split(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        rest = iter(tensors)
        return (list(islice(rest, len(slots))) for slots, _ in self._pieces)


def in_pieces(tensors: Iterable[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors, in their order, in pieces of at most so many bytes, or of one that has more."""
    piece: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if piece and num_bytes + tensor.nbytes > most_bytes:
            yield piece
            piece, num_bytes = [], 0
        piece.append(tensor)
        num_bytes += tensor.nbytes
    if piece:
        yield piece
