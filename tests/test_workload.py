"""What `lightning-harmony bench` trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.workload import Sizes, Workload, workload_of
from support.lightning_fits import Model

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.cpu, pytest.mark.in_memory]

BERT = transformers.BertConfig(
    vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=2
)


def of_bert(batch: object = None, **more: int) -> Workload:
    return workload_of(BERT, batch, **{"batch_size": 4, "sequence_length": 6, "num_microbatches": 2, **more})


def test_batches_are_the_same_however_they_are_split() -> None:
    workload = of_bert()
    whole, other = workload.batches(2, splits=1)
    parts = [*workload.batches(2, splits=2)]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts[:2]]), whole["input_ids"])
    assert torch.equal(torch.cat([part["labels"] for part in parts[2:]]), other["labels"])
    assert not torch.equal(whole["input_ids"], other["input_ids"])


def test_tokens_are_of_the_vocabulary_and_labels_are_of_two_classes() -> None:
    batch = {"input_ids": torch.empty(4, 6, dtype=torch.int64), "labels": torch.empty(4, dtype=torch.int64)}
    workload = workload_of(
        transformers.BertConfig(**{**BERT.to_diff_dict(), "architectures": ["BertForSequenceClassification"]}),
        batch,
        batch_size=None,
        sequence_length=None,
        num_microbatches=2,
    )
    (made,) = workload.batches(1, splits=1)
    assert 2 < made["input_ids"].max() < 50
    assert set(made["labels"].tolist()) <= {0, 1}
    loss = workload.build().training_step(made, 0)
    assert isinstance(loss, torch.Tensor)
    assert loss.requires_grad


def test_a_module_of_the_users_is_trained_on_numbers_of_the_shapes_of_its_batch() -> None:
    workload = workload_of(
        Model, [torch.empty(6, 8), torch.empty(6, 8)], batch_size=None, sequence_length=None, num_microbatches=3
    )
    assert workload.text == "Model"
    first, *others = workload.batches(1, splits=3)
    assert [tuple(tensor.shape) for tensor in first] == [(2, 8), (2, 8)]
    assert len(others) == 2
    assert first[0].std() > 0
    assert isinstance(workload.build(), nn.Module)


def test_microbatches_have_one_size() -> None:
    with pytest.raises(ValueError, match="--num-microbatches 3 must divide --batch-size 4"):
        of_bert(num_microbatches=3)
    with pytest.raises(ValueError, match="--num-microbatches 3 must divide --batch-size 32"):
        Sizes(64, 1, num_microbatches=3).workload()


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear has no training_step"):
        workload_of(
            lambda: nn.Linear(2, 2), [torch.empty(2, 2)], batch_size=None, sequence_length=None, num_microbatches=1
        )
