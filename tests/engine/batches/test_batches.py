"""Batches split into microbatches, and the outputs of microbatches merged."""

import dataclasses
import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_harmony.engine.batches.merge import merge_evaluations, merge_losses, merge_outputs
from lightning_harmony.engine.batches.split import (
    UNKNOWN,
    Indivisible,
    Loaded,
    count_samples,
    microbatch_sizes,
    split_batch,
)

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    note: str = "whole"
    doubled: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.doubled += 2


@dataclasses.dataclass(frozen=True)
class FrozenSample:
    x: torch.Tensor
    y: torch.Tensor


class Config(Mapping):
    """Read-only, and not made from a mapping."""

    def __init__(self, name, /, **items):
        self.name, self.items_by_key = name, items

    def __getitem__(self, key):
        return self.items_by_key[key]

    def __iter__(self):
        return iter(self.items_by_key)

    def __len__(self):
        return len(self.items_by_key)


def rows(num_rows, width=3):
    return torch.arange(num_rows * width, dtype=torch.float32).reshape(num_rows, width)


class TestMicrobatchSizes:
    @given(batch_size=st.integers(1, 200), num_microbatches=st.integers(1, 200))
    def test_a_number_of_microbatches_makes_them_equal_and_the_larger_first(self, batch_size, num_microbatches):
        num_microbatches = min(num_microbatches, batch_size)
        sizes = microbatch_sizes(batch_size, num_microbatches=num_microbatches)
        assert sum(sizes) == batch_size
        assert len(sizes) == num_microbatches
        assert list(sizes) == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1

    @given(batch_size=st.integers(1, 200), microbatch_size=st.integers(1, 250))
    def test_a_microbatch_size_fills_all_but_the_last(self, batch_size, microbatch_size):
        sizes = microbatch_sizes(batch_size, microbatch_size=microbatch_size)
        assert sum(sizes) == batch_size
        assert set(sizes[:-1]) <= {microbatch_size}
        assert 0 < sizes[-1] <= microbatch_size

    def test_by_default_there_is_one(self):
        assert microbatch_sizes(6) == (6,)

    def test_an_empty_batch_is_one_empty_microbatch_of_any_size(self):
        assert microbatch_sizes(0, microbatch_size=2) == (0,)

    def test_a_batch_with_fewer_samples_than_microbatches_is_split_into_its_samples(self):
        assert microbatch_sizes(3, num_microbatches=5) == (1, 1, 1)
        assert microbatch_sizes(0, num_microbatches=5) == (0,)

    @pytest.mark.parametrize("option", ["num_microbatches", "microbatch_size"])
    def test_less_than_one_is_refused(self, option):
        with pytest.raises(ValueError, match=f"`{option}` must be at least 1, not 0"):
            microbatch_sizes(8, **{option: 0})


class TestSplitBatch:
    @given(batch_size=st.integers(2, 40), num_microbatches=st.integers(2, 40))
    def test_concatenating_the_parts_gives_the_batch(self, batch_size, num_microbatches):
        sizes = microbatch_sizes(batch_size, num_microbatches=num_microbatches)
        batch = {"x": rows(batch_size), "nested": [rows(batch_size, 1), {"names": [str(i) for i in range(batch_size)]}]}
        parts = split_batch(batch, batch_size, sizes)
        assert [len(part["x"]) for part in parts] == list(sizes)
        assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
        assert torch.equal(torch.cat([part["nested"][0] for part in parts]), batch["nested"][0])
        assert [name for part in parts for name in part["nested"][1]["names"]] == batch["nested"][1]["names"]

    def test_one_microbatch_is_the_batch_itself(self):
        batch = {"x": rows(4)}
        assert split_batch(batch, 4, [4])[0] is batch

    def test_parts_are_views(self):
        batch = rows(4)
        _, second = split_batch(batch, 4, [2, 2])
        assert second.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()

    @pytest.mark.parametrize(
        "value",
        [torch.tensor(4.0), rows(5), rows(2).T, "abcd", 4, None, {1, 2, 3, 4}, torch.Size([4, 4, 4, 4])],
        ids=["0-dim", "other length", "samples second", "string of that length", "int", "None", "set", "size"],
    )
    def test_what_has_no_row_for_each_sample_goes_unchanged_into_every_part(self, value):
        first, second = split_batch({"value": value, "x": rows(4)}, 4, [2, 2])
        for part in (first, second):
            assert type(part["value"]) is type(value)
            # Small tensors are each part's own.
            assert torch.equal(part["value"], value) if isinstance(value, torch.Tensor) else part["value"] == value

    def test_a_list_of_tensors_is_a_container_whatever_its_length(self):
        parts = split_batch([rows(2), rows(2, 1)], 2, [1, 1], is_stacked=True)
        assert [[tensor.shape for tensor in part] for part in parts] == [[(1, 3), (1, 1)]] * 2

    def test_a_list_with_a_record_for_each_sample_is_sliced(self):
        # Detection targets: that one image has as many boxes as the batch has images means nothing.
        targets = [{"boxes": torch.zeros(count, 4)} for count in (3, 1, 2)]
        parts = split_batch({"x": rows(3), "targets": targets}, 3, [2, 1])
        assert parts[0]["targets"] == targets[:2]
        assert parts[1]["targets"] == targets[2:]

    def test_a_tuple_of_strings_is_sliced_and_a_tuple_of_numbers_is_a_record(self):
        collated = torch.utils.data.default_collate([("a", 0), ("b", 1), ("c", 2)])
        assert collated[0] == ("a", "b", "c")
        first, second = split_batch({"texts": collated[0], "extent": (2, 3, 5)}, 3, [2, 1])
        assert (first["texts"], second["texts"]) == (("a", "b"), ("c",))
        assert first["extent"] == second["extent"] == (2, 3, 5)

    def test_numpy_arrays_are_split(self):
        parts = split_batch({"x": np.arange(6).reshape(3, 2), "scalar": np.float32(3)}, 3, [2, 1])
        assert [part["x"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5]]]
        assert parts[0]["scalar"] == 3

    @pytest.mark.parametrize(
        "container",
        [
            {"x": rows(4)},
            OrderedDict(x=rows(4)),
            defaultdict(list, x=rows(4)),
            UserDict(x=rows(4)),
            MappingProxyType({"x": rows(4)}),
            BatchEncoding({"x": rows(4)}),
        ],
        ids=lambda container: type(container).__name__,
    )
    def test_mappings_keep_their_type(self, container):
        parts = split_batch(container, 4, [3, 1])
        assert [type(part) for part in parts] == [type(container)] * 2
        assert [len(part["x"]) for part in parts] == [3, 1]
        assert len(container["x"]) == 4

    def test_a_defaultdict_keeps_its_factory(self):
        assert split_batch(defaultdict(list, x=rows(2)), 2, [1, 1])[0]["missing"] == []

    def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dict(self):
        parts = split_batch(Config("train", x=rows(2)), 2, [1, 1])
        assert [{key: len(value) for key, value in part.items()} for part in parts] == [{"x": 1}] * 2

    def test_a_namedtuple_and_a_tuple_keep_their_types(self):
        part = split_batch((Pair(rows(2), "y"), rows(2)), 2, [1, 1])[0]
        assert type(part) is tuple
        assert type(part[0]) is Pair
        assert part[0].x.shape == (1, 3)
        assert part[0].y == "y"

    def test_a_dataclass_is_copied_without_running_its_initialiser_again(self):
        batch = Sample(rows(2))
        parts = split_batch(batch, 2, [1, 1])
        assert [(part.x.shape, part.note, part.doubled) for part in parts] == [((1, 3), "whole", 2)] * 2
        assert batch.x.shape == (2, 3)

    def test_a_frozen_dataclass_is_split(self):
        parts = split_batch(FrozenSample(rows(2), torch.tensor([5, 6])), 2, [1, 1])
        assert [part.y.tolist() for part in parts] == [[5], [6]]
        assert type(parts[0]) is FrozenSample

    def test_empty_containers_go_into_every_part(self):
        assert split_batch([rows(2), {}, []], 2, [1, 1])[1][1:] == [{}, []]

    @pytest.mark.parametrize("is_sorted", [True, False])
    def test_a_packed_sequence_is_split_by_its_sequences(self, is_sorted):
        sequences = [torch.arange(length * 2.0).reshape(length, 2) for length in (5, 4, 2, 1)]
        sequences = sequences if is_sorted else sequences[::-1]
        parts = split_batch([pack_sequence(sequences, enforce_sorted=is_sorted)], 4, [3, 1])
        for (part,), own in zip(parts, (sequences[:3], sequences[3:]), strict=True):
            expected = pack_sequence(own, enforce_sorted=is_sorted)
            assert all(map(torch.equal, unpack_sequence(part), own))
            assert torch.equal(part.batch_sizes, expected.batch_sizes)
            assert (part.sorted_indices is None) == is_sorted


class TestMergeOutputs:
    @given(sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5))
    def test_merging_undoes_splitting(self, sizes):
        batch_size = sum(sizes)
        batch = {"x": rows(batch_size), "rest": (rows(batch_size, 1), ["n"] * batch_size)}
        merged = merge_outputs(split_batch(batch, batch_size, sizes), sizes)
        assert torch.equal(merged["x"], batch["x"])
        assert torch.equal(merged["rest"][0], batch["rest"][0])
        assert merged["rest"][1] == batch["rest"][1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_scalar_tensors_are_averaged_by_samples_in_their_type(self, dtype):
        merged = merge_outputs([torch.tensor(1.0, dtype=dtype), torch.tensor(4.0, dtype=dtype)], [2, 1])
        assert merged == 2.0
        assert merged.dtype == dtype
        assert merged.dim() == 0

    @given(value=st.floats(-1e6, 1e6, width=32), sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6))
    def test_the_mean_of_one_value_is_that_value(self, value, sizes):
        assert merge_outputs([torch.tensor(value)] * len(sizes), sizes).item() == value

    def test_python_floats_are_averaged_by_samples(self):
        assert merge_outputs([{"accuracy": 1.0}, {"accuracy": 0.0}], [3, 1]) == {"accuracy": 0.75}

    def test_gradients_reach_every_part_by_its_share(self):
        parts = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
        merge_outputs(parts, [3, 1]).backward()
        assert [part.grad.item() for part in parts] == [0.75, 0.25]

    @pytest.mark.parametrize(
        "values", [(1, 2), ("a", "b"), (True, False), (torch.tensor(1), torch.tensor(2)), (rows(3), rows(5))]
    )
    def test_of_anything_else_the_last_is_kept(self, values):
        assert merge_outputs([{"value": value} for value in values], [2, 1])["value"] is values[-1]

    def test_the_loss_of_a_mapping_is_left_to_the_caller(self):
        outputs = [
            {"loss": torch.zeros(2), "nested": {"loss": 1.0}},
            {"loss": torch.zeros(1, 7), "nested": {"loss": 4.0}},
        ]
        merged = merge_outputs(outputs, [2, 1])
        assert merged["loss"] is outputs[-1]["loss"]
        assert merged["nested"] == {"loss": 2.0}

    def test_the_outputs_are_not_changed(self):
        outputs = [{"x": rows(2)}, {"x": rows(1)}]
        merge_outputs(outputs, [2, 1])
        assert [len(output["x"]) for output in outputs] == [2, 1]

    def test_containers_keep_their_types(self):
        outputs = [[Pair(rows(n), FrozenSample(rows(n), torch.tensor(float(n))))] for n in (2, 1)]
        (merged,) = merge_outputs(outputs, [2, 1])
        assert type(merged) is Pair
        assert merged.x.shape == (3, 3)
        assert type(merged.y) is FrozenSample
        assert merged.y.y.item() == pytest.approx(5 / 3)

    def test_hugging_face_outputs_are_merged(self):
        outputs = [SequenceClassifierOutput(loss=torch.tensor(1.0), logits=rows(n)) for n in (2, 1)]
        merged = merge_outputs(outputs, [2, 1])
        assert type(merged) is SequenceClassifierOutput
        assert merged.logits.shape == merged["logits"].shape == (3, 3)

    def test_numpy_arrays_are_concatenated(self):
        merged = merge_outputs([np.zeros((2, 3)), np.ones((1, 3))], [2, 1])
        assert merged.tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]

    def test_lists_with_an_entry_for_each_sample_are_joined(self):
        assert merge_outputs([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]

    def test_outputs_of_different_structures_give_the_last(self):
        assert merge_outputs([{"a": 1.0}, {"b": 2.0}], [1, 1]) == {"b": 2.0}
        assert merge_outputs([{"a": [1.0, 2.0, 3.0]}, {"a": [1.0, 2.0]}], [1, 1]) == {"a": [1.0, 2.0]}

    def test_one_output_is_returned_itself(self):
        output = {"x": rows(2)}
        assert merge_outputs([output], [2]) is output

    def test_outputs_that_are_all_none_merge_to_none(self):
        assert merge_outputs([None, None], [1, 1]) is None

    def test_an_output_of_some_microbatches_alone_is_refused_with_their_numbers(self):
        with pytest.raises(ValueError, match=r"None for microbatches 1, 3 of 3"):
            merge_outputs([None, torch.tensor(1.0), None], [1, 1, 1])

    def test_tensors_that_do_not_fit_together_are_refused_with_their_shapes(self):
        with pytest.raises(ValueError, match=r"shapes \(2, 3\), \(1, 4\)"):
            merge_outputs([rows(2, 3), rows(1, 4)], [2, 1])


class TestMergeEvaluations:
    def test_rows_are_joined_and_what_all_share_is_kept(self):
        outputs = [
            {
                "x": rows(2),
                "ids": ["a", "b"],
                "size": (3, "px"),
                "classes": torch.arange(5),
                "none": None,
                "np": np.ones(4),
            },
            {"x": rows(1), "ids": ["c"], "size": (3, "px"), "classes": torch.arange(5), "none": None, "np": np.ones(4)},
        ]
        merged = merge_evaluations(outputs, [2, 1], averages=False)
        assert torch.equal(merged["x"], torch.cat([rows(2), rows(1)]))
        assert torch.equal(merged["classes"], torch.arange(5))
        assert (merged["np"] == np.ones(4)).all()
        assert (merged["ids"], merged["size"], merged["none"]) == (["a", "b", "c"], (3, "px"), None)

    def test_means_are_averaged_where_they_are_means(self):
        outputs = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}]
        assert merge_evaluations(outputs, [2, 1], averages=True) == {"loss": torch.tensor(2.0)}
        with pytest.raises(ValueError, match="type Tensor that differ from microbatch to microbatch"):
            merge_evaluations(outputs, [2, 1], averages=False)

    @pytest.mark.parametrize(
        "outputs",
        [
            [1, 2],
            [1, 1.0],
            ["a", "b"],
            [object(), object()],
            [torch.ones(5), torch.ones(6)],
            [torch.ones(5), torch.ones(5).double()],
            [{"a": 1}, {"b": 1}],
            [torch.ones(2), None],
        ],
        ids=lambda outputs: "-".join(type(output).__name__ for output in outputs),
    )
    def test_anything_else_is_refused(self, outputs):
        with pytest.raises(ValueError, match="microbatch"):
            merge_evaluations(outputs, [2, 1], averages=False)


def test_a_part_of_a_tensor_has_its_own_rows_of_what_is_set_on_that():
    batch = torch.arange(4.0)
    batch.weights, batch.source = torch.arange(4.0) * 2, "whole"
    first, second = split_batch(batch, 4, [1, 3])
    assert (first.weights.tolist(), first.source) == ([0.0], "whole")
    assert second.weights.tolist() == [2.0, 4.0, 6.0]


def detection_batch(num_boxes: list[int]) -> tuple[tuple[torch.Tensor, ...], tuple[dict[str, torch.Tensor], ...]]:
    """As `tuple(zip(*samples))` collates it: images of three channels, and for each its boxes."""
    images = tuple(torch.zeros(3, 8, 8 + number) for number in num_boxes)
    return images, tuple({"boxes": torch.zeros(number, 4)} for number in num_boxes)


@pytest.mark.parametrize("num_boxes", [[1, 2, 5, 4], [3, 1, 3, 4], [2, 1, 4, 4]])
def test_lists_with_an_entry_for_each_sample_are_split_by_samples(num_boxes: list[int]) -> None:
    """The first tensor's rows are channels: each image was split by them, and every microbatch had all targets."""
    for images, targets in (detection_batch(num_boxes[:4]),):
        for batch in ((images, targets), {"x": images, "y": targets}):
            number = len(images)
            assert count_samples(batch, exactly(number)) == number
            first, second = split_batch(batch, number, [number - 1, 1])
            for part, own in ((first, slice(number - 1)), (second, slice(number - 1, number))):
                x, y = part.values() if isinstance(part, dict) else part
                assert x == images[own]
                assert y == targets[own]


def exactly(number: int) -> Loaded:
    return Loaded(range(number, number + 1))


def readable(value: Any) -> str:
    """A name that is the same in each process."""
    return re.sub(r" object at 0x\w+", "", str(value))


class Bag:
    """An object whose class alone knows what its tensors are."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@attrs.frozen
class Pairs:
    left: torch.Tensor
    right: torch.Tensor
    name: str = "pairs"


def ragged(*lengths: int, width: int = 2) -> list[torch.Tensor]:
    return [torch.full((length, width), float(length)) for length in lengths]


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor(ragged(*lengths), layout=torch.jagged)


class TestCountSamples:
    @pytest.mark.parametrize(
        ("batch", "loaded", "number"),
        [
            (rows(4), UNKNOWN, 4),
            ((rows(4), torch.zeros(4), torch.tensor(0.5), torch.ones(1, 9), "text", None, 7), UNKNOWN, 4),
            ({"a": [1, FrozenSample(rows(4), None)], "names": ["w", "x", "y", "z"]}, UNKNOWN, 4),
            (["w", "x", "y", "z"], UNKNOWN, 4),
            (pack_sequence([torch.zeros(2)] * 4), UNKNOWN, 4),
            (jagged(1, 3, 2, 2), UNKNOWN, 4),
            (Pairs(rows(4), rows(4)), UNKNOWN, 4),
            ((rows(4), [{"boxes": box} for box in ragged(1, 4, 4, 2)]), UNKNOWN, 4),
            (([*ragged(3, 3, 3, 3)], torch.zeros(4)), UNKNOWN, 4),
            ([{"ids": row} for row in ragged(16, 16, 16, 16)], exactly(4), 4),
            ([{"ids": row} for row in ragged(16, 2, 7, 16)], exactly(4), 4),
            ([(row, 3) for row in ragged(16, 2, 7, 16)], exactly(4), 4),
            ([rows(4), rows(4)], exactly(4), 4),
            ((rows(2), torch.zeros(2)), Loaded(range(2, 3), is_stacked=True), 2),
            ((rows(2), rows(2)), Loaded(range(2, 3), is_stacked=True), 2),
            ((rows(2), rows(2)), UNKNOWN, 2),
            (rows(1), UNKNOWN, 1),
            (rows(0), UNKNOWN, 0),
            (rows(5), Loaded(range(1, 9)), 5),
            (torch.zeros(8, 8), Loaded(range(8, 9), is_stacked=True), 8),
            (torch.zeros(8, 8), Loaded(range(8, 9), has_rows=True), 8),
            (torch.zeros(8, 8), UNKNOWN, 8),
            ((torch.zeros(8, 8), torch.zeros(8)), exactly(8), 8),
            ((torch.zeros(8, 8), torch.zeros(8, 3)), exactly(8), 8),
            (torch.zeros(8), Loaded(range(8, 9), is_stacked=True), 8),
            (torch.zeros(8, dtype=torch.long), exactly(8), 8),
            ((torch.zeros(8), torch.zeros(8)), exactly(8), 8),
            ((rows(8), torch.zeros(8)), exactly(8), 8),
            (torch.zeros(8, 1), exactly(8), 8),
            (torch.zeros(1), exactly(1), 1),
        ],
        ids=readable,
    )
    def test_a_number_that_alone_is_possible_is_found(self, batch, loaded, number):
        assert count_samples(batch, loaded) == number

    @pytest.mark.parametrize(
        ("batch", "loaded", "why"),
        [
            ((rows(8), rows(56)), UNKNOWN, "has 56 rows, and others tell of 8 samples"),
            ({"nodes": rows(8), "edges": torch.zeros(2, 20)}, UNKNOWN, "has 2 rows"),
            ((rows(8), torch.ones(5)), UNKNOWN, "has 5 rows"),
            (torch.zeros(8), exactly(8), "one vector of 8 numbers"),
            (torch.zeros(8), UNKNOWN, "one vector of 8 numbers"),
            ({"signal": np.zeros(8, np.float32), "rate": 16000}, exactly(8), "one vector of 8 numbers"),
            ((torch.zeros(8), torch.ones(1, 9)), exactly(8), "one vector of 8 numbers"),
            (torch.zeros(8, 8), exactly(8), "8 rows and 8 columns"),
            ({"ids": torch.zeros(8, 8), "mask": torch.ones(8, 8, 2)}, exactly(8), "8 rows and 8 columns"),
            (rows(16), exactly(8), "puts 8 samples into a batch, but its first tensor has 16 rows"),
            ((rows(16), torch.zeros(16)), Loaded(range(1, 9)), "may belong together"),
            ([{"ids": row} for row in ragged(16, 16, 16, 16)], UNKNOWN, "may be of 16 or 4 samples"),
            ([rows(4), rows(4)], UNKNOWN, "may be of 4 or 2 samples"),
            ([{"ids": row} for row in ragged(16, 2, 7, 16)], UNKNOWN, "others tell of 16 samples"),
            ([rows(2), rows(2)], exactly(2), "either may be samples"),
            ((rows(3), rows(3).to_sparse()), UNKNOWN, "sparse tensor of shape"),
            ((rows(3), torch.eye(3).to_sparse()), UNKNOWN, "sparse tensor of shape"),
            (Bag(x=rows(4)), UNKNOWN, "a Bag in it"),
            ((rows(4), Bag(deep=[Bag(x=rows(4))])), UNKNOWN, "a Bag in it"),
            ((rows(4), iter([1, 2])), UNKNOWN, "only its class"),
            ((rows(4), ["a"] * 20), UNKNOWN, "a list in it has 20 entries"),
            ((torch.tensor(1.0), None, "text"), UNKNOWN, "nothing in it has a row for each sample"),
            (Bag(), UNKNOWN, "nothing in it"),
        ],
        ids=readable,
    )
    def test_what_is_not_certain_is_not_guessed(self, batch, loaded, why):
        with pytest.raises(Indivisible, match=why):
            count_samples(batch, loaded)

    def test_an_object_without_tensors_is_for_all_samples(self):
        config = Bag(name="train", sizes=(1, 2))
        first, second = split_batch((rows(4), config), count_samples((rows(4), config)), [2, 2])
        assert first[1] is second[1] is config


def test_jagged_tensors_are_split_by_their_components_and_those_that_share_offsets_still_do() -> None:
    one = jagged(1, 3, 2, 2)
    other = torch.nested.nested_tensor_from_jagged(one.values() * 2, one.offsets())
    for (left, right), lengths in zip(split_batch((one, other), 4, [3, 1]), ([1, 3, 2], [2]), strict=True):
        assert [len(row) for row in left.unbind()] == lengths
        assert torch.equal((left + right).values(), left.values() * 3)


def test_a_list_of_samples_is_sliced_whatever_the_lengths_of_their_tensors() -> None:
    """Each sample's own tensor was cut along its tokens: every microbatch had all samples, a part of each."""
    samples = [{"ids": row} for row in ragged(16, 16, 4, 16)]
    assert split_batch(samples, 4, [1, 3]) == [samples[:1], samples[1:]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_joined() -> None:
    for layout in (torch.jagged, torch.strided):
        whole = torch.nested.nested_tensor(ragged(1, 3, 2), layout=layout)
        assert count_samples(whole) == 3
        merged = merge_outputs([{"x": part} for part in split_batch(whole, 3, [2, 1])], [2, 1])
        assert all(map(torch.equal, merged["x"].unbind(), whole.unbind()))


def test_losses_of_one_element_are_added_up_whatever_their_shapes() -> None:
    losses = [torch.tensor([2.0], requires_grad=True), torch.tensor(4.0, requires_grad=True), torch.full((1, 1), 8.0)]
    loss = merge_losses(losses, [Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)])
    assert loss.shape == ()
    assert loss.item() == 4.5
    loss.backward()
    assert [each.grad.flatten().tolist() for each in losses[:2]] == [[0.25], [0.5]]


class TestTensorDict:
    def test_rows_are_samples_and_are_joined_again(self):
        tensordict = pytest.importorskip("tensordict")
        inner = tensordict.TensorDict({"a": rows(4)}, batch_size=[4])
        batch = tensordict.TensorDict({"x": rows(4), "inner": inner}, batch_size=[4])
        assert count_samples({"data": batch}) == 4
        parts = split_batch(batch, 4, [3, 1])
        assert [part["inner", "a"].shape for part in parts] == [(3, 3), (1, 3)]
        assert torch.equal(merge_outputs(parts, [3, 1])["x"], batch["x"])

    def test_it_says_itself_that_its_rows_are_samples_also_where_the_data_loader_has_a_collate_function_of_its_own(
        self,
    ):
        """It was taken to have as many columns as rows, and ran whole."""
        tensordict = pytest.importorskip("tensordict")
        batch = tensordict.TensorDict({"x": rows(4)}, batch_size=[4])
        assert count_samples(batch, Loaded(range(4, 5))) == 4
        square = tensordict.TensorDict({"x": torch.zeros(4, 4)}, batch_size=[4, 4])
        with pytest.raises(Indivisible, match="4 rows and 4 columns"):
            count_samples(square, Loaded(range(4, 5)))

    def test_a_tensordict_without_a_batch_size_is_a_mapping(self):
        tensordict = pytest.importorskip("tensordict")
        batch = tensordict.TensorDict({"x": rows(4), "y": torch.zeros(4)})
        assert count_samples(batch) == 4
        assert [part["x"].shape for part in split_batch(batch, 4, [3, 1])] == [(3, 3), (1, 3)]


def test_lists_of_views_are_split() -> None:
    views = [[torch.zeros(6, 2), torch.ones(6, 2)], [torch.zeros(6), torch.ones(6)]]
    first, second = split_batch(views, 6, [4, 2])
    assert [len(tensor) for each in first for tensor in each] == [4, 4, 4, 4]
    assert [len(tensor) for each in second for tensor in each] == [2, 2, 2, 2]
