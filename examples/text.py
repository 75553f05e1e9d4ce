"""The text of Python's own standard library, cut into windows of bytes: real text that every machine has."""

import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Sample = tuple[Tensor, Tensor]


def read_standard_library() -> bytes:
    """Return the top-level modules of the standard library, joined in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda file: file.name)
    if not files:
        raise FileNotFoundError(f"no *.py file in {folder}: this Python carries no source of its standard library")
    return b"\n".join(file.read_bytes() for file in files)


class Windows(Dataset[Sample]):
    """Windows at random places of a text, with the same text one byte further on as the target.

    All places are drawn once from the seed, so a window depends on its index alone and two runs see equal data.
    """

    def __init__(self, text: bytes, num_windows: int, context: int, seed: int = 0) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - context, (num_windows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sample:
        start = self.starts[index]
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class StandardLibrary(pl.LightningDataModule):
    """Training data for `num_steps` batches, always in the same order."""

    def __init__(self, num_steps: int, batch_size: int = 8, context: int = 128, seed: int = 0) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.context = context
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Read the text and draw the windows."""
        self.windows = Windows(read_standard_library(), self.num_steps * self.batch_size, self.context, self.seed)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Return the windows in order: they are at random places already."""
        return DataLoader(self.windows, batch_size=self.batch_size)
