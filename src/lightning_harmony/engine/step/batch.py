"""Batches into microbatches, and the outputs of microbatches back into one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_harmony.engine.memory.guise import Guise
from lightning_harmony.engine.memory.stash import SMALLEST_BYTES, is_small
from lightning_harmony.engine.structures.nested import Node, holds_tensors, is_ndarray, open_node


def microbatch_sizes(
    batch_size: int, *, num_microbatches: int = 1, microbatch_size: int | None = None
) -> tuple[int, ...]:
    """Say how many samples each microbatch of a batch gets.

    Args:
        batch_size: Samples in the batch.
        num_microbatches: How many microbatches, or as many as the batch has samples; they are as equal as possible, the
            larger ones first.
        microbatch_size: Samples in each microbatch; the last one takes the rest. It goes before a number.

    Returns:
        The sizes in order. They add up to ``batch_size``, and there is at least one.

    Raises:
        ValueError: If either is less than one.
    """
    if microbatch_size is not None:
        return _sizes_of(batch_size, microbatch_size)
    # The short last batch of an epoch may have fewer.
    return _equal_sizes(batch_size, min(num_microbatches, max(batch_size, 1)))


class Indivisible(ValueError):
    """What belongs to a sample of a batch cannot be told. The message says why."""


class Loaded(NamedTuple):
    """What the data loader that made a batch tells of it.

    Attributes:
        samples: how many there may be; None if that is not known.
        is_stacked: whether the default collate function made it. Its lists and tuples are those of a sample, and what they
            hold has a row for each sample; other functions may return a list of the samples themselves.
    """

    samples: range | None = None
    is_stacked: bool = False


#: Nothing is told of the batch.
UNKNOWN = Loaded()


def count_samples(batch: Any, loaded: Loaded = UNKNOWN) -> int:
    """Say how many samples a batch has, if only one number is possible.

    A number is possible if everything in the batch either has a row for each sample or is for all of them. A row is that of a
    tensor or an array, a component of a nested tensor, a sequence of a `PackedSequence`, an entry of a list. For all of them
    are tensors without rows or with a single one, numbers, strings and what else holds no tensors.

    Args:
        batch: what the data loader yielded.
        loaded: what is known of it.

    Returns:
        The number of samples, by which `split_batch` splits the batch.

    Raises:
        Indivisible: if no number is possible, or several are.
    """
    batch = _as_record(batch)
    found = _candidates(batch, (), loaded.is_stacked)
    expected = loaded.samples or range(1, sys.maxsize)
    candidates = [number for number in found or expected[:1] if number in expected or number == 0]
    if not candidates:
        raise Indivisible(
            f"its data loader puts {expected[-1]} samples into a batch, but its first tensor has {found[0]} rows, some of "
            "which may belong together"
        )
    possible: dict[int, _Evidence] = {}
    reasons: list[Indivisible] = []
    for number in candidates:
        try:
            evidence = _evidence(batch, number, loaded.is_stacked)
        except Indivisible as reason:
            reasons.append(reason)
        else:
            possible |= {number: evidence} if evidence else {}
    if len(possible) > 1:
        raise Indivisible(
            f"it may be of {' or '.join(map(str, possible))} samples: either the entries of a list in it are samples, or the "
            "rows of these entries"
        )
    for number, evidence in possible.items():
        # A list with one entry too few could be one of anything.
        if evidence is _Evidence.ROWS or number == expected[-1] or not holds_tensors(batch):
            return number
        reasons.append(Indivisible(f"only the length of a list, {number}, tells of samples"))
    raise next(iter(reasons), Indivisible("nothing in it has a row for each sample"))


def split_batch(batch: Any, batch_size: int, sizes: Sequence[int], *, is_stacked: bool = False) -> list[Any]:
    """Split a batch into microbatches.

    Tensors and arrays with ``batch_size`` rows are cut into views, lists of the samples are sliced, and so are nested tensors
    and packed sequences, at any depth of containers and records. Everything else goes unchanged into each microbatch: small
    tensors and arrays as copies, which a step may change, and larger ones themselves.

    Args:
        batch: What the dataloader yielded.
        batch_size: Samples in the batch, as `count_samples` returned it.
        sizes: Samples in each microbatch.
        is_stacked: As `Loaded` says.

    Returns:
        One batch for each size, of the structure of ``batch``; ``[batch]`` itself if there is only one.
    """
    assert sum(sizes) == batch_size, f"microbatches of {tuple(sizes)} do not make a batch of {batch_size}"
    if len(sizes) == 1:
        return [batch]
    slices = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    parts = _Splitter(batch_size, slices, is_stacked).split(_as_record(batch))
    return [tuple(part.values()) for part in parts] if type(batch) is tuple else parts


def shared_tensors(one: Any, other: Any) -> list[Tensor]:
    """List the tensors that two microbatches share."""
    if isinstance(one, Tensor):
        return [one] if one is other else []
    node, others = open_node(one), open_node(other)
    if node is None or others is None:
        return []
    pairs = zip(node.children, others.children, strict=False)
    return [tensor for pair in pairs for tensor in shared_tensors(*pair)]


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Merge what the step returned for each microbatch into what it would have returned for the whole batch.

    Per-sample values are concatenated, floating-point scalars averaged by samples, at any depth of containers and records;
    of anything else the last microbatch's value is kept. So it is of the entry ``"loss"``
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
    # The rows of a TensorDict are joined.
    nodes = _alike(outputs) if isinstance(outputs[-1], Mapping) and not _is_array(outputs[-1]) else None
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


def merge_losses(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Add up the losses of microbatches, each of one element, whatever their shapes, as accumulation would."""
    return torch.stack([loss.reshape(()) * weight for loss, weight in zip(losses, weights, strict=True)]).sum()


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


def _as_record(batch: Any) -> Any:
    """What a tuple holds are fields, as in `x, y = batch`, and no samples; within it, there may be tuples of these."""
    return dict(enumerate(batch)) if type(batch) is tuple else batch


class _Splitter:
    """Splits what is in one batch.

    Args:
        num_samples: of the batch.
        slices: those of each microbatch.
        is_stacked: as `Loaded` says.
    """

    def __init__(self, num_samples: int, slices: Sequence[slice], is_stacked: bool) -> None:
        self._num_samples = num_samples
        self._slices = slices
        self._is_stacked = is_stacked
        # Jagged tensors can be added to each other if they have the same offsets. So can their parts.
        self._offsets: dict[int, list[Tensor]] = {}

    def split(self, value: Any) -> list[Any]:
        """The parts of a value for each microbatch."""
        if isinstance(value, PackedSequence):
            if int(value.batch_sizes[0]) == self._num_samples:
                rows, is_sorted = unpack_sequence(value), value.sorted_indices is None
                return [pack_sequence(rows[part], enforce_sorted=is_sorted) for part in self._slices]
        elif _has_rows(value, self._num_samples):
            return self._rows(value)
        elif _is_list_of_samples(value, self._num_samples, self._is_stacked):
            return [value[part] for part in self._slices]
        node = open_node(value)
        if node is None:
            return [value, *(_own(value) for _ in self._slices[1:])]
        parts = [self.split(child) for child in node.children]
        return [node.build([part[index] for part in parts]) for index in range(len(self._slices))]

    def _rows(self, value: Any) -> list[Any]:
        if isinstance(value, Tensor) and value.is_nested:
            return self._components(value)
        parts = [value[part] for part in self._slices]
        guise = Guise.of(value) if isinstance(value, Tensor) else None
        if guise is None:
            return parts
        attributes = self.split(guise.attributes)
        # A class that knows what becomes of its own when it is sliced has seen to it.
        return [
            guise._replace(attributes=own | vars(part)).on(part) for own, part in zip(attributes, parts, strict=True)
        ]

    def _components(self, value: Any) -> list[Tensor]:
        if value.layout is not torch.jagged:
            rows = value.unbind()
            return [torch.nested.as_nested_tensor(list(rows[part])) for part in self._slices]
        offsets = value.offsets()
        if id(offsets) not in self._offsets:
            self._offsets[id(offsets)] = [offsets[p.start : p.stop + 1] - offsets[p.start] for p in self._slices]
        ends = offsets.tolist()
        return [
            torch.nested.nested_tensor_from_jagged(value.values()[ends[part.start] : ends[part.stop]], own)
            for part, own in zip(self._slices, self._offsets[id(offsets)], strict=True)
        ]


def _candidates(value: Any, lists: tuple[int, ...], is_stacked: bool) -> list[int]:
    """The numbers of samples by which the first tensor with several rows has rows for samples, or is within a sample.

    Args:
        value: what is in the batch.
        lists: the lengths of the lists that it is in.
        is_stacked: as `Loaded` says.
    """
    if isinstance(value, PackedSequence):
        return [int(value.batch_sizes[0]), *lists]
    if (rows := _num_rows(value)) is not None:
        return list(dict.fromkeys([rows, *lists]))
    node = open_node(value)
    if node is None or not node.children:
        return []
    if _may_be_samples(value, is_stacked):
        lists = (len(value), *lists)
    single: list[int] = []
    for child in node.children:
        found = _candidates(child, lists, is_stacked)
        if found and found[0] != 1:
            return found
        single = single or found
    return single or ([len(value)] if _may_be_samples(value, is_stacked) else [])


class _Evidence(IntEnum):
    """What tells that a value has something for each of a number of samples."""

    NONE = 0
    LENGTH = 1
    ROWS = 2


def _evidence(value: Any, number: int, is_stacked: bool) -> _Evidence:
    """What in a value tells of so many samples; where nothing does, it is for all of them.

    Raises:
        Indivisible: if neither is certain.
    """
    if isinstance(value, PackedSequence):
        rows: int | None = int(value.batch_sizes[0])
    elif _is_array(value):
        _refuse_layout(value)
        rows = _num_rows(value)
    else:
        return _evidence_within(value, number, is_stacked)
    if rows in (None, number, 1):
        return _Evidence.ROWS if rows == number else _Evidence.NONE
    raise Indivisible(f"a {type(value).__name__} in it has {rows} rows, and others tell of {number} samples")


def _refuse_layout(value: Any) -> None:
    if not isinstance(value, Tensor):
        return
    if value.is_nested:
        if value.layout is torch.jagged and not value.is_contiguous():
            raise Indivisible("a jagged tensor in it is not contiguous")
    elif value.layout is not torch.strided:
        raise Indivisible(f"a sparse tensor of shape {tuple(value.shape)} in it may tell how its rows belong together")


def _evidence_within(value: Any, number: int, is_stacked: bool) -> _Evidence:
    node = open_node(value)
    if node is None:
        if isinstance(value, Iterator) or holds_tensors(value):
            raise Indivisible(
                f"a {type(value).__name__} in it is of no kind whose parts are known: only its class can take it apart"
            )
        return _Evidence.NONE
    conflict: Indivisible | None = None
    evidence = _Evidence.NONE
    for child in node.children:
        try:
            evidence = max(evidence, _evidence(child, number, is_stacked))
        except Indivisible as reason:
            conflict = conflict or reason
    if _may_be_samples(value, is_stacked) and len(value) == number:
        if evidence and conflict is None:
            raise Indivisible(f"a list of {number} tensors in it has as many rows: either may be samples")
        return _Evidence.LENGTH
    if conflict is not None:
        raise conflict
    if not evidence and type(value) is list and len(value) > 1 and any(open_node(each) is None for each in value):
        raise Indivisible(f"a list in it has {len(value)} entries, and others tell of {number} samples")
    return evidence


def _is_list_of_samples(value: Any, number: int, is_stacked: bool) -> bool:
    """Whether a list has an entry for each sample, in a batch of which that number of samples is certain."""
    if not _may_be_samples(value, is_stacked) or len(value) != number:
        return False
    try:
        return max(_evidence(child, number, is_stacked) for child in value) is _Evidence.NONE
    except Indivisible:
        return True


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple)


def _may_be_samples(value: Any, is_stacked: bool) -> bool:
    """Whether the entries of a list or tuple may be samples, or parts of such: they are alike."""
    if not _is_list(value) or not value:
        return False
    if not holds_tensors(value):
        # The default collate function makes a tuple of the samples' strings. Others are records: (height, width).
        return type(value) is list or all(isinstance(item, str | bytes) for item in value)
    return not is_stacked and all(_are_alike(value[0], each) for each in value[1:])


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two values may be the same thing of two samples: of the same types, but for the sizes of tensors and lists."""
    if type(one) is not type(other):
        return False
    if _is_array(one):
        return bool(one.dtype == other.dtype and one.ndim == other.ndim) if _is_tensor(one) else True
    node, others = open_node(one), open_node(other)
    if node is None or others is None or isinstance(one, list):
        return True
    return node.has_structure_of(others) and all(map(_are_alike, node.children, others.children))


def _own(value: Any) -> Any:
    """Let a microbatch have what others have, too; what a step may change, such as a counter, as a copy."""
    if is_ndarray(value):
        return value.copy() if value.nbytes < SMALLEST_BYTES else value
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    if not is_dense or value.requires_grad or not is_small(value):
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


def _is_array(value: Any) -> bool:
    if _is_tensor(value):
        return True
    # By shape, not by type: data frames and tensor dictionaries slice like tensors.
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0 and hasattr(value, "__getitem__")


def _num_rows(value: Any) -> int | None:
    """The rows of an array; None for anything else."""
    if isinstance(value, Tensor):
        return int(value.size(0)) if value.dim() > 0 else None
    return int(value.shape[0]) if _is_array(value) and value.shape else None


def _has_rows(value: Any, num_rows: int) -> bool:
    return _num_rows(value) == num_rows


def _all_have_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    # Besides tensors and arrays, those classes that teach torch.cat to join them.
    can_be_joined = all(_is_tensor(value) or hasattr(type(value), "__torch_function__") for value in values)
    return can_be_joined and all(map(_has_rows, values, sizes))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or is_ndarray(value)


def _is_per_sample(value: Any, num_samples: int) -> bool:
    """Tell a list with one entry a sample from a container of a few tensors."""
    if isinstance(value, list) and len(value) == num_samples:
        return not any(_is_tensor(item) for item in value)
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
