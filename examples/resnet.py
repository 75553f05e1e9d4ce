"""Train a ResNet to tell shapes on images, with a validation after each epoch."""

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from shapes import SHAPES, draw_shapes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_harmony import HarmonyStrategy


class Block(nn.Module):
    """Two convolutions, added to what they are given."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of `channels` channels."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(pl.LightningModule):
    """A ResNet of three stages, each with half as many pixels and twice as many channels as the one before."""

    def __init__(
        self, width: int = 32, blocks: int = 4, num_classes: int = len(SHAPES), learning_rate: float = 2e-3
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, 2 * width, 4 * width]
        self.stages = nn.ModuleList()
        for channels_in, channels in zip([width, *widths], widths, strict=False):
            self.stages.append(Block(channels_in, channels, stride=1 if channels_in == channels else 2))
            self.stages.extend(Block(channels, channels) for _ in range(blocks - 1))
        self.head = nn.Linear(widths[-1], num_classes)
        self.accuracy = MulticlassAccuracy(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        x = self.stem(images)
        for block in self.stages:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over the images of the batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy on images that the training does not see."""
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on all weights."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device-memory", default="5.5MiB", help="what the fit may take of the device, such as 16GiB")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--max-epochs", type=int, default=3)
    parser.add_argument("--num-images", type=int, default=640, help="of an epoch")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-microbatches", type=int, default=4, help="parts of a batch, each run by itself")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> pl.Trainer:
    """Train the network."""
    options = parse_arguments(arguments)
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy=HarmonyStrategy(device_memory=options.device_memory, num_microbatches=options.num_microbatches),
        accelerator=options.accelerator,
        devices=1,
        max_epochs=options.max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    training = DataLoader(draw_shapes(options.num_images, noise=0.3), options.batch_size, shuffle=True)
    validation = DataLoader(draw_shapes(options.num_images // 4, noise=0.3, seed=1), options.batch_size)
    trainer.fit(ResNet(), training, validation)
    return trainer


if __name__ == "__main__":
    main()
