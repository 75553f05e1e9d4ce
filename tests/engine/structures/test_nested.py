"""Nested values are taken apart and put together again, each kind by its own rule."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_pytree_node
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from lightning_harmony.engine.structures.nested import holds_tensors, leaves_of, map_tensors, open_node

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: Any
    y: Any = None


@attrs.define(slots=True)
class Slotted:
    x: Any
    y: Any = None


class Registered:
    """As libraries register theirs."""

    def __init__(self, x: Any) -> None:
        self.x = x


register_pytree_node(Registered, lambda node: ([node.x], None), lambda children, _: Registered(*children))


def containers(x: Any) -> dict[str, Any]:
    return {
        "list": [x, 1],
        "tuple": (x, 1),
        "named tuple": Pair(x, 1),
        "deque": deque([x, 1], maxlen=3),
        "dict": {"x": x},
        "ordered": OrderedDict(x=x),
        "default": defaultdict(list, x=x),
        "encoding": BatchEncoding({"x": x}),
        "output": BaseModelOutput(last_hidden_state=x),
        "dataclass": Record(x),
        "attrs": Slotted(x),
        "registered": Registered(x),
        "deep": {"a": [Record(Pair(x, Slotted(1)))]},
    }


@pytest.mark.parametrize("name", containers(None))
def test_a_tensor_is_found_and_replaced_in_every_kind_and_nothing_else_changes(name: str) -> None:
    value, doubled = containers(torch.ones(2))[name], torch.full((2,), 2.0)
    assert next(leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)).tolist() == [1, 1]
    changed = map_tensors(lambda tensor: tensor * 2, value)
    assert type(changed) is type(value)
    others = [leaf for leaf in leaves_of(value) if not isinstance(leaf, Tensor)]
    assert [leaf for leaf in leaves_of(changed) if not isinstance(leaf, Tensor)] == others
    (tensor,) = [leaf for leaf in leaves_of(changed) if isinstance(leaf, Tensor)]
    assert torch.equal(tensor, doubled)
    assert map_tensors(lambda tensor: tensor, value) is value


def test_what_a_constructor_does_not_take_is_kept() -> None:
    kept = map_tensors(lambda tensor: tensor + 1, defaultdict(list, x=torch.ones(1)))
    assert kept["missing"] == []
    assert map_tensors(lambda tensor: tensor + 1, deque([torch.ones(1)], maxlen=3)).maxlen == 3


class Lasting(Mapping[str, Any]):
    """Made of no dict."""

    def __init__(self, x: Any, *, y: Any) -> None:
        self.both = {"x": x, "y": y}

    def __getitem__(self, name: str) -> Any:
        return self.both[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.both)

    def __len__(self) -> int:
        return 2


def test_a_mapping_that_nobody_can_fill_or_make_of_a_dict_becomes_one() -> None:
    assert map_tensors(float, Lasting(torch.ones(()), y="text")) == {"x": 1.0, "y": "text"}


@pytest.mark.parametrize(
    "leaf",
    [torch.ones(2).to_sparse(), torch.Size([2]), "text", b"text", 3, None, nn.Linear(1, 1), np.ones(2), Record, {1}],
)
def test_a_leaf_is_not_taken_apart(leaf: Any) -> None:
    assert open_node(leaf) is None


def test_values_of_one_structure_are_told_from_others() -> None:
    def alike(one: Any, other: Any) -> bool:
        first, second = open_node(one), open_node(other)
        assert first is not None
        assert second is not None
        return first.has_structure_of(second)

    assert alike({"a": 1}, {"a": 2})
    assert not alike({"a": 1}, {"b": 1})
    assert not alike([1], (1,))
    assert not alike([1], [1, 2])
    assert alike(Record(1), Record(2))


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class SlottedHolder:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize(
    "held", [torch.ones(1), np.ones(1), pack_sequence([torch.ones(1)])], ids=["tensor", "array", "packed"]
)
@pytest.mark.parametrize("kind", [Holder, SlottedHolder, Record, lambda held: Holder([{"a": SlottedHolder(held)}])])
def test_tensors_are_found_in_attributes_of_objects(kind: Any, held: Any) -> None:
    assert holds_tensors([kind(held)])
    assert not holds_tensors([kind("text")])


def test_an_object_that_holds_itself_ends_the_search() -> None:
    holder = Holder(None)
    holder.held = [holder]
    assert not holds_tensors(holder)
