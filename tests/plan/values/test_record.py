"""What is kept of the steps that were seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.profile import DeviceLimits, Profile, share_seconds
from lightning_harmony.plan.values.record import NarrowWeights, Origin, Record, SeenSize


def costs(samples: int, fixed: int = 7) -> tuple[Cost, ...]:
    return tuple(
        Cost(
            name, 100, 80, fixed + 10 * samples, 20 * samples, 5 * samples, 100, 3 * samples, 3 * samples, 0.5 * samples
        )
        for name in ("a", "b")
    )


def record(*sizes: int) -> Record:
    seen = tuple(SeenSize(size, costs(size)) for size in sizes)
    narrow = (NarrowWeights("b", (0, 2)),)
    return Record(Origin("model", "machine", "versions"), ("a", "b", "a"), True, narrow, seen, DeviceLimits(None, 3.0))


def test_a_record_is_read_as_it_was_written() -> None:
    whole = record(2, 8)
    assert Record.from_json(whole.to_json()) == whole


class TestOtherSizes:
    def test_a_size_that_was_seen_is_told_as_it_was(self) -> None:
        assert record(2, 8).costs_at(8) == costs(8)

    def test_between_two_and_beyond_them_they_lie_on_the_line_through_two(self) -> None:
        for size in (1, 3, 5, 7, 11, 20):
            assert record(2, 8, 16).costs_at(size) == costs(size), size

    @given(st.integers(1, 64))
    def test_of_one_size_alone_nothing_smaller_is_said_to_take_less(self, size: int) -> None:
        assert record(64).costs_at(size) == costs(64)

    @given(st.integers(8, 640))
    def test_nothing_larger_is_taken_to_take_less_than_in_proportion(self, size: int) -> None:
        known = record(8)
        for cost, real in zip(known.costs_at(size), costs(size), strict=True):
            # What the weights take does not depend on microbatches.
            assert (cost.weight_bytes, cost.gradient_bytes, cost.copied_bytes) == (100, 80, 100)
            assert cost.forward_work_bytes >= real.forward_work_bytes
            assert cost.forward_seconds == pytest.approx(real.forward_seconds)

    def test_what_weights_take_does_not_grow_with_the_microbatch(self) -> None:
        """Neither where they are cast, nor where they stay as they are on the host."""
        seen = replace(costs(8)[0], staging_bytes=16, master_bytes=100)
        known = replace(record(8), sizes=(SeenSize(8, (seen, costs(8)[1])),))
        larger = known.costs_at(64)[0]
        fields = ("weight_bytes", "gradient_bytes", "copied_bytes", "staging_bytes", "master_bytes")
        assert [getattr(larger, name) for name in fields] == [getattr(seen, name) for name in fields]

    def test_a_size_is_kept_once(self) -> None:
        again = record(2, 8).with_size(SeenSize(2, costs(2, fixed=9))).with_size(SeenSize(4, costs(4)))
        assert [size.num_elements for size in again.sizes] == [2, 4, 8]
        assert again.costs_at(2) == costs(2, fixed=9)


class TestRefuses:
    def refuse(self, changed: Record | str, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            Record.from_json(changed if isinstance(changed, str) else changed.to_json())

    def test_what_is_something_else(self) -> None:
        self.refuse("[]", "this is not a profile")
        self.refuse('{"format": "lightning-harmony plan"}', "this is not a profile")
        self.refuse("{", "is not JSON")

    def test_what_lacks_a_part_or_has_one_too_many(self) -> None:
        data = json.loads(record(2).to_json())
        self.refuse(json.dumps({**data, "more": 1}), "'more', which is not known")
        del data["sizes"][0]["layers"][1]["graph_bytes"]
        self.refuse(json.dumps(data), r"profile.sizes\[0\].layers\[1\] has no 'graph_bytes'")

    def test_what_contradicts_itself(self) -> None:
        whole = record(2, 8)
        self.refuse(replace(whole, sizes=()), "sizes .* have to grow")
        self.refuse(replace(whole, sizes=whole.sizes[::-1]), r"have to grow, but are \[8, 2\]")
        self.refuse(replace(whole, calls=("a", "c")), "what layer 'c' costs")
        self.refuse(replace(whole, narrow=(NarrowWeights("d", ()),)), "what layer 'd' costs")
        other = replace(whole.sizes[1], layers=costs(8)[:1])
        self.refuse(replace(whole, sizes=(whole.sizes[0], other)), "the same layers for each size")

    @pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
    def test_what_cannot_be_measured(self, value: Any) -> None:
        layers = tuple(replace(cost, backward_seconds=value) for cost in costs(2))
        self.refuse(replace(record(2), sizes=(SeenSize(2, layers),)), "backward_seconds: Expected `float`")
        self.refuse(replace(record(2), machine=DeviceLimits(None, value)), "swap_in_bytes_per_second: Expected `float`")


def test_a_profile_prints_as_a_table_of_its_layers() -> None:
    first, rule, *rows, last = str(
        Profile(tuple(replace(cost, backward_seconds=0.25) for cost in costs(2)))
    ).splitlines()
    assert first == "Layer | Weights | Forward  | Backward"
    assert rows == ["a     | 100 B   | 1e+03 ms | 250 ms", "b     | 100 B   | 1e+03 ms | 250 ms"]
    assert rule == last == "-" * len(first)


class TestSharing:
    def test_layers_that_are_alike_share_what_was_timed(self) -> None:
        layers = [
            replace(
                costs(2)[0], name=f"{n}", forward_seconds=float(n), backward_seconds=3.0 * n, recompute_seconds=n / 2
            )
            for n in (1, 2, 90)
        ]
        shared = share_seconds(layers, ["block"] * 3)
        assert [cost.forward_seconds for cost in shared] == [2.0] * 3
        assert [cost.spared_backward_seconds for cost in shared] == [5.0] * 3
        assert [cost.name for cost in shared] == ["1", "2", "90"]

    def test_layers_of_other_kinds_or_costs_do_not_share_seconds(self) -> None:
        one, other = costs(2)
        other = replace(other, forward_seconds=5.0)
        assert share_seconds([one, other], ["block", "head"]) == [one, other]
        # Of the same kind, but with other inputs.
        wider = replace(other, stash_bytes=99)
        assert share_seconds([one, wider], ["block"] * 2) == [one, wider]

    @pytest.mark.parametrize("its_own", [{"forward_work_bytes": 999}, {"arriving_bytes": 0}, {"returning_bytes": 999}])
    def test_the_first_of_its_kind_allocates_more_and_is_slow(self, its_own: dict[str, Any]) -> None:
        """On a GPU it makes a handle of each library for each lane: it used to be planned with what that took.

        It still was where tokens came to it, which are small, and to the others activations.
        """
        first = replace(costs(2)[0], arriving_bytes=40, returning_bytes=40)
        layers = [replace(first, name="1", forward_seconds=50.0, **its_own)]
        layers += [replace(first, name=f"{n}", forward_seconds=3.0) for n in (2, 3)]
        shared = share_seconds(layers, ["block"] * 3)
        assert [cost.forward_seconds for cost in shared] == [3.0] * 3
        assert [cost.forward_work_bytes for cost in shared] == [cost.forward_work_bytes for cost in layers]
