"""What several nodes have in common: each has gradients of its own batch, and goes on with the mean of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_harmony.engine.nodes.averaging import Averaging
from lightning_harmony.engine.nodes.division import Division, Need
from lightning_harmony.engine.nodes.exchange import Exchange, flat_on, pieces, views_like
from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.engine.structures.strides import assign


def average_behind(
    loss: Tensor,
    parameters: Sequence[nn.Parameter],
    division: Division,
    *,
    by_hand: bool,
    hear: Callable[[Averaging], bool] = lambda averaging: False,
) -> None:
    """Have gradients averaged before anybody sees them: as in plain Lightning with DDP.

    Args:
        loss: whose backward follows.
        parameters: of the module, in an order that all nodes have.
        division: between the nodes.
        by_hand: whether the user's code calls backwards, and earlier ones may have left gradients that are averaged.
        hear: told of the averaging when the backward begins; whether it agrees with other nodes on what they need. If the
            averaging is not started, it follows the backward.
    """
    before = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None} if by_hand else {}

    def new_gradient(parameter: nn.Parameter) -> Tensor | None:
        return None if _is_as(parameter.grad, before.get(parameter)) else parameter.grad

    def begin(gradient: Tensor) -> None:
        averaging = Averaging(division, parameters, new_gradient)
        if not hear(averaging):
            division.agree(Need.WHOLE)

        def average() -> None:
            if not averaging.is_over:
                averaging.finish()

        call_behind: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
        # Behind what layers, to which the backward comes later, have called behind it: that brings gradients, too.
        call_behind(lambda: call_behind(average))

    loss.register_hook(begin)


def _is_as(gradient: Tensor | None, before: tuple[Tensor, int] | None) -> bool:
    return before is not None and gradient is before[0] and gradient._version == before[1]


def take_from_first_node(tensors: Iterable[Tensor], exchange: Exchange, device: torch.device) -> None:
    """Have parameters or buffers as the first node has them.

    Args:
        tensors: the same ones in the same order on all nodes, wherever each has them.
        exchange: between the nodes.
        device: by way of which they are sent: that of the exchange, or the host.
    """
    for parts in pieces(part for tensor in tensors for part in parts_of(tensor)):
        sent = flat_on(parts, device)
        # As bytes: not each backend knows each type.
        as_bytes = sent.view(torch.uint8)
        before = as_bytes.clone()
        exchange.broadcast(as_bytes)
        if torch.equal(as_bytes, before):
            continue
        for part, own, other in zip(
            parts, views_like(parts, before.view(sent.dtype)), views_like(parts, sent), strict=True
        ):
            # Not into tensors that have these values: by the version of a tensor, code tells whether it has changed.
            if not torch.equal(own, other):
                with torch.no_grad():
                    assign(part, other)
