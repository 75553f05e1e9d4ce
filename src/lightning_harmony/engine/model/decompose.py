"""Finding the layers of a model in its module tree, without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize
from torchmetrics import Metric, MetricCollection

from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.structures.parts import num_bytes_of

# Blocks of a stack that is no block itself, at least; of a model that has as many of these, each is a block all the same.
_LEAST_BLOCKS, _MOST_LARGE_BLOCKS = 4, 16
LayerChoice: TypeAlias = Collection[type[nn.Module]] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Layer:
    """A module whose call is intercepted: the smallest unit that is scheduled."""

    name: str
    """Qualified name in the root module."""
    module: nn.Module
    borrowed: tuple[nn.Module, ...] = ()
    """Modules elsewhere that its code uses, too."""
    unswapped: frozenset[tuple[type, str]] = frozenset()
    """Buffers that stay where code finds them, by the classes of the modules that have them."""
    seen_buffers: Collection[tuple[nn.Module, str]] = ()
    """Buffers of any layers that others have, too."""

    @property
    def whole(self) -> nn.Module:
        """All that its code uses, below one module."""
        return nn.ModuleList([self.module, *self.borrowed]) if self.borrowed else self.module

    def swapped(self, index: int, compute_dtype: torch.dtype | None = None) -> SwappedLayer:
        """The layer as it is swapped, with a number, and a type to compute in."""
        parameters, whole = list(self.whole.parameters()), self.whole
        apart = self.unswapped, self.seen_buffers
        return SwappedLayer(index, self.name, self.module, parameters, compute_dtype, whole, *apart)


def find_layers(root: nn.Module, *, max_layer_bytes: int | None, layers: LayerChoice | None = None) -> list[Layer]:
    """Find the layers of a model.

    The outermost repeated blocks (several modules of one class in a ``ModuleList``, ``Sequential`` or ``ModuleDict``,
    or of a class that Hugging Face's ``_no_split_modules`` names) are layers, but for large ones that are stacks of
    repeated blocks themselves. So is what is left over beside them, each module as a whole. A module that is too large
    is descended into, as long as it has modules to descend to.
    No layer lies within another.

    Args:
        root: The model, which is never a layer itself.
        max_layer_bytes: What a layer's weights and gradients may take together; None for no limit.
        layers: The classes of the layers, or a predicate on a module's qualified name and the module. The outermost
            matches are layers whatever their size; the rest of the tree is treated as usual.

    Returns:
        The layers in the order of the module tree, under the first name of each.

    Raises:
        TypeError: If ``layers`` is neither a collection of module classes nor a predicate.
    """
    rules = _Rules(_chosen(root, layers), _blocks(root), max_layer_bytes)
    return _outermost(list(_descend("", root, rules, visited={id(root)})))


@dataclass(frozen=True)
class _Rules:
    """What makes a module a layer. Modules are known by id, as they may define equality."""

    chosen: frozenset[int]
    blocks: frozenset[int]
    max_layer_bytes: int | None

    def is_layer(self, module: nn.Module) -> bool:
        if not _can_be_layer(module):
            return False
        if id(module) in self.chosen:
            return True
        below = [inner for _, inner in _tree(module)][1:]
        if type(module) is nn.Sequential or self._any_of(self.chosen, below):
            return False
        if not self._fits(module) and any(_can_be_layer(inner) for inner in below):
            return False
        return id(module) in self.blocks or not self._any_of(self.blocks, below)

    def _fits(self, module: nn.Module) -> bool:
        # Twice, as the gradients of its weights lie beside them.
        return self.max_layer_bytes is None or 2 * _parameter_bytes(module) <= self.max_layer_bytes

    @staticmethod
    def _any_of(ids: frozenset[int], modules: Sequence[nn.Module]) -> bool:
        return any(id(module) in ids for module in modules)


def _descend(prefix: str, module: nn.Module, rules: _Rules, visited: set[int]) -> Iterator[Layer]:
    for name, child in _children(prefix, module):
        if id(child) in visited:
            continue
        visited.add(id(child))
        if rules.is_layer(child):
            yield Layer(name, child)
        else:
            yield from _descend(name, child, rules, visited)


def _outermost(layers: Sequence[Layer]) -> list[Layer]:
    """Drop layers within layers: a shared module may be found on its own and below another one, in either order."""
    inner = {id(below) for layer in layers for below in layer.module.modules() if below is not layer.module}
    return [layer for layer in layers if id(layer.module) not in inner]


def _children(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the named submodules that count, a shared one each time that it occurs.

    Metrics do not count: they keep state of their own. Nor do parametrizations: they compute the module's parameters.
    """
    for name, child in module._modules.items():
        if child is None or isinstance(child, Metric | MetricCollection):
            continue
        if not (name == "parametrizations" and parametrize.is_parametrized(module)):
            yield (f"{prefix}.{name}" if prefix else name), child


def _tree(module: nn.Module, name: str = "", visited: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all that counts below it, each once, parents first."""
    visited = set() if visited is None else visited
    if id(module) in visited:
        return
    visited.add(id(module))
    yield name, module
    for child_name, child in _children(name, module):
        yield from _tree(child, child_name, visited)


def _can_be_layer(module: nn.Module) -> bool:
    return _has_forward(module) and _has_parameters(module)


def _has_forward(module: nn.Module) -> bool:
    # Lists, dictionaries and mere namespaces are never called, so there is nothing to intercept.
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return any(
        parametrize.is_parametrized(inner) or any(parameter is not None for parameter in inner._parameters.values())
        for _, inner in _tree(module)
    )


def _parameter_bytes(module: nn.Module) -> int:
    return sum(map(num_bytes_of, module.parameters()))


def _chosen(root: nn.Module, layers: LayerChoice | None) -> frozenset[int]:
    if layers is None:
        return frozenset()
    matches = _predicate(layers)
    chosen = frozenset(
        id(module)
        for name, module in _tree(root)
        if module is not root and _can_be_layer(module) and matches(name, module)
    )
    if not chosen:
        raise ValueError(f"HarmonyStrategy(layers={layers!r}) matches no module of {type(root).__name__}")
    return chosen


def _predicate(layers: LayerChoice) -> Callable[[str, nn.Module], bool]:
    if callable(layers) and not isinstance(layers, type):
        return layers
    if isinstance(layers, str | type) or not isinstance(layers, Collection):
        raise _not_a_choice(layers)
    kinds = tuple(layers)
    if not all(isinstance(kind, type) for kind in kinds):
        raise _not_a_choice(layers)
    return lambda _, module: isinstance(module, kinds)


def _not_a_choice(layers: object) -> TypeError:
    return TypeError(f"`layers` takes a collection of module classes or a predicate, not {layers!r}.")


def _blocks(root: nn.Module) -> frozenset[int]:
    modules = [module for _, module in _tree(root)]
    names = {name for module in modules for name in getattr(module, "_no_split_modules", None) or ()}
    named = (module for module in modules if type(module).__name__ in names)
    whole_bytes = _parameter_bytes(root)
    repeated = (block for module in modules for block in _repeated(module) if not _is_stack(block, whole_bytes))
    return frozenset(id(module) for group in (named, repeated) for module in group if _has_parameters(module))


def _is_stack(module: nn.Module, whole_bytes: int) -> bool:
    """Whether a block is a network of blocks itself: a model beside its frozen copy, a member of an ensemble, a long stage.

    As one layer it would take the memory of a whole network at work, wherever a device has the room for its weights.
    """
    num_bytes = _parameter_bytes(module)
    if _MOST_LARGE_BLOCKS * num_bytes <= whole_bytes:
        return False
    inside = ([block for block in _repeated(inner) if block._modules] for _, inner in _tree(module))
    return any(len(blocks) >= _LEAST_BLOCKS and 2 * sum(map(_parameter_bytes, blocks)) > num_bytes for blocks in inside)


def _repeated(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return []
    children = [child for _, child in _children("", module)]
    # Parametrizing gives each module a class of its own.
    classes = [parametrize.type_before_parametrizations(child) for child in children]
    occurrences = Counter(classes)
    return [child for child, cls in zip(children, classes, strict=True) if occurrences[cls] > 1]
