"""Whether parameters need gradients, where a step's code says otherwise for a while, as for a model without its adapters."""

from __future__ import annotations

from collections import defaultdict
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
        # By microbatch, those that differ from that.
        self._own: defaultdict[int, dict[int, bool]] = defaultdict(dict)
        self._current: int | None = None

    def needed(self, tensor: Tensor) -> bool:
        """Whether a tensor needed gradients when the step began."""
        return self._before.get(id(tensor), (tensor, tensor.requires_grad))[1]

    def set(self, microbatch: int, tensors: Iterable[Tensor], flag: bool) -> None:
        """The microbatch that runs says whether these need gradients."""
        self._current = microbatch
        for tensor in tensors:
            _, before = self._before.setdefault(id(tensor), (tensor, tensor.requires_grad))
            if flag == before:
                self._own[microbatch].pop(id(tensor), None)
            else:
                self._own[microbatch][id(tensor)] = flag
            _set(tensor, flag)

    def switch_to(self, microbatch: int) -> None:
        """From now on another microbatch runs."""
        if microbatch == self._current or not self._before:
            return
        last, self._current = self._current, microbatch
        for key in () if last is None else self._own[last]:
            _set(*self._before[key])
        for key, flag in self._own[microbatch].items():
            _set(self._before[key][0], flag)

    @property
    def are_left(self) -> bool:
        """Whether a microbatch has left one other than it was: the next one would find it so."""
        return any(self._own.values())

    def restore(self) -> None:
        """The step is undone."""
        for tensor, before in self._before.values():
            _set(tensor, before)
        self.forget()


def _set(tensor: Tensor, flag: bool) -> None:
    with torch._C.DisableTorchFunction():
        if tensor.requires_grad != flag:
            tensor.requires_grad_(flag)
