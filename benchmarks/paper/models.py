"""The four models that the paper trains, in plain torch, and small ones of the same structure.

Each is a sequence of layers of which the last one computes the loss, so that all work is in layers. Sizes are those of the
published models; nothing is downloaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Transformer:
    """BERT with a classifier of sequences, or GPT-2 with a head of its own."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    is_causal: bool
    num_classes: int = 2


@dataclass(frozen=True)
class Vgg:
    """VGG with so many convolutions in each of its groups, and three linear layers."""

    convolutions: tuple[int, ...]
    channels: tuple[int, ...]
    hidden: int
    image: int
    num_classes: int


@dataclass(frozen=True)
class ResNet:
    """A ResNet of bottleneck blocks, so many in each of its stages."""

    blocks: tuple[int, ...]
    channels: int
    image: int
    num_classes: int


Shape = Transformer | Vgg | ResNet


@dataclass(frozen=True)
class Subject:
    """What is trained, and how.

    Attributes:
        title: as the paper calls it.
        shape: its size.
        microbatch_size: samples of a microbatch.
        num_microbatches: of each device.
    """

    title: str
    shape: Shape
    microbatch_size: int
    num_microbatches: int


SUBJECTS = {
    # BERT-Large with 96 layers.
    "bert-96": Subject("BERT-96", Transformer(1024, 96, 16, 30522, 512, is_causal=False), 4, 4),
    "gpt2-xl": Subject("GPT2-XL", Transformer(1600, 48, 25, 50257, 1024, is_causal=True), 2, 4),
    # 413 convolutions and 3 linear layers: 80 more in each group of VGG-16.
    "vgg-416": Subject("VGG-416", Vgg((82, 82, 83, 83, 83), (64, 128, 256, 512, 512), 4096, 224, 1000), 4, 4),
    # 333 blocks of 3 convolutions, one before and a linear layer behind.
    "resnet-1001": Subject("ResNet-1001", ResNet((83, 84, 83, 83), 64, 224, 1000), 4, 4),
}

# The same structures in sizes that a CPU trains in no time.
SMALL: dict[str, Shape] = {
    "bert-96": Transformer(64, 6, 4, 96, 32, is_causal=False),
    "gpt2-xl": Transformer(64, 6, 4, 96, 32, is_causal=True),
    "vgg-416": Vgg((3, 3, 3), (16, 32, 64), 64, 16, 16),
    "resnet-1001": ResNet((2, 3, 2), 16, 32, 16),
}


def subject_of(name: str, *, is_small: bool) -> Subject:
    """A model by its name."""
    subject = SUBJECTS[name]
    return replace(subject, shape=SMALL[name], microbatch_size=2, num_microbatches=3) if is_small else subject


# ---- layers ------------------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Of tokens and their positions."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.length, shape.hidden)
        self.norm = nn.Identity() if shape.is_causal else nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.tokens(tokens) + self.positions(places))


class Block(nn.Module):
    """A transformer block: normalised before, as GPT-2's, or after, as BERT's."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads, self.is_causal = shape.heads, shape.is_causal
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_causal:
            x = x + self.attend(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(attended.transpose(1, 2).reshape(batch, length, hidden))


class LanguageHead(nn.Module):
    """The loss of the next token."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden)
        self.words = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.words(self.norm(x)).flatten(0, 1), labels.flatten())


class SequenceHead(nn.Module):
    """The loss of a class for each sequence."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.pooler = nn.Linear(shape.hidden, shape.hidden)
        self.classes = nn.Linear(shape.hidden, shape.num_classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classes(torch.tanh(self.pooler(x[:, 0]))), labels)


class Convolution(nn.Module):
    """Of a VGG; the last one of a group halves the image."""

    def __init__(self, before: int, channels: int, *, is_last: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, channels, 3, padding=1)
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.convolution(x))
        return F.max_pool2d(x, 2) if self.is_last else x


class Hidden(nn.Module):
    """A linear layer of a VGG."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x.flatten(1)))


class ImageHead(nn.Module):
    """The loss of a class for each image."""

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.mean((2, 3))
        return F.cross_entropy(self.classes(x), labels)


class Stem(nn.Module):
    """What a ResNet begins with."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.convolution(x))), 3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """Three convolutions around a connection that skips them."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        after = 4 * channels
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(before, channels, 1, bias=False),
                nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False),
                nn.Conv2d(channels, after, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.BatchNorm2d(after)])
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            if number < 2:
                y = F.relu(y)
        return F.relu(self.skip(x) + y)


LAYERS = {Embedding, Block, LanguageHead, SequenceHead, Convolution, Hidden, ImageHead, Stem, Bottleneck}


def _layers_of(shape: Shape) -> tuple[list[nn.Module], nn.Module]:
    """The layers, and the last one, which takes the labels, too."""
    if isinstance(shape, Transformer):
        body: list[nn.Module] = [Embedding(shape), *(Block(shape) for _ in range(shape.layers))]
        return body, LanguageHead(shape) if shape.is_causal else SequenceHead(shape)
    if isinstance(shape, Vgg):
        body, before = [], 3
        for number, channels in zip(shape.convolutions, shape.channels, strict=True):
            for place in range(number):
                body.append(Convolution(before, channels, is_last=place == number - 1))
                before = channels
        side = shape.image // 2 ** len(shape.channels)
        body += [Hidden(before * side**2, shape.hidden), Hidden(shape.hidden, shape.hidden)]
        return body, ImageHead(shape.hidden, shape.num_classes)
    body, before = [Stem(shape.channels)], shape.channels
    for stage, number in enumerate(shape.blocks):
        channels = shape.channels * 2**stage
        for place in range(number):
            body.append(Bottleneck(before, channels, 2 if stage and place == 0 else 1))
            before = 4 * channels
    return body, ImageHead(before, shape.num_classes)


# ---- training ----------------------------------------------------------------------------------------------------------


class Model(pl.LightningModule):
    """One of the models.

    Attributes:
        losses: of all steps.
        recomputes: whether each layer runs again in the backward: under harmony it does so by itself.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        body, self.head = _layers_of(shape)
        self.body = nn.ModuleList(body)
        self.losses: list[Tensor] = []
        self.recomputes = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        loss: Tensor = self.head(x, labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def build(shape: Shape) -> Model:
    """A model on the host, without numbers."""
    with torch.device("meta"):
        model = Model(shape)
    return model.to_empty(device="cpu")


def initialise(model: Model, shape: Shape) -> None:
    """Give a model the same numbers each time. Where there is a GPU, they are drawn there: on the host it takes a minute."""
    model.losses = []
    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(where).manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    deviation = 0.02 if isinstance(shape, Transformer) else math.sqrt(2 / parameter[0].numel())
                    drawn = torch.empty(parameter.shape, device=where).normal_(0, deviation, generator=generator)
                    parameter.copy_(drawn)
                else:
                    parameter.fill_(1.0 if name == "weight" else 0.0)
    if where == "cuda":
        torch.cuda.empty_cache()


def batch_on_meta(shape: Shape, num_samples: int) -> tuple[Tensor, Tensor]:
    """The shapes of a batch."""
    x, labels = Samples(shape, 1)[0]
    return tuple(  # type: ignore[return-value]
        torch.empty(num_samples, *each.shape, dtype=each.dtype, device="meta") for each in (x, labels)
    )


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random ones."""

    def __init__(self, shape: Shape, num_samples: int) -> None:
        self._shape = shape
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self._num_samples:
            raise IndexError(index)
        shape = self._shape
        generator = torch.Generator().manual_seed(index)
        if not isinstance(shape, Transformer):
            image = torch.randn(3, shape.image, shape.image, generator=generator)
            return image, torch.randint(0, shape.num_classes, (), generator=generator)
        tokens = torch.randint(0, shape.vocabulary, (shape.length + 1,), generator=generator)
        if shape.is_causal:
            return tokens[:-1], tokens[1:]
        return tokens[:-1], tokens[-1] % shape.num_classes
