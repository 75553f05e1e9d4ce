"""What `lightning-harmony bench` trains: a transformer of some size, or a model of the user's on a batch of random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_harmony.estimating.subject import make_subject, model_class

# What is a class or a flag is one or zero.
_LEAST_VOCABULARY = 2


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        text: what it is, for the table.
        estimated: what `estimate` takes for it.
        build: makes its module.
        batch: of all samples of a step, on the meta device.
        batch_size: its samples.
        num_microbatches: into which a step is split.
        vocabulary: below which token numbers are.
        smaller: how to make it smaller.
    """

    text: str
    estimated: Any
    build: Callable[[], pl.LightningModule]
    batch: Any
    batch_size: int
    num_microbatches: int
    vocabulary: int
    smaller: str

    def __post_init__(self) -> None:
        if self.batch_size % self.num_microbatches:
            raise ValueError(
                f"--num-microbatches {self.num_microbatches} must divide --batch-size {self.batch_size}: plain Lightning "
                "takes the microbatches as batches of its own, which have one size"
            )

    def samples(self, number: int) -> list[Any]:
        """Random ones, the same in each training, which make batches of that shape together.

        Raises:
            ValueError: if not each tensor of a batch has a row for each sample.
        """
        generator = torch.Generator().manual_seed(0)

        def made(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or len(tensor) != self.batch_size:
                raise ValueError(
                    f"a tensor of the batch is of shape {list(tensor.shape)}: give each the {self.batch_size} samples of a "
                    "step in its first dimension"
                )
            if tensor.is_floating_point():
                return torch.randn(tensor.shape[1:], generator=generator, dtype=tensor.dtype)
            below = self.vocabulary if _is_text(tensor) else _LEAST_VOCABULARY
            return torch.randint(0, below, tensor.shape[1:], generator=generator).to(tensor.dtype)

        return [tree_map_only(Tensor, made, self.batch) for _ in range(number)]


def _is_text(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool


# ---- a transformer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Of a transformer.

    Attributes:
        hidden: numbers for each token between the layers.
        layers: of the transformer.
        length: tokens of a sample.
        batch_size: samples of a step.
        num_microbatches: into which a step is split.
        vocabulary: different tokens.
    """

    hidden: int
    layers: int
    length: int = 1024
    batch_size: int = 32
    num_microbatches: int = 8
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            if number < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {number}")
        if self.hidden > 64 and self.hidden % 64:
            raise ValueError(
                f"--hidden {self.hidden}: each head has 64 numbers, so give a multiple of 64, or less than that"
            )

    def workload(self) -> Workload:
        """To train a transformer of these sizes."""
        words = torch.empty(self.batch_size, self.length, dtype=torch.int64, device="meta")

        def build() -> pl.LightningModule:
            return Transformer(self)

        return Workload(
            f"transformer, {self.layers} layers of {self.hidden}",
            build,
            build,
            [words, words],
            self.batch_size,
            self.num_microbatches,
            self.vocabulary,
            "use a smaller --hidden, --layers, --length or --batch-size",
        )


class Transformer(pl.LightningModule):
    """A plain transformer that is trained to tell a word from each of its words."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, heads = sizes.hidden, max(1, sizes.hidden // 64)
        self.tokens = nn.Embedding(sizes.vocabulary, hidden)
        self.positions = nn.Embedding(sizes.length, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, sizes.vocabulary, bias=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: D102
        words, targets = batch
        x = self.tokens(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


# ---- a model of the user's ---------------------------------------------------------------------------------------------


def workload_of(
    model: Any, batch: Any, *, batch_size: int | None, sequence_length: int | None, num_microbatches: int
) -> Workload:
    """To train a model with random weights on random batches.

    Args:
        model: a function that makes a LightningModule, or the configuration of a Hugging Face model.
        batch: an example batch; for a Hugging Face model, it may be left out.
        batch_size: samples of a Hugging Face model's batch.
        sequence_length: tokens of each.
        num_microbatches: into which a step is split.

    Raises:
        UnsupportedModelError: if it cannot be built without data.
        ValueError: if there is no batch, or it has no samples.
    """
    subject = make_subject(
        model, batch, batch_size=batch_size, sequence_length=sequence_length, precision="32-true", optimizer=None
    )
    is_config = not callable(model)
    config = getattr(model, "get_text_config", lambda: model)() if is_config else None
    return Workload(
        subject.name,
        model,
        (lambda: _Configured(model)) if is_config else model,
        subject.batch,
        subject.batch_size,
        num_microbatches,
        getattr(config, "vocab_size", _LEAST_VOCABULARY),
        "use a smaller model or batch",
    )


class _Configured(pl.LightningModule):
    """A Hugging Face model with random weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = model_class(config)._from_config(copy.deepcopy(config))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)
