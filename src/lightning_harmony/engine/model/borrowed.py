"""What a step shows of layers: modules that their code uses though they are no parts of them, and buffers with graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.errors import BorrowsModuleError, LeavesGraphError


class BorrowedModules:
    """What steps have shown: the layers of a class are given the same modules, and have the same buffers to themselves."""

    def __init__(self) -> None:
        self._with_graphs: frozenset[tuple[type, str]] = frozenset()
        self._of_classes: dict[type[nn.Module], dict[int, nn.Module]] = {}
        self._layers: Sequence[Layer] = ()

    def note(self, root: nn.Module, error: BorrowsModuleError | LeavesGraphError) -> bool:
        """Note what a step has shown; whether it is new, and, where it is a module, one of its own that can be lent.

        Args:
            root: the model.
            error: what it has shown.
        """
        if isinstance(error, LeavesGraphError):
            known, self._with_graphs = self._with_graphs, self._with_graphs | {(type(error.owner), error.buffer)}
            return known != self._with_graphs
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

    def lent(self, layers: Sequence[Layer]) -> list[Layer]:
        """The layers, with what they borrow."""
        self._layers = layers
        found: list[Layer] = []
        for layer in layers:
            own = {id(each) for each in layer.module.modules()}
            others = self._of_classes.get(type(layer.module), {})
            borrowed = tuple(each for key, each in others.items() if key not in own)
            found.append(replace(layer, borrowed=borrowed, with_graphs=self._with_graphs))
        return found
