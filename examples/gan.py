"""Train a GAN to draw shapes: two optimizers that take turns in a step, which optimizes manually."""

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from shapes import draw_shapes, save_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy


def generator_network(latent: int, width: int) -> nn.Sequential:
    """Return a network that makes images of 16 x 16 pixels of vectors of `latent` numbers."""
    return nn.Sequential(
        nn.Linear(latent, 4 * width * 4 * 4),
        nn.Unflatten(1, (4 * width, 4, 4)),
        nn.GroupNorm(8, 4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1),
        nn.GroupNorm(8, 2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.Conv2d(width, 1, 3, padding=1),
        nn.Tanh(),
    )


def discriminator_network(width: int) -> nn.Sequential:
    """Return a network that gives each image a score: high for those that it takes for real."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.GroupNorm(8, 2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1),
        nn.GroupNorm(8, 4 * width),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(4 * width * 2 * 2, 1),
    )


class GAN(pl.LightningModule):
    """A generator, and a discriminator that tells its images from real ones."""

    def __init__(self, latent: int = 64, width: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.learning_rate = learning_rate
        self.generator = generator_network(latent, width)
        self.discriminator = discriminator_network(width)

    def forward(self, num_images: int) -> Tensor:
        """Return images of the generator."""
        images: Tensor = self.generator(torch.randn(num_images, self.latent, device=self.device))
        return images

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Train both networks, each once."""
        real, _ = batch
        optimizers: Any = self.optimizers()
        for_generator, for_discriminator = optimizers

        self.toggle_optimizer(for_generator)
        loss = F.softplus(-self.discriminator(self(len(real)))).mean()
        self.log("generator_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        fake = self(len(real)).detach()
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        self.log("discriminator_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)

    def configure_optimizers(self) -> Any:
        """Return one optimizer for each network."""
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), self.learning_rate, (0.5, 0.999)) for network in networks]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device-memory", default="6MiB", help="what the fit may take of the device, such as 16GiB")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", default="gan.png", help="file for images that the trained generator makes")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> pl.Trainer:
    """Train the networks, and write images to a file."""
    options = parse_arguments(arguments)
    pl.seed_everything(1)
    model = GAN()
    trainer = pl.Trainer(
        # A step that optimizes manually has its batch whole: there is no number of microbatches to give.
        strategy=HarmonyStrategy(device_memory=options.device_memory),
        accelerator=options.accelerator,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(draw_shapes(options.max_steps * options.batch_size), options.batch_size))
    with torch.no_grad():
        save_images(model(32), options.samples)
    print(f"images of the generator: {options.samples}")
    return trainer


if __name__ == "__main__":
    main()
