"""What must stay as it is: parameters until the backward, and what microbatches share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.batches.split import shared_by
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import Versions, version_of
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
