"""A batch before its step runs: a step that runs again finds what it found first, whatever it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from typing_extensions import override

from lightning_harmony.engine.model.layer import version_of
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.engine.structures.strides import assign
from lightning_harmony.microbatches.remembered import Remembered, undo_of_flag


class KeptBatch(Remembered):
    """A batch, or its microbatches, before a step runs that may run again: it may change what it is called with.

    Args:
        given: what it is called with.
        copies: whether copies are kept of tensors; without, it is only known whether they change.
        watches: whether it is known, too, where they tell nobody that they change, as through `.data` and by NumPy.
    """

    def __init__(self, given: Any, *, copies: bool, watches: bool = False) -> None:
        super().__init__()
        self._copies, self._watches = copies, watches
        self._checksums: list[tuple[Tensor, Tensor]] = []
        self._versions: list[tuple[Tensor, int]] = []
        self.add(given)

    def has_changed(self) -> bool:
        """Whether a tensor has been changed in place."""
        if any(version_of(tensor) != version for tensor, version in self._versions):
            return True
        with DisableTorchFunction():
            return any(not torch.equal(checksum(tensor), before) for tensor, before in self._checksums)

    def restore(self) -> bool:
        """Make everything what it was; whether that is possible."""
        if self.has_changed() and not self._copies:
            return False
        self.undo()
        return True

    @override
    def undo_of_tensor(self, tensor: Tensor) -> Callable[[], None]:
        """What makes it what it is now, if there is a copy."""
        is_inference = tensor.is_inference()
        self._versions.append((tensor, version_of(tensor)))
        # On the host: a device may have no room for it. Those of inference mode do not tell whether they change.
        before = tensor.detach().to("cpu", copy=True) if self._copies or is_inference else None
        has_bits = tensor.layout is torch.strided and not (tensor.is_nested or is_inference or is_composed(tensor))
        if self._watches and has_bits:
            with DisableTorchFunction():
                self._checksums.append((tensor, checksum(tensor)))

        need_again = undo_of_flag(tensor)

        def undo() -> None:
            need_again()
            # Not all that changes tells so.
            if before is not None:
                with torch.inference_mode(is_inference), torch.no_grad():
                    assign(tensor, before.to(tensor.device))

        return undo
