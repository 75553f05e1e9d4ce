"""Between the forward of a batch and its backward, in which layers run again, hooks must leave parameters as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.hooks import between_passes
from lightning_harmony.lightning_tree import LightningTree


@dataclass(frozen=True)
class UnchangedParameters:
    """What parameters were like when a forward had ended.

    Attributes:
        hooks: those that run before the backward, and could change them.
    """

    hooks: list[str]
    _parameters: dict[str, tuple[nn.Parameter, bool, tuple[int, int]]]

    @classmethod
    def of(cls, tree: LightningTree, trainer: Any) -> UnchangedParameters:
        """The forward of a batch has ended. All parameters are read, but only where a hook could change them."""
        hooks = between_passes(tree, trainer)
        named = trainer.lightning_module.named_parameters() if hooks else ()
        return cls(hooks, {name: (each, each.requires_grad, _state(each)) for name, each in named})

    def check(self) -> None:
        """The backward begins.

        Raises:
            UnsupportedModelError: if a parameter has changed.
        """
        for name, (parameter, required_grad, state) in self._parameters.items():
            if parameter.requires_grad != required_grad:
                self._refuse("requires_grad", name)
            if _state(parameter) != state:
                self._refuse("the data", name)

    def _refuse(self, what: str, name: str) -> None:
        raise UnsupportedModelError(
            f"{what} of parameter {name!r} changed between the forward of a batch and its backward, in which its layer runs "
            f"again ({'; '.join(self.hooks)}): change it in on_train_batch_start or on_train_batch_end"
        )


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes with a parameter: autograd counts changes in place, but not those through `.data`."""
    return 0 if parameter.is_inference() else parameter._version, _checksum(parameter)


def _checksum(parameter: Tensor) -> int:
    """A sum over the bits, in the widest words that they fill: those are summed as fast as memory is read."""
    flat = parameter.detach().contiguous().as_strided((parameter.numel(),), (1,)).view(torch.uint8)
    for word in (torch.int64, torch.int32, torch.int16):
        if flat.numel() % word.itemsize == 0 and flat.storage_offset() % word.itemsize == 0:
            flat = flat.view(word)
            break
    return int(flat.sum())
