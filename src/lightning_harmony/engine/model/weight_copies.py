"""Copies of weights, which code has in the places of tensors in their memory: they follow the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_harmony.engine.model.companions import View
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import Unseen, version_counter, version_of
from lightning_harmony.errors import UnsupportedModelError


@dataclass
class _Copy:
    """One of them, which ends when nobody has it, or a view of it.

    Attributes:
        memory: its own.
        where: its first element there, its size and its strides.
        view: where the tensor lay that it takes the place of.
        stride: of the weight there.
        dtype: of the weight there.
        counter: counts its changes; None where that counts others, too.
        state: what tells whether it was changed.
    """

    memory: StorageWeakRef
    where: tuple[int, torch.Size, tuple[int, ...]]
    view: View
    stride: tuple[int, ...]
    dtype: torch.dtype
    counter: Tensor | None
    state: Any = None

    def tensor(self) -> Tensor | None:
        """Itself, or one that has its memory; None if it has ended."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self.view.dtype, device=storage.device).set_(storage, *self.where)

    def note(self, copy: Tensor) -> None:
        """Note what it is now."""
        self.state = checksum(copy) if self.counter is None else version_of(self.counter)

    def has_changed(self, copy: Tensor) -> bool:
        """Whether it is something else than what was noted."""
        if self.counter is None:
            return not torch.equal(checksum(copy), self.state)
        return bool(version_of(self.counter) != self.state)


class WeightCopies:
    """What code has of the weights of a layer, and may keep: `weight.detach()` in an attribute, or returned, or a row of it.

    The memory where a layer finds its weights is used for others when it has run, so what is in that is copied. In plain
    PyTorch it would have the memory of the weight, and change with each update.

    Args:
        layer: its name.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._copies: list[_Copy] = []

    def note(
        self, copy: Tensor, original: Tensor, parameter: nn.Parameter, leaf: Tensor, *, counts: bool = True
    ) -> None:
        """A tensor in the memory of a weight has been copied.

        Args:
            copy: what takes its place.
            original: one that lies where it lay.
            parameter: the weight.
            leaf: the weight where the code has found it.
            counts: whether the version of the copy counts its own changes alone.
        """
        place = (int(copy.storage_offset()), copy.size(), copy.stride())
        counter = version_counter(copy) if counts and not copy.is_inference() else None
        view = View.of(original, parameter, leaf)
        noted = _Copy(StorageWeakRef(copy.untyped_storage()), place, view, leaf.stride(), leaf.dtype, counter)
        noted.note(copy)
        self._copies.append(noted)

    def __bool__(self) -> bool:
        """Whether somebody has one."""
        return any(not each.memory.expired() for each in self._copies)

    def follow(self) -> None:
        """Let them be what the weights on the host are.

        Raises:
            UnsupportedModelError: if one was changed in place.
        """
        with Unseen():
            alive = [(each, copy) for each in self._copies if (copy := each.tensor()) is not None]
            self._copies = [each for each, _ in alive]
            for each, copy in alive:
                if each.has_changed(copy):
                    raise UnsupportedModelError(
                        f"a tensor of shape {tuple(copy.shape)} that code keeps in the memory of a weight of layer "
                        f"{self._layer!r} was changed in place, which does not change the weight where layers are swapped: "
                        "change the weight itself, under torch.no_grad() in a hook such as on_train_batch_start, or keep "
                        "weight.detach().clone()"
                    )
                now = each.view.parameter.detach().to(each.dtype)
                if now.stride() != each.stride:
                    now = torch.empty_strided(now.shape, each.stride, dtype=now.dtype).copy_(now)
                copy.copy_(each.view.within(now))
                if each.counter is not None:
                    torch.autograd.graph.increment_version(each.counter)
                each.note(copy)
