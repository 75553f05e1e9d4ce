"""Whether parameters need gradients, where a step's code says otherwise for a while, as for a model without its adapters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class GradientFlags:
    """Those that the code of a step changes: microbatches that take turns each find what they have said."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A step begins, which finds them as they are."""
        # By their identities: tensors, and what they were when the step began.
        self._before: dict[int, tuple[Tensor, bool]] = {}
        # By microbatch, what each has said.
        self._own: dict[int, dict[int, bool]] = {}
        self._current: int | None = None

    def needed(self, tensor: Tensor) -> bool:
        """Whether a tensor needed gradients when the step began."""
        return self._before.get(id(tensor), (tensor, tensor.requires_grad))[1]

    def set(self, microbatch: int, tensors: Iterable[Tensor], flag: bool) -> None:
        """A microbatch says whether these need gradients."""
        self._current = microbatch
        own = self._own.setdefault(microbatch, {})
        for tensor in tensors:
            self._before.setdefault(id(tensor), (tensor, tensor.requires_grad))
            own[id(tensor)] = flag
            _set(tensor, flag)

    def switch_to(self, microbatch: int) -> None:
        """From now on another microbatch runs."""
        if microbatch == self._current or not self._before:
            return
        self._current = microbatch
        own = self._own.get(microbatch, {})
        for key, (tensor, before) in self._before.items():
            _set(tensor, own.get(key, before))

    @property
    def are_left(self) -> bool:
        """Whether a microbatch has left one other than it was: the next one would find it so."""
        return any(flag != self._before[key][1] for own in self._own.values() for key, flag in own.items())

    def restore(self) -> None:
        """The step is undone."""
        for tensor, before in self._before.values():
            _set(tensor, before)
        self.forget()


def _set(tensor: Tensor, flag: bool) -> None:
    with torch._C.DisableTorchFunction():
        if tensor.requires_grad != flag:
            tensor.requires_grad_(flag)
