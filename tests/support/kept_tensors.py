"""Code that keeps a tensor in the memory of one of a layer's own: what it keeps, where, from when on, and who reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Kept:
    """What is kept of a tensor of the fourth of some blocks, which have a `box`, and a list `values`.

    Args:
        of: gives the tensor of a block.
        view: what is kept of it.
        place: where: in an attribute or a list of the block, in an attribute of its box or of the tensor, or elsewhere.
        maker: when it is taken.
        reader: what uses it.
        factor: what it multiplies there.
    """

    def __init__(
        self,
        of: Callable[[Any], Tensor],
        view: Callable[[Tensor], Tensor],
        place: str,
        maker: str,
        reader: str,
        factor: Callable[[Tensor], Tensor],
    ) -> None:
        self.of, self.view, self.place, self.maker, self.reader, self.factor = of, view, place, maker, reader, factor
        self.elsewhere = list[Tensor]()

    def look_at(self, blocks: nn.ModuleList) -> None:
        self.owner: Any = blocks[3]
        self.first = blocks[0]

    def _holder(self) -> Any:
        return {
            "attribute": self.owner,
            "object": self.owner.box,
            "parameter": self.of(self.owner),
        }[self.place]

    def _values(self) -> list[Any] | None:
        return {"list": self.owner.values, "elsewhere": self.elsewhere}.get(self.place)

    def make(self) -> None:
        kept = self.view(self.of(self.owner))
        if (values := self._values()) is not None:
            values[:] = [kept]
        else:
            self._holder().kept = kept

    def find(self) -> Tensor | None:
        if (values := self._values()) is not None:
            return values[0] if values else None
        kept: Tensor | None = getattr(self._holder(), "kept", None)
        return kept

    def used(self, x: Tensor) -> Tensor:
        kept = self.find()
        return x if kept is None else x * self.factor(kept)

    def during(self, block: nn.Module, x: Tensor) -> Tensor:
        if block is self.owner and (self.maker == "each call" or (self.maker == "first call" and self.find() is None)):
            self.make()
        is_reader = block is {"its layer": self.owner, "an earlier layer": self.first}.get(self.reader)
        return self.used(x) if is_reader else x
