"""A snapshot of a module: what a user's step left in it is taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.attributes import restore_of_generator
from lightning_harmony.engine.containers import have_same_content
from lightning_harmony.engine.device import Device
from lightning_harmony.engine.rng import RandomState

# What a module holds its tensors and submodules in: their entries are looked after one by one, or never change in a step.
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """What a module is now, to be made so again.

    Attributes of every submodule, with lists, dicts, sets and deques to any depth, and tensors but for parameters: buffers,
    and the state of metrics. Also what Lightning has collected from `self.log`, and the random number generators.

    Args:
        module: its parameters are left alone, for no step may change them.
        results: Lightning's result collection, a dict of metrics; None if there is none.
        cuda_devices: the GPUs whose generators are remembered.
    """

    def __init__(self, module: nn.Module, results: Any, cuda_devices: Sequence[torch.device]) -> None:
        self._cuda_devices = cuda_devices
        self._random, self._cuda = self._states()
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        logged = [] if results is None else [results, *results.values()]
        for owner in logged:
            if isinstance(owner, dict):
                self._remember(owner)
            self._remember_attributes(owner)
        for owner in module.modules():
            self._remember_attributes(owner)
            self._remember(owner._buffers)

    @classmethod
    def of_trainer(cls, trainer: Any, devices: Sequence[Device]) -> Snapshot:
        """That of the module that a trainer runs on these devices."""
        cuda_devices = [device.torch_device for device in devices if device.torch_device.type == "cuda"]
        return cls(trainer.lightning_module, trainer._results, cuda_devices)

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        now, cuda = self._states()
        tensors = [(now.cpu, self._random.cpu), *zip(cuda, self._cuda, strict=True)]
        same = all(torch.equal(one, other) for one, other in tensors)
        return not same or (now.python, now.numpy) != (self._random.python, self._random.numpy)

    def restore(self) -> None:
        """Make everything what it was."""
        # What is restored here, streams may still be reading.
        for device in self._cuda_devices:
            torch.cuda.synchronize(device)
        with torch.no_grad():
            for undo in self._undo:
                undo()
        self._random.restore(None)
        for device, state in zip(self._cuda_devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    def _states(self) -> tuple[RandomState, list[Tensor]]:
        return RandomState.capture(None), [torch.cuda.get_rng_state(device) for device in self._cuda_devices]

    def _remember_attributes(self, owner: Any) -> None:
        attributes = vars(owner)
        before = dict(attributes)

        def undo() -> None:
            attributes.clear()
            attributes.update(before)

        self._undo.append(undo)
        for name, value in before.items():
            if name not in _REGISTRIES:
                self._remember(value)

    def _remember(self, value: Any) -> None:
        if isinstance(value, tuple):
            for inner in value:
                self._remember(inner)
            return
        undo = self._undo_of(value)
        if undo is None or id(value) in self._seen:
            return
        # The function that undoes refers to the value, so that no other gets its id.
        self._seen.add(id(value))
        self._undo.append(undo)
        for inner in _contents(value):
            self._remember(inner)

    def _undo_of(self, value: Any) -> Callable[[], None] | None:
        if isinstance(value, nn.Parameter):
            return None
        if isinstance(value, Tensor):
            return _undo_tensor(value)
        if type(value) in (list, deque):
            return _undo_sequence(value)
        return _undo_collection(value) if isinstance(value, dict | set) else restore_of_generator(value)


def _undo_tensor(value: Tensor) -> Callable[[], None]:
    before = value.detach().clone()
    # Inference tensors count no versions, and are written to in inference mode alone.
    version = None if value.is_inference() else value._version

    def undo() -> None:
        if version is None or value._version != version:
            with torch.inference_mode(version is None):
                value.detach().copy_(before)

    return undo


def _undo_sequence(value: Any) -> Callable[[], None]:
    before = list(value)

    def undo() -> None:
        value.clear()
        value.extend(before)

    return undo


def _undo_collection(value: Any) -> Callable[[], None]:
    before = dict(value) if isinstance(value, dict) else set(value)

    def undo() -> None:
        # Some refuse to be changed, such as a config that is frozen.
        if not have_same_content(value, before):
            value.clear()
            value.update(before)

    return undo


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | deque):
        yield from value
