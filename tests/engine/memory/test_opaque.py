"""Objects as arguments: kept as they were, their tensors on the side."""

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache, PretrainedConfig

from lightning_harmony.engine.memory.opaque import ObjectSnapshot, is_opaque, without_caches


class Colour(enum.Enum):
    RED = 1


class Bag:
    """Holds anything."""

    def __init__(self, content: Any) -> None:
        self.content = content


# fmt: off
CONSTANTS = [
    None, True, 1, 1.5, 1j, "text", b"bytes", Colour.RED, slice(3), range(3), Bag, torch.float32, torch.device("cpu"),
    torch.Size([1]), torch.channels_last, torch.ones(1), nn.Linear(1, 1), len, lambda: None,
]
# fmt: on


class Configured(nn.Module):
    """A model with a configuration, as Hugging Face has them."""

    def __init__(self, config: PretrainedConfig, *children: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.ModuleList(children)


class TestIsOpaque:
    @pytest.mark.parametrize("value", CONSTANTS, ids=lambda value: type(value).__name__)
    def test_what_a_layer_cannot_change_is_not_opaque(self, value: Any) -> None:
        assert not is_opaque(value)

    @pytest.mark.parametrize(
        "make", [DynamicCache, lambda: Bag(1), set, bytearray], ids=["cache", "bag", "set", "bytes"]
    )
    def test_any_other_object_is_opaque(self, make: Callable[[], Any]) -> None:
        assert is_opaque(make())


class TestSnapshot:
    def test_of_a_cache_is_the_cache_before_a_layer_wrote_to_it(self) -> None:
        cache = DynamicCache()
        keys, values = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
        cache.update(keys, values, 0)
        snapshot = ObjectSnapshot(cache)
        cache.update(keys, values, 0)
        cache.update(keys, values, 1)

        restored = snapshot.restore(snapshot.tensors)

        assert isinstance(restored, DynamicCache)
        assert restored.get_seq_length() == 3
        assert len(restored.layers) == 1
        assert torch.equal(restored.layers[0].keys, keys)
        assert cache.get_seq_length() == 6

    def test_shares_the_tensors(self) -> None:
        tensor = torch.ones(3)
        snapshot = ObjectSnapshot(Bag({"deep": [tensor]}))
        assert snapshot.tensors[0] is tensor
        assert snapshot.restore(snapshot.tensors).content["deep"][0] is tensor

    def test_restores_with_other_tensors_in_their_places(self) -> None:
        snapshot = ObjectSnapshot(Bag([torch.zeros(1), "between", torch.ones(1)]))
        others = [tensor + 5 for tensor in snapshot.tensors]
        restored = snapshot.restore(others)
        assert restored.content[0] is others[0]
        assert restored.content[1:] == ["between", others[1]]

    def test_tensors_with_a_graph_can_be_kept(self) -> None:
        tensor = torch.ones(1, requires_grad=True) * 2
        assert ObjectSnapshot(Bag(tensor)).tensors[0] is tensor

    def test_each_restored_object_is_another(self) -> None:
        snapshot = ObjectSnapshot(Bag([]))
        first, second = snapshot.restore([]), snapshot.restore([])
        first.content.append(1)
        assert second.content == []

    @pytest.mark.parametrize("content", [lambda: None, (number for number in range(3))], ids=["lambda", "generator"])
    def test_of_what_cannot_be_taken_apart_is_refused_by_type(self, content: Any) -> None:
        with pytest.raises(TypeError, match="cannot keep a Bag as it is"):
            ObjectSnapshot(Bag(content))

    def test_of_an_object_of_a_local_class_is_refused(self) -> None:
        class Local:
            pass

        with pytest.raises(TypeError, match="cannot keep a Local as it is"):
            ObjectSnapshot(Local())


class TestWithoutCaches:
    def test_configurations_say_so_for_a_while(self) -> None:
        outer, inner, off = (AutoConfig.for_model("gpt2", use_cache=on) for on in (True, True, False))
        model = Configured(outer, Configured(inner), Configured(inner), Configured(off), nn.Linear(1, 1))
        with without_caches(model):
            assert [config.use_cache for config in (outer, inner, off)] == [False, False, False]
        assert [config.use_cache for config in (outer, inner, off)] == [True, True, False]

    def test_configurations_are_as_before_after_an_error(self) -> None:
        config = AutoConfig.for_model("gpt2")
        with pytest.raises(ZeroDivisionError), without_caches(Configured(config)):
            raise ZeroDivisionError
        assert config.use_cache


def test_a_tensor_is_not_pickled_by_value() -> None:
    snapshot = ObjectSnapshot(Bag(torch.ones(100_000)))
    assert isinstance(snapshot.tensors[0], Tensor)
    assert len(snapshot._pickled) < 1000
