"""Batches into microbatches, and the outputs of microbatches back into one."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_harmony.engine.guise import Guise
from lightning_harmony.engine.stash import SMALLEST_BYTES, is_small

#: Enough microbatches to keep a few devices busy, few enough that each still fills one.
DEFAULT_NUM_MICROBATCHES = 4


def microbatch_sizes(batch_size: int, *, num_microbatches: int | None, microbatch_size: int | None) -> tuple[int, ...]:
    """Say how many samples each microbatch of a batch gets.

    Args:
        batch_size: Samples in the batch.
        num_microbatches: How many microbatches, or as many as the batch has samples; they are as equal as possible, the
            larger ones first.
        microbatch_size: Samples in each microbatch; the last one takes the rest.

    Returns:
        The sizes in order. They add up to ``batch_size``, and there is at least one.

    Raises:
        ValueError: If both are given, or either is less than one.
    """
    if num_microbatches is not None and microbatch_size is not None:
        raise ValueError("Give `num_microbatches` or `microbatch_size`, not both.")
    if microbatch_size is not None:
        return _sizes_of(batch_size, microbatch_size)
    number = DEFAULT_NUM_MICROBATCHES if num_microbatches is None else num_microbatches
    # The short last batch of an epoch may have fewer.
    return _equal_sizes(batch_size, min(number, max(batch_size, 1)))


def split_batch(batch: Any, batch_size: int, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into microbatches.

    Tensors and arrays with ``batch_size`` rows are cut into views, lists of ``batch_size`` other things are sliced, at
    any depth of mappings, sequences, namedtuples and dataclasses. Everything else goes unchanged into each microbatch: small
    tensors and arrays as copies, which a step may change, and larger ones themselves.

    Args:
        batch: What the dataloader yielded.
        batch_size: Samples in the batch.
        sizes: Samples in each microbatch.

    Returns:
        One batch for each size, of the structure of ``batch``; ``[batch]`` itself if there is only one.

    Raises:
        ValueError: If the batch holds a ``PackedSequence``, whose rows are time steps of many samples, or lists with an entry
            for each sample, whose rows are anything.
    """
    assert sum(sizes) == batch_size, f"microbatches of {tuple(sizes)} do not make a batch of {batch_size}"
    if len(sizes) == 1:
        return [batch]
    if _is_lists_of_samples(batch, batch_size):
        raise ValueError(
            f"The batch is made of lists with an entry for each sample, as for detection, so that {batch_size} rows of the "
            "first tensor are no samples. Let the DataLoader's collate_fn stack or pad them to tensors with one row for each "
            "sample, or pass `HarmonyStrategy(num_microbatches=1)`."
        )
    return _split(
        batch, batch_size, [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    )


def shared_tensors(one: Any, other: Any) -> list[Tensor]:
    """List the tensors that two microbatches share."""
    if isinstance(one, Tensor):
        return [one] if one is other else []
    children, others = _children(one) or (), _children(other) or ()
    return [tensor for pair in zip(children, others, strict=False) for tensor in shared_tensors(*pair)]


def can_be_split(batch: Any, batch_size: int) -> bool:
    """Say whether `split_batch` finds samples in a batch: others go whole into each microbatch, as many times the work."""
    if _has_rows(batch, batch_size) or _is_per_sample(batch, batch_size) or isinstance(batch, PackedSequence):
        return True
    return any(can_be_split(child, batch_size) for child in _children(batch) or ())


def numbers_of_rows(batch: Any) -> set[int]:
    """Say how many rows tensors and arrays in a batch have, at any depth of what `split_batch` looks into."""
    if _is_tensor(batch):
        return {batch.shape[0]} if len(batch.shape) > 0 else set()
    return set().union(*(numbers_of_rows(child) for child in _children(batch) or ()))


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Merge what the step returned for each microbatch into what it would have returned for the whole batch.

    Per-sample values are concatenated, floating-point scalars averaged by samples, at any depth of mappings, sequences,
    namedtuples and dataclasses; of anything else the last microbatch's value is kept. So it is of the entry ``"loss"``
    of a returned mapping: whoever knows how the loss is reduced replaces it.

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
    if isinstance(outputs[-1], Mapping) and _same_structure(outputs):
        return _merge_mappings(outputs, sizes)
    return _merge(outputs, sizes)


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


def _equal_sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    if num_microbatches < 1:
        raise ValueError(f"`num_microbatches` must be at least 1, not {num_microbatches}.")
    size, num_larger = divmod(batch_size, num_microbatches)
    return (size + 1,) * num_larger + (size,) * (num_microbatches - num_larger)


def _sizes_of(batch_size: int, microbatch_size: int) -> tuple[int, ...]:
    if microbatch_size < 1:
        raise ValueError(f"`microbatch_size` must be at least 1, not {microbatch_size}.")
    num_full, rest = divmod(batch_size, microbatch_size)
    return (microbatch_size,) * num_full + ((rest,) if rest else ()) or (0,)


def _split(value: Any, batch_size: int, slices: Sequence[slice]) -> list[Any]:
    if isinstance(value, PackedSequence):
        raise ValueError(
            "A PackedSequence cannot be split into microbatches. Put the padded tensor and the lengths into the batch "
            "and pack them in the step, or pass `HarmonyStrategy(num_microbatches=1)`."
        )
    if _has_rows(value, batch_size) or _is_per_sample(value, batch_size):
        parts = [value[part] for part in slices]
        guise = Guise.of(value) if isinstance(value, Tensor) else None
        if guise is None:
            return parts
        attributes = _split(guise.attributes, batch_size, slices)
        # A class that knows what becomes of its own when it is sliced has seen to it.
        return [
            guise._replace(attributes=own | vars(part)).on(part) for own, part in zip(attributes, parts, strict=True)
        ]
    children = _children(value)
    if children is None:
        return [value, *(_own(value) for _ in slices[1:])]
    parts = [_split(child, batch_size, slices) for child in children]
    return [_rebuild(value, [part[index] for part in parts]) for index in range(len(slices))]


def _own(value: Any) -> Any:
    """Let a microbatch have what others have, too; what a step may change, such as a counter, as a copy."""
    if is_ndarray(value):
        return value.copy() if value.nbytes < SMALLEST_BYTES else value
    if not isinstance(value, Tensor) or value.requires_grad or not is_small(value):
        return value
    guise = Guise.of(value)
    return value.clone() if guise is None else guise.on(value.clone())


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


def _must_be_same(values: Sequence[Any]) -> Any:
    """Return a value that all microbatches returned."""
    first = values[0]
    tensors = all(_is_tensor(value) for value in values)
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
    if not _same_structure(values):
        return otherwise(values)
    return _rebuild(values[-1], [_merge(column, sizes, otherwise, averages=averages) for column in _columns(values)])


def _merge_mappings(values: Sequence[Mapping[Any, Any]], sizes: Sequence[int]) -> Any:
    merged = [
        column[-1] if key == "loss" else _merge(column, sizes)
        for key, column in zip(values[-1], _columns(values), strict=True)
    ]
    return _rebuild(values[-1], merged)


def _refuse_partly_none(outputs: Sequence[Any]) -> None:
    empty = [str(number) for number, output in enumerate(outputs, start=1) if output is None]
    if 0 < len(empty) < len(outputs):
        raise ValueError(
            f"The step returned None for microbatches {', '.join(empty)} of {len(outputs)} and a value for the others. "
            "A batch is trained as a whole or skipped as a whole, so no single output stands for this one. Decide by "
            "what all microbatches share, or pass `HarmonyStrategy(num_microbatches=1)`."
        )


def _has_rows(value: Any, num_rows: int) -> bool:
    # By shape, not by type: NumPy arrays, data frames and tensor dictionaries slice like tensors.
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0 and shape[0] == num_rows and hasattr(value, "__getitem__")


def _all_have_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return all(_is_tensor(value) and _has_rows(value, size) for value, size in zip(values, sizes, strict=True))


def is_ndarray(value: Any) -> bool:
    """Say whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")  # whoever made an array has imported it; we need not
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or is_ndarray(value)


def _is_per_sample(value: Any, num_samples: int) -> bool:
    """Tell a list with one entry a sample from a container of a few tensors."""
    if isinstance(value, list) and len(value) == num_samples:
        return not any(_is_tensor(item) for item in value)
    # The default collate function makes a tuple of the samples' strings. Other tuples are records: (height, width).
    return type(value) is tuple and len(value) == num_samples and all(isinstance(item, str | bytes) for item in value)


def _is_lists_of_samples(batch: Any, num_rows: int) -> bool:
    """Tell lists of samples, images beside targets, from lists of a few tensors: what goes with an image has other rows."""
    lists = _children(batch) or []
    if len(lists) < 2 or len({len(each) if isinstance(each, list | tuple) else -1 for each in lists}) > 1:
        return False
    if not isinstance(lists[0], list | tuple):
        return False
    return any(bool(rows) and num_rows not in rows for each in lists[1:] for rows in map(numbers_of_rows, each))


def _is_floating_scalar(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point())


def _concatenate(values: Sequence[Any]) -> Any:
    if len({tuple(value.shape[1:]) for value in values}) > 1:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise ValueError(
            f"The step returned tensors of shapes {shapes} for the microbatches of one batch, which do not make one "
            "tensor. Pad them to one shape in the step, or pass `HarmonyStrategy(num_microbatches=1)`."
        )
    if all(isinstance(value, Tensor) for value in values):
        return torch.cat(list(values))
    return sys.modules["numpy"].concatenate(values)


def _weighted_mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    # In double precision, so that the mean of equal values is that very value in any narrower type.
    total = sum(sizes)
    if isinstance(values[-1], Tensor):
        parts = [torch.as_tensor(value).double() * size for value, size in zip(values, sizes, strict=True)]
        return (sum(parts[1:], start=parts[0]) / total).to(values[-1].dtype)
    return sum(float(value) * size for value, size in zip(values, sizes, strict=True)) / total


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _children(value: Any) -> list[Any] | None:
    """List what a container holds, or return None for anything else."""
    if isinstance(value, Mapping):
        return [value[key] for key in value]
    if isinstance(value, list | tuple):
        return list(value)
    if _is_dataclass_instance(value):
        return [getattr(value, name) for name in _field_names(value)]
    return None


def _columns(containers: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Group the children of containers of one structure by their places."""
    return list(zip(*(_children(container) or () for container in containers), strict=True))


def _same_structure(values: Sequence[Any]) -> bool:
    last = values[-1]
    if any(type(value) is not type(last) for value in values):
        return False
    if isinstance(last, Mapping):
        return all(list(value) == list(last) for value in values)
    if isinstance(last, list | tuple):
        return all(len(value) == len(last) for value in values)
    return _is_dataclass_instance(last) and all(_field_names(value) == _field_names(last) for value in values)


def _rebuild(container: Any, children: Sequence[Any]) -> Any:
    """Make a container like the given one that holds these children."""
    if isinstance(container, Mapping):
        return _rebuild_mapping(container, dict(zip(container, children, strict=True)))
    if isinstance(container, tuple) and hasattr(container, "_make"):
        return container._make(children)
    if isinstance(container, list | tuple):
        return type(container)(children)
    return _rebuild_dataclass(container, children)


def _rebuild_mapping(container: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(container, MutableMapping):
        # A copy keeps what its constructor may not take: a default factory, a tokenizer's encodings.
        filled = copy.copy(container)
        for key, value in items.items():  # one by one, as Hugging Face's outputs refuse update()
            filled[key] = value
        return filled
    constructor: Any = type(container)
    try:
        rebuilt = constructor(items)
    except TypeError:
        return items
    return rebuilt if list(rebuilt) == list(items) else items  # its constructor may take something else


def _rebuild_dataclass(container: Any, children: Sequence[Any]) -> Any:
    # A copy, not replace(): that calls __post_init__ again and refuses fields that are not arguments.
    rebuilt = copy.copy(container)
    for name, child in zip(_field_names(container), children, strict=True):
        object.__setattr__(rebuilt, name, child)  # past the guard of frozen ones
    return rebuilt
