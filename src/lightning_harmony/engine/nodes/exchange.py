"""What nodes tell each other, and how they add up gradients, in a group of processes of its own: beside what users send."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_harmony.engine.replicas.flat_pieces import in_pieces

# How long a node waits for the others: to plan a step, and to make page-locked buffers, takes some of them longer.
TIMEOUT = timedelta(minutes=30)
# What is sent at once. One piece is added up while the next one comes.
_PIECE_BYTES = 16 << 20

_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class Exchange:
    """The exchange between all nodes.

    Messages go by way of hosts. To wait for one ends with the process, and when the node that would send it is gone. To begin
    an operation of all nodes that one does not come to would not end: `average` is for gradients that all have agreed on.

    Args:
        device: where gradients are added up: over GPUs, nodes are faster connected than over hosts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._group = distributed.new_group(backend=backend, timeout=TIMEOUT)
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent_bytes = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the node that tells others."""
        return self._rank == 0

    def take_sent_bytes(self) -> int:
        """Bytes of gradients that this node has sent to others since this was last asked."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The context of a thread that exchanges beside others' work."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def tell(self, message: Tensor) -> None:
        """Have a message of the first node on all nodes, in the place of theirs."""
        if self.is_first:
            sending: list[Any] = [distributed.isend(message, node, self._group) for node in range(1, self._size)]
            for each in sending:
                each.wait()
        else:
            distributed.recv(message, 0, self._group)

    def merge(self, message: Tensor) -> None:
        """Have the largest of all nodes' messages on all nodes, element by element, in the place of theirs."""
        if self.is_first:
            other = torch.empty_like(message)
            for node in range(1, self._size):
                distributed.recv(other, node, self._group)
                torch.maximum(message, other, out=message)
        else:
            distributed.send(message, 0, self._group)
        self.tell(message)

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Put the mean of all nodes into the place of each gradient: the sum in the order of nodes, whatever the pieces.

        Args:
            gradients: the same ones in the same order on all nodes.
        """
        under_way: deque[tuple[Any, Tensor, Tensor, list[Tensor]]] = deque()
        for some in pieces(part for gradient in gradients for part in _cut(gradient) if part.numel()):
            under_way.append(self._spread(some))
            if len(under_way) > 1:
                self._gather(*under_way.popleft())
        while under_way:
            self._gather(*under_way.popleft())

    def _spread(self, gradients: list[Tensor]) -> tuple[Any, Tensor, Tensor, list[Tensor]]:
        """Begin to send each node its share of some gradients, of which it makes the mean."""
        flat = flat_on(gradients, self._device)
        # Before they are added, as DDP does: the sum of large ones in 16 bits would be infinite.
        flat.div_(self._size)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self._size))
        shares = torch.empty_like(padded)
        self._count(padded)
        return (
            distributed.all_to_all_single(shares, padded, group=self._group, async_op=True),
            padded,
            shares,
            gradients,
        )

    def _gather(self, work: Any, padded: Tensor, shares: Tensor, gradients: list[Tensor]) -> None:
        """Make the mean of this node's share, have those of the others, and bring them to where the gradients are."""
        work.wait()
        mean, *others = shares.chunk(self._size)
        for other in others:
            mean += other
        self._count(padded)
        _gather(padded, mean, group=self._group)
        for gradient, view in zip(gradients, views_like(gradients, padded), strict=True):
            gradient.copy_(view)

    def _count(self, padded: Tensor) -> None:
        self._sent_bytes += padded.nbytes // self._size * (self._size - 1)


# Of the group of all processes that has met last, by device.
_known: dict[torch.device, tuple[Any, Exchange]] = {}


def exchange_of(device: torch.device) -> Exchange:
    """The exchange between the processes that have met. All of them ask for the first one at the same time."""
    world = distributed.group.WORLD
    if device not in _known or _known[device][0] is not world:
        _known[device] = world, Exchange(device)
    return _known[device][1]


def take_sent_bytes() -> int:
    """Bytes of gradients that this node has sent to others since this was last asked."""
    return sum(exchange.take_sent_bytes() for _, exchange in _known.values())


def pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in pieces that are sent at once, each of one type."""
    of_types: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        of_types[tensor.dtype].append(tensor)
    for of_type in of_types.values():
        yield from in_pieces(of_type, _PIECE_BYTES)


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor, cut by its first dimension if it is large."""
    if tensor.nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        return [tensor]
    parts: Sequence[Tensor] = tensor.split(max(_PIECE_BYTES * len(tensor) // tensor.nbytes, 1))
    return parts


def flat_on(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The elements of tensors, one behind the other, on a device."""
    return torch.cat([tensor.detach().to(device, non_blocking=True).reshape(-1) for tensor in tensors])


def views_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """What lies so, in the shapes of tensors; more may follow."""
    numbers = [tensor.numel() for tensor in tensors]
    views = flat[: sum(numbers)].split(numbers)
    return [view.view(tensor.shape) for view, tensor in zip(views, tensors, strict=True)]
