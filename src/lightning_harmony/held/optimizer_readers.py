"""Where a step's code can reach an optimizer or its state: it may read there what an update changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_harmony.engine.structures.nested import is_ndarray, reachable
from lightning_harmony.engine.structures.object_state import attributes_of
from lightning_harmony.engine.structures.spans import Spans, span_of
from lightning_harmony.held.held_state import Held, Kind, in_one
from lightning_harmony.held.places import Places
from lightning_harmony.held.within import parts_within

# Of a container that is data, the first elements tell what the others are.
_MOST_ELEMENTS = 100
# What functions and objects of torch lead to, is followed through so many of them.
_MOST_FOLLOWED = 1000


class Reader(NamedTuple):
    """A place that leads to an optimizer or to its state.

    Attributes:
        in_words: the place, for messages.
        runs_in_backward: whether the code of layers may read it, which runs again while updates just in time are made.
    """

    in_words: str
    runs_in_backward: bool


class OptimizerReaders:
    """Finds places that lead to optimizers, or that hold tensors which share memory with their state.

    Args:
        places: all that a step's code can reach.
        model: whose buffers are looked at, too.
        of_layers: the modules of layers.
    """

    def __init__(self, places: Places, model: nn.Module, of_layers: Iterable[nn.Module]) -> None:
        self._places, self._model = places, model
        self._of_layers = {id(module) for module in of_layers}
        # What was looked at: places, copies of what was in those without tensors, and the names that lead to optimizers.
        self._all: Sequence[Held] = ()
        self._wanted: frozenset[int] = frozenset()
        self._copies: list[Any] = []
        self._holders: dict[int, Any] = {}
        self._arrays: dict[int, list[tuple[Any, Any]]] = {}

    def find(self, optimizers: Sequence[Optimizer]) -> Reader | None:
        """The first such place, before others one that layers may read; None if there is none.

        Args:
            optimizers: the fit's.
        """
        found: Reader | None = None
        with torch._C.DisableTorchFunctionSubclass():
            for reader in self._readers(optimizers):
                found = found or reader
                if reader.runs_in_backward:
                    return reader
        return found

    def _readers(self, optimizers: Sequence[Optimizer]) -> Iterator[Reader]:
        self._look(optimizers)
        for number, name in self._holders.items():
            held = self._all[number]
            yield Reader(f"the optimizer is held in {_path(held, name)!r}", self._is_read_by_layers(held))
        for path in self._with_state(optimizers):
            # An update just in time changes it while others' code still runs in the backward.
            yield Reader(f"state of the optimizer is held in {path!r}", True)

    def _look(self, optimizers: Sequence[Optimizer]) -> None:
        """Look into the places that have changed since they were looked at last."""
        contents = self._places.look()
        wanted = frozenset(id(each) for optimizer in optimizers for each in (optimizer, optimizer.state))
        if contents.places is not self._all or wanted != self._wanted:
            self._all, self._wanted, self._holders, self._arrays = contents.places, wanted, {}, {}
            self._copies = [None] * len(contents.places)
        both = zip(self._copies, contents.copies, strict=True)
        for number in [number for number, (before, now) in enumerate(both) if before is not now]:
            held = self._all[number]
            self._holders.pop(number, None)
            names = (name for name, value in held.items() if _leads_to(value, wanted))
            self._holders.update((number, name) for name in islice(names, 1))
            self._arrays[number] = [
                (name, each) for name, value in held.items() for each in in_one(value) if is_ndarray(each)
            ]
            # Tensors are not kept for longer than the user does.
            self._copies[number] = None if held.has_tensors else contents.copies[number]

    def _is_read_by_layers(self, held: Held) -> bool:
        """Whether a layer's code may come there: not to what another module has for itself."""
        owner = held.owner if held.kind is Kind.MODULE else None if held.root is None else held.root[0]
        is_of_module = isinstance(owner, nn.Module) and not held.is_shared
        return not is_of_module or id(owner) in self._of_layers

    def _with_state(self, optimizers: Sequence[Optimizer]) -> Iterator[str]:
        """The places that are state of an optimizer, or hold what shares memory with it."""
        # Copies are made at once: an update may add to it meanwhile.
        states = [state for optimizer in optimizers for state in list(optimizer.state.values())]
        of_states = set(map(id, states))
        yield from (held.name for held in self._all if held.key in of_states)
        candidates = [(_path(held, name), value) for held in self._all for name, value in held.marked]
        candidates += [
            (_path(self._all[number], name), value) for number in self._arrays for name, value in self._arrays[number]
        ]
        candidates += self._model.named_buffers()
        for data in self._places.too_long:
            if id(data) in self._wanted:
                yield "a dict"
            values = dict.values(data) if isinstance(data, dict) else data
            candidates += [(f"a {type(data).__name__}", value) for value in islice(values, _MOST_ELEMENTS)]
        memory = sorted((span, path) for path, value in candidates if (span := span_of(value)) is not None)
        if not memory:
            return
        spans = Spans(span for span, _ in memory)
        for state in states:
            for value in list(state.values()) if isinstance(state, dict) else ():
                span = span_of(value)
                if span is not None and spans.meet([span]):
                    yield next(path for (start, end), path in memory if start < span[1] and end > span[0])


def scheduler_reader(schedulers: Iterable[Any], optimizers: Sequence[Optimizer]) -> str | None:
    """A scheduler whose code may read optimizer state: of no class of torch, or with a function that holds an optimizer.

    Args:
        schedulers: those that step after a batch.
        optimizers: the fit's.

    Returns:
        It, in words; None if there is none.
    """
    wanted = frozenset(map(id, optimizers))
    for scheduler in reachable(schedulers, _schedulers_in):
        kind = type(scheduler)
        if kind.__module__.partition(".")[0] != "torch":
            return f"scheduler {kind.__name__} may read optimizer state"
        functions = (FunctionType, MethodType, partial)
        if any(
            issubclass(type(each), functions) and _leads_to(each, wanted) for each in _parts_of_scheduler(scheduler)
        ):
            return f"a function of scheduler {kind.__name__} holds the optimizer"
    return None


def _schedulers_in(scheduler: Any) -> Iterator[Any]:
    return (each for each in _parts_of_scheduler(scheduler) if _is_around_optimizers(type(each)))


def _path(held: Held, name: Any) -> str:
    if not isinstance(name, str) or not (held.kind is Kind.MODULE or held.has_attributes):
        return held.name
    return f"{held.name}.{name}" if held.name else name


def _leads_to(value: Any, wanted: frozenset[int]) -> bool:
    """Whether a value is one of some objects, or holds one where no place is: as a variable of a function, or a scheduler."""
    return any(id(each) in wanted for each in islice(reachable([value], _parts_of), _MOST_FOLLOWED))


def _parts_of(value: Any) -> Iterable[Any]:
    return _parts_of_scheduler(value) if _is_around_optimizers(type(value)) else parts_within(value)


def _is_around_optimizers(kind: type) -> bool:
    """Whether objects of a class of torch or Lightning wrap optimizers, as schedulers do; into those of users one looks."""
    if issubclass(kind, Optimizer):
        return False
    return kind.__module__.startswith("torch.optim.") or kind.__module__.endswith(".core.optimizer")


def _parts_of_scheduler(value: Any) -> Iterator[Any]:
    for each in list((attributes_of(value) or {}).values()):
        yield from each[:_MOST_ELEMENTS] if type(each) is list else (each,)
