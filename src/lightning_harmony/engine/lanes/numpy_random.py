"""The state of NumPy's global generator: read and written as memory, for its own functions take as long as a change of lanes.

They are called where it keeps more than its memory holds: the second of a pair of normal numbers.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from typing import Any, NamedTuple

# The Mersenne Twister: 624 words and an index (numpy/random/src/mt19937/mt19937.h).
_NUM_WORDS = 624
_NUM_BYTES = 4 * _NUM_WORDS + ctypes.sizeof(ctypes.c_int)


class NumpyState(NamedTuple):
    """What the generator will draw.

    Attributes:
        content: its memory; NumPy's own state, pickled, of one that is no Mersenne Twister.
        gauss: the normal number that it has ready.
    """

    content: bytes
    gauss: float | None

    @classmethod
    def capture(cls) -> NumpyState | None:
        """Read the generator as it is; None where NumPy isn't loaded."""
        module = sys.modules.get("numpy.random")
        if module is None or not hasattr(module, "get_state"):
            return None
        memory, newest = _memory.of(module), _memory.newest
        if memory is not None and newest is not None and newest.gauss is None and memory.tobytes() == newest.content:
            # A number that is ready was drawn as one of two, and they as others.
            return newest
        _memory.newest = _state_of(module.get_state(legacy=False))
        return _memory.newest

    @classmethod
    def seeded(cls, seed: int) -> NumpyState | None:
        """What it would be with a seed; None where NumPy isn't loaded."""
        module = sys.modules.get("numpy.random")
        if module is None or not hasattr(module, "get_state"):
            return None
        if _memory.of(module) is not None:
            return _memory.seeded(module, seed)
        state = module.get_state(legacy=False)
        fresh = getattr(module, state["bit_generator"])(seed)
        return _state_of({**state, **fresh.state, "has_gauss": 0})

    def restore(self, now: NumpyState | None = None) -> None:
        """Set the generator to this state.

        Args:
            now: the one that it is in, if that is known.
        """
        now = now or NumpyState.capture()
        if now is self or now == self or now is None:
            return
        module = sys.modules["numpy.random"]
        memory = _memory.of(module)
        if memory is None or now.gauss is not None or self.gauss is not None:
            module.set_state(self._for_numpy(module))
        else:
            memory[:] = self.content
        _memory.newest = self

    def _for_numpy(self, module: Any) -> Any:
        if len(self.content) != _NUM_BYTES:
            return pickle.loads(self.content)
        state = module.get_state(legacy=False)
        state["state"] = {
            "key": memoryview(self.content[: 4 * _NUM_WORDS]).cast("I"),
            "pos": int.from_bytes(self.content[4 * _NUM_WORDS :], sys.byteorder),
        }
        state["has_gauss"], state["gauss"] = int(self.gauss is not None), self.gauss or 0.0
        return state


class _Memory:
    """Where the generator has its state.

    Attributes:
        newest: the state that was last read or set.
    """

    def __init__(self) -> None:
        self.newest: NumpyState | None = None
        self._generator: Any = None
        self._memory: memoryview | None = None
        self._for_seeds: Any = None

    def seeded(self, module: Any, seed: int) -> NumpyState:
        """What the generator would be with a seed. To make another takes six times as long as to seed one again."""
        if self._for_seeds is None:
            self._for_seeds = module.RandomState(0)
        self._for_seeds.seed([seed & 0xFFFFFFFF, seed >> 32])
        return _state_of(self._for_seeds.get_state(legacy=False))

    def of(self, module: Any) -> memoryview | None:
        """The state as bytes; None of a generator or a version of NumPy that has it elsewhere."""
        get = getattr(module, "get_bit_generator", None)
        if get is None:
            return None
        generator = get()
        if generator is not self._generator:
            self._generator, self._memory, self.newest = generator, _find(module, generator), None
        return self._memory


_memory = _Memory()


def _find(module: Any, generator: Any) -> memoryview | None:
    state = module.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    content = (ctypes.c_ubyte * _NUM_BYTES).from_address(generator.ctypes.state_address)
    memory = memoryview(content).cast("B")
    return memory if memory.tobytes() == _state_of(state).content else None


def _state_of(state: Any) -> NumpyState:
    if state["bit_generator"] != "MT19937":
        return NumpyState(pickle.dumps(state), None)
    key, position = state["state"]["key"], int(state["state"]["pos"])
    content = key.tobytes() + position.to_bytes(ctypes.sizeof(ctypes.c_int), sys.byteorder)
    return NumpyState(content, float(state["gauss"]) if state["has_gauss"] else None)
