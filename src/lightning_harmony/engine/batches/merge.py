"""The outputs of microbatches, merged into what a step over the whole batch would have returned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.batches.rows import has_rows, is_array, is_tensor
from lightning_harmony.engine.structures.nested import Node, is_ndarray, open_node


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Merge what the step returned for each microbatch into what it would have returned for the whole batch.

    Per-sample values are concatenated, floating-point scalars averaged by samples, at any depth of containers and records;
    of anything else the last microbatch's value is kept. So it is of the entry ``"loss"``
    of a returned mapping: the caller knows how the loss is reduced, and replaces it.

    Args:
        outputs: What each microbatch's step returned.
        sizes: Samples in each microbatch.

    Returns:
        The merged output, still attached to the graphs of its parts; None if every output is None.

    Raises:
        ValueError: If the step returned None for some microbatches only, or tensors that do not fit together.
    """
    if len(outputs) == 1:
        return outputs[0]
    _refuse_partly_none(outputs)
    # The rows of a TensorDict are joined.
    nodes = _alike(outputs) if isinstance(outputs[-1], Mapping) and not is_array(outputs[-1]) else None
    if nodes is None:
        return _merge(outputs, sizes)
    columns = zip(nodes[-1].keys, _columns(nodes), strict=True)
    return nodes[-1].build([column[-1] if key == "loss" else _merge(column, sizes) for key, column in columns])


def merge_evaluations(outputs: Sequence[Any], sizes: Sequence[int], *, averages: bool) -> Any:
    """Merge what an evaluation returned for each microbatch, as `merge_outputs` does, but only where nothing is lost.

    Args:
        outputs: What each microbatch's step returned.
        sizes: Samples in each microbatch.
        averages: Whether floating-point scalars are means over samples.

    Returns:
        What the step would have returned for the whole batch.

    Raises:
        ValueError: If a value is neither one row a sample, nor the same for all microbatches, nor averaged.
    """
    _refuse_partly_none(outputs)
    return _merge(outputs, sizes, _must_be_same, averages=averages)


def loss_of(output: Any) -> Any:
    """Where Lightning finds the loss in what a training_step returned; it may be none."""
    return output.get("loss") if isinstance(output, Mapping) else output


def merge_losses(losses: Sequence[Tensor], weights: Sequence[Fraction]) -> Tensor:
    """Add up the losses of microbatches, each of one element, as accumulation would; their shape is kept if it is one.

    A step that skips its batch may return a new zero, which is on the host.
    """
    place = max((loss.device for loss in losses), key=lambda device: device.type != "cpu")
    parts = [loss.reshape(()).to(place) * float(weight) for loss, weight in zip(losses, weights, strict=True)]
    return torch.stack(parts).sum().reshape(min((loss.shape for loss in losses), key=len))


def gradient_of(loss: Tensor, whole: Tensor | float, weight: Fraction) -> Tensor:
    """The gradient of a microbatch's loss, rounded once, as accumulation rounds it.

    Args:
        loss: of the microbatch.
        whole: the gradient of the sum of which the loss is a part.
        weight: what the loss counts in that sum.

    Returns:
        A tensor of the shape, type and device of the loss.
    """
    # A number is put where it is needed: to copy it to a GPU, the host would wait for all that was launched there.
    brought = whole.to(loss.device, loss.dtype) if isinstance(whole, Tensor) else loss.detach().new_full((), whole)
    is_part = weight.numerator == 1
    return (brought / weight.denominator if is_part else brought * float(weight)).expand_as(loss)


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


def _must_be_same(values: Sequence[Any]) -> Any:
    """Return a value that all microbatches returned."""
    first = values[0]
    tensors = all(is_tensor(value) for value in values)
    same = _is_same_tensor if tensors else _is_same
    if any(type(value) is not type(first) or not same(value, first) for value in values):
        raise ValueError(
            f"The step returned values of type {type(first).__name__} that differ from microbatch to microbatch and have "
            "no row for each sample, so they do not make one value for the batch. Return one row for each sample, or let "
            "the DataLoader make batches that fit into memory whole."
        )
    return first


def _is_same_tensor(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype and (one == other).all())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | bytes | int | float | complex) and one == other)


def _merge(
    values: Sequence[Any],
    sizes: Sequence[int],
    otherwise: Callable[[Sequence[Any]], Any] = _last,
    *,
    averages: bool = True,
) -> Any:
    if _all_have_rows(values, sizes):
        return _concatenate(values)
    if averages and all(_is_floating_scalar(value) for value in values):
        return _weighted_mean(values, sizes)
    if all(_is_per_sample(value, size) for value, size in zip(values, sizes, strict=True)):
        return type(values[-1])(chain.from_iterable(values))
    nodes = _alike(values)
    if nodes is None:
        return otherwise(values)
    return nodes[-1].build([_merge(column, sizes, otherwise, averages=averages) for column in _columns(nodes)])


def _refuse_partly_none(outputs: Sequence[Any]) -> None:
    empty = [str(number) for number, output in enumerate(outputs, start=1) if output is None]
    if 0 < len(empty) < len(outputs):
        raise ValueError(
            f"The step returned None for microbatches {', '.join(empty)} of {len(outputs)} and a value for the others. "
            "A batch is trained as a whole or skipped as a whole, so no single output stands for this one. Decide by "
            "what all microbatches share, or pass `HarmonyStrategy(num_microbatches=1)`."
        )


def _all_have_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    # Besides tensors and arrays, those classes that teach torch.cat to join them.
    can_be_joined = all(is_tensor(value) or hasattr(type(value), "__torch_function__") for value in values)
    return can_be_joined and all(map(has_rows, values, sizes))


def _is_per_sample(value: Any, num_samples: int) -> bool:
    """Tell a list with one entry a sample from a container of a few tensors."""
    if isinstance(value, list) and len(value) == num_samples:
        return not any(is_tensor(item) for item in value)
    # The default collate function makes a tuple of the samples' strings. Other tuples are records: (height, width).
    return type(value) is tuple and len(value) == num_samples and all(isinstance(item, str | bytes) for item in value)


def _is_floating_scalar(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point())


def _concatenate(values: Sequence[Any]) -> Any:
    if all(isinstance(value, Tensor) and value.is_nested for value in values):
        rows = [row for value in values for row in value.unbind()]
        return torch.nested.as_nested_tensor(rows, layout=values[-1].layout)
    if len({tuple(value.shape[1:]) for value in values}) > 1:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise ValueError(
            f"The step returned tensors of shapes {shapes} for the microbatches of one batch, which do not make one "
            "tensor. Pad them to one shape in the step, or pass `HarmonyStrategy(num_microbatches=1)`."
        )
    if any(is_ndarray(value) for value in values):
        return sys.modules["numpy"].concatenate(values)
    return torch.cat(list(values))


def _weighted_mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    # In double precision, so that the mean of equal values is that very value in any narrower type.
    total = sum(sizes)
    if isinstance(values[-1], Tensor):
        parts = [torch.as_tensor(value).double() * size for value, size in zip(values, sizes, strict=True)]
        return (sum(parts[1:], start=parts[0]) / total).to(values[-1].dtype)
    return sum(float(value) * size for value, size in zip(values, sizes, strict=True)) / total


def _alike(values: Sequence[Any]) -> list[Node] | None:
    """Take values apart that are containers of one structure; None for others."""
    nodes = [open_node(value) for value in values]
    last = nodes[-1]
    if last is None or any(node is None or not node.has_structure_of(last) for node in nodes):
        return None
    return [node for node in nodes if node is not None]


def _columns(nodes: Sequence[Node]) -> list[tuple[Any, ...]]:
    """Group the children of containers of one structure by their places."""
    return list(zip(*(node.children for node in nodes), strict=True))
