"""A snapshot of a module: what a user's step left in it is taken back."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.lanes.rng import RandomState
from lightning_harmony.held.places import Places
from lightning_harmony.microbatches.collectives import num_collectives
from lightning_harmony.microbatches.fingerprints import Fingerprints, is_of_numbers
from lightning_harmony.microbatches.remembered import KeptBatch, Remembered
from lightning_harmony.setup import compat


class Snapshot:
    """What a module is now, to be made so again.

    Attributes of every submodule, with objects, lists, dicts, sets and deques to any depth, arrays, and tensors but for
    parameters: buffers, and the state of metrics. Also what Python holds elsewhere for its code, such as globals and
    iterators, what Lightning has collected from `self.log`, and the random number generators. Left alone is what is data and
    not a count, and what other threads may change.

    Args:
        trainer: the module that it runs is remembered, but its parameters, which no step may change.
        devices: those whose generators are remembered.
        given: what the step is called with.
    """

    def __init__(self, trainer: Any, devices: Sequence[Device], given: Any = ()) -> None:
        self._cuda_devices = [device.torch_device for device in devices if device.torch_device.type == "cuda"]
        self._random, self._cuda = self._states()
        self._num_collectives = num_collectives()
        self._places = Places(trainer.lightning_module)
        held = [(each, copy) for each, copy in self._places.look() if not each.is_of_threads]
        self._elsewhere = [(each, copy, each.undo_in_place()) for each, copy in held]
        hidden = ((each, [item for item in each.items() if not is_of_numbers(item[1])]) for each, _ in held)
        self._silent = Fingerprints(hidden)
        self._remembered = Remembered(trainer)
        results = compat.logged_results(trainer)
        for owner in [] if results is None else [results, *results.values()]:
            if isinstance(owner, dict):
                self._remembered.add(owner)
            self._remembered.add_attributes(owner)
        for owner in trainer.lightning_module.modules():
            self._remembered.add_module(owner)
        self._batch = KeptBatch(given, copies=True)

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        now, cuda = self._states()
        tensors = [(now.cpu, self._random.cpu), *zip(cuda, self._cuda, strict=True)]
        same = all(torch.equal(one, other) for one, other in tensors)
        return not same or (now.python, now.numpy) != (self._random.python, self._random.numpy)

    def has_exchanged(self) -> bool:
        """Whether tensors were exchanged with other nodes since, which would not begin anew."""
        return num_collectives() != self._num_collectives

    def restore(self) -> str:
        """Make everything what it was. Not to be called within an except clause: frames hold what the attempt has allocated.

        Returns:
            What cannot be made so, such as a hash, in words; empty if nothing is left.
        """
        gc.collect()
        # What is restored here, streams may still be reading.
        for device in self._cuda_devices:
            torch.cuda.synchronize(device)
        self._remembered.undo()
        self._batch.restore()
        for held, before, in_place in self._elsewhere:
            for undo in in_place:
                undo()
            held.put(before)
        self._random.restore(None)
        for device, state in zip(self._cuda_devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        left = self._silent.changed()
        return "" if left is None else f"; {left} stays as that step has left it, for nothing can take that back"

    def let_go(self) -> None:
        """It is not needed any more: the user's iterators are what they were."""
        self._places.let_go()

    def _states(self) -> tuple[RandomState, list[Tensor]]:
        return RandomState.capture(None), [torch.cuda.get_rng_state(device) for device in self._cuda_devices]
