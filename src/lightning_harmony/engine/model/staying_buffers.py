"""Buffers that stay where code finds them, as others have them, too, or have tensors in their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.memory_users import has_memory
from lightning_harmony.engine.structures.operations import Unseen, version_of
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.engine.structures.strides import copied

# Larger ones are compared before they are copied once more: calls share a copy.
_SOON_COPIED_BYTES = 16 * 1024


@dataclass(frozen=True)
class Content:
    """What a tensor held at one moment.

    Attributes:
        tensor: the one.
        copy: holds it.
        version: how often it had been changed, as far as that is counted.
        checksum: of a large one.
    """

    tensor: Tensor
    copy: Tensor
    version: int | None
    checksum: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> Content:
        """What it holds now."""
        is_large = tensor.nbytes > _SOON_COPIED_BYTES
        return cls(tensor, copied(tensor), version_of(tensor), checksum(tensor) if is_large else None)

    def is_current(self, tensor: Tensor) -> bool:
        """Whether a large tensor is the one, and holds it still."""
        if self.checksum is None or tensor is not self.tensor or version_of(tensor) != self.version:
            return False
        return torch.equal(checksum(tensor), self.checksum)


class StayingBuffers:
    """Lets a layer's code find what these held in its call when it runs again, by whichever way it comes to them.

    Args:
        keys: the modules that have them, and their names there.
    """

    def __init__(self, keys: Sequence[tuple[nn.Module, str]] = ()) -> None:
        self._keys = keys
        # By identity.
        self._newest: dict[int, Content] = {}

    def memory(self) -> set[int]:
        """What their memory is told from others by."""
        if not self._keys:
            return set()
        with DisableTorchFunctionSubclass():
            return {tensor.untyped_storage()._cdata for tensor in self._tensors()}

    def look(self) -> list[Content]:
        """What they hold."""
        if not self._keys:
            return []
        # Who watches what code reads is not to see this.
        with Unseen(), DisableTorchFunctionSubclass():
            return list(map(self._content, self._tensors()))

    def _content(self, tensor: Tensor) -> Content:
        known = self._newest.get(id(tensor))
        if known is None or not known.is_current(tensor):
            known = self._newest[id(tensor)] = Content.of(tensor)
        return known

    @contextmanager
    def as_they_were(self, then: list[Content]) -> Iterator[None]:
        """Within the context they hold what they held; what is done to them there is taken back. No version tells of that."""
        if not then:
            yield
            return
        now = self.look()
        _fill(then)
        try:
            yield
        finally:
            _fill(now)

    def _tensors(self) -> list[Tensor]:
        """Those that hold something by themselves, and not as results that have a graph."""
        found = (owner._buffers.get(name) for owner, name in self._keys)
        tensors = {id(each): each for each in found if each is not None and _is_plain(each)}
        return [each for each in tensors.values() if not (each.requires_grad or each.is_inference() or each.is_meta)]


def _is_plain(tensor: Tensor) -> bool:
    # One that is expanded cannot be changed in place.
    return has_memory(tensor) and not is_composed(tensor) and torch._debug_has_internal_overlap(tensor) != 1


def _fill(contents: list[Content]) -> None:
    with Unseen(), DisableTorchFunctionSubclass():
        for content in contents:
            content.tensor.data.copy_(content.copy)
