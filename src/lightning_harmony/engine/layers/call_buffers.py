"""The buffers of a layer in one of its calls: it may change them, and its recompute must find them as the call did."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_harmony.engine.layers.saved_tensors import Saves
from lightning_harmony.engine.model.layer import BufferKey, ParameterKey, SwappedLayer, buffer_of, host_buffer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.memory_users import ALONE, memory_of, num_holders, num_users, with_others
from lightning_harmony.engine.structures.parts import are_equal, parts_of
from lightning_harmony.engine.structures.strides import copied
from lightning_harmony.errors import UnsupportedModelError, UnswappableBufferError


class CallBuffers:
    """What a call finds in the layer's buffers, and leaves there.

    Args:
        layer: what is called.
        residency: of its pack.
        last_filled: what calls in its microbatch have filled through `.data`, as the last one left it; None after one.
        copies: whether to copy them before the call. Else they are compared for as long as it isn't known which ones calls
            change.
        drops: whether the layer is to keep what it has, whatever the call changes.

    Attributes:
        bound: what the layer's code is to find.
    """

    bound: dict[BufferKey, Tensor]
    _before: dict[BufferKey, Tensor]
    _filled: dict[BufferKey, list[weakref.ref[UntypedStorage]]]

    def __init__(
        self,
        layer: SwappedLayer,
        residency: Residency,
        last_filled: dict[BufferKey, Tensor | None],
        *,
        copies: bool,
        drops: bool,
    ) -> None:
        self._layer, self._last_filled, self._drops = layer, last_filled, drops
        self._changes_by_others = dict(layer.changes_by_others)
        # Statistics of modules that count nothing, as those of InstanceNorm.
        self._uncounted: list[BufferKey] = []
        if not layer.buffers:
            self._filled, self._before, self.bound = {}, {}, {}
            return
        # Where those lie that the call has filled through `.data`, in its run and in its recomputes.
        self._filled = {}
        found = {key: residency.buffers[key] for key in layer.buffers}
        self._is_unknown = layer.has_unknown_buffers()
        copies = copies or self._is_unknown
        # What a call changes is apart: the graph of another call may have saved what this one finds, and behind the memory of
        # one that becomes larger, as those of observers of quantization do, lies another one.
        apart = [key for key in found if self._is_unknown or (copies and key in layer.changing_buffers)]
        with torch.inference_mode(False):
            copied_ones = _copies(found) if copies else {}
        self.bound = found | {key: copied_ones[key] for key in apart}
        self._before = copied_ones | {key: found[key] for key in apart}
        self._apart = frozenset(apart)
        self._versions = {key: tensor._version for key, tensor in self.bound.items()}
        self._extents = {key: _extent(tensor) for key, tensor in found.items() if key not in self._apart}

    def take_over(
        self, residency: Residency, left: Mapping[BufferKey, Tensor | None], saves: Saves
    ) -> dict[BufferKey, Tensor]:
        """Let the pack have those that the layer changed or replaced.

        Args:
            residency: of the pack.
            left: what the layer had after the call.
            saves: what the call's graph has saved.

        Returns:
            These, as the pack has them now.

        Raises:
            UnsupportedModelError: if the layer has made one larger in its memory, deleted one, left a graph in one, or changed
                one in place that others see.
        """
        layer = self._layer
        self._refuse_deleted(left)
        self._refuse_grown(left)
        self._refuse_graphs(left)
        if self._is_unknown:
            layer.note_calls(self._before, left)
        counted, statistics = self._counted(left)
        self._uncounted = [key for key in left if _is_statistic(key) and key not in statistics]
        changed = [key for key in left if key in counted or _is_statistic(key) or key in layer.unversioned_buffers]
        self._refuse_seen(changed, residency, left, saves)
        if self._drops:
            self._keep(changed, residency)
            return {}
        taken = self._hand_over(changed, residency, left)
        for key in changed:
            tensor = self.bound[key]
            if tensor is left[key] and tensor._version == self._versions[key] and not _is_statistic(key):
                self._last_filled[key] = tensor.detach() if key in self._last_filled else None
                self._filled[key] = [_memory(tensor)]
        self._keep(changed, residency)
        return taken

    def _counted(self, left: Mapping[BufferKey, Tensor | None]) -> tuple[set[BufferKey], set[BufferKey]]:
        """The buffers that have changed as their versions tell, and the statistics of modules that have such buffers."""
        versions = self._versions
        counted = {key for key, it in left.items() if it is not self.bound[key] or it._version != versions[key]}
        owners = {id(owner) for owner, _ in counted}
        return counted, {key for key in left if _is_statistic(key) and id(key[0]) in owners}

    def restore(self, residency: Residency) -> None:
        """Let the pack have what the call has found."""
        residency.buffers.update(self._before)

    def _keep(self, changed: Iterable[BufferKey], residency: Residency) -> None:
        """Keep what a recompute must find, but not in the pack's memory, which does not last."""
        before = {key: self._before[key] for key in changed if key in self._before}
        self._before = {key: copied(each) if residency.has_staged(each) else each for key, each in before.items()}
        self.bound = {}

    def _refuse_grown(self, left: Mapping[BufferKey, Tensor | None]) -> None:
        for key, (storages, length) in self._extents.items():
            tensor = left[key]
            if tensor is not None and tensor.numel() > length and storages and _extent(tensor)[0] == storages:
                raise UnsupportedModelError(
                    f"layer {self._layer.name!r} makes its buffer {key[1]!r} larger in place (resize_, or out=) for the "
                    "first time when it has been called before without, over what lies behind it on the device: assign a "
                    "new tensor, or make it as large in the first call"
                )

    def _refuse_graphs(self, left: Mapping[BufferKey, Tensor | None]) -> None:
        for key, tensor in left.items():
            if tensor is not None and tensor.requires_grad and not isinstance(key, ParameterKey):
                does = f"layer {self._layer.name!r} leaves a tensor that needs gradients in its buffer {key[1]!r}"
                why = "no gradient would come through it to an earlier call: assign tensor.detach()"
                raise UnswappableBufferError(does, why, *key)

    def _refuse_seen(
        self,
        changed: Iterable[BufferKey],
        residency: Residency,
        left: Mapping[BufferKey, Tensor | None],
        saves: Saves,
    ) -> None:
        """Refuse to change in place what others have, or have tensors in the memory of, and to replace it.

        What takes its place is written to the memory that the host has of it.
        """
        layer = self._layer
        for key in changed:
            if self.bound[key] is not left[key] and self.bound[key]._version == self._versions[key]:
                host = host_buffer(key)
                if key in layer.seen_buffers or (type(host) is Tensor and _has_other_users(host, saves)):
                    raise layer.seen_change(key)
                if not isinstance(key, ParameterKey):
                    self._leave_to_others(key)
                continue
            layer.refilled_buffers.add(key)
            if key not in self._apart or type(self.bound[key]) is not Tensor or isinstance(key, ParameterKey):
                continue
            # Later, a compiler may hold it as well.
            is_kept = self._is_unknown and num_holders(self.bound, key) > 1 + (left[key] is self.bound[key])
            is_seen = is_kept or key in layer.seen_buffers
            places = [self.bound[key]]
            if residency.device.torch_device.type == "cpu":
                places.append(buffer_of(key))
            if is_seen or any(_has_other_users(each, saves) for each in places):
                raise layer.seen_change(key)

    def _leave_to_others(self, key: BufferKey) -> None:
        """A buffer was replaced: code of the step that has what stands in for it has what the call has found there."""
        # The module has it, and the model.
        if num_holders(key[0]._buffers, key[1]) > 2 and hasattr(key[0]._buffers[key[1]], "host_buffer"):
            shown: Any = key[0]._buffers[key[1]]
            shown.keep(copied(self.bound[key]))

    def _refuse_deleted(self, left: Mapping[BufferKey, Tensor | None]) -> None:
        for (_, name), tensor in left.items():
            if tensor is None:
                raise UnsupportedModelError(
                    f"layer {self._layer.name!r} deletes its buffer {name!r} or makes it None, but it is swapped with the "
                    "layer: do that before the fit, or assign an empty tensor"
                )

    def as_they_were(self) -> dict[BufferKey, Tensor]:
        """What the recompute finds of those that calls change; what it does to these is dropped.

        Raises:
            UnsupportedModelError: if others have changed one since that the call has not changed.
        """
        for key, number in self._layer.changes_by_others.items():
            if key not in self._before and number != self._changes_by_others.get(key, 0):
                raise self._layer.refusal_of_change(key)
        buffers = _copies(self._before)
        for key, places in self._filled.items():
            places.append(_memory(buffers[key]))
        return buffers

    def as_they_are(self, residency: Residency) -> dict[BufferKey, Tensor]:
        """What code of the layer finds that runs in the backward, such as a checkpoint's: what was left there last."""
        self.bound = {key: residency.buffers[key] for key in self._layer.buffers}
        self._versions = {key: tensor._version for key, tensor in self.bound.items()}
        self._uncounted_before = _copies({key: self.bound[key] for key in self._uncounted})
        return self.bound

    def take_over_again(self, residency: Residency, left: Mapping[BufferKey, Tensor | None]) -> dict[BufferKey, Tensor]:
        """Let the pack have those that such code has changed or replaced.

        Args:
            residency: of the pack.
            left: what the layer had when the backward went on elsewhere.

        Returns:
            These, as the pack has them now.
        """
        counted, statistics = self._counted(left)
        self.bound = {}
        changed = counted | statistics
        compared = ((key, it, left[key]) for key, it in self._uncounted_before.items())
        changed |= {key for key, before, now in compared if now is not None and not are_equal(now, before)}
        return self._hand_over([key for key in left if key in changed], residency, left)

    def _hand_over(
        self, changed: Collection[BufferKey], residency: Residency, left: Mapping[BufferKey, Tensor | None]
    ) -> dict[BufferKey, Tensor]:
        """Let the pack have what the layer has left in some of its buffers, and return that."""
        residency.buffers.update({key: tensor.detach() for key in changed if (tensor := left[key]) is not None})
        for keys in (residency.dirty_buffers, self._layer.changed_buffers, self._layer.changing_buffers):
            keys.update(changed)
        return {key: residency.buffers[key] for key in changed}

    def fill_again(self, saves: Saves) -> None:
        """Let what a graph has saved of buffers be as a later call has left them that filled them through `.data`.

        No version tells of that: the backward of plain PyTorch, where all calls fill the same memory, computes with it.
        """
        for key, places in self._filled.items():
            last = self._last_filled.get(key)
            if last is None:
                continue
            memory = [storage._cdata for place in places if (storage := place()) is not None]
            for content in [each.content for each in saves.alive() if each.content is not None]:
                if content.untyped_storage()._cdata in memory:
                    content.untyped_storage().copy_(last.untyped_storage())


def _has_other_users(tensor: Tensor, saves: Saves) -> bool:
    """Whether Python code has tensors in the memory of one, apart from what a graph has saved."""
    if num_users(tensor) <= ALONE:
        return False
    saved = [content for each in saves.alive() if (content := each.content) is not None]
    own = [content for content in saved if memory_of(content) == memory_of(tensor)]
    return num_users(tensor) > ALONE + len(own) and bool(with_others([tensor], own))


def _copies(tensors: Mapping[BufferKey, Tensor]) -> dict[BufferKey, Tensor]:
    return {key: copied(tensor) for key, tensor in tensors.items()}


def _memory(tensor: Tensor) -> weakref.ref[UntypedStorage]:
    return weakref.ref(tensor.untyped_storage())


def _extent(tensor: Tensor) -> tuple[list[int], int]:
    """Where a tensor lies, and how many elements it has."""
    plain = [part for part in parts_of(tensor) if part.layout is torch.strided]
    return [part.untyped_storage()._cdata for part in plain], tensor.numel()


def _is_statistic(key: BufferKey) -> bool:
    """Whether a buffer is one that batch and instance norm kernels update, which count no version."""
    owner, name = key
    return owner.training and name in ("running_mean", "running_var")
