"""What `lightning-harmony bench` trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

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


def test_samples_are_the_same_in_each_training() -> None:
    first, other = of_bert().samples(2), of_bert().samples(2)
    assert [sample["input_ids"].shape for sample in first] == [(6,), (6,)]
    assert all(torch.equal(one["labels"], two["labels"]) for one, two in zip(first, other, strict=True))
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])


def test_tokens_are_of_the_vocabulary_and_labels_are_of_two_classes() -> None:
    batch = {"input_ids": torch.empty(4, 6, dtype=torch.int64), "labels": torch.empty(4, dtype=torch.int64)}
    workload = workload_of(
        transformers.BertConfig(**{**BERT.to_diff_dict(), "architectures": ["BertForSequenceClassification"]}),
        batch,
        batch_size=None,
        sequence_length=None,
        num_microbatches=2,
    )
    made = default_collate(workload.samples(8))
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
    sample = workload.samples(1)[0]
    assert [tuple(tensor.shape) for tensor in sample] == [(8,), (8,)]
    assert sample[0].std() > 0
    assert isinstance(workload.build(), nn.Module)


def test_a_batch_that_is_not_made_of_samples_is_refused() -> None:
    batch = [torch.empty(6, 8), torch.empty(3, 8)]
    workload = workload_of(Model, batch, batch_size=None, sequence_length=None, num_microbatches=3)
    with pytest.raises(
        ValueError, match=r"of shape \[3, 8\]: give each the 6 samples of a step in its first dimension"
    ):
        workload.samples(1)


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
