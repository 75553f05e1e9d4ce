"""Models and batches in words."""

import pytest
import torch

from lightning_harmony.estimating.application import parse_arguments, parse_batch

pytestmark = pytest.mark.cpu


def test_a_batch_is_described_in_words() -> None:
    alone = parse_batch("int64[8, 128]")
    assert (alone.shape, alone.dtype, alone.device.type) == ((8, 128), torch.int64, "meta")
    assert [tuple(t.shape) for t in parse_batch("float32[2, 3, 4],int64[2]")] == [(2, 3, 4), (2,)]
    named = parse_batch("x=bfloat16[2, 3], y=bool[2]")
    assert {name: tensor.dtype for name, tensor in named.items()} == {"x": torch.bfloat16, "y": torch.bool}


@pytest.mark.parametrize(
    "text", ["", "8", "int64", "int64(8)", "nonsense[8]", "x=int64[8], int64[8]", "int64[8] int64[8]"]
)
def test_what_is_no_batch(text: str) -> None:
    with pytest.raises(ValueError, match="is no batch"):
        parse_batch(text)


def test_arguments_are_literals_or_text() -> None:
    assert parse_arguments(["a=3", "b=0.5", "c=[1, 2]", "d=relu", "e=None", "f='3'"]) == {
        "a": 3, "b": 0.5, "c": [1, 2], "d": "relu", "e": None, "f": "3",
    }  # fmt: skip
    with pytest.raises(ValueError, match="no argument"):
        parse_arguments(["hidden size=3"])
