"""Train a graph network on one whole graph: few of its nodes tell their group, and the others' follow from their edges."""

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_harmony import HarmonyStrategy

# Features of the nodes, edges as pairs of nodes, groups of the nodes, and whether each is told in training.
Graph = tuple[Tensor, Tensor, Tensor, Tensor]

NUM_GROUPS, NUM_FEATURES = 5, 32


def make_graph(num_nodes: int = 400, degree: int = 6, seed: int = 0) -> Graph:
    """Return a graph most of whose edges are within its groups.

    Args:
        num_nodes: how many.
        degree: edges from each node.
        seed: of all that is random.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(NUM_GROUPS, (num_nodes,), generator=generator)
    centres = torch.randn(NUM_GROUPS, NUM_FEATURES, generator=generator)
    features = 0.3 * centres[groups] + torch.randn(num_nodes, NUM_FEATURES, generator=generator)
    candidates = torch.randint(num_nodes, (2, 4 * degree * num_nodes), generator=generator)
    source, target = groups[candidates]
    is_edge = (source == target) | (torch.rand(candidates.shape[1], generator=generator) < 0.1)
    edges = candidates[:, is_edge][:, : degree * num_nodes]
    return features, edges, groups, torch.rand(num_nodes, generator=generator) < 0.1


class OneGraph(Dataset[Graph]):
    """A data set of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Graph:
        return self.graph


class Convolution(nn.Module):
    """Adds to each node what comes of itself and of the mean of its neighbours."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own = nn.Linear(width, width)
        self.neighbours = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the features of the nodes, of shape (nodes, width)."""
        source, target = edges
        normed = self.norm(x)
        number = torch.zeros(len(x), 1, device=x.device).index_add(
            0, target, torch.ones(len(target), 1, device=x.device)
        )
        total = torch.zeros_like(x).index_add(0, target, normed[source])
        added: Tensor = self.dropout(F.relu(self.own(normed) + self.neighbours(total / number.clamp(min=1))))
        return x + added


class GraphNetwork(pl.LightningModule):
    """Tells the group of each node."""

    def __init__(self, width: int = 256, depth: int = 16, dropout: float = 0.2, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.embed = nn.Linear(NUM_FEATURES, width)
        self.convolutions = nn.ModuleList(Convolution(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, NUM_GROUPS)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        """Return the logits of the groups for each node."""
        x = self.embed(features)
        for convolution in self.convolutions:
            x = convolution(x, edges)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, graph: Graph, batch_idx: int) -> Tensor:
        """Return the mean loss over the nodes whose group is told."""
        features, edges, groups, is_told = graph
        loss = F.cross_entropy(self(features, edges)[is_told], groups[is_told])
        self.log("train_loss", loss, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, graph: Graph, batch_idx: int) -> None:
        """Log the accuracy over all other nodes."""
        features, edges, groups, is_told = graph
        is_right = self(features, edges).argmax(dim=1) == groups
        self.log("val_accuracy", is_right[~is_told].float().mean(), prog_bar=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on all weights."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device-memory", default="7.5MiB", help="what the fit may take of the device, such as 16GiB")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--max-epochs", type=int, default=30)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> pl.Trainer:
    """Train the network."""
    options = parse_arguments(arguments)
    pl.seed_everything(1)
    # One batch is the whole graph.
    graph: DataLoader[Graph] = DataLoader(OneGraph(make_graph()), batch_size=None)
    trainer = pl.Trainer(
        # A graph cannot be split into samples.
        strategy=HarmonyStrategy(device_memory=options.device_memory, num_microbatches=1),
        accelerator=options.accelerator,
        devices=1,
        max_epochs=options.max_epochs,
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(GraphNetwork(), graph, graph)
    return trainer


if __name__ == "__main__":
    main()
