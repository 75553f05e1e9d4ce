"""What users choose, checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_harmony.engine.batches.split import microbatch_sizes
from lightning_harmony.engine.devices.cuda_device import CudaDevice
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure import profile_cache
from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search.given import read_plan
from lightning_harmony.plan.values.memory_size import parse_bytes
from lightning_harmony.plan.values.plan import Parallel, Plan

# Into how many microbatches a batch is split that is too large to be evaluated whole, where nothing says that.
NUM_EVALUATION_MICROBATCHES = 4


class Settings:
    """The arguments of `HarmonyStrategy`, which describes them, none of them wrong by itself or beside another.

    Attributes:
        capacities: of each device, or a single one for all.
        compile_options: of `torch.compile`; None not to compile.
        reduction: how losses are merged.
        check_loss: whether to check that the loss of a batch is that of its samples, so merged.
        split_batch: the user's function that takes a batch apart, given the samples of each microbatch.

    Raises:
        ValueError: if an argument is wrong, or two contradict each other.
        PlanError: if the plan cannot be read, or is for another number of microbatches.
    """

    def __init__(
        self,
        *,
        device_memory: Any,
        num_microbatches: int | Literal["auto"] | None,
        microbatch_size: int | None,
        layers: Collection[type] | Callable[[str, nn.Module], bool] | None,
        update: str,
        update_on: str,
        loss_reduction: str | None,
        check_loss: bool,
        split_batch: Callable[[Any, Sequence[int]], Sequence[Any]] | None,
        parallel: Parallel,
        compile_layers: Any,
        plan: Plan | str | Path | None,
        profile_cache: bool | str | Path,
        offload_dir: str | Path | None,
        cuda_graphs: bool,
        timeout: timedelta,
        state_dict_type: str,
    ) -> None:
        if num_microbatches is not None and microbatch_size is not None:
            raise ValueError(
                f"HarmonyStrategy(num_microbatches={num_microbatches}, microbatch_size={microbatch_size}): "
                "give at most one of the two, the other follows from the batch"
            )
        if num_microbatches == "auto":
            num_microbatches = None
        _whole_number("num_microbatches", num_microbatches)
        _whole_number("microbatch_size", microbatch_size)
        _one_of("update", update, ("auto", "just-in-time", "deferred"))
        _one_of("update_on", update_on, ("device", "host"))
        _one_of("loss_reduction", loss_reduction, ("mean", "sum", None))
        _one_of("parallel", parallel, ("pipeline", "data"))
        _one_of("state_dict_type", state_dict_type, ("full", "sharded"))
        if not isinstance(timeout, timedelta):
            raise ValueError(f"HarmonyStrategy(timeout={timeout!r}): a datetime.timedelta is needed")
        if not isinstance(check_loss, bool):
            raise ValueError(f"HarmonyStrategy(check_loss={check_loss!r}): True or False is needed")
        if not isinstance(cuda_graphs, bool):
            raise ValueError(f"HarmonyStrategy(cuda_graphs={cuda_graphs!r}): True or False is needed")
        if split_batch is not None and not callable(split_batch):
            raise ValueError(
                f"HarmonyStrategy(split_batch={split_batch!r}): a function is needed, which takes a batch and the samples of "
                "each microbatch, and returns the microbatches"
            )
        each = device_memory if isinstance(device_memory, list | tuple) else [device_memory]
        self.capacities = tuple(None if one is None else parse_bytes(one) for one in each)
        self.compile_options = _compile_options(compile_layers)
        self.plan = None if plan is None else read_plan(plan)
        planned = None if self.plan is None else self.plan.num_microbatches
        if None not in (planned, num_microbatches) and planned != num_microbatches:
            raise PlanError(
                f"HarmonyStrategy(plan=...) is for {planned} microbatches, but num_microbatches={num_microbatches}: "
                "leave one of the two out"
            )
        self.num_microbatches: int | None = num_microbatches
        self.microbatch_size = microbatch_size
        self.layers, self.split_batch = layers, split_batch
        self.update, self.update_on, self.parallel = update, update_on, parallel
        self.reduction, self.check_loss = loss_reduction or "mean", check_loss
        self.cuda_graphs = cuda_graphs
        self.profile_cache = _folder_or_switch(profile_cache)
        self.offload_dir = _offload_folder(offload_dir, update_on)
        self.timeout, self.state_dict_type = timeout, state_dict_type

    def capacities_of(self, num_devices: int) -> tuple[int | None, ...]:
        """The capacity of each device.

        Raises:
            ValueError: if there are others than devices.
        """
        if len(self.capacities) == 1:
            return self.capacities * num_devices
        if len(self.capacities) != num_devices:
            raise ValueError(
                f"HarmonyStrategy(device_memory=...) has {len(self.capacities)} entries for {num_devices} devices: "
                "give one for each of Trainer(devices=...), or a single one for all"
            )
        return self.capacities

    def open_devices(self, torch_devices: Sequence[torch.device]) -> list[Device]:
        """The devices, each with its capacity.

        Raises:
            ValueError: if there are more or fewer capacities than devices.
        """
        return [
            CudaDevice.within(device, capacity, is_one_of_several=len(torch_devices) > 1)
            if device.type == "cuda"
            else VirtualDevice(capacity)
            for device, capacity in zip(torch_devices, self.capacities_of(len(torch_devices)), strict=True)
        ]

    def profile_folder(self) -> Path | None:
        """Where profiles are kept; None if they are not."""
        if isinstance(self.profile_cache, Path):
            return self.profile_cache
        return profile_cache.default_folder() if self.profile_cache else None

    @property
    def leaves_number(self) -> bool:
        """Whether nothing says into how many microbatches a batch is split, or how large they are."""
        return self.microbatch_size is None and self._given_number is None

    @property
    def _given_number(self) -> int | None:
        return self.num_microbatches or (None if self.plan is None else self.plan.num_microbatches)

    def sizes(self, batch_size: int, number: int) -> tuple[int, ...]:
        """The samples of each microbatch of a batch.

        Args:
            batch_size: samples of the batch.
            number: of microbatches, where nothing else says that.
        """
        number = self._given_number or number
        return microbatch_sizes(batch_size, num_microbatches=number, microbatch_size=self.microbatch_size)

    def evaluation_sizes(self, batch_size: int) -> tuple[int, ...]:
        """The samples of each microbatch of a batch that is too large to be evaluated whole."""
        number = self.num_microbatches or NUM_EVALUATION_MICROBATCHES
        return microbatch_sizes(batch_size, num_microbatches=number, microbatch_size=self.microbatch_size)

    def weights(self, sizes: Sequence[int]) -> list[Fraction]:
        """What each microbatch's loss counts in that of the batch."""
        if self.reduction == "sum":
            return [Fraction(1)] * len(sizes)
        return [Fraction(size, sum(sizes)) for size in sizes]


def _whole_number(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"HarmonyStrategy({name}={value!r}): a whole number of at least 1 is needed")


def _one_of(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        raise ValueError(f"HarmonyStrategy({name}={value!r}): one of {', '.join(map(repr, allowed))} is needed")


def _folder_or_switch(profile_cache: Any) -> bool | Path:
    if isinstance(profile_cache, bool):
        return profile_cache
    if not isinstance(profile_cache, str | Path) or not str(profile_cache):
        raise ValueError(
            f"HarmonyStrategy(profile_cache={profile_cache!r}): True, False, or a folder to keep profiles in, is needed"
        )
    folder = Path(profile_cache).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"HarmonyStrategy(profile_cache={str(profile_cache)!r}): this is not a folder")
    return folder


def _offload_folder(offload_dir: Any, update_on: str) -> Path | None:
    if offload_dir is None:
        return None
    if not isinstance(offload_dir, str | Path) or not Path(offload_dir).expanduser().is_dir():
        raise ValueError(
            f"HarmonyStrategy(offload_dir={str(offload_dir)!r}): a folder is needed, on the disk where optimizer state is to "
            "live that the host has no room for"
        )
    if update_on == "host":
        raise ValueError(
            "HarmonyStrategy(offload_dir=..., update_on='host'): what lives on disk is updated on the device: leave one "
            "of the two out"
        )
    if sys.platform != "linux":
        raise ValueError(
            "HarmonyStrategy(offload_dir=...) needs Linux, which keeps mapped files and direct copies the same"
        )
    return Path(offload_dir).expanduser()


def _compile_options(compile_layers: Any) -> Mapping[str, Any] | None:
    if not isinstance(compile_layers, bool | Mapping):
        raise ValueError(
            f"HarmonyStrategy(compile_layers={compile_layers!r}): True, False, or the arguments of torch.compile, such as "
            "{'mode': 'max-autotune-no-cudagraphs'}, are needed"
        )
    if isinstance(compile_layers, Mapping):
        return compile_layers
    return {} if compile_layers else None
