"""Companions of a frozen weight: tensors that Python code keeps of it, in attributes of the parameter or in an object.

Layers with quantized weights do so: attributes have the scales, or an object has these and the packed elements, in the memory
of the parameter. Companions stay the user's own tensors, wherever code passes them on to: their data is on the host between
calls of the layer, and on the device during one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from lightning_harmony.engine.model.attributes import OF_TORCH
from lightning_harmony.engine.model.keeping_places import Place, places_of, places_within
from lightning_harmony.engine.structures.containers import MISSING, Unchanged, changed_names, copied_content, put_value
from lightning_harmony.engine.structures.memory_users import begins_in, has_memory, has_memory_alone, place_in_memory
from lightning_harmony.engine.structures.operations import viewed
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.errors import UnsupportedModelError

# So many calls of a layer are looked at for views of its weights that they leave in objects.
_WATCHED_CALLS = 8


def changes_data(layer: str) -> str:
    """Why a layer with a name is refused that changes the data of its weights; of which one it is may not be known."""
    name = f" {layer!r}" if layer else ""
    return (
        f"layer{name} changes the data of a parameter in its forward, or that of a tensor which an object has of "
        "a frozen one, which swapping would lose; "
        "do that in a hook such as on_train_batch_start, or in place: weight.data.copy_(...)"
    )


@dataclass(frozen=True)
class View:
    """Where a tensor lies in the memory of a parameter, or of a companion.

    Attributes:
        parameter: in whose memory.
        size: of the view.
        stride: of the view.
        offset: of its first byte, from that of the parameter.
        dtype: of the view, which may be another than the parameter's.
    """

    parameter: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, parameter: Tensor, base: Tensor) -> View:
        """A view of a parameter or companion, which is `base` now."""
        offset = int(tensor.storage_offset() * tensor.element_size() - base.storage_offset() * base.element_size())
        return cls(parameter, tensor.size(), tensor.stride(), offset, tensor.dtype)

    def within(self, base: Tensor) -> Tensor:
        """The same view of the parameter, where that is `base`."""
        return viewed(base, self._within)

    def _within(self, base: Tensor) -> Tensor:
        base = Tensor.detach(base)
        if base.dtype is not self.dtype:
            base = base.as_strided((base.numel(),), (1,)).view(self.dtype)
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset // self.dtype.itemsize)


class Companions:
    """The companions of some frozen parameters.

    A tensor in the memory of a parameter is one wherever it is found: among the parameter's attributes, and in attributes of
    modules and of objects that these hold. So are the other tensors to which the parameter's attributes lead, and those of an
    object that has such a view.

    Args:
        modules: in which to look.
        parameters: whose companions they are.
        layer: the name of the layer that the modules are of; empty if they are of none.

    Attributes:
        apart: of each parameter, the companions that have memory of their own.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter], layer: str = "") -> None:
        self._layer = layer
        self._modules = list(modules)
        # What was set on a composed one its class has put there.
        self._with_attributes = [parameter for parameter in parameters if not is_composed(parameter)]
        self._parameters = [p for p in self._with_attributes if not p.requires_grad and has_memory(p)]
        # The user's own tensors, which end when nobody else has them.
        self._views: list[tuple[weakref.ref[Tensor], View]] = []
        # The dicts of objects in which it looks.
        self._objects: list[dict[str, Any]] = []
        self.apart: dict[nn.Parameter, list[Tensor]] = {}
        self._num_calls = 0
        self._makes_views = False
        if self._parameters:
            self._find()

    def _find(self) -> None:
        bases = {p.untyped_storage()._cdata: p for p in self._parameters}
        places = list(self._places({p: p for p in self._parameters}))
        # Whose view each owner has, or whose attributes lead to it, and which tensors are companions already.
        owners: dict[int | None, nn.Parameter] = {}
        seen: set[int] = set()
        for place in places:
            for _, tensor in place.tensors():
                parameter = bases.get(tensor.untyped_storage()._cdata)
                if parameter is None:
                    continue
                owners.setdefault(place.owner, parameter)
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._views.append((weakref.ref(tensor), View.of(tensor, parameter, parameter)))
        self._note_objects(places, {p: p for p in self._parameters})
        for place in places:
            if place.parameter is not None:
                owners.setdefault(place.owner, place.parameter)
            if place.owner is None or place.owner not in owners:
                continue
            parameter = owners[place.owner]
            for _, tensor in place.tensors():
                # Apart from others that have its memory, it would no longer change with these.
                is_apart = has_memory(tensor) and tensor.is_meta is parameter.is_meta and has_memory_alone(tensor)
                if is_apart and id(tensor) not in seen:
                    seen.add(id(tensor))
                    self.apart.setdefault(parameter, []).append(tensor)

    def _note_objects(self, places: Iterable[Place], leaves: Mapping[nn.Parameter, Tensor]) -> None:
        of_parameters = {id(vars(leaf)) for leaf in leaves.values()}
        found = [place.content for place in places if place.owner is not None and isinstance(place.content, dict)]
        self._objects = [content for content in found if id(content) not in of_parameters]

    def _places(self, leaves: Mapping[nn.Parameter, Tensor]) -> Iterator[Place]:
        """Where companions may be, given what has the attributes of each parameter."""
        seen: set[int] = set()
        for parameter, leaf in leaves.items():
            seen.add(id(leaf))
            for place in places_within(vars(leaf), id(leaf), seen, 0):
                yield replace(place, parameter=parameter)
        for module in self._modules:
            yield Place(vars(module), None)
            for name, value in list(vars(module).items()):
                if name not in OF_TORCH:
                    yield from places_of(value, None, seen, 0)

    def surroundings(self) -> Unchanged:
        """What tells whether the attributes that have some hold what they hold now."""
        own = set(map(id, self.tensors()))
        places = self._places({p: p for p in self._parameters}) if own else ()
        contents = [
            place.content
            for place in places
            if not isinstance(place.content, tuple)
            and (place.parameter is not None or any(id(tensor) in own for _, tensor in place.tensors()))
        ]
        return Unchanged([(content, copied_content(content)) for content in contents])

    def objects(self) -> set[int]:
        """The attributes, of parameters and objects, that may have some in the memory of a parameter, by their identities."""
        return {id(each) for each in (*self._objects, *map(vars, self._parameters))} if self._alive() else set()

    def __bool__(self) -> bool:
        return bool(self._views or self.apart)

    @property
    def with_views(self) -> set[nn.Parameter]:
        """The parameters that have some in their memory."""
        return {view.parameter for _, view in self._views if isinstance(view.parameter, nn.Parameter)}

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that have some."""
        return self.with_views | self.apart.keys()

    def restrict(self, beside: Mapping[nn.Parameter, Sequence[Tensor]]) -> None:
        """Of those with memory of their own, only some are carried: those beside their parameters in the host store."""
        self.apart = {p: list(beside[p]) for p in self._parameters if p in beside}

    def within(self, parameter: nn.Parameter, base: Tensor) -> dict[int, Tensor]:
        """Those in the memory of a parameter as they would be in that of another tensor, by their identities."""
        return {id(tensor): view.within(base) for tensor, view in self._alive() if view.parameter is parameter}

    def follow(self, parameter: nn.Parameter) -> None:
        """Let those in the memory of a parameter lie where it is now."""
        for tensor, view in self._alive():
            if view.parameter is parameter:
                tensor.data = view.within(parameter)

    def __contains__(self, tensor: Tensor) -> bool:
        return any(tensor is each for each in self.tensors())

    def _alive(self) -> list[tuple[Tensor, View]]:
        """Those in the memory of others that somebody still has."""
        return [(tensor, view) for weak, view in self._views if (tensor := weak()) is not None]

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [
            *(tensor for tensor, _ in self._alive()),
            *(tensor for tensors in self.apart.values() for tensor in tensors),
        ]

    def exchange(self, others: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Put others into their places.

        Args:
            others: by the identities of those whose places they take.

        Returns:
            What puts them back.
        """
        before = {id(others[id(tensor)]): tensor for tensor in self.tensors()}
        for place in self._places({p: p for p in self._parameters}):
            for key, tensor in place.tensors():
                if id(tensor) in others and not isinstance(place.content, tuple):
                    place.content[key] = others[id(tensor)]
        self._views = [
            (weakref.ref(others[id(each)]), replace(view, parameter=others.get(id(view.parameter), view.parameter)))
            for each, view in self._alive()
        ]
        self.apart = {p: [others[id(tensor)] for tensor in tensors] for p, tensors in self.apart.items()}
        return before

    def move(self, device: torch.device) -> None:
        """Move the parameters that have some to a device, and these with them."""
        for parameter in self.parameters:
            parameter.data = parameter.detach().to(device)
            self.follow(parameter)
            for tensor in self.apart.get(parameter, ()):
                tensor.data = tensor.detach().to(device)

    # ---- calls ---------------------------------------------------------------------------------------------------------

    def bound(
        self,
        leaves: Mapping[nn.Parameter, Tensor],
        apart: Mapping[Tensor, Tensor],
        before: CallChanges | None = None,
    ) -> AbstractContextManager[CallChanges]:
        """Let the layer's code find companions on a device.

        Args:
            leaves: the parameters there.
            apart: the companions there that have memory of their own.
            before: of a call, whose attributes of parameters are what it has found, for the time of the context.

        Returns:
            The context, with what the code has changed, once it is left.

        Raises:
            UnsupportedModelError: if the code changes a companion in place, or its data.
        """
        named = [leaves[parameter] for parameter in self._with_attributes]
        if self._parameters or any(map(vars, named)):
            return self._bound(leaves, apart, before)
        return _WithoutAttributes(self._with_attributes, named)

    @contextmanager
    def _bound(
        self, leaves: Mapping[nn.Parameter, Tensor], apart: Mapping[Tensor, Tensor], before: CallChanges | None
    ) -> Iterator[CallChanges]:
        found = CallChanges()
        attributes = [(p, now := leaves[p].__dict__, now.copy()) for p in self._with_attributes]
        objects = [(content, copied_content(content)) for content in (self._objects if self else ())]
        unchanged = Unchanged([*((now, then) for _, now, then in attributes), *objects])
        if before is not None:
            for parameter, values in before.attributes.items():
                _update(leaves[parameter].__dict__, values)
        # Who watches what code reads is not to see this.
        with DisableTorchFunctionSubclass():
            bound = _Bound(list(self._places_there(leaves, apart)))
        try:
            yield found
            with DisableTorchFunctionSubclass():
                if bound.have_changed():
                    raise UnsupportedModelError(changes_data(self._layer))
        finally:
            # Sooner asked than each of them.
            if not unchanged.holds():
                for parameter, now, then in attributes:
                    if before is not None:
                        now.clear()
                        now.update(then)
                    elif changed := changed_names(then, now):
                        found.attributes[parameter] = {name: then.get(name, MISSING) for name in changed}
                        _update(vars(parameter), {name: now.get(name, MISSING) for name in changed})
                found.objects += [(now, names) for now, then in objects if (names := set(changed_names(then, now)))]
            with DisableTorchFunctionSubclass():
                bound.end()
                self._find_new(leaves, apart)

    def _places_there(
        self, leaves: Mapping[nn.Parameter, Tensor], apart: Mapping[Tensor, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The companions, and where each lies on the device."""
        alive = self._alive()
        if len(alive) < len(self._views):
            self._views = [each for each in self._views if each[0]() is not None]
        for tensor, view in alive:
            base = view.parameter
            yield tensor, view.within(leaves[base] if isinstance(base, nn.Parameter) else apart[base])
        for several in self.apart.values():
            for tensor in several:
                yield tensor, apart[tensor]

    def _find_new(self, leaves: Mapping[nn.Parameter, Tensor], apart: Mapping[Tensor, Tensor]) -> None:
        """Let views of weights and companions that a call has left in objects be companions from now on."""
        if not self._makes_views and self._num_calls >= _WATCHED_CALLS:
            return
        self._num_calls += 1
        # Of a model without data, there is nowhere for them to be.
        bases = {p: leaves[p] for p in self._parameters if not p.is_meta}
        places = list(self._places(bases))
        self._note_objects(places, bases)
        own = {id(tensor): tensor for tensor in self.tensors()}
        there: dict[Any, Tensor] = {**bases, **{each: apart[each] for each in own.values() if each in apart}}
        for place in places:
            # What modules have themselves, calls own already: copies are there.
            for _, tensor in place.tensors() if place.owner is not None else ():
                if id(tensor) in own:
                    continue
                memory = tensor.untyped_storage()._cdata
                sharing = (each for each, at in there.items() if at.untyped_storage()._cdata == memory)
                base = next((each for each in sharing if begins_in(tensor, there[each])), None)
                if base is not None:
                    self._makes_views = True
                    view = View.of(tensor, base, there[base])
                    self._views.append((weakref.ref(tensor), view))
                    tensor.data = view.within(base)


def join_copies(module: nn.Module) -> None:
    """Let objects that have a copy of one of a module's own weights have the weight's memory, as before they were moved apart.

    Moves make such copies: `module.to` leaves behind what objects have, or moves it by itself. Weights of floating-point
    numbers stay as they are. They may be trained one day, and the copy may be there to stay what it is.
    """
    parameters = [parameter for parameter in module.parameters(recurse=False) if _is_packed(parameter)]
    places = Companions([module], parameters)._places({p: p for p in parameters}) if parameters else ()
    for place in places:
        for _, tensor in place.tensors() if place.owner is not None else ():
            for parameter in parameters:
                if _is_copy(tensor, parameter):
                    tensor.data = viewed(parameter, Tensor.detach)


def _is_packed(parameter: nn.Parameter) -> bool:
    """Whether a weight is a matrix of integers. Shorter ones are none: counters may have equal values by chance."""
    is_matrix = parameter.layout is torch.strided and parameter.dim() > 1 and parameter.numel() > 0
    is_of_integers = not (parameter.is_floating_point() or parameter.is_complex())
    return is_matrix and is_of_integers and not (parameter.is_meta or is_composed(parameter))


def _is_copy(tensor: Tensor, parameter: nn.Parameter) -> bool:
    kinds = [(each.dtype, each.size(), each.stride()) for each in (tensor, parameter)]
    if kinds[0] != kinds[1] or tensor.is_meta:
        return False
    is_apart = tensor.untyped_storage()._cdata != parameter.untyped_storage()._cdata
    return is_apart and torch.equal(tensor.to(parameter.device), viewed(parameter, Tensor.detach))


def beside_parameters(companions: Iterable[Companions]) -> dict[nn.Parameter, list[Tensor]]:
    """Of each parameter, the companions that have memory of their own, as several layers have found them."""
    beside: dict[nn.Parameter, dict[int, Tensor]] = {}
    for each in companions:
        for parameter, tensors in each.apart.items():
            beside.setdefault(parameter, {}).update({id(tensor): tensor for tensor in tensors})
    return {parameter: list(tensors.values()) for parameter, tensors in beside.items()}


@dataclass
class CallChanges:
    """What a call has changed of attributes.

    Attributes:
        attributes: of parameters, as they were before.
        objects: the attributes of each object, and the dicts in such, with the names of those that are others now.
    """

    attributes: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    objects: list[tuple[dict[str, Any], set[str]]] = field(default_factory=list)


class _WithoutAttributes:
    """The context of a call before which nothing is set on parameters: what it sets first.

    Args:
        parameters: the user's own.
        leaves: those that the code finds.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], leaves: Sequence[Tensor]) -> None:
        self._parameters, self._leaves, self._found = parameters, leaves, CallChanges()

    def __enter__(self) -> CallChanges:
        return self._found

    def __exit__(self, *args: object) -> None:
        for parameter, leaf in zip(self._parameters, self._leaves, strict=True):
            if vars(leaf):
                self._found.attributes[parameter] = dict.fromkeys(vars(leaf), MISSING)


class _Bound:
    """Companions on a device, until `end`.

    Args:
        places: each of them, and where it lies there.
    """

    def __init__(self, places: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._tensors = tensors = [tensor for tensor, _ in places]
        self._homes = viewed(tensors[0], lambda _: list(map(Tensor.detach, tensors))) if tensors else []
        for tensor, there in places:
            tensor.data = there
        self._state = self._state_now()

    def _state_now(self) -> list[Any]:
        return [(tensor._version, *place_in_memory(tensor)) for tensor in self._tensors]

    def have_changed(self) -> bool:
        """Whether any was changed in place, or has other data."""
        return self._state_now() != self._state

    def end(self) -> None:
        """They are on the host again."""
        for tensor, home in zip(self._tensors, self._homes, strict=True):
            tensor.data = home


def _update(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        put_value(attributes, name, value)
