"""A module that logs what evaluations find, and batches for it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from support import nets
from support.lightning_fits import Model

# Half of the microbatches of a training step fit, and an evaluation's batch of four times the samples does not.
BATCH_SIZE, NUM_BATCHES = 64, 3
TIGHT = {"device_memory": "160KiB", "num_microbatches": 8}


def batches(rest: int = 0) -> DataLoader[Any]:
    return DataLoader(nets.tokens(NUM_BATCHES * BATCH_SIZE + rest), batch_size=BATCH_SIZE)


class Evaluated(Model):
    """Logs values and metrics, keeps what it saw, and counts how often it was run."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(nets.VOCABULARY, average="micro")
        self.mean = MeanMetric()
        self.lengths: list[int] = []

    def evaluate(self, batch: Tensor) -> dict[str, Tensor]:
        self.lengths.append(len(batch))
        logits, labels = self(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.accuracy(logits.flatten(0, 1), labels.flatten())
        self.mean.update(loss, len(batch))
        self.log("loss", loss)
        self.log("num_samples", float(len(batch)), reduce_fx="sum")
        self.log("accuracy", self.accuracy)
        self.log("mean", self.mean)
        return {"loss": loss, "best": logits.argmax(-1)}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.evaluate(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.evaluate(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.lengths.append(len(batch))
        return {"logits": self(batch[:, :-1]), "first": batch[:, 0].tolist(), "scale": (2.0, 1)}
