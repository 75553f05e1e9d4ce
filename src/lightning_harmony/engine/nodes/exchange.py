"""What nodes tell each other, and how they add up gradients, in a group of processes of its own: beside what users send."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, Any

import torch
from torch import Tensor, distributed

from lightning_harmony.engine.replicas.flat_pieces import in_pieces

# What is sent at once. One piece is added up while the next one comes.
_PIECE_BYTES = 16 << 20

_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class Exchange:
    """The exchange between all nodes.

    Messages go by way of hosts. To wait for one ends with the process, and when the node that would send it is gone. To begin
    an operation of all nodes that one does not come to would not end: `average` is for gradients that all have agreed on.

    Args:
        device: where gradients are added up: over GPUs, nodes are faster connected than over hosts.
        timeout: how long a node waits for the others: to plan a step, and to make page-locked buffers, takes some longer.

    Attributes:
        rank: the number of this node.
        size: how many nodes there are.
        group: of the processes that exchange.
        host_group: of the same processes, for what is sent from host to host while a thread exchanges in the other group.
        device: where gradients are added up.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self.group = distributed.new_group(backend=backend, timeout=timeout)
        self.host_group = distributed.new_group(backend="gloo", timeout=timeout)
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent_bytes = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the node that tells others."""
        return self.rank == 0

    def take_sent_bytes(self) -> int:
        """Bytes of gradients and weights that this node has sent to others since the last call."""
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
            sending: list[Any] = [distributed.isend(message, node, self.group) for node in range(1, self.size)]
            for each in sending:
                each.wait()
        else:
            distributed.recv(message, 0, self.group)

    def merge(self, message: Tensor) -> None:
        """Have the largest of all nodes' messages on all nodes, element by element, in the place of theirs."""
        if self.is_first:
            other = torch.empty_like(message)
            for node in range(1, self.size):
                distributed.recv(other, node, self.group)
                torch.maximum(message, other, out=message)
        else:
            distributed.send(message, 0, self.group)
        self.tell(message)

    def send_bytes(self, data: memoryview, nodes: Sequence[int]) -> None:
        """Send other nodes what they receive as bytes."""
        everything = torch.frombuffer(data, dtype=torch.uint8)
        for node in nodes:
            distributed.send(torch.tensor([len(everything)]), node, self.group)
            for piece in everything.split(_PIECE_BYTES):
                distributed.send(piece, node, self.group)

    def receive_bytes(self, node: int, file: IO[bytes]) -> None:
        """Write what another node sends as bytes to a file."""
        left = torch.empty(1, dtype=torch.long)
        distributed.recv(left, node, self.group)
        while left > 0:
            piece = torch.empty(min(int(left), _PIECE_BYTES), dtype=torch.uint8)
            distributed.recv(piece, node, self.group)
            file.write(piece.numpy().tobytes())
            left -= len(piece)

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Put the mean of all nodes into the place of each gradient: the sum in the order of nodes, whatever the pieces.

        Args:
            gradients: the same ones in the same order on all nodes.
        """
        parts = (part for gradient in gradients for part in _cut(gradient) if part.numel())
        _one_ahead(map(self._begin_average, pieces(parts)))

    def reduce(self, gradients: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Put the mean of all nodes into the place of each gradient on its owner; elsewhere it stays.

        Args:
            gradients: the same ones in the same order on all nodes.
            owners: the number of the node that owns each.
        """

        def send(theirs: list[list[Tensor]]) -> Callable[[], None]:
            flat = self._to_add([gradient for some in theirs for gradient in some])
            sent = flat.split(_sizes(theirs))
            shares = [torch.empty_like(sent[self.rank]) for _ in theirs]
            shares[self.rank] = sent[self.rank]
            work = self._swap(sent, shares)

            def add_up() -> None:
                for each in work:
                    each.wait()
                _copy_back(theirs[self.rank], _added(shares))

            return add_up

        self._in_pieces(gradients, owners, send)

    def spread(self, weights: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Put what its owner has into the place of each of some weights.

        Args:
            weights: the same ones in the same order on all nodes.
            owners: the number of the node that owns each.
        """

        def send(theirs: list[list[Tensor]]) -> Callable[[], None]:
            dtype = next(weight.dtype for some in theirs for weight in some)
            flats = torch.empty(sum(_sizes(theirs)), dtype=dtype, device=self.device).split(_sizes(theirs))
            for weight, view in zip(theirs[self.rank], views_like(theirs[self.rank], flats[self.rank]), strict=True):
                view.copy_(weight)
            work = self._swap([flats[self.rank]] * self.size, flats)

            def bring() -> None:
                for each in work:
                    each.wait()
                for node, some in enumerate(theirs):
                    if node != self.rank:
                        _copy_back(some, flats[node])

            return bring

        self._in_pieces(weights, owners, send)

    def _in_pieces(
        self,
        tensors: Sequence[Tensor],
        owners: Sequence[int],
        send: Callable[[list[list[Tensor]]], Callable[[], None]],
    ) -> None:
        """Exchange tensors in pieces.

        Args:
            tensors: all of them.
            owners: of each.
            send: given a piece, the tensors of each node in it, it begins to exchange that, and returns what ends it.
        """
        parts = [(part, node) for each, node in zip(tensors, owners, strict=True) for part in _cut(each)]
        owner_of = {id(part): node for part, node in parts}

        def begin(some: list[Tensor]) -> Callable[[], None]:
            theirs: list[list[Tensor]] = [[] for _ in range(self.size)]
            for part in some:
                theirs[owner_of[id(part)]].append(part)
            return send(theirs)

        _one_ahead(map(begin, pieces(part for part, _ in parts if part.numel())))

    def broadcast(self, data: Tensor) -> None:
        """Have what the first node has on all nodes, in the place of theirs.

        Args:
            data: on the host, where a thread may exchange meanwhile; or on the device, where none may.
        """
        distributed.broadcast(data, 0, self.host_group if data.device.type == "cpu" else self.group)

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Any]:
        """Begin to send something to each other node, and to receive something from it."""
        operations: list[Any] = []
        for node in range(self.size):
            for operation, tensor in ((distributed.isend, sent[node]), (distributed.irecv, received[node])):
                if tensor.numel() and node != self.rank:
                    # As bytes: not each backend knows each type.
                    operations.append(distributed.P2POp(operation, tensor.view(torch.uint8), node, self.group))
        self._sent_bytes += sum(tensor.nbytes for node, tensor in enumerate(sent) if node != self.rank)
        return distributed.batch_isend_irecv(operations) if operations else []

    def _begin_average(self, gradients: list[Tensor]) -> Callable[[], None]:
        """Begin to send each node its share of some gradients; what is returned ends that, and brings all means back."""
        flat = self._to_add(gradients)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.size))
        shares = torch.empty_like(padded)
        self._count(padded)
        work = distributed.all_to_all_single(shares, padded, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            mean = _added(shares.chunk(self.size))
            self._count(padded)
            _gather(padded, mean, group=self.group)
            _copy_back(gradients, padded)

        return end

    def _to_add(self, gradients: Sequence[Tensor]) -> Tensor:
        # Divided before they are added, as DDP does: the sum of large ones in 16 bits would be infinite.
        return flat_on(gradients, self.device).div_(self.size)

    def _count(self, padded: Tensor) -> None:
        self._sent_bytes += padded.nbytes // self.size * (self.size - 1)


# Of the group of all processes that has met last, by device.
_known: dict[torch.device, tuple[Any, Exchange]] = {}


def exchange_of(device: torch.device, timeout: timedelta) -> Exchange:
    """The exchange between the processes that have met. All of them ask for the first one at the same time."""
    world = distributed.group.WORLD
    if device not in _known or _known[device][0] is not world:
        _known[device] = world, Exchange(device, timeout)
    return _known[device][1]


def is_of_exchange(group: Any) -> bool:
    """Whether a group of processes is that of an exchange."""
    return any(group in (exchange.group, exchange.host_group) for _, exchange in _known.values())


def take_sent_bytes() -> int:
    """Bytes of gradients and weights that this node has sent to others since the last call."""
    return sum(exchange.take_sent_bytes() for _, exchange in _known.values())


def pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in pieces that are sent at once, each of one type."""
    of_types: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        of_types[tensor.dtype].append(tensor)
    for of_type in of_types.values():
        yield from in_pieces(of_type, _PIECE_BYTES)


def _one_ahead(begun: Iterable[Callable[[], None]]) -> None:
    """Begin each exchange before the one before it is ended.

    Args:
        begun: begins the next one, and gives what ends it.
    """
    under_way: deque[Callable[[], None]] = deque()
    for end in begun:
        under_way.append(end)
        if len(under_way) > 1:
            under_way.popleft()()
    while under_way:
        under_way.popleft()()


def _added(shares: Sequence[Tensor]) -> Tensor:
    """The sum in the order of nodes, in the place of the first one's."""
    total, *others = shares
    for other in others:
        total += other
    return total


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor, cut by its first dimension if it is large."""
    if tensor.nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        return [tensor]
    parts: Sequence[Tensor] = tensor.split(max(_PIECE_BYTES * len(tensor) // tensor.nbytes, 1))
    return parts


def flat_on(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The elements of tensors, one behind the other, on a device."""
    # What does not block has not yet come to the host when it returns.
    blocks = device.type == "cpu"
    return torch.cat([tensor.detach().to(device, non_blocking=not blocks).reshape(-1) for tensor in tensors])


def _sizes(theirs: Sequence[Sequence[Tensor]]) -> list[int]:
    """How many elements each node has of a piece."""
    return [sum(tensor.numel() for tensor in some) for some in theirs]


def _copy_back(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Let tensors have what lies one behind the other."""
    for tensor, view in zip(tensors, views_like(tensors, flat), strict=True):
        tensor.copy_(view)


def views_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """What lies so, in the shapes of tensors; more may follow."""
    numbers = [tensor.numel() for tensor in tensors]
    views = flat[: sum(numbers)].split(numbers)
    return [view.view(tensor.shape) for view, tensor in zip(views, tensors, strict=True)]
