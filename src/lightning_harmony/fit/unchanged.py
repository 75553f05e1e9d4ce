"""What must stay as it is: parameters until the backward, what microbatches share, and buffers where a step is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.batches.split import shared_by
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import Versions, version_of
from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.engine.structures.strides import assign, narrowed
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.updating.hooks import between_passes


class UnchangedParameters:
    """What parameters were like when a forward had ended. They are read, but only where a hook could change them.

    Args:
        tree: tells which hooks are overridden.
        trainer: whose they are.
        in_graph: the parameters that the backward reads. Frozen ones of others, as those of a teacher, may change.
    """

    def __init__(self, tree: LightningTree, trainer: Any, in_graph: set[nn.Parameter]) -> None:
        # Those that run before the backward, and could change them.
        self._hooks = between_passes(tree, trainer)
        named = list(trainer.lightning_module.named_parameters()) if self._hooks else []
        is_read = {name: each in in_graph for name, each in named}
        numbers = {name: (version_of(each), checksum(each)) if is_read[name] else None for name, each in named}
        self._parameters = {name: (each, each.requires_grad, numbers[name]) for name, each in named}

    def check(self) -> None:
        """The backward begins.

        Raises:
            UnsupportedModelError: if a parameter has changed.
        """
        for name, (parameter, required_grad, numbers) in self._parameters.items():
            if parameter.requires_grad != required_grad:
                self._refuse("requires_grad", name)
            if numbers is None:
                continue
            version, bits = numbers
            # Autograd counts changes in place, but not those through `data`.
            if version_of(parameter) != version or not torch.equal(checksum(parameter), bits):
                self._refuse("the data", name)

    def _refuse(self, what: str, name: str) -> None:
        raise UnsupportedModelError(
            f"{what} of parameter {name!r} changed between the forward of a batch and its backward, in which its layer runs "
            f"again ({'; '.join(self._hooks)}): change it in on_train_batch_start or on_train_batch_end"
        )


class UnchangedBatch:
    """What the microbatches of a batch share, before their steps run.

    Args:
        parts: the microbatches.

    Attributes:
        parts: the same.
        shared: tensors, and other objects.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.shared = shared_by(parts[0], parts[1]) if len(parts) > 1 else []
        self._versions = Versions(each for each in self.shared if isinstance(each, Tensor))

    def check(self) -> None:
        """The steps have run.

        Raises:
            UnsupportedModelError: if one changed what others found.
        """
        for tensor in self._versions.changed():
            raise UnsupportedModelError(
                f"the step changes a tensor of shape {tuple(tensor.shape)} of its batch in place, which has no rows for "
                "samples and is the same for all microbatches: change a copy of it, or use "
                "HarmonyStrategy(num_microbatches=1)"
            )


class BuffersBefore:
    """Copies of all buffers, such as the statistics of batch normalization, on the host.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = list(module.modules())
        # Those of TorchScript cannot be replaced.
        self._buffers = [(owner, dict(owner._buffers)) for owner in owners if isinstance(owner._buffers, dict)]
        buffers = [buffer for owner in owners for buffer in owner._buffers.values() if buffer is not None]
        parts = dict.fromkeys(part for buffer in buffers for part in parts_of(buffer))
        # By what they are of: its size, and its distinct elements.
        self._copies = {part: (part.size(), narrowed(part.detach()).to("cpu", copy=True)) for part in parts}

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
