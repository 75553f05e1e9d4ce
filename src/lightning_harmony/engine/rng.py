"""Random number streams: one for each microbatch, so that what is drawn doesn't depend on the order of lanes."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


def stream_seed(seed: int, *key: int) -> int:
    """The seed of the random stream with a key, such as (step, microbatch), under the user's seed."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class RandomState:
    """The state of every generator that layers draw from: torch's, on the host and on devices, and Python's."""

    cpu: Tensor
    cuda: dict[int, Tensor]
    python: Any

    @classmethod
    def capture(cls, cuda_devices: Sequence[int]) -> RandomState:
        """Read the generators as they are."""
        cuda = {index: torch.cuda.get_rng_state(index) for index in cuda_devices}
        return cls(torch.default_generator.get_state(), cuda, _get_python_state())

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.default_generator.set_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        _set_python_state(self.python)


class RandomStreams:
    """Gives each lane its own generators while it holds the baton, and the caller's back afterwards.

    NumPy's global generator is switched too, where NumPy is loaded, by exchanging its bit generator.

    Args:
        seeds: one for each lane; None where the lane goes on with the caller's stream, as a single one does.
        cuda_devices: indices of the devices whose generators are switched.
    """

    def __init__(self, seeds: Sequence[int | None], cuda_devices: Sequence[int]) -> None:
        self._seeds = seeds
        self._cuda_devices = cuda_devices
        self._states: dict[int, RandomState] = {}
        self._numpy: dict[int, Any] = {}
        self._owner: int | None = None
        self._caller: RandomState | None = None
        self._numpy_caller: Any = None

    def switch_to(self, lane: int) -> None:
        """Make the generators those of a lane."""
        if lane == self._owner or self._seeds[lane] is None:
            return
        self._put_away()
        if lane in self._states:
            self._states[lane].restore()
        else:
            self._seed(lane)
        if lane in self._numpy:
            _numpy_random().set_bit_generator(self._numpy[lane])
        self._owner = lane

    def switch_back(self) -> None:
        """Make the generators the caller's again."""
        if self._owner is not None:
            self._put_away()
            assert self._caller is not None
            self._caller.restore()
            if self._numpy_caller is not None:
                _numpy_random().set_bit_generator(self._numpy_caller)
        self._owner = self._caller = self._numpy_caller = None

    def _put_away(self) -> None:
        state = RandomState.capture(self._cuda_devices)
        if self._owner is None:
            self._caller = state
            if _numpy_random() is not None:
                self._numpy_caller = _numpy_random().get_bit_generator()
        else:
            self._states[self._owner] = state

    def _seed(self, lane: int) -> None:
        seed = self._seeds[lane]
        assert seed is not None
        torch.default_generator.manual_seed(seed)
        for index in self._cuda_devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)
        if self._numpy_caller is not None:
            self._numpy[lane] = _numpy_random().MT19937(seed)


def _numpy_random() -> Any:
    """NumPy's random module, where it is loaded and can exchange bit generators (1.24 and later)."""
    module = sys.modules.get("numpy.random")
    return module if hasattr(module, "set_bit_generator") else None


# CPython's generator: behind the object's header an index and 624 words (Modules/_randommodule.c). Through the public
# functions the words become as many Python integers, each time: most of what a change of lanes would cost.
_PYTHON_STATE_BYTES = 4 + 624 * 4


def _state_address(generator: random.Random) -> int:
    return id(generator) + object.__basicsize__


@cache
def _copies_bytes() -> bool:
    """Whether the state of Python's generator is where CPython has it, so that it may be copied as bytes."""
    if sys.implementation.name != "cpython":
        return False
    generator = random.Random(1)
    generator.random()
    _, (*words, index), _ = generator.getstate()
    expected = b"".join(number.to_bytes(4, sys.byteorder) for number in (index, *words))
    return ctypes.string_at(_state_address(generator), _PYTHON_STATE_BYTES) == expected


def _get_python_state() -> Any:
    generator = _python_generator()
    if not _copies_bytes():
        return generator.getstate()
    return ctypes.string_at(_state_address(generator), _PYTHON_STATE_BYTES), generator.gauss_next


def _set_python_state(state: Any) -> None:
    generator = _python_generator()
    if not _copies_bytes():
        generator.setstate(state)
        return
    words, generator.gauss_next = state
    ctypes.memmove(_state_address(generator), words, _PYTHON_STATE_BYTES)


def _python_generator() -> Any:
    """The generator behind the functions of the random module."""
    return random.random.__self__  # type: ignore[attr-defined]
