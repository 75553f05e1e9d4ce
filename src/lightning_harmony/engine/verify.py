"""What a layer must not do: checked when it first runs backward, and when its graph has another size."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.layer import SwappedLayer, changes_data
from lightning_harmony.engine.opaque import PLAIN
from lightning_harmony.engine.pack import Residency
from lightning_harmony.errors import UnsupportedModelError


def verify_layer(
    layer: SwappedLayer, num_nodes: int, residency: Residency, outputs: Sequence[Tensor], known: Sequence[Tensor]
) -> None:
    """Check a recomputed layer, and see what its graph holds.

    Args:
        layer: the layer.
        num_nodes: of its graph.
        residency: its weights on the device.
        outputs: what it returned, with the graph of the recompute.
        known: every tensor that its gradients are asked for, or that nobody wants any of.

    Raises:
        UnsupportedModelError: if gradients would be lost, or a change of the weights.
    """
    ours = {id(tensor) for tensor in known}
    nodes = _nodes(outputs, known)
    if any(id(variable) not in ours for variable in _leaves(outputs, nodes)):
        raise UnsupportedModelError(
            f"layer {layer.name!r} uses a tensor that needs gradients but is neither its parameter nor an argument of "
            "its call, such as a weight that a forward pre-hook computes (old-style weight_norm: use "
            "torch.nn.utils.parametrizations.weight_norm), or a parameter that it holds outside of its module; "
            "pass it as an argument, or make a larger module the layer with HarmonyStrategy(layers=...)"
        )
    # To compare weights takes long, and what has other ones later most often makes the same graph.
    has_compared = bool(layer.holds_tensors)
    layer.holds_tensors[num_nodes] = any(_holds_tensors(node, ours) for node in nodes)
    for parameter in () if has_compared else layer.parameters:
        if _differ(residency.leaves[parameter], parameter):
            raise UnsupportedModelError(changes_data(layer))


# Compared on the device, in pieces: the way to the host is slow, and there may be no room for a second weight.
_PIECE_BYTES = 16 * 1024 * 1024


def _differ(leaf: Tensor, parameter: Tensor) -> bool:
    """Whether a weight on the device is no longer what was swapped in."""
    num_elements = _PIECE_BYTES // parameter.element_size()
    pieces = zip(_flat(leaf).split(num_elements), _flat(parameter).split(num_elements), strict=True)
    found = [_bits_differ(one, other.to(one.device, non_blocking=True)) for one, other in pieces]
    return bool(found) and bool(torch.stack(found).any())


def _bits_differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether bytes differ: a parameter that is not a number yet is still unchanged."""
    # Cast where it was cast when it was swapped in: devices have different ideas of what is not a number.
    return (one.view(torch.uint8) != other.to(one.dtype).view(torch.uint8)).any()


def _flat(tensor: Tensor) -> Tensor:
    # A single element may have any stride, and counts as contiguous.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))


def _references_of_graph() -> int:
    """How many references a leaf has that nobody but a graph knows, such as one that a layer makes on its way."""
    graph = torch.ones((), requires_grad=True).neg()
    return sys.getrefcount(graph.grad_fn.next_functions[0][0].variable)  # type: ignore[union-attr]


_REFERENCES_OF_GRAPH = _references_of_graph()


def _leaves(outputs: Sequence[Tensor], nodes: Iterable[Any]) -> Iterator[Tensor]:
    """The leaf tensors that the graph of some outputs leads to, and whose gradients anybody could read."""
    yield from (tensor for tensor in outputs if tensor.is_leaf and tensor.requires_grad)
    for node in nodes:
        if hasattr(node, "variable") and sys.getrefcount(node.variable) > _REFERENCES_OF_GRAPH:
            yield node.variable


def _nodes(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> list[Any]:
    """The nodes of the graph of some outputs, up to tensors that are known."""
    seen = {tensor.grad_fn for tensor in known}
    nodes: list[Any] = list({tensor.grad_fn for tensor in outputs} - seen - {None})
    seen.update(nodes)
    for node in nodes:
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        nodes.extend(following)
    return nodes


def _holds_tensors(node: Any, ours: Collection[int]) -> bool:
    """Whether a node may keep tensors beside those that autograd saves.

    Nodes of Python's functions have attributes, and those of leaves keep them: all but ours, which are emptied.
    """
    if hasattr(node, "variable"):
        return id(node.variable) not in ours
    kept = vars(node) if isinstance(node, torch._C._FunctionBase) else {}
    return not all(isinstance(leaf, PLAIN) for leaf in tree_leaves(dict(kept)))
