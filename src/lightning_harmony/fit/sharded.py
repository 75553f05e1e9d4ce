"""Sharded checkpoints: folders that nodes write together with `torch.distributed.checkpoint`, laid out as FSDPStrategy's.

A value has a path: that of a weight is ``("model", name)``, and that of optimizer state is ``("optimizer_0", "state", name of
the parameter, "exp_avg")``. Lightning's tool that makes one file of such a folder puts values back by their paths. What else
Lightning saves is in a file of its own, `META`.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_harmony.engine.nodes.division import parameters_of

META = "meta.pt"
# The keys of weights in folders of FSDPStrategy, and of ModelParallelStrategy. Ours are as the first.
_WEIGHTS = ("model", "state_dict")

_Path = tuple[Any, ...]
_Make = Callable[[_Path, TensorStorageMetadata], Tensor]


def is_sharded(path: str | Path) -> bool:
    """Whether there is a sharded checkpoint of this strategy, or of one of Lightning's."""
    return (Path(path) / META).is_file() and (Path(path) / ".metadata").is_file()


# ---- writing ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pickled:
    """What is written as an object: anything but an ordinary tensor."""

    value: Any


class _Planner(DefaultSavePlanner):
    """Plans to write values by paths. What several nodes have of the same path, one of them writes: who has least to write.

    Args:
        values: by their paths.
    """

    def __init__(self, values: Mapping[_Path, Any]) -> None:
        super().__init__()
        self._values = values

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.mappings = {".".join(map(str, path)): path for path in self._values}
        assert len(self.mappings) == len(self._values)
        values = (value if _is_plain(value) else _Pickled(value) for value in self._values.values())
        self.state_dict = dict(zip(self.mappings, values, strict=True))
        self.is_coordinator = is_coordinator

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object.value if isinstance(object, _Pickled) else object)


def write(values: Mapping[_Path, Any], folder: Path, group: Any) -> None:
    """Write values to a folder, one after the other. All nodes come here.

    Args:
        values: those of this node, by their paths.
        folder: where.
        group: of the processes that write; None for a process alone.

    Raises:
        Exception: that of any node that could not write.
    """
    with warnings.catch_warnings():
        # That a process is alone.
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        try:
            save({}, storage_writer=FileSystemWriter(folder), planner=_Planner(values), process_group=group)
        except CheckpointException as error:
            # It is not an Exception, and says nothing of its own.
            raise next(iter(error.failures.values()))[0] from error


def take_values(
    checkpoint: dict[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    is_first: bool,
    all_agree: Callable[[bool], bool],
) -> dict[_Path, Any]:
    """Take what a node writes as shards out of Lightning's checkpoint.

    Args:
        checkpoint: of this node, which keeps what goes to `META`.
        module: whose weights it has.
        optimizers: whose states it has, each as far as this node has it.
        is_first: whether this is the first node, which gives what may differ between nodes, such as buffers.
        all_agree: tells whether all nodes, each of which asks, say yes.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    common = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    weights = checkpoint.pop("state_dict")
    values: dict[_Path, Any] = {(_WEIGHTS[0], name): weights[name] for name in weights if is_first or name in common}
    # What is empty stays: it says that this is a whole checkpoint.
    states = checkpoint.pop("optimizer_states") if any(checkpoint.get("optimizer_states", [])) else []
    for number, (optimizer, given) in enumerate(zip(optimizers, states, strict=False)):
        top, state = f"optimizer_{number}", {"state": {}, "param_groups": [], **given}
        keys = [names.get(parameter, str(place)) for place, parameter in enumerate(parameters_of(optimizer))]
        own = {(top, "state", keys[key] if isinstance(key, int) else key): each for key, each in state["state"].items()}
        values |= dict(_descended(own))
        is_empty = all_agree(not own)
        if is_first:
            others = {**state, "param_groups": [_rekeyed(group, keys) for group in state["param_groups"]]}
            # What has no parts is written by itself.
            values |= {(top, key): each for key, each in others.items() if key != "state" or is_empty}
    return values


def _descended(values: Mapping[_Path, Any]) -> Iterator[tuple[_Path, Any]]:
    for path, value in values.items():
        if value and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            yield from (((*path, key), each) for key, each in value.items())
        else:
            yield path, value


def _rekeyed(group: Mapping[str, Any], keys: Any) -> dict[str, Any]:
    """The settings of a group of parameters, which has other keys for these."""
    return {**group, "params": [keys[key] for key in group["params"]]}


def _is_plain(value: Any) -> bool:
    """Whether a value is all that its shape, its type and its numbers say."""
    is_tensor = type(value) in (Tensor, nn.Parameter)
    return is_tensor and value.layout is torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, beside the path, whose place it takes if all goes well. Until then, that is as it was."""
    partial = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    try:
        yield partial
        with aside(path):
            os.rename(partial, path)
    finally:
        remove(partial)


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written that is not whole."""
    return path.with_name(f"{path.name}.partial")


@contextmanager
def aside(path: Path) -> Iterator[None]:
    """The context of making a checkpoint in whose place there may be one. That has another name, and its own if it fails."""
    previous = path.with_name(f"{path.name}.previous")
    is_there = os.path.lexists(path)
    if is_there:
        remove(previous)
        os.rename(path, previous)
    try:
        yield
    except BaseException:
        if is_there:
            remove(path)
            os.rename(previous, path)
        raise
    remove(previous)


def remove(path: Path) -> None:
    """Remove a checkpoint, of one file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- reading ---------------------------------------------------------------------------------------------------------------


class Shards:
    """What a sharded checkpoint holds, which each node reads by itself, as far as it needs it.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self._metadata: Metadata = FileSystemReader(folder).read_metadata()
        self._keys: dict[_Path, str] = {path: key for key, path in (self._metadata.planner_data or {}).items()}

    def weights(self, module: nn.Module) -> dict[str, Any]:
        """The state_dict of a module. If all is as in the module, its own tensors are filled, so that no copy is made."""
        own = module.state_dict()
        paths = {path[1]: path for path in self._keys if path[0] in _WEIGHTS}
        are_same = own.keys() == paths.keys() and all(self._is_as(path, own[name]) for name, path in paths.items())
        found = self._read(paths.values(), (lambda path, _: own[path[1]].detach()) if are_same else _in_memory)
        return {name: found[path] for name, path in paths.items()}

    def _is_as(self, path: _Path, own: Any) -> bool:
        saved = self._metadata.state_dict_metadata[self._keys[path]]
        if not isinstance(saved, TensorStorageMetadata):
            return True
        return _is_plain(own) and own.shape == saved.size and own.dtype == saved.properties.dtype

    def optimizers(self) -> list[SavedState]:
        """The states of optimizers. None, if weights alone have been saved."""
        tops = {path[0] for path in self._keys}
        number = sum(f"optimizer_{number}" in tops for number in range(len(tops)))
        return [SavedState(self, f"optimizer_{each}") for each in range(number)]

    def nested(self, top: str, is_wanted: Callable[[_Path], bool], make: _Make) -> dict[str, Any]:
        """Read values, and put them into dictionaries within dictionaries, by what follows the first key of their paths."""
        found: dict[str, Any] = {}
        for path, value in self._read((p for p in self._keys if p[0] == top and is_wanted(p)), make).items():
            place = found
            for key in path[1:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = value
        return found

    def _read(self, paths: Iterable[_Path], make: _Make) -> dict[_Path, Any]:
        keys = {path: self._keys[path] for path in paths}
        saved = self._metadata.state_dict_metadata
        values: dict[str, Any] = {}
        for path, key in keys.items():
            of_tensor = saved[key]
            values[key] = make(path, of_tensor) if isinstance(of_tensor, TensorStorageMetadata) else None
        reader, planner = FileSystemReader(self._folder), DefaultLoadPlanner(False, False)
        # No node reads for another one.
        planner.set_up_planner(values, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        return {path: values[key] for path, key in keys.items()}


@dataclass(frozen=True)
class SavedState:
    """The state of an optimizer in a sharded checkpoint.

    Attributes:
        shards: the checkpoint.
        top: the first key of its paths.
    """

    shards: Shards
    top: str

    def read(self, parameters: Sequence[nn.Parameter], others: Collection[int], folder: Path | None) -> dict[str, Any]:
        """The optimizer's state_dict.

        Args:
            parameters: by their numbers in it.
            others: the numbers of those whose state is not needed.
            folder: on a disk, where it lives; None for memory.
        """
        found = self.shards.nested(self.top, lambda path: path[1] != "state", _in_memory)
        groups = found["param_groups"]
        if isinstance(groups, dict):
            # Lightning's strategies save each setting by itself.
            groups = [groups[number] for number in sorted(groups)]
        numbers = {key: number for number, key in enumerate(key for group in groups for key in group["params"])}
        by_key = dict(zip(numbers, parameters, strict=False))

        def make(path: _Path, saved: TensorStorageMetadata) -> Tensor:
            parameter: Any = by_key.get(path[2])
            # As optimizers make it: in memory, the numbers have the order that those of the parameter have.
            is_alike = _is_plain(parameter) and parameter.shape == saved.size
            like = parameter.detach() if is_alike else torch.empty(saved.size, device="meta")
            like = torch.empty_like(like, dtype=saved.properties.dtype, device="meta")
            return torch.empty_like(like, device="cpu") if folder is None else _on_disk(like, folder)

        state: dict[str, Any] = self.shards.nested(
            self.top,
            lambda path: path[1] == "state" and path[2:3] != () and numbers.get(path[2]) not in others,
            make,
        )
        return {
            **found,
            "state": {numbers.get(key, key): each for key, each in state.get("state", {}).items()},
            "param_groups": [_rekeyed(group, numbers) for group in groups],
        }


def _in_memory(_: _Path, saved: TensorStorageMetadata) -> Tensor:
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _on_disk(like: Tensor, folder: Path) -> Tensor:
    """A tensor in a file that takes room for as long as it is in use."""
    if not like.nbytes:
        return torch.empty_like(like, device="cpu")
    with NamedTemporaryFile(dir=folder) as file:
        # Where there is no room, this says so. To write to what is mapped would end the process.
        os.posix_fallocate(file.fileno(), 0, like.nbytes)
        flat = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
        return flat.as_strided(like.size(), like.stride())
