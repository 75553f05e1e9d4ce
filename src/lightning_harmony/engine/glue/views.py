"""Views of parameters in the code between layers: copies, for parameters are swapped out. A change of one would be lost."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_harmony.engine.structures.operations import version_counter, version_of
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.errors import UnsupportedModelError


class Views:
    """Those that a microbatch has been given. They are not kept, but what counts their changes is."""

    def __init__(self) -> None:
        self._counters: list[tuple[Tensor, int | None, Callable[[], str]]] = []
        self._memory: list[tuple[nn.Parameter, StorageWeakRef]] = []

    def note(self, view: Tensor, parameter: nn.Parameter, refusal: Callable[[], str]) -> None:
        """One has been given.

        Args:
            view: the copy.
            parameter: of which it is one.
            refusal: says what is refused if it is changed in place.
        """
        if is_composed(view):
            return
        self._memory.append((parameter, StorageWeakRef(view.untyped_storage())))
        if not view.is_inference():
            self._counters.append((version_counter(view), version_of(view), refusal))

    def has_of(self, parameter: nn.Parameter) -> bool:
        """Whether the microbatch still has one of a parameter, which would not change with it."""
        return any(each is parameter and not memory.expired() for each, memory in self._memory)

    def refuse_changed(self) -> None:
        """The microbatch has come to its loss or to its end.

        Raises:
            UnsupportedModelError: if it has changed one of them in place.
        """
        counters, self._counters, self._memory = self._counters, [], []
        for counter, version, refusal in counters:
            if version_of(counter) != version:
                raise UnsupportedModelError(refusal())
