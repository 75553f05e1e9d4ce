"""Random number streams: one for each microbatch, so that what is drawn doesn't depend on the order of lanes."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_harmony.engine.lanes.numpy_random import NumpyState


def stream_seed(seed: int, *key: int) -> int:
    """The seed of the random stream with a key, such as (step, microbatch), under the user's seed."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_of_lanes(generator: Any) -> bool:
    """Whether it is one of the process, of which each lane has a state of its own."""
    numpy = sys.modules.get("numpy.random.mtrand")
    on_host = torch.default_generator, _python_generator(), getattr(numpy, "_rand", None)
    return any(generator is each for each in (*on_host, *torch.cuda.default_generators))


class RandomState(NamedTuple):
    """The state of all that layers draw from: torch's generators on the host and the current GPU, Python's and NumPy's."""

    cpu: Tensor
    cuda: Tensor | None
    python: Any
    numpy: NumpyState | None

    @classmethod
    def capture(cls, cuda_device: int | None) -> RandomState:
        """Read the generators as they are, on a GPU that of the device given by its index."""
        cuda = None if cuda_device is None else _cuda_generator(cuda_device).get_state()
        return cls(torch.default_generator.get_state(), cuda, _get_python_state(), NumpyState.capture())

    def restore(self, cuda_device: int | None, now: RandomState | None = None) -> None:
        """Set the generators to this state, which may come from another GPU.

        Args:
            cuda_device: the index of the one to set it on.
            now: the state that they are in, if that is known.
        """
        torch.default_generator.set_state(self.cpu)
        if cuda_device is not None and self.cuda is not None:
            _cuda_generator(cuda_device).set_state(self.cuda)
        _set_python_state(self.python)
        if self.numpy is not None:
            self.numpy.restore(now and now.numpy)

    @contextmanager
    def entered(self, cuda_device: int | None) -> Iterator[None]:
        """The context in which the generators are in this state; behind it they are where they were.

        Args:
            cuda_device: the index of the GPU whose generator is one of them.
        """
        now = RandomState.capture(cuda_device)
        self.restore(cuda_device, now)
        try:
            yield
        finally:
            now.restore(cuda_device)


class RandomStreams:
    """Gives each lane its own generators while it holds the baton, and the caller's back afterwards.

    Until then all GPUs draw from one stream, the first one's: what a lane draws doesn't depend on where. Who reads or sets
    the state on any of them, as a checkpoint around layers does, has that of all.

    Args:
        seeds: one for each lane; None where the lane goes on with the caller's stream, as a single one does.
        cuda_devices: indices of the GPUs, the caller's first.
    """

    def __init__(self, seeds: Sequence[int | None], cuda_devices: Sequence[int]) -> None:
        self._seeds = seeds
        self._states: dict[int, RandomState] = {}
        self._owner: int | None = None
        self._caller: RandomState | None = None
        self._at = cuda_devices[0] if cuda_devices else None
        self._others = cuda_devices[1:]
        # What the other GPUs' generators had of their own.
        self._own: dict[int, torch.Generator] = {}

    def switch_to(self, lane: int) -> None:
        """Make the generators those of a lane."""
        if self._others and not self._own:
            self._join()
        if lane == self._owner or self._seeds[lane] is None:
            return
        now = self._put_away()
        if lane in self._states:
            self._states[lane].restore(self._at, now)
        else:
            self._seed(lane)
        self._owner = lane

    def switch_back(self) -> None:
        """Make the generators the caller's again."""
        if self._owner is not None:
            now = self._put_away()
            assert self._caller is not None
            self._caller.restore(self._at, now)
        for index, own in self._own.items():
            _cuda_generator(index).graphsafe_set_state(own)
        self._own = {}
        self._owner = self._caller = None

    def _join(self) -> None:
        """Let all GPUs draw from the first one's stream."""
        assert self._at is not None
        first = _cuda_generator(self._at).graphsafe_get_state()
        for index in self._others:
            generator = _cuda_generator(index)
            self._own[index] = generator.graphsafe_get_state()
            generator.graphsafe_set_state(first)

    def _put_away(self) -> RandomState:
        state = RandomState.capture(self._at)
        if self._owner is None:
            self._caller = state
        else:
            self._states[self._owner] = state
        return state

    def _seed(self, lane: int) -> None:
        seed = self._seeds[lane]
        assert seed is not None
        torch.default_generator.manual_seed(seed)
        if self._at is not None:
            _cuda_generator(self._at).manual_seed(seed)
        random.seed(seed)
        numpy = NumpyState.seeded(seed)
        if numpy is not None:
            numpy.restore()


def _cuda_generator(index: int) -> torch.Generator:
    """The generator of a GPU that has been used. What `torch.cuda.get_rng_state` does besides takes longer than to read it."""
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


# CPython's generator: behind the object's header an index and 624 words (Modules/_randommodule.c). Through the public
# functions the words become as many Python integers, each time: most of what a change of lanes would cost.
_PYTHON_STATE_BYTES = 4 + 624 * 4


def _state_of(generator: random.Random) -> memoryview:
    # A view, for `ctypes.memmove` lets other threads run meanwhile, which takes far longer than the copy.
    content = (ctypes.c_ubyte * _PYTHON_STATE_BYTES).from_address(id(generator) + object.__basicsize__)
    return memoryview(content).cast("B")


@cache
def _python_state() -> memoryview | None:
    """The state of Python's generator, to copy as bytes; None where it isn't where CPython has it."""
    generator = random.Random(1)
    generator.random()
    _, (*words, index), _ = generator.getstate()
    expected = b"".join(number.to_bytes(4, sys.byteorder) for number in (index, *words))
    return _state_of(_python_generator()) if _state_of(generator) == expected else None


def _get_python_state() -> Any:
    generator, state = _python_generator(), _python_state()
    return generator.getstate() if state is None else (state.tobytes(), generator.gauss_next)


def _set_python_state(saved: Any) -> None:
    generator, state = _python_generator(), _python_state()
    if state is None:
        generator.setstate(saved)
    else:
        state[:], generator.gauss_next = saved


def _python_generator() -> Any:
    """The generator behind the functions of the random module."""
    return random.random.__self__  # type: ignore[attr-defined]
