"""Buffers of layers that other code reads: it gets copies, and what it changes in one would be lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_harmony.engine.lanes.lane import AnyLane, this_thread
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer, buffer_of
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import Unseen, version_of
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.engine.structures.strides import ViewAgain


@dataclass
class _Copy:
    """A copy of a buffer.

    Attributes:
        layer: whose buffer it is of.
        host: the host's buffer, as it was copied.
        version: that of it.
        tensor: the copy.
        checksum: of what was copied.
    """

    layer: SwappedLayer
    host: Tensor
    version: int | None
    tensor: Tensor
    checksum: Tensor

    def is_of_now(self, key: BufferKey) -> bool:
        """Whether nobody has changed the buffer since."""
        host = buffer_of(key)
        return key not in self.layer.changed_buffers and host is self.host and version_of(host) == self.version

    def refuse_changed(self, key: BufferKey) -> None:
        """Refuse what others have changed in it."""
        with Unseen():
            has_changed = not torch.equal(checksum(self.tensor), self.checksum)
        if has_changed:
            raise self.layer.refusal_of_change(key)


class ReadBuffers:
    """The newest copies that each lane has, until it comes to its loss or to its end."""

    def __init__(self) -> None:
        self._copies: dict[AnyLane | None, dict[tuple[BufferKey, torch.device], _Copy]] = {}
        # The memory of those that lanes had, and the layers whose they are.
        self._given: list[tuple[BufferKey, SwappedLayer, StorageWeakRef]] = []

    def read(self, layer: SwappedLayer, key: BufferKey, device: torch.device, copy: Callable[[], Tensor]) -> Tensor:
        """A copy of a buffer for the calling lane: the same one as before while nobody has changed the buffer.

        Args:
            layer: whose buffer it is.
            key: which.
            device: where the copy is to be.
            copy: makes one.

        Raises:
            UnsupportedModelError: if the lane has changed an older copy.
        """
        copies = self._copies.setdefault(this_thread.lane, {})
        known = copies.get((key, device))
        if known is not None:
            if known.is_of_now(key):
                return known.tensor
            known.refuse_changed(key)
        made = copy()
        # What a graph records holds nothing yet.
        if made.layout is torch.strided and not is_composed(made) and not _is_recording(device):
            host = buffer_of(key)
            with Unseen():
                copies[key, device] = _Copy(layer, host, version_of(host), made, checksum(made))
        return made

    def filled_since(
        self, tensor: Tensor, last_filled: Callable[[], dict[BufferKey, Tensor | None]]
    ) -> Callable[[], Tensor | None]:
        """What tells a backward the content of a tensor that a graph saves, where calls have filled it through `.data` since.

        No version tells of that: the backward of plain PyTorch, where all have the same memory, computes with it.

        Args:
            tensor: may be a view of the newest copy of a buffer.
            last_filled: what the calls of the microbatch have filled so, as the last one left it.
        """
        copies = self._copies.get(this_thread.lane, {}).items()
        of = next(((key, copy.tensor) for (key, _), copy in copies if lies_in(tensor, copy.tensor)), None)
        if of is None or tensor.dtype is not of[1].dtype:
            return lambda: None
        key, device = of[0], tensor.device

        def newest() -> Tensor:
            last = last_filled()[key]
            assert last is not None
            return last.to(device)

        view = ViewAgain(tensor, of[1], newest)
        # So the next call keeps it, though it may be the first.
        last_filled().setdefault(key, None)
        return lambda: None if last_filled().get(key) is None else view.load()

    def refuse_changed(self) -> None:
        """The calling lane has come to its loss or to its end: refuse what it has changed in its copies, and forget them.

        Raises:
            UnsupportedModelError: naming the buffer.
        """
        for (key, _), copy in self._copies.pop(this_thread.lane, {}).items():
            copy.refuse_changed(key)
            self._given.append((key, copy.layer, StorageWeakRef(copy.tensor.untyped_storage())))

    def refuse_kept(self) -> None:
        """Refuse that code keeps a copy of what its layer has changed in place since, or a view of one.

        Raises:
            UnswappableBufferError: naming the buffer.
        """
        self._given = [each for each in self._given if not each[2].expired()]
        for key, layer, _ in self._given:
            if key in layer.refilled_buffers:
                raise layer.seen_change(key)


def _is_recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
