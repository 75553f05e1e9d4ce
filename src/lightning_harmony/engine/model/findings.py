"""Findings: what a step has shown of layers that must be known before one runs, so that it begins again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.engine.model.layer import BufferKey, buffers_of
from lightning_harmony.engine.structures.memory_users import num_holders
from lightning_harmony.errors import BorrowsModuleError, UnswappableBufferError


class Findings:
    """Which modules that are no parts of them the layers of a class use, and which of their buffers stay where they are."""

    def __init__(self) -> None:
        self._unswapped: frozenset[tuple[type, str]] = frozenset()
        self._of_classes: dict[type[nn.Module], dict[int, nn.Module]] = {}
        self._layers: Sequence[Layer] = ()
        self._seen_buffers: set[BufferKey] = set()

    def note_seen_buffers(self) -> None:
        """No step has run: note the buffers of layers that others have, too. Whoever watches steps will have all of them."""
        keys = (key for layer in self._layers for key in buffers_of(layer.whole))
        self._seen_buffers.update(key for key in keys if num_holders(key[0]._buffers, key[1]) > 1)

    def note(self, root: nn.Module, error: BorrowsModuleError | UnswappableBufferError) -> bool:
        """Note what a step has shown; whether it is new, and, where it is a module, one of its own that can be lent.

        Args:
            root: the model.
            error: what it has shown.
        """
        if isinstance(error, UnswappableBufferError):
            known, self._unswapped = self._unswapped, self._unswapped | {(type(error.owner), error.buffer)}
            return known != self._unswapped
        borrower, lender = root.get_submodule(error.borrower), error.lender
        if not isinstance(lender, nn.Module):
            lender = root.get_submodule(str(lender))
            others = {id(each) for each in lender.modules() if each is not lender}
            if any(id(layer.module) in others for layer in self._layers):
                # One of its own parameters is read, and not what its layers are for.
                return False
        borrowed = self._of_classes.setdefault(type(borrower), {})
        if id(lender) in borrowed or any(each is borrower for each in lender.modules()):
            return False
        borrowed[id(lender)] = lender
        return True

    def applied(self, layers: Sequence[Layer]) -> list[Layer]:
        """The layers, with what is known of them."""
        self._layers = layers
        found: list[Layer] = []
        for layer in layers:
            own = {id(each) for each in layer.module.modules()}
            others = self._of_classes.get(type(layer.module), {})
            borrowed = tuple(each for key, each in others.items() if key not in own)
            found.append(replace(layer, borrowed=borrowed, unswapped=self._unswapped, seen_buffers=self._seen_buffers))
        return found
