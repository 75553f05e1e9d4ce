"""The buffers of a module before a step that may be refused: who catches the error finds them as they were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.engine.structures.strides import assign, narrowed


class BuffersBefore:
    """Copies of all buffers, such as the statistics of batch normalization, on the host.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        # By what they are of: its size, and its distinct elements.
        self._copies: dict[Tensor, tuple[torch.Size, Tensor]] = {}
        for owner in module.modules():
            buffers = dict(owner._buffers)
            # Those of TorchScript cannot be replaced.
            if isinstance(owner._buffers, dict):
                self._buffers.append((owner, buffers))
            for buffer in buffers.values():
                for part in () if buffer is None else parts_of(buffer):
                    if part not in self._copies:
                        self._copies[part] = part.size(), narrowed(part.detach()).to("cpu", copy=True)

    def restore(self) -> None:
        """Make them what they were."""
        if torch.cuda.is_initialized():
            # Copies to the host may be under way.
            torch.cuda.synchronize()
        for owner, buffers in self._buffers:
            owner._buffers.clear()
            owner._buffers.update(buffers)
        with torch.no_grad():
            for buffer, (size, copy) in self._copies.items():
                if buffer.size() != size:
                    buffer.resize_(size)
                assign(buffer, copy.expand(size) if copy.size() != size else copy)
