"""What several nodes have in common: each has gradients of its own batch, and goes on with the mean of all."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.errors import UnsupportedModelError

# What is sent at once, and how many of that are under way. One is added up while another one comes from the host.
_BUCKET_BYTES, _MOST_UNDER_WAY = 64 << 20, 2


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
    flags = torch.tensor([parameter in found for parameter in parameters], dtype=torch.uint8, device=device)
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
    for gradients in _buckets([_gradient(parameter) for parameter in parameters]):
        flat = torch.cat([gradient.detach().to(device, non_blocking=True).reshape(-1) for gradient in gradients])
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


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients in shares that are sent at once, each of one type."""
    shares: defaultdict[torch.dtype, list[list[Tensor]]] = defaultdict(lambda: [[]])
    for gradient in gradients:
        of_type = shares[gradient.dtype]
        if of_type[-1] and sum(each.nbytes for each in of_type[-1]) + gradient.nbytes > _BUCKET_BYTES:
            of_type.append([])
        of_type[-1].append(gradient)
    return [share for of_type in shares.values() for share in of_type]


def _end(work: Any, flat: Tensor, gradients: Sequence[Tensor]) -> None:
    """Bring what has been added up to where the gradients are."""
    work.wait()
    with torch.no_grad():
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


def take_from_first_node(tensors: Iterable[Tensor]) -> None:
    """Have parameters or buffers as the first node has them."""
    for tensor in tensors:
        for part in parts_of(tensor):
            # A copy: whoever keeps what is in a tensor sees by its version that it is another one.
            sent = part.detach().clone(memory_format=torch.contiguous_format)
            # As bytes: not each backend knows each type.
            distributed.broadcast(sent.reshape(-1).view(torch.uint8), 0)
            if not torch.equal(sent, part):
                with torch.no_grad():
                    part.copy_(sent)
