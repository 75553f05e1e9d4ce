"""The agenda of a device: what the plan tells to bring and to evict before which visit, and what is needed when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.plan.simulate.lowering import Moves
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import Errand, Phase


class Place(NamedTuple):
    """Where a lane is: in a pack, in a phase, and where in the plan's order of that phase."""

    pack: SwappedPack
    phase: Phase
    position: int


class Agenda:
    """What the plan tells of one device.

    Args:
        number: of the device.

    Attributes:
        plan: what is needed when.
        follows_moves: whether a step visits packs as moves were made for: not if microbatches run one after the other.
        ends_with_forward: whether a step that does so has no backward, as evaluations have none.
    """

    def __init__(self, number: int) -> None:
        self.plan = Plan((), (), 0)
        self.follows_moves = True
        self.ends_with_forward = False
        self._number = number
        self._moves: Moves = {}
        # The visits of this step that moves were made for, and the packs that were to come with them, and are not yet there.
        self._visited: set[tuple[Phase, int]] = set()
        self._due: dict[int, None] = {}

    def use(self, plan: Plan, moves: Moves) -> None:
        """Go by a plan from now on.

        Args:
            plan: the plan.
            moves: what comes and goes before which visit; empty where the plan doesn't tell.
        """
        self.plan, self._moves = plan, moves

    def reset(self) -> None:
        """The step is over."""
        self._visited.clear()
        self._due.clear()
        self.ends_with_forward = False

    @property
    def has_moves(self) -> bool:
        """Whether the plan tells what comes and goes."""
        return self.follows_moves and bool(self._moves)

    def begin_visit(self, place: Place) -> list[int]:
        """Note what the plan tells to bring before a visit; the packs that it tells to evict."""
        key = place.phase, place.position
        if key in self._visited or not self.follows_moves:
            return []
        self._visited.add(key)
        evicted: list[int] = []
        for pack, kind, _ in self._moves.get(key, ()):
            if kind is Errand.SWAP_IN:
                self._due[pack] = None
                continue
            self._due.pop(pack, None)
            if pack != place.pack.index:
                evicted.append(pack)
        return evicted

    def come(self, pack: int) -> None:
        """A pack is there, or on its way."""
        self._due.pop(pack, None)

    def following(self, place: Place, packs: Sequence[SwappedPack]) -> list[SwappedPack]:
        """The packs that are fetched ahead: those that the plan tells to bring, or as many as it looks ahead.

        Args:
            place: where lanes are.
            packs: all, by their indices.
        """
        if self.has_moves:
            return [packs[index] for index in self._due] if self.plan.lookahead else []
        following: list[SwappedPack] = []
        rest = self._rest_of_forward(place)
        for index in self.plan.upcoming(place.phase, place.position) if rest is None else rest:
            if len(following) == self.plan.lookahead:
                break
            pack = packs[index]
            if pack is not place.pack and pack not in following and self.plan.runs_on(index, self._number):
                following.append(pack)
        return following

    def is_over(self, pack: int, place: Place) -> bool:
        """Whether a pack isn't needed any more in a phase, after a place."""
        rest = self._rest_of_forward(place)
        if rest is not None:
            return pack not in rest
        return self.plan.is_over(pack, place.phase, place.position)

    def _rest_of_forward(self, place: Place) -> Sequence[int] | None:
        """What is visited after a place of the forward, if that is all there is; else None."""
        # User code may run a backward within an evaluation.
        is_all = self.ends_with_forward and place.phase is Phase.FORWARD
        return self.plan.visits[place.position + 1 :] if is_all else None

    def needed_last(self, packs: Sequence[int], place: Place) -> int:
        """Which of some packs is needed last after a place."""
        return self.plan.needed_last(packs, place.phase, place.position)

    def keeps_masters(self, pack: SwappedPack, place: Place) -> bool:
        """Whether a pack that comes for what a lane does at a place, or later, stays as it is on the host for its update.

        Where it would have to be there twice from the forward on, as it is and as it has been cast, it does not.
        """
        if pack.index not in self.plan.device_updated:
            return False
        return not pack.layout.casts or self.plan.comes_back_to(pack.index, place.phase, place.position)
