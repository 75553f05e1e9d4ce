"""A replica: copies of a model's tensors on another device, whose memory its own tensors take while its code runs there."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.attributes import OF_TORCH
from lightning_harmony.engine.replicas.flat_pieces import FlatPieces
from lightning_harmony.engine.structures.containers import ChangesOf, entries_of
from lightning_harmony.engine.structures.nested import leaves_of, map_tensors
from lightning_harmony.engine.structures.strides import spanned_bytes

_CONTAINERS = (list, deque, dict)
# Longer lists are looked at for what is new in them: they collect.
_SHORT = 64


class NotReplicableError(Exception):
    """A model's code has to run where its tensors are; the message says why."""


class _Place(NamedTuple):
    """A place where a module holds a tensor, a device, or a tuple with some.

    Attributes:
        holder: the dict that it is in.
        name: the key.
        value: what it holds.
    """

    holder: dict[str, Any]
    name: str
    value: Any

    def is_same(self, other: _Place) -> bool:
        """Whether another place is this one, and holds the same object."""
        return self.holder is other.holder and self.name == other.name and self.value is other.value


class _Owner:
    """What one module holds. It is looked at anew when one of its dicts has changed, which torch counts.

    Attributes:
        places: of its parameters and buffers, and of attributes, as metrics keep.
        containers: lists and dicts in its attributes, which may come to hold tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self.places: list[_Place] = []
        self.look()

    def look(self) -> bool:
        """See what it holds now; return whether that is something else."""
        before, attributes = self.places, self._attributes
        registries = (attributes["_parameters"], attributes["_buffers"])
        self._dicts = (attributes, *registries, attributes["_modules"])
        own = [(name, value) for name, value in attributes.items() if name not in OF_TORCH]
        self.places = [_Place(each, *item) for each in registries for item in each.items() if item[1] is not None]
        self.places += [_Place(attributes, *item) for item in own if _is_held_by_itself(item[1])]
        self.containers = [value for _, value in own if type(value) in _CONTAINERS]
        self.note()
        return len(before) != len(self.places) or not all(map(_Place.is_same, before, self.places))

    def note(self) -> None:
        """What it holds is known."""
        self._changes = ChangesOf(self._dicts)

    def has_changed(self) -> bool:
        """Whether it may hold something else than is known."""
        return not self._changes.are_none()


class Holders:
    """The modules of a model, and what each of them holds.

    Args:
        module: the model.
        home: the device where its tensors are.
    """

    def __init__(self, module: nn.Module, home: torch.device) -> None:
        self._module, self._home = module, home
        self._owners: dict[nn.Module, _Owner] = {}
        self._tensors: list[Tensor] | None = None

    def look(self) -> None:
        """See what has changed."""
        changed = [owner for owner in self.owners if owner.has_changed()]
        if not changed and self._owners:
            return
        has_others = sum(owner.look() for owner in changed) > 0
        # Another module may be one of it now.
        known = self._owners
        self._owners = {module: known.get(module) or _Owner(module) for module in self._module.modules()}
        if has_others or self._owners.keys() != known.keys():
            self._tensors = None

    @property
    def owners(self) -> Iterable[_Owner]:
        """The modules, as they were found."""
        return self._owners.values()

    def tensors(self) -> list[Tensor]:
        """The tensors that are at home, each once.

        Raises:
            NotReplicableError: if one of them would not be the same as a copy.
        """
        if self._tensors is None:
            places = [place for owner in self.owners for place in owner.places]
            found = {p.value: p.name for p in places if isinstance(p.value, Tensor) and p.value.device == self._home}
            for tensor, name in found.items():
                _refuse_odd(tensor, name)
            _refuse_aliases(found)
            self._tensors = list(found)
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        if any(getattr(tensor, each, None) for tensor in self._tensors for each in hooks):
            raise NotReplicableError("one of its parameters has a hook of its own")
        return self._tensors


class Replica:
    """The tensors of a model on another device.

    Within `entered`, the model's own tensors have the memory of the copies: code that holds one, in any way, computes
    there. What the model's code changes or assigns is brought home, so that the next microbatch finds it, wherever that runs.

    Args:
        module: the model.
        home: the device where its tensors are.
        device: the other one.
        changing: the tensors that steps change in place, by their identities.
    """

    def __init__(self, module: nn.Module, home: torch.device, device: torch.device, changing: Container[int]) -> None:
        self._home, self._device, self._changing = home, device, changing
        self._holders = Holders(module, home)
        # By the identity of each tensor: itself and its copy.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        # Those that lie together: the tensors, and where their copies are.
        self._together: list[Tensor] = []
        self._flat: set[int] = set()
        self._pieces = FlatPieces(())
        self._buffers: list[Tensor] = []

    # ---- copies --------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Make all copies what their tensors are: others may have changed these since, and in ways that nobody counts.

        Raises:
            NotReplicableError: if one of them would not be the same as a copy.
        """
        self._add_new()
        known = {id(tensor) for tensor in self._holders.tensors()}
        self._copies = {key: both for key, both in self._copies.items() if key in known}
        with torch.no_grad():
            self._pieces.fill(self._buffers, [tensor.detach() for tensor in self._together])
            for tensor, copy in self._copies.values():
                if id(tensor) not in self._flat:
                    _fill(copy, tensor)

    def bring(self) -> None:
        """Bring what changes, and what is new, for a microbatch that will run here."""
        for tensor in self._add_new():
            _fill(self._copies[id(tensor)][1], tensor)
        for tensor, copy in self._copies.values():
            if id(tensor) in self._changing:
                _fill(copy, tensor)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor, and its copy here."""
        return list(self._copies.values())

    def copy_of(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor that it has."""
        return self._copies[id(tensor)][1]

    def _add_new(self) -> list[Tensor]:
        """Make copies of tensors that have none yet, or one that is not alike, and return those."""
        self._holders.look()
        tensors = self._holders.tensors()
        missing = [each for each in tensors if not _are_alike(each, self._copies.get(id(each)))]
        if any(id(each) in self._flat for each in missing):
            # It has another shape than its place among the others: all are laid out anew.
            missing, self._copies = tensors, {}
        if missing:
            alone = [
                torch.empty_like(each, device=self._device, requires_grad=False) for each in missing if self._copies
            ]
            copies = alone or self._laid_out(missing)
            self._copies.update((id(tensor), (tensor, copy)) for tensor, copy in zip(missing, copies, strict=True))
        return missing

    def _laid_out(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of the tensors of a model, which lie together; those that come later lie by themselves."""
        self._together, self._flat = tensors, {id(tensor) for tensor in tensors}
        self._pieces = FlatPieces(tensors)
        self._buffers = self._pieces.buffers(self._device)
        return [view.data for view in self._pieces.views(self._buffers)]

    # ---- places --------------------------------------------------------------------------------------------------------

    @contextmanager
    def entered(self, *, carries: bool) -> Iterator[None]:
        """The context in which the model is here.

        Args:
            carries: whether it may change tensors, which are to be the same at home behind it.

        Raises:
            NotReplicableError: if its code gives a tensor other memory.
        """
        self._holders.look()
        owners = list(self._holders.owners)
        containers = [each for owner in owners for each in owner.containers]
        lengths = {id(each): len(each) for each in containers if type(each) is list}
        places = [each for owner in owners for each in owner.places]
        devices = [each for each in places if isinstance(each.value, torch.device) and each.value == self._home]
        for place in devices:
            place.holder[place.name] = self._device
        for owner in owners:
            owner.note()
        at_home = [(tensor, tensor.data, copy) for tensor, copy in self._copies.values()]
        for tensor, _, copy in at_home:
            tensor.data = copy
        try:
            yield
        finally:
            others = [tensor for tensor, _, copy in at_home if tensor.data_ptr() != copy.data_ptr()]
            for tensor, own, _ in at_home:
                tensor.data = own
            changed = [owner for owner in owners if owner.has_changed()]
            for place in devices:
                if place.holder.get(place.name) is self._device:
                    place.holder[place.name] = place.value
            for owner in owners:
                owner.note()
            self._bring_home(changed, containers, lengths)
        if others:
            raise NotReplicableError("the step gives one of its tensors other memory")
        if carries:
            for tensor, copy in self._copies.values():
                if id(tensor) in self._changing:
                    _fill(tensor, copy)

    def _bring_home(self, changed: list[_Owner], containers: list[Any], lengths: dict[int, int]) -> None:
        """Bring home what was assigned here, and what was put into containers.

        Args:
            changed: the modules to which something was assigned.
            containers: those that were there before.
            lengths: of the lists among them: what was appended to longer ones is looked at alone.
        """
        for owner in changed:
            owner.look()
            for place in owner.places:
                home = map_tensors(self._at_home, place.value)
                if home is not place.value:
                    place.holder[place.name] = home
            owner.look()
            known = set(map(id, containers))
            containers = [*containers, *(each for each in owner.containers if id(each) not in known)]
        for container in containers:
            length = lengths.get(id(container), 0)
            for key, each in list(entries_of(container, length if length > _SHORT else 0)):
                home = map_tensors(self._at_home, each)
                if home is not each:
                    container[key] = home

    def _at_home(self, tensor: Tensor) -> Tensor:
        is_here = tensor.device == self._device and self._device != self._home
        return tensor.detach().to(self._home, non_blocking=True) if is_here else tensor


def _is_held_by_itself(value: Any) -> bool:
    return isinstance(value, Tensor | torch.device) or (
        type(value) is tuple and any(isinstance(leaf, Tensor) for leaf in leaves_of(value))
    )


def _refuse_odd(tensor: Tensor, name: str) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise NotReplicableError(f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout}")


def _refuse_aliases(tensors: Iterable[Tensor]) -> None:
    """Refuse tensors that share memory, for their copies would not."""
    ends: dict[int, int] = {}
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        storage, begin = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        if begin < ends.get(storage, 0):
            raise NotReplicableError("two of its tensors share memory")
        ends[storage] = begin + spanned_bytes(tensor)


def _are_alike(tensor: Tensor, known: tuple[Tensor, Tensor] | None) -> bool:
    copy = None if known is None else known[1]
    return copy is not None and tensor.shape == copy.shape and tensor.dtype == copy.dtype


def _fill(tensor: Tensor, content: Tensor) -> None:
    if tensor.shape != content.shape or tensor.dtype != content.dtype:
        raise NotReplicableError(f"a tensor of shape {tuple(tensor.shape)} is resized in the step")
    with torch.no_grad():
        # Past the version that autograd checks: operations that have used it before ran on another device.
        tensor.data.copy_(content, non_blocking=True)
