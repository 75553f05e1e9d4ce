"""What several nodes have in common: each has gradients of its own batch, and goes on with the mean of all."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lightning_harmony.engine.replicas.flat_pieces import in_pieces
from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.engine.structures.strides import assign
from lightning_harmony.errors import UnsupportedModelError

# What is sent at once, and how many of that are under way. One is added up while another one comes from the host.
_PIECE_BYTES, _MOST_UNDER_WAY = 64 << 20, 2


def average_behind(loss: Tensor, parameters: Sequence[nn.Parameter], device: torch.device, *, by_hand: bool) -> None:
    """Have gradients averaged when the backward of a loss is over, before anybody sees them: as in plain Lightning with DDP.

    Args:
        loss: whose backward follows.
        parameters: of the module, in an order that all nodes have.
        device: over which nodes are faster connected than over hosts, if it is a GPU.
        by_hand: whether the user's code calls backwards, and earlier ones may have left gradients that are averaged.
    """
    before = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None} if by_hand else {}

    def average() -> None:
        has_new = [p for p in parameters if p.grad is not None and not _is_as(p.grad, before.get(p))]
        try:
            average_gradients(_of_any_node(parameters, has_new, device), device)
        except RuntimeError as error:
            raise RuntimeError(
                f"gradients could not be averaged over nodes: where one has failed, its own output says why ({error})"
            ) from error

    def begin(gradient: Tensor) -> None:
        call_behind: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
        # Behind what layers, to which the backward comes later, have called behind it: that brings gradients, too.
        call_behind(lambda: call_behind(average))

    loss.register_hook(begin)


def _is_as(gradient: Tensor, before: tuple[Tensor, int] | None) -> bool:
    return before is not None and gradient is before[0] and gradient._version == before[1]


def _of_any_node(
    parameters: Sequence[nn.Parameter], having: Iterable[nn.Parameter], device: torch.device
) -> list[nn.Parameter]:
    """The parameters that have gradients on some node. Where one has none, those of the others count as if it had zeros."""
    found = set(having)
    # On the host, where a node that has failed is missed at once, and no GPU is waited for: unless processes have met before,
    # as for a fit with DDP, over GPUs alone.
    by_hosts = "cpu" in distributed.get_backend_config()
    flags = torch.tensor([p in found for p in parameters], dtype=torch.uint8, device="cpu" if by_hosts else device)
    distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    chosen = [parameter for parameter, flag in zip(parameters, flags.tolist(), strict=True) if flag]
    for parameter in chosen:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return chosen


def average_gradients(parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Put the mean of all nodes into the place of each gradient.

    Args:
        parameters: that have gradients, the same ones in the same order on all nodes.
        device: where they are added up.

    Raises:
        UnsupportedModelError: if a gradient is sparse.
    """
    under_way: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
    for gradients in _pieces(map(_gradient, parameters)):
        flat = _flat(gradients, device)
        # Before they are added, as DDP does: the sum of large ones in 16 bits would be infinite.
        flat.div_(distributed.get_world_size())
        under_way.append((distributed.all_reduce(flat, async_op=True), flat, gradients))
        if len(under_way) > _MOST_UNDER_WAY:
            _end(*under_way.popleft())
    while under_way:
        _end(*under_way.popleft())


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise UnsupportedModelError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which is not averaged over nodes: make "
            "dense ones, as with sparse=False"
        )
    return gradient


def _end(work: Any, flat: Tensor, gradients: Sequence[Tensor]) -> None:
    """Bring what has been added up to where the gradients are."""
    work.wait()
    with torch.no_grad():
        for gradient, mean in zip(gradients, _views_like(gradients, flat), strict=True):
            gradient.copy_(mean)


def take_from_first_node(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Have parameters or buffers as the first node has them.

    Args:
        tensors: the same ones in the same order on all nodes, wherever each has them.
        device: by way of which they are sent.
    """
    for parts in _pieces(part for tensor in tensors for part in parts_of(tensor)):
        sent = _flat(parts, device)
        # As bytes: not each backend knows each type.
        as_bytes = sent.view(torch.uint8)
        before = as_bytes.clone()
        distributed.broadcast(as_bytes, 0)
        if torch.equal(as_bytes, before):
            continue
        for part, own, other in zip(
            parts, _views_like(parts, before.view(sent.dtype)), _views_like(parts, sent), strict=True
        ):
            # Not into tensors that have these values: by the version of a tensor, code tells whether it has changed.
            if not torch.equal(own, other):
                with torch.no_grad():
                    assign(part, other)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in pieces that are sent at once, each of one type."""
    of_types: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        of_types[tensor.dtype].append(tensor)
    for of_type in of_types.values():
        yield from in_pieces(of_type, _PIECE_BYTES)


def _flat(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The elements of tensors, one behind the other, on a device."""
    return torch.cat([tensor.detach().to(device, non_blocking=True).reshape(-1) for tensor in tensors])


def _views_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """What lies so, in the shapes of tensors."""
    numbers = [tensor.numel() for tensor in tensors]
    return [view.view(tensor.shape) for view, tensor in zip(flat.split(numbers), tensors, strict=True)]
