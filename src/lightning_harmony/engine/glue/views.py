"""Views of parameters in the code between layers: copies, for parameters are swapped out. A change of one would be lost."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_harmony.engine.model.layer import version_of
from lightning_harmony.engine.structures.operations import version_counter
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.errors import UnsupportedModelError


class Views:
    """Those that a microbatch has been given. They are not kept, but what counts their changes is."""

    def __init__(self) -> None:
        self._counters: list[tuple[Tensor, int, Callable[[], str]]] = []

    def note(self, view: Tensor, refusal: Callable[[], str]) -> None:
        """One has been given.

        Args:
            view: the copy.
            refusal: says what is refused if it is changed in place.
        """
        if not is_composed(view) and not view.is_inference():
            self._counters.append((version_counter(view), version_of(view), refusal))

    def refuse_changed(self) -> None:
        """The microbatch has come to its loss or to its end.

        Raises:
            UnsupportedModelError: if it has changed one of them in place.
        """
        counters, self._counters = self._counters, []
        for counter, version, refusal in counters:
            if version_of(counter) != version:
                raise UnsupportedModelError(refusal())
