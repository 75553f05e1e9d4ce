"""The reference manual of Python, as `help()` shows it, cut into windows of tokens: real text that every Python brings."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Sample = tuple[Tensor, Tensor]

VOCABULARY_SIZE = 2048
# So much of the manual that a small model learns some of its phrases in a minute.
NUM_CHARACTERS = 60_000
# A word or a run of one other character, perhaps with a space before it; the end of a line and what indents the next; spaces.
WORD = re.compile(r" ?[A-Za-z_]+| ?([^A-Za-z_\n ])\1*|\n[\n ]*| +")


@cache
def read_manual() -> str:
    """Return the first topics of the manual, one after the other."""
    return "\n\n".join(topics.values())[:NUM_CHARACTERS]


def words_of(text: str) -> Iterator[str]:
    """Cut a text into words, spaces and other characters, with nothing left out."""
    return (match.group() for match in WORD.finditer(text))


class Vocabulary:
    """The characters and the most frequent words of a text; other words are cut into tokens as long as possible."""

    def __init__(self, text: str, size: int) -> None:
        characters = sorted(set(text))
        frequent = (word for word, _ in Counter(words_of(text)).most_common() if len(word) > 1)
        self.tokens = [*characters, *frequent][:size]
        self.numbers = {token: number for number, token in enumerate(self.tokens)}
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text: str) -> Tensor:
        """Return the numbers of the text's tokens, of shape (tokens,)."""
        cut = cache(self._cut)
        return torch.tensor([number for word in words_of(text) for number in cut(word)])

    def decode(self, numbers: Tensor) -> str:
        """Return the text of tokens; of numbers that a short text has no token for, nothing."""
        return "".join(self.tokens[number] for number in numbers.tolist() if number < len(self.tokens))

    def _cut(self, word: str) -> list[int]:
        tokens = [word] if word in self.numbers else self._token.findall(word)
        return [self.numbers[token] for token in tokens]


@cache
def manual_vocabulary() -> Vocabulary:
    """Return the vocabulary of the manual."""
    return Vocabulary(read_manual(), VOCABULARY_SIZE)


@cache
def manual_tokens() -> Tensor:
    """Return the tokens of the manual."""
    return manual_vocabulary().encode(read_manual())


class Windows(Dataset[Sample]):
    """Windows at random places of a text, with the same text one token further on as the target.

    All places are drawn once from the seed, so a window depends on its index alone and two runs see equal data.
    """

    def __init__(self, tokens: Tensor, num_windows: int, context: int, seed: int = 0) -> None:
        self.tokens = tokens
        self.context = context
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(tokens) - context, (num_windows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sample:
        start = self.starts[index]
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class Manual(pl.LightningDataModule):
    """Training data for `num_steps` batches, always in the same order."""

    def __init__(self, num_steps: int = 50, batch_size: int = 8, context: int = 128, seed: int = 0) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.context = context
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Read the text and draw the windows."""
        num_windows = self.num_steps * self.batch_size
        self.windows = Windows(manual_tokens(), num_windows, self.context, self.seed)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Return the windows in order: they are at random places already."""
        return DataLoader(self.windows, batch_size=self.batch_size)
