"""Batches into microbatches: which dimension of what has samples, by rules that are certain."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_harmony.engine.batches.rows import has_rows, is_array, is_tensor, rows_of
from lightning_harmony.engine.memory.stash import SMALLEST_BYTES, is_small
from lightning_harmony.engine.memory.tensor_class import TensorClass
from lightning_harmony.engine.structures.nested import holds_tensors, is_ndarray, open_node


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
        has_rows: whether another batch of it was seen to have a row for each sample, and no column.
    """

    samples: range | None = None
    is_stacked: bool = False
    has_rows: bool = False


#: Nothing is told of the batch.
UNKNOWN = Loaded()


def count_samples(batch: Any, loaded: Loaded = UNKNOWN) -> int:
    """Say how many samples a batch has, if only one number is possible.

    A number is possible if everything in the batch either has a row for each sample or is for all of them. A row is that of a
    tensor or an array, a component of a nested tensor, a sequence of a `PackedSequence`, an entry of a list. For all of them
    are tensors without rows or with a single one, numbers, strings and what else holds no tensors. If a single vector has
    rows, and a function of the user's made it, its floating-point numbers may as well be of all samples together. If all that
    has rows has as many columns, that function may have put samples into these.

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
        if evidence is _Evidence.ROWS and number > 1 and not loaded.is_stacked and _is_one_vector(batch):
            raise Indivisible(
                f"all that it has is one vector of {number} numbers, which may be of a sample each, or of all together"
            )
        tells_of_rows = evidence is _Evidence.ROWS and number > 1 and loaded.samples is not None
        if tells_of_rows and not (loaded.is_stacked or loaded.has_rows) and is_square(batch, number):
            raise Indivisible(
                f"all that it has are {number} rows and {number} columns, and either may be samples, as of sequences that are "
                "stacked side by side"
            )
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


def shared_by(one: Any, other: Any) -> list[Any]:
    """List the tensors and other objects that two microbatches share."""
    node, others = (None, None) if isinstance(one, Tensor) else (open_node(one), open_node(other))
    if node is None or others is None:
        return [one] if one is other else []
    return [each for pair in zip(node.children, others.children, strict=False) for each in shared_by(*pair)]


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
        elif has_rows(value, self._num_samples):
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
        own_class = TensorClass.of(value) if isinstance(value, Tensor) else None
        if own_class is None:
            # Each has a version of its own: a microbatch may change its rows while the graphs of others wait.
            return [part.data if isinstance(part, Tensor) and not part.requires_grad else part for part in parts]
        attributes = self.split(own_class.attributes)
        # A class that knows what becomes of its own when it is sliced has seen to it.
        return [
            own_class._replace(attributes=own | vars(part)).on(part)
            for own, part in zip(attributes, parts, strict=True)
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
    if (rows := rows_of(value)) is not None:
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
    elif is_array(value):
        _refuse_layout(value)
        rows = rows_of(value)
    else:
        return _evidence_within(value, number, is_stacked)
    if rows in (None, number, 1):
        return _Evidence.ROWS if rows == number else _Evidence.NONE
    raise Indivisible(f"a {type(value).__name__} in it has {rows} rows, and others tell of {number} samples")


def _is_one_vector(batch: Any) -> bool:
    """Whether a single array in a batch has rows, which are numbers: no labels or indices, which samples have one by one."""
    arrays = [each for each in _arrays_in(batch) if rows_of(each) not in (None, 1)]
    if len(arrays) != 1 or not is_tensor(arrays[0]) or arrays[0].ndim != 1:
        return False
    (array,) = arrays
    return array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f"


def is_square(batch: Any, number: int) -> bool:
    """Whether all arrays in a batch that have so many rows have as many columns: one or the other may be samples."""
    arrays = [each for each in _arrays_in(batch) if rows_of(each) == number]
    return all(len(each.shape) > 1 and each.shape[1] == number for each in arrays) and bool(arrays)


def _arrays_in(value: Any) -> Iterator[Any]:
    if is_array(value):
        yield value
    elif (node := open_node(value)) is not None:
        for child in node.children:
            yield from _arrays_in(child)


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


def _may_be_samples(value: Any, is_stacked: bool) -> bool:
    """Whether the entries of a list or tuple may be samples, or parts of such: they are alike."""
    if type(value) not in (list, tuple) or not value:
        return False
    if not holds_tensors(value):
        # The default collate function makes a tuple of the samples' strings. Others are records: (height, width).
        return type(value) is list or all(isinstance(item, str | bytes) for item in value)
    return not is_stacked and all(_are_alike(value[0], each) for each in value[1:])


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two values may be the same thing of two samples: of the same types, but for the sizes of tensors and lists."""
    if type(one) is not type(other):
        return False
    if is_array(one):
        return bool(one.dtype == other.dtype and one.ndim == other.ndim) if is_tensor(one) else True
    node, others = open_node(one), open_node(other)
    if node is None or others is None or isinstance(one, list):
        return True
    return node.has_structure_of(others) and all(map(_are_alike, node.children, others.children))


def _own(value: Any) -> Any:
    """Let a microbatch have what others have, too; what a step may change, such as a counter, as a copy."""
    if is_ndarray(value):
        return value.copy() if value.nbytes < SMALLEST_BYTES else value
    if type(value) is set:
        return value.copy()
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    if not is_dense or value.requires_grad or not is_small(value):
        return value
    own_class = TensorClass.of(value)
    return value.clone() if own_class is None else own_class.on(value.clone())
