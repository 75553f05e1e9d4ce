"""A batch before its step runs: a step that runs again finds what it found first, whatever it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_harmony.engine.model.layer import version_of
from lightning_harmony.engine.structures.strides import assign
from lightning_harmony.microbatches.remembered import Remembered


class KeptBatch(Remembered):
    """A batch, or its microbatches, before a step runs that may run again: it may change what it is called with.

    Args:
        given: what it is called with.
        copies: whether copies are kept of tensors; without, it is only known whether they change.
    """

    def __init__(self, given: Any, *, copies: bool) -> None:
        super().__init__()
        self._copies = copies
        self._versions: list[tuple[Tensor, int]] = []
        self.add(given)

    def has_changed(self) -> bool:
        """Whether a tensor has been changed in place."""
        return any(version_of(tensor) != version for tensor, version in self._versions)

    def restore(self) -> bool:
        """Make everything what it was; whether that is possible."""
        if self.has_changed() and not self._copies:
            return False
        self.undo()
        return True

    @override
    def undo_of_tensor(self, tensor: Tensor) -> Callable[[], None]:
        """What makes it what it is now, if there is a copy."""
        version, is_inference = version_of(tensor), tensor.is_inference()
        self._versions.append((tensor, version))
        # On the host: a device may have no room for it. Those of inference mode do not tell whether they change.
        before = tensor.detach().to("cpu", copy=True) if self._copies or is_inference else None

        def undo() -> None:
            if before is not None and (is_inference or version_of(tensor) != version):
                with torch.inference_mode(is_inference):
                    assign(tensor, before.to(tensor.device))

        return undo
