"""A snapshot of a module: what a user's step left in it is taken back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.lanes.rng import RandomState
from lightning_harmony.engine.structures.containers import have_same_content
from lightning_harmony.engine.structures.nested import is_ndarray
from lightning_harmony.engine.structures.object_state import restore_of
from lightning_harmony.engine.structures.strides import assign
from lightning_harmony.held.places import Places
from lightning_harmony.held.walk import OF_THREADS
from lightning_harmony.microbatches.fingerprints import Fingerprints, is_of_numbers
from lightning_harmony.setup import compat

# Larger arrays are data.
_LARGEST_COUNTS = 64 * 1024 * 1024
# Classes and modules change in no step; nor do optimizers and data, which may be large.
_LEFT_ALONE = (type, ModuleType, Optimizer, Dataset, DataLoader, *weakref.ProxyTypes)
_OWN_PACKAGE = __name__.partition(".")[0]
# What a module holds its tensors and submodules in: their entries are looked after one by one, or never change in a step.
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """What a module is now, to be made so again.

    Attributes of every submodule, with objects, lists, dicts, sets and deques to any depth, arrays, and tensors but for
    parameters: buffers, and the state of metrics. Also what Python holds elsewhere for its code, such as globals and
    iterators, what Lightning has collected from `self.log`, and the random number generators. Left alone is what is data and
    not a count, and what other threads may change.

    Args:
        trainer: the module that it runs is remembered, but its parameters, which no step may change.
        devices: those whose generators are remembered.
    """

    def __init__(self, trainer: Any, devices: Sequence[Device]) -> None:
        self._cuda_devices = [device.torch_device for device in devices if device.torch_device.type == "cuda"]
        self._random, self._cuda = self._states()
        self._places = Places(trainer.lightning_module)
        held = [(each, copy) for each, copy in self._places.look() if not each.is_of_threads]
        self._elsewhere = [(each, copy, each.undo_in_place()) for each, copy in held]
        hidden = ((each, [item for item in each.items() if not is_of_numbers(item[1])]) for each, _ in held)
        self._silent = Fingerprints(hidden)
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = {id(trainer)}
        results = compat.logged_results(trainer)
        for owner in [] if results is None else [results, *results.values()]:
            if isinstance(owner, dict):
                self._remember(owner)
            self._remember_attributes(owner)
        for owner in trainer.lightning_module.modules():
            self._remember_module(owner)

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        now, cuda = self._states()
        tensors = [(now.cpu, self._random.cpu), *zip(cuda, self._cuda, strict=True)]
        same = all(torch.equal(one, other) for one, other in tensors)
        return not same or (now.python, now.numpy) != (self._random.python, self._random.numpy)

    def restore(self) -> str:
        """Make everything what it was.

        Returns:
            What cannot be made so, such as a hash, in words; empty if nothing is left.
        """
        # What is restored here, streams may still be reading.
        for device in self._cuda_devices:
            torch.cuda.synchronize(device)
        with torch.no_grad():
            for undo in self._undo:
                undo()
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

    def _remember_module(self, module: nn.Module) -> None:
        self._seen.add(id(module))
        self._remember_attributes(module)
        self._remember(module._buffers)

    def _remember_attributes(self, owner: Any) -> None:
        attributes = vars(owner)
        self._undo.append(_undo_of_content(attributes))
        for name, value in list(attributes.items()):
            if name not in _REGISTRIES:
                self._remember(value)

    def _remember(self, value: Any) -> None:
        if isinstance(value, tuple):
            for inner in value:
                self._remember(inner)
        elif id(value) in self._seen:
            return
        # Such as a metric in a plain dict.
        elif isinstance(value, nn.Module):
            for module in value.modules():
                self._remember_module(module)
        elif (undo := _undo_of(value)) is not None:
            # The function that undoes refers to the value, so that no other gets its id.
            self._seen.add(id(value))
            self._undo.append(undo)
            for inner in _contents(value):
                self._remember(inner)
        elif _is_countable(value):
            self._seen.add(id(value))
            self._remember_attributes(value)


def _undo_of(value: Any) -> Callable[[], None] | None:
    """What takes changes of a value back; None if nothing changes or that is not its own to say."""
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return undo_of_tensor(value)
    if is_ndarray(value):
        return undo_of_array(value) if value.nbytes <= _LARGEST_COUNTS else None
    is_container = type(value) in (list, deque) or isinstance(value, dict | set)
    return _undo_of_content(value) if is_container else restore_of(value)


def _is_countable(value: Any) -> bool:
    """Whether an object may hold counts of the user's own, as a meter does, and no other thread changes it."""
    kind = type(value)
    # Functions and methods say what they are in a class.
    if issubclass(kind, _LEFT_ALONE) or hasattr(kind, "__get__") or kind.__module__.startswith(_OWN_PACKAGE):
        return False
    attributes = getattr(value, "__dict__", None)
    return isinstance(attributes, dict) and not any(isinstance(held, OF_THREADS) for held in attributes.values())


def undo_of_tensor(value: Tensor) -> Callable[[], None]:
    """What makes a tensor, which is no parameter, what it is now. A copy is kept."""
    before = value.detach().clone()
    # Inference tensors count no versions, and are written to in inference mode alone.
    version = None if value.is_inference() else value._version
    is_strided = value.layout is torch.strided and not value.is_nested

    def undo() -> None:
        # The statistics of a normalization change without a new version. Those are in strided tensors.
        if version is not None and value._version == version and (not is_strided or torch.equal(value, before)):
            return
        with torch.inference_mode(version is None):
            if is_strided and value.size() != before.size():
                value.resize_(before.size())
            # Not another tensor of its memory: a sparse one gets other memory.
            assign(value, before)

    return undo


def undo_of_array(value: Any) -> Callable[[], None]:
    """What makes an array what it is now. A copy is kept."""
    before = value.copy()

    def undo() -> None:
        if value.flags.writeable:
            value[...] = before

    return undo


def _undo_of_content(value: Any) -> Callable[[], None]:
    kind = next((kind for kind in (dict, set) if isinstance(value, kind)), list)
    before = kind(value)

    def undo() -> None:
        # Some refuse to be changed, such as a config that is frozen.
        if not have_same_content(value, before):
            value.clear()
            (value.extend if kind is list else value.update)(before)

    return undo


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | deque):
        yield from value
