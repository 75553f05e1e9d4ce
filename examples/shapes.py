"""Grey images of shapes, drawn by code: a small data set with something to learn, and nothing to download."""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

SHAPES = ("disc", "square", "diamond", "cross", "ring")


def draw_shapes(num_images: int, size: int = 16, noise: float = 0.0, seed: int = 0) -> TensorDataset:
    """Return images, of shape (1, size, size) and with values around -1 and 1, and the number of the shape on each.

    Args:
        num_images: how many.
        size: of an image, in pixels.
        noise: standard deviation of what is added to each pixel.
        seed: of places, radii, shapes and noise.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES), (num_images,), generator=generator)
    across, down = torch.rand(2, num_images, 1, 1, generator=generator) * 0.6 - 0.3
    radius = torch.rand(num_images, 1, 1, generator=generator) * 0.25 + 0.45
    grid = torch.linspace(-1, 1, size)
    x, y = ((grid - across) / radius).abs(), ((grid[:, None] - down) / radius).abs()
    distance = (x**2 + y**2).sqrt()
    masks = torch.stack([distance < 1, *_polygons(x, y), (distance < 1) & (distance > 0.5)])
    images = masks[labels, torch.arange(num_images)][:, None] * 2.0 - 1.0
    return TensorDataset(images + noise * torch.randn(images.shape, generator=generator), labels)


def _polygons(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masks of square, diamond and cross, from the distances to their centres in units of the radius."""
    farther, nearer = torch.maximum(x, y), torch.minimum(x, y)
    return farther < 0.85, x + y < 1.1, (farther < 1) & (nearer < 0.3)


def save_images(images: Tensor, file: str, num_columns: int = 8) -> None:
    """Write images, of shape (images, 1, size, size), to a PNG file, side by side."""
    from matplotlib.image import imsave

    rows = images.float().cpu().clamp(-1, 1).squeeze(1).split(num_columns)
    picture = torch.cat([torch.cat(list(row), dim=1) for row in rows])
    imsave(file, picture.numpy(), cmap="gray", vmin=-1, vmax=1)
