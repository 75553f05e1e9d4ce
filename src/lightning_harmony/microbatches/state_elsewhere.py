"""What layers' code finds elsewhere than on their modules when it is called: its recompute finds that, and leaves no trace.

Objects, variables of closures, globals, and attributes of functions, classes and modules: of those that are in no layer, or
that other code finds, too, as a layer does that has another one in a list. The layer's own code may change them, as one that
counts its calls, or the code between layers, as one that sets a scale for each. They are looked at before each call, all in
one go, since most never change, and kept for its recompute: of what has changed, copies of the tensors, large ones in the
stash. A large one that is changed in place for the first time after a call is refused, if the code reads it when it runs
again. What a call makes, and leaves there, is looked at from the next one on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from lightning_harmony.engine.layers.runtime import FoundAtCall, ObjectsOfCall, OnCall
from lightning_harmony.engine.memory.kept_tensor import KeptTensor
from lightning_harmony.engine.memory.stash import is_small
from lightning_harmony.engine.model.derived import OutOfReach
from lightning_harmony.engine.structures.containers import entries_of, num_kept, others_for, with_others
from lightning_harmony.engine.structures.memory_users import has_memory_among
from lightning_harmony.engine.structures.operations import detached
from lightning_harmony.engine.structures.strides import copied
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.held.cached_functions import CacheThen, cached_in, filling_of
from lightning_harmony.held.found_elsewhere import FoundElsewhere, is_attribute_of
from lightning_harmony.held.held_state import Held, Kind, Marks, joint_marks
from lightning_harmony.held.places import Places, Together
from lightning_harmony.held.variables import Chosen
from lightning_harmony.held.walk_of_values import WalkOf
from lightning_harmony.microbatches.metric_states import CountedOnce
from lightning_harmony.microbatches.step_undo import MOST_COPIED


class _Moment:
    """What is in a place, from one change to the next."""

    def __init__(self) -> None:
        # With kept tensors in place of those that may be changed: these may end. Of a set a list, which keeps its order.
        self._content: Any = None
        self._is_set = False
        # What there is of these, by names or numbers.
        self._kept: dict[Any, Any] = {}
        self._cached: dict[Any, CacheThen] = {}
        self._undo: list[Callable[[], None]] = []
        # The other tensors, and how often each was changed in place.
        self._same = Marks()
        self._versions: list[int | None] = []
        # The memory of tensors that are what they were when code runs again, by identity.
        self._staying: Collection[int] = ()

    def keep(
        self,
        held: Held,
        copies: Callable[[Tensor], KeptTensor | None],
        first: int | None,
        staying: Collection[int] = (),
    ) -> None:
        """Keep it for recomputes.

        Args:
            held: the place, which was looked at.
            copies: makes a copy of a tensor; None of one that stays what it is.
            first: from which number of a list on tensors may be copied; None for none anywhere.
            staying: the memory of buffers that are then what they are now.
        """
        self._staying = staying
        copied = set[int]()

        def keep(tensor: Tensor) -> Any:
            if has_memory_among(tensor, staying) or (copy := copies(tensor)) is None:
                return tensor
            copied.add(id(tensor))
            return copy

        self._is_set = isinstance(held.newest, set)
        self._content = list(held.newest) if self._is_set else held.newest
        self._same, self._undo = held.marks, held.undo_in_place()
        if first is not None:
            self._kept = others_for(entries_of(self._content, first), Tensor, keep)
        if copied:
            self._content = with_others(self._content, self._kept)
            self._same = Marks([tensor for tensor in held.marks.tensors if id(tensor) not in copied])
        self._versions = self._same.versions()
        self._cached = {name: CacheThen(value) for name, value in held.cached} if held.is_named else {}

    def put(self, held: Held) -> None:
        """Let it be in its place."""
        for undo in self._undo:
            undo()
        content, kept, versions = self._content, self._kept, self._same.versions()
        if versions != self._versions:
            then_and_now = zip(self._same.tensors, self._versions, versions, strict=True)
            different = (tensor for tensor, then, now in then_and_now if then != now)
            changed = {id(tensor) for tensor in different if not has_memory_among(tensor, self._staying)}
            unless_changed = partial(_unless_changed, held.name, changed)
            content = with_others(content, others_for(entries_of(content), Tensor, unless_changed))
            kept = {name: content[name] for name in kept}
        others = others_for(kept.items(), KeptTensor, KeptTensor.again)
        content = with_others(content, others | {name: each.again() for name, each in self._cached.items()})
        held.put(set(content) if self._is_set else content)


class _Changed(OutOfReach):
    """Is in the place of a tensor that was changed in place after a call: to use it raises."""

    def _refusal(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"a layer's code reads a tensor in {self._name!r} which was changed in place after the layer was called, so that "
            "its backward cannot run the call again: pass it to the layer as an argument, or assign a new tensor"
        )

    def _refuse(self, *args: Any) -> Any:
        raise self._refusal()

    # Python does not ask `__getattr__` for these.
    __getitem__ = __iter__ = __len__ = __float__ = __bool__ = _refuse


class StateElsewhere:
    """What is elsewhere, in the steps of one kind.

    Args:
        places: all that steps may change.
        of_layers: the modules of each layer: their own attributes are looked at with these.
        with_weights: gives the attributes of objects that keep weights of layers, by their identities: so are they.
        metrics: those of no layer.

    Attributes:
        default_dtypes: those that layers were called with and that hold in steps alone, as with `precision="64-true"`.
    """

    def __init__(
        self,
        places: Places,
        of_layers: Iterable[Iterable[nn.Module]],
        with_weights: Callable[[], set[int]],
        metrics: CountedOnce,
    ) -> None:
        self._places, self._metrics = places, metrics
        self._modules, self._with_weights = FoundElsewhere(of_layers), with_weights
        self._excluded: set[int] = set()
        self.default_dtypes: set[torch.dtype] = set()
        self._dtype_outside = torch.get_default_dtype()
        # All places, of which these are some.
        self._all: Sequence[Held] = ()
        self._together: Together | None = None
        # Those of them that have come in this step, and the objects that were looked into, by their identities.
        self._late: list[Held] = []
        self._known: dict[int, Any] = {}
        self._is_begun, self._step = False, 0
        # Of each place. What may be changed in place, with marks.
        self._moments: list[_Moment] = []
        self._marks: dict[int, tuple[Marks, list[Any]]] = {}
        # Those of all places together, made when they are asked for.
        self._joint: tuple[Marks, list[Any]] | None = None
        # Of lists that have grown in this step, how much was in them before.
        self._num_old: dict[int, int] = {}
        # The functions with a cache, and how far that is filled.
        self._fillings: dict[int, list[tuple[Any, Any]]] = {}
        # By numbers: those that have changed in this step, and those that are not kept as they are.
        self._changed: set[int] = set()
        self._new: set[int] = set()
        # The names of places in which tensors were changed in place. In the first step small ones are copied wherever they are
        # unless there are too many of them.
        self._in_place: set[str] = set()
        self._is_first = self._copies_all = True

    def begin(self) -> OnCall:
        """A step begins.

        Returns:
            What to call before a layer's code runs, for the context in which that code runs again.
        """
        self._metrics.refuse_late()
        self.finish()
        self._dtype_outside = torch.get_default_dtype()
        return self._at_call

    def finish(self) -> None:
        """The step is over."""
        if self._is_begun and self._together is not None:
            for held in self._late:
                held.look()
                held.give_back()
            self._together.let_go()
            self._is_first = False
            self._metrics.is_known = True
        self._is_begun, self._moments, self._fillings, self._num_old = False, [], {}, {}
        self._marks, self._joint = {}, None
        self._late, self._known = [], {}

    def changes(self) -> Callable[[], str | None]:
        """Code runs now.

        Returns:
            What tells, when it has run, the name of a place that it has changed; None if it has changed none.
        """
        with DisableTorchFunctionSubclass():
            found, together = self._look(), self._looked_at()

        def changed() -> str | None:
            with DisableTorchFunctionSubclass():
                numbers = _differing(self._look(), found)
            return together.places[numbers[0]].name if numbers else None

        return changed

    def _looked_at(self) -> Together:
        """The places, which a step looks at from its first call on."""
        return self._together if self._is_begun and self._together is not None else self._begin()

    def _begin(self) -> Together:
        contents = self._places.look()
        together, excluded = self._together, self._with_weights()
        if together is None or self._all is not contents.places or excluded != self._excluded:
            self._all, self._excluded = contents.places, excluded
            self._modules.look(self._all)
            self._together = together = Together([*filter(self._is_elsewhere, self._all), *self._cached_by_layers()])
        together.look()
        held = together.places
        self._is_begun, self._step = True, self._step + 1
        self._moments, self._num_old = [_Moment() for _ in held], {}
        self._changed, self._new = set(), set(range(len(held)))
        for number in self._new:
            self._mark(number, held[number])
        self._copies_all = self._is_first and sum(len(each.marks.tensors) for each in held) <= MOST_COPIED
        return together

    def _is_elsewhere(self, held: Held) -> bool:
        # What other threads do meanwhile is not to be taken back.
        if held.key in self._excluded or held.is_of_threads:
            return False
        if held.kind is Kind.MODULE:
            return not self._modules.is_of_layer_alone(held.owner)
        # Hooks are called by no layer's code alone. Containers among a layer's attributes are looked at with these.
        is_of_layer = held.root is not None and not held.is_shared and self._modules.is_of_layer_alone(held.root[0])
        return held.kind is Kind.OBJECT or (held.kind is Kind.CONTAINER and not is_of_layer)

    def _cached_by_layers(self) -> Iterator[Held]:
        """The functions with a cache among the attributes of layers' modules."""
        for held in self._all:
            if held.cached and held.kind is Kind.MODULE and not self._is_elsewhere(held):
                yield Held(held.name, Chosen(held.content, [name for name, _ in held.cached]), Kind.OBJECT)

    def _changed_in_place(self) -> set[int]:
        """Where objects have been changed in place since they were marked."""
        # All are asked in one go, for nothing changes in most turns.
        if self._joint is None:
            each = self._marks.values()
            self._joint = Marks.joint(marks for marks, _ in each), joint_marks(then for _, then in each)
        marks, then = self._joint
        if marks.now() == then:
            return set()
        return {number for number, (marks, then) in self._marks.items() if marks.now() != then}

    def _filled(self) -> set[int]:
        """Where functions with a cache have been called with something new."""
        caches = self._fillings.items()
        return {number for number, all_of in caches if any(filling_of(each) != then for each, then in all_of)}

    def _mark(self, number: int, held: Held) -> None:
        self._joint = None
        if held.cached:
            functions = [cached_in(value) for _, value in held.cached]
            self._fillings[number] = [(each, filling_of(each)) for each in functions]
        else:
            self._fillings.pop(number, None)
        if held.marked:
            self._marks[number] = held.marks, held.marks.now()
        else:
            self._marks.pop(number, None)

    def _look(self, objects: Sequence[Any] = ()) -> list[_Moment]:
        """What is in each place: the same list as long as nothing has changed. Places come behind the others.

        Args:
            objects: may lead to places, too.
        """
        together = self._looked_at()
        changed = self._changed_in_place()
        self._in_place.update(together.places[number].name for number in changed)
        changed |= self._filled()
        before, different = together.newest, together.look()
        for number in different:
            kept = num_kept(before[number], together.newest[number])
            self._num_old[number] = min(kept, self._num_old.get(number, kept))
        changed.update(different)
        if changed:
            self._moments = list(self._moments)
            self._changed |= changed
            self._new |= changed
            for number in changed:
                self._moments[number] = _Moment()
                self._mark(number, together.places[number])
            objects = [*objects, *(each for n in different for each in together.places[n].come(before[n]))]
        self._look_into(together, objects)
        return self._moments

    def _look_into(self, together: Together, objects: Sequence[Any]) -> None:
        """Look at the places, too, to which some objects lead that were not there when the step began."""
        if not self._known:
            self._known = {id(held.owner): held.owner for held in self._all}
        objects = [each for each in objects if id(each) not in self._known and not issubclass(type(each), Tensor)]
        if not objects:
            return
        self._known.update((id(each), each) for each in objects)
        keys = self._with_weights().union(held.key for held in together.places)
        late = [held for held in _places_of(objects) if held.key not in keys and self._is_elsewhere(held)]
        if late:
            self._late += late
            self._together = Together([*together.places, *late])
            self._moments = [*self._moments, *(_Moment() for _ in late)]
        for number, held in enumerate(late, len(together.places)):
            self._changed.add(number)
            self._new.add(number)
            self._mark(number, held)

    def _keep(self, objects: ObjectsOfCall, number: int, held: Held, moment: _Moment) -> None:
        """Keep what is in a place for the backward: copies of the tensors that may be changed before."""
        is_changed_in_place, has_changed = held.name in self._in_place, number in self._changed

        def copies(tensor: Tensor) -> KeptTensor | None:
            if is_small(tensor):
                may_change = is_changed_in_place or self._copies_all
            else:
                may_change = (is_changed_in_place or has_changed) and tensor.layout is torch.strided
            if not may_change:
                return None
            # The user may change the tensor itself before it is in the stash. Of a small one, a copy is kept.
            return KeptTensor(objects.stash(detached(tensor) if is_small(tensor) else copied(detached(tensor))), tensor)

        first: int | None = 0 if is_changed_in_place or self._copies_all else None
        if first is None and has_changed:
            # Not the tensors of all batches before, in a list that grows.
            first = self._num_old.get(number, 0)
        moment.keep(held, copies, first if held.has_tensors else None, objects.staying)

    def _at_call(self, objects: ObjectsOfCall) -> FoundAtCall:
        if (dtype := torch.get_default_dtype()) is not self._dtype_outside:
            self.default_dtypes.add(dtype)
        self._metrics.refuse_late()
        # Who watches what code reads is not to see this.
        with DisableTorchFunctionSubclass():
            found, together = self._look(objects.held), self._looked_at()
            for number in self._new:
                held = together.places[number]
                self._keep(objects, number, held, found[number])
            self._new.clear()
            kept = _kept_of(objects)
            restore = self._restoring(together, objects.given)
        return FoundAtCall(restore, partial(self._as_it_was, self._step, together, found, kept, objects.own))

    def _restoring(self, together: Together, given: Iterable[Any]) -> Callable[[], str | None]:
        """What makes all what it is now, while the call is running; the name of what is changed in place, if any is."""
        found, copies = self._moments, together.newest
        of_given = [(held, held.newest) for held in _places_of(given)]
        marks = Marks.joint(held.marks for held, _ in of_given)
        then = marks.now()

        def restore() -> str | None:
            with DisableTorchFunctionSubclass():
                if marks.now() != then:
                    return "what it is called with"
                if changed := self._changed_in_place() | self._filled():
                    return together.places[min(changed)].name
                numbers = _differing(self._look(), found)
                for held, content in (*of_given, *((together.places[number], copies[number]) for number in numbers)):
                    held.put(content)
            return None

        return restore

    @contextmanager
    def _as_it_was(
        self,
        step: int,
        together: Together,
        found: list[_Moment],
        kept: list[tuple[Held, _Moment]],
        own: Collection[int],
    ) -> Iterator[None]:
        with DisableTorchFunctionSubclass():
            if self._is_begun and self._step == step:
                numbers, copies = _differing(self._look(), found), self._looked_at().newest
            else:
                # A graph may be kept for longer than its step.
                numbers, copies = list(range(len(found))), [held.look() for held in together.places]
            # The recompute sees to the layer's own.
            numbers = [number for number in numbers if not is_attribute_of(together.places[number], own)]
            before = [(held, held.look()) for held, _ in kept]
            before += [(together.places[number], copies[number]) for number in numbers]
            # Of all, before any is as it was: several places may hold one generator.
            undo = [held.undo_in_place() for held, _ in before]
            for held, moment in kept:
                moment.put(held)
            for number in numbers:
                found[number].put(together.places[number])
        try:
            with self._metrics.again():
                yield
        finally:
            with DisableTorchFunctionSubclass():
                # What the recompute changes, the call has changed: it is among these.
                for (held, content), all_of in zip(before, undo, strict=True):
                    for each in all_of:
                        each()
                    held.put(content)


def _places_of(values: Iterable[Any]) -> list[Held]:
    """The places that some values lead to, but what other threads may change."""
    return [held for held in WalkOf(values).take_places() if not held.is_of_threads] if values else []


def _kept_of(objects: ObjectsOfCall) -> list[tuple[Held, _Moment]]:
    """What some objects lead to that a layer is called with, and finds in them when it runs again."""
    kept = [(held, _Moment()) for held in _places_of(objects.again)]
    for held, moment in kept:
        moment.keep(
            held,
            lambda each: KeptTensor(objects.stash(detached(each)), each) if is_small(each) else None,
            0,
            objects.staying,
        )
    return kept


def _differing(one: list[_Moment], other: list[_Moment]) -> list[int]:
    """The numbers of the places that have changed. Those that have come meanwhile, no earlier call has found."""
    if one is other:
        return []
    return [number for number, (now, then) in enumerate(zip(one, other, strict=False)) if now is not then]


def _unless_changed(place: str, changed: set[int], tensor: Tensor) -> Any:
    return _Changed(place) if id(tensor) in changed else tensor
