"""Batches of certain samples train in microbatches as under accumulation; others run whole, or as users split them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_harmony import HarmonyStrategy
from support.same_training import root, trainer_for
from support.sampling import combined

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]
MEMORIES = pytest.mark.parametrize("memory", [None, "32KiB"], ids=["in memory", "swapped"])


class Model(pl.LightningModule):
    """Trains on whatever a function makes tensors of, and remembers how many rows came."""

    def __init__(self, tensors: Callable[[Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(16)])
        self.tensors = tensors
        self.rows: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.tensors(batch)
        self.rows.append(len(x))
        loss: Tensor = self.net(x).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(tensors: Any, data: Any, strategy: Any, **options: Any) -> tuple[Model, list[str]]:
    model = Model(tensors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for(strategy, 6, [], **options).fit(model, data)
    return model, [str(each.message) for each in caught if "runs whole" in str(each.message)]


def weights(model: Model) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def samples(number: int = 48) -> list[Tensor]:
    return list(torch.randn(number, 16, generator=torch.Generator().manual_seed(2)))


def as_dicts(batch: list[Tensor]) -> list[dict[str, Tensor]]:
    return [{"ids": sample} for sample in batch]


def as_jagged(batch: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor([sample[None].expand(2, 16) for sample in batch], layout=torch.jagged)


def as_two_lists(batch: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[dict[str, Tensor], ...]]:
    return tuple(batch), tuple({"boxes": torch.zeros(1 + number % 3, 4)} for number in range(len(batch)))


KINDS: dict[str, tuple[Any, Any]] = {
    "list of tensors": (list, torch.stack),
    "list of dicts": (as_dicts, lambda batch: torch.stack([each["ids"] for each in batch])),
    "lists of images and targets": (as_two_lists, lambda batch: torch.stack(batch[0])),
    "jagged": (as_jagged, lambda batch: torch.stack([each.mean(0) for each in batch.unbind()])),
    "packed": (
        partial(nn.utils.rnn.pack_sequence),
        lambda batch: torch.stack(nn.utils.rnn.unpack_sequence(batch)).reshape(-1, 16),
    ),
}


@pytest.mark.parametrize(("kind", "memory"), combined(KINDS, [("32KiB",), (None,)]))
def test_a_batch_of_certain_samples_trains_as_under_accumulation(kind: str, memory: str | None) -> None:
    """Of a list of samples, each sample's own tensor was cut: every microbatch had a part of all samples."""
    collate, tensors = KINDS[kind]
    plain, _ = train(tensors, DataLoader(samples(), 2, collate_fn=collate), "auto", accumulate_grad_batches=4)
    strategy = HarmonyStrategy(num_microbatches=4, device_memory=memory, profile_cache=False)
    harmony, said = train(tensors, DataLoader(samples(), 8, collate_fn=collate), strategy)
    assert set(harmony.rows) == {2}
    assert said == []
    assert torch.equal(weights(plain), weights(harmony))


def test_a_short_last_batch_of_a_list_is_split_by_samples_too() -> None:
    harmony, said = train(torch.stack, DataLoader(samples(20), 8, collate_fn=list), HarmonyStrategy(num_microbatches=4))
    assert harmony.rows == [2] * 8 + [1] * 4 + [2] * 8 + [1] * 4
    assert said == []


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples(20))


def test_a_stream_of_stacked_samples_is_split_to_its_short_end() -> None:
    harmony, said = train(lambda batch: batch, DataLoader(Stream(), 8), HarmonyStrategy(num_microbatches=4))
    assert harmony.rows == [2] * 8 + [1] * 4 + [2] * 8 + [1] * 4
    assert said == []


class Graph:
    """What nobody but its owner can take apart."""

    def __init__(self, nodes: Sequence[Tensor]) -> None:
        self.nodes = torch.stack(list(nodes))


def labelled_and_more(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.stack(batch), torch.stack(batch * 7)


def both_views(batch: list[Tensor]) -> Tensor:
    return torch.stack(batch + [-sample for sample in batch])


def mean_sample(batch: list[Tensor]) -> Tensor:
    """It has as many numbers as there are samples in a batch, by chance."""
    return torch.stack(batch).mean(0)[:8]


def side_by_side(batch: list[Tensor]) -> Tensor:
    """Samples in columns, of which there are as many as numbers in a sample, by chance."""
    return torch.stack([sample[:8] for sample in batch], 1)


UNCERTAIN: dict[str, tuple[Any, Any, str]] = {
    "one vector": (mean_sample, lambda batch: torch.cat([batch, -batch])[None], "one vector of 8 numbers"),
    "samples in columns": (side_by_side, lambda batch: torch.cat([batch, -batch], 0).T, "8 rows and 8 columns"),
    "larger unlabelled half": (labelled_and_more, torch.cat, "has 56 rows, and others tell of 8 samples"),
    "pairs": (both_views, lambda batch: batch, "puts 8 samples into a batch, but its first tensor has 16 rows"),
    "object": (Graph, lambda batch: batch.nodes.to(root()), "a Graph in it"),
    "sparse": (lambda batch: torch.stack(batch).to_sparse(), Tensor.to_dense, "a sparse tensor of shape"),
}


@pytest.mark.parametrize(("kind", "memory"), combined(UNCERTAIN, [("32KiB",), (None,)]))
def test_a_batch_of_uncertain_samples_runs_whole_and_says_so_once(kind: str, memory: str | None) -> None:
    collate, tensors, why = UNCERTAIN[kind]
    data = DataLoader(samples(), 8, collate_fn=collate)
    plain, _ = train(tensors, data, "auto")
    strategy = HarmonyStrategy(num_microbatches=4, device_memory=memory, profile_cache=False)
    harmony, said = train(tensors, data, strategy)
    assert harmony.rows == plain.rows
    assert torch.equal(weights(plain), weights(harmony))
    (message,) = said
    assert why in message
    assert "split_batch=" in message
    assert "num_microbatches=1" in message


def halves_of_pairs(batch: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    one, other = batch.chunk(2)
    return [torch.cat(pair) for pair in zip(one.split(list(sizes)), other.split(list(sizes)), strict=True)]


@MEMORIES
def test_the_users_own_function_splits_what_no_rule_does(memory: str | None) -> None:
    plain, _ = train(
        lambda batch: batch, DataLoader(samples(), 2, collate_fn=both_views), "auto", accumulate_grad_batches=4
    )
    strategy = HarmonyStrategy(
        num_microbatches=4, split_batch=halves_of_pairs, device_memory=memory, profile_cache=False
    )
    harmony, said = train(lambda batch: batch, DataLoader(samples(), 8, collate_fn=both_views), strategy)
    assert said == []
    assert set(harmony.rows) == {4}
    assert torch.equal(weights(plain), weights(harmony))


class Graphs:
    """A batch of whose number of samples neither its loader nor Lightning knows."""

    def __init__(self, nodes: Sequence[Tensor]) -> None:
        self.nodes = nodes

    def to(self, *args: Any, **kwargs: Any) -> Graphs:
        return Graphs([nodes.to(*args, **kwargs) for nodes in self.nodes])

    def tensor(self) -> Tensor:
        return torch.cat(list(self.nodes))


def of_graphs(batch: Graphs, sizes: Sequence[int]) -> list[Graphs]:
    each = len(batch.nodes) // len(sizes)
    return [Graphs(batch.nodes[first : first + each]) for first in range(0, len(batch.nodes), each)]


@MEMORIES
def test_ready_batches_of_objects_are_split_into_as_many_parts_as_are_asked_for(memory: str | None) -> None:
    nodes = torch.stack(samples()).split(2)
    plain, _ = train(
        Graphs.tensor,
        DataLoader([Graphs([each]) for each in nodes], batch_size=None),
        "auto",
        accumulate_grad_batches=4,
    )
    strategy = HarmonyStrategy(num_microbatches=4, split_batch=of_graphs, device_memory=memory, profile_cache=False)
    data = DataLoader([Graphs(nodes[first : first + 4]) for first in range(0, len(nodes), 4)], batch_size=None)
    harmony, said = train(Graphs.tensor, data, strategy)
    assert said == []
    assert set(harmony.rows) == {2}
    assert torch.equal(weights(plain), weights(harmony))


@pytest.mark.parametrize(
    ("split", "found"), [(lambda batch, sizes: batch, "a Tensor"), (lambda batch, sizes: [batch], "1 entries")]
)
def test_what_that_function_returns_is_checked(split: Any, found: str) -> None:
    strategy = HarmonyStrategy(num_microbatches=4, split_batch=split)
    with pytest.raises(ValueError, match=rf"split_batch=.*sizes=\(2, 2, 2, 2\) and returned {found}"):
        train(lambda batch: batch, DataLoader(samples(), 8, collate_fn=both_views), strategy)


@MEMORIES
def test_losses_of_shapes_1_and_none_add_up(memory: str | None) -> None:
    """The usual way to skip a batch, a loss of shape [1], ended in torch.stack's error beside other microbatches' scalars."""

    class Skips(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch[0, 0] > 0:
                return torch.tensor([0.0], requires_grad=True)
            return super().training_step(batch, batch_idx)

    trained = []
    for strategy, size, more in (
        ("auto", 2, {"accumulate_grad_batches": 4}),
        (HarmonyStrategy(num_microbatches=4, device_memory=memory, profile_cache=False), 8, {}),
    ):
        model = Skips(lambda batch: batch)
        trainer_for(strategy, 6, [], **more).fit(model, DataLoader(samples(), size))
        trained.append(model)
    assert 0 < len(trained[0].rows) < 24
    assert torch.equal(*map(weights, trained))
