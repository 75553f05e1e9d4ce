"""Train a diffusion model to draw shapes, with an exponential moving average of its weights, which draws."""

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from shapes import draw_shapes, save_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy


class Block(nn.Module):
    """Two convolutions, told the time, added to what they are given."""

    def __init__(self, channels_in: int, channels: int, time: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.time = nn.Linear(time, channels)
        self.norm2 = nn.GroupNorm(8, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return features of `channels` channels."""
        out = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        out = self.conv2(F.silu(self.norm2(out)))
        total: Tensor = self.shortcut(x) + out
        return total


class UNet(nn.Module):
    """Tells the noise in images of 16 x 16 pixels: down to 4 x 4 and up again, with a bridge at each size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time), nn.SiLU())
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        sizes = [(width, width), (width, 2 * width), (2 * width, 4 * width)]
        self.down = nn.ModuleList(Block(channels_in, channels, time) for channels_in, channels in sizes)
        self.middle = nn.ModuleList(Block(4 * width, 4 * width, time) for _ in range(6))
        self.up = nn.ModuleList(Block(2 * channels, channels_in, time) for channels_in, channels in reversed(sizes))
        self.head = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the noise in images, of shape (batch, 1, 16, 16), at times between 0 and 1, of shape (batch,)."""
        frequencies = torch.exp(torch.linspace(0, math.log(1000), self.width // 2, device=time.device))
        angles = time[:, None] * frequencies
        told = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.stem(x)
        bridges = []
        for number, block in enumerate(self.down):
            x = block(F.avg_pool2d(x, 2) if number else x, told)
            bridges.append(x)
        for block in self.middle:
            x = block(x, told)
        for number, block in enumerate(self.up):
            x = block(torch.cat([F.interpolate(x, scale_factor=2) if number else x, bridges.pop()], dim=1), told)
        noise: Tensor = self.head(x)
        return noise


class Diffusion(pl.LightningModule):
    """Learns to tell the noise that was added to images, and makes images of noise."""

    def __init__(self, width: int = 32, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = UNet(width)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error of the noise."""
        images, _ = batch
        time, noise = torch.rand(len(images), device=images.device), torch.randn_like(images)
        signal, strength = mixture(time[:, None, None, None])
        loss = F.mse_loss(self.network(signal * images + strength * noise, time), noise)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on all weights."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    @torch.no_grad()
    def draw(self, num_images: int, num_steps: int = 50) -> Tensor:
        """Return images, of shape (num_images, 1, 16, 16), which begin as noise and lose it step by step (DDIM)."""
        x = torch.randn(num_images, 1, 16, 16, device=self.device)
        times = torch.linspace(0.99, 0, num_steps + 1, device=self.device)
        for now, then in pairwise(times):
            noise = self.network(x, now.expand(num_images))
            signal, strength = mixture(now)
            image = ((x - strength * noise) / signal).clamp(-1, 1)
            signal, strength = mixture(then)
            x = signal * image + strength * noise
        return x


def mixture(time: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of image and noise at times between 0 and 1."""
    angle = time * (math.pi / 2)
    return angle.cos(), angle.sin()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device-memory", default="9MiB", help="what the fit may take of the device, such as 16GiB")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-microbatches", type=int, default=4, help="parts of a batch, each run by itself")
    parser.add_argument("--samples", default="diffusion.png", help="file for images that the trained model draws")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> pl.Trainer:
    """Train the model, and write images to a file."""
    options = parse_arguments(arguments)
    pl.seed_everything(1)
    model = Diffusion()
    trainer = pl.Trainer(
        strategy=HarmonyStrategy(device_memory=options.device_memory, num_microbatches=options.num_microbatches),
        accelerator=options.accelerator,
        devices=1,
        max_epochs=1,
        # The average takes the place of the weights when the fit ends.
        callbacks=EMAWeightAveraging(decay=0.98),
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(draw_shapes(options.max_steps * options.batch_size), options.batch_size))
    save_images(model.draw(32), options.samples)
    print(f"images of the model: {options.samples}")
    return trainer


if __name__ == "__main__":
    main()
