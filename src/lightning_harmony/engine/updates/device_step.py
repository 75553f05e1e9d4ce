"""An optimizer's step on a device: the pieces in which it is made, and what of the optimizer's state it finds there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.host_store import ALIGNMENT, aligned
from lightning_harmony.engine.nodes.division import parameters_of
from lightning_harmony.engine.structures.strides import is_dense
from lightning_harmony.engine.updates.optimizer_twin import Clip, Share, States
from lightning_harmony.engine.updates.separable_optimizers import is_elementwise, step_unheard

# Bytes of state for each byte of a parameter, where that cannot be told: the two moments of Adam.
ASSUMED_STATE_COPIES = 2
_PLAIN = {Tensor, nn.Parameter}


@dataclass(frozen=True)
class Part:
    """A parameter, or a range of its elements in the order in which they lie in memory.

    Attributes:
        parameter: which one.
        elements: the range; None for the parameter in its own shape.
        is_last: whether no other range of the parameter follows.
    """

    parameter: nn.Parameter
    elements: slice | None = None
    is_last: bool = True

    @property
    def is_first(self) -> bool:
        """Whether no other range of the parameter comes before."""
        return self.elements is None or self.elements.start == 0

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of a tensor that lies in memory as the parameter does; all of a single number."""
        if self.elements is None or tensor.dim() == 0:
            return tensor
        return tensor.as_strided((tensor.numel(),), (1,))[self.elements]


class Pieces:
    """Parts of parameters in pieces, each of which is stepped at once.

    Nothing is stepped while the first piece comes, and nothing comes while the last one goes back: those are smaller.

    Args:
        parameters: all of them, in order.
        most_bytes: of the parameters in a piece, rounded up to units of alignment; more if one cannot be cut.
        may_be_cut: whether ranges of a parameter may be stepped one after the other.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], most_bytes: int, may_be_cut: Callable[[nn.Parameter], bool]
    ) -> None:
        parameters = list(parameters)
        self._least = self._limit = max(most_bytes // 4, 1)
        self._most = most_bytes
        self._left = sum(aligned(parameter.nbytes) for parameter in parameters)
        self._pieces: list[list[Part]] = []
        self._begin()
        for parameter in parameters:
            self._add(parameter, may_be_cut)

    def __iter__(self) -> Iterator[list[Part]]:
        return (piece for piece in self._pieces if piece)

    def _begin(self) -> None:
        self._room = min(self._limit, max(self._left // 2, self._least))
        self._limit = min(2 * self._limit, self._most)
        self._pieces.append([])

    def _add(self, parameter: nn.Parameter, may_be_cut: Callable[[nn.Parameter], bool]) -> None:
        size, number, begin = parameter.element_size(), parameter.numel(), 0
        while (number - begin) * size > self._room and may_be_cut(parameter):
            # In whole units of alignment: kernels are chosen by it, and vectors leave nothing over but at the end.
            length = max(self._room, 0) // (ALIGNMENT * size) * ALIGNMENT
            if length == 0 and not self._pieces[-1]:
                length = ALIGNMENT
            if begin + length >= number:
                break
            if length:
                self._take(Part(parameter, slice(begin, begin + length), is_last=False), length * size)
                begin += length
            self._begin()
        rest = aligned((number - begin) * size)
        if self._pieces[-1] and rest > self._room:
            self._begin()
        self._take(Part(parameter, slice(begin, number) if begin else None), rest)

    def _take(self, part: Part, num_bytes: int) -> None:
        self._pieces[-1].append(part)
        self._room -= num_bytes
        self._left -= num_bytes


def may_be_cut(share: Share, parameter: nn.Parameter) -> bool:
    """Whether a parameter's elements are updated one by one, with all that belongs to them in the same place."""
    tensors = [share.gradients[parameter], *share.state(parameter).values()]
    return (
        is_elementwise(share.optimizer)
        and is_dense(parameter)
        and all(
            value.shape == parameter.shape and value.stride() == parameter.stride()
            for value in tensors
            if isinstance(value, Tensor) and value.dim() > 0
        )
    )


def is_on_device(name: str | None, value: Any, group: Mapping[str, Any]) -> bool:
    """Whether a step finds a part of a parameter's state on the parameter's device: where torch loads it to.

    Args:
        name: of the part; None if it has none.
        value: what it is.
        group: the group of the parameter.
    """
    return isinstance(value, Tensor) and (name != "step" or bool(group.get("fused") or group.get("capturable")))


def own_of(part: Part, value: Tensor) -> Tensor:
    """A part of a tensor; of a number that other parts begin with, too, one of its own."""
    return part.of(value) if part.is_last or value.dim() > 0 else value.clone()


def make_step(
    share: Share,
    clip: Clip | None,
    parameters: Mapping[nn.Parameter, Tensor],
    gradients: Mapping[nn.Parameter, Tensor],
    states: States,
) -> None:
    """Clip gradients, and let the user's own optimizer step, where these tensors are."""
    twin = share.elsewhere(parameters, gradients, states)
    if clip is not None:
        clip(parameters_of(twin))
    with share.surroundings():
        step_unheard(twin)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Start to copy to the first of each pair from the second: plain ones in one call, for other threads run between calls."""
    plain: tuple[list[Tensor], list[Tensor]] = [], []
    for destination, source in pairs:
        if type(destination) in _PLAIN and type(source) in _PLAIN:
            plain[0].append(destination)
            plain[1].append(source)
        else:
            destination.copy_(source, non_blocking=True)
    if plain[0]:
        torch._foreach_copy_(*plain, non_blocking=True)
