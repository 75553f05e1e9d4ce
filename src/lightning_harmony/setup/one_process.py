"""What a strategy of one process answers where Lightning asks about processes: there is one, with one logical device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_harmony.setup.refusals import refuse_several_processes

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object


class OneProcess(_Base):
    """A strategy of one process, to whose code all devices are one."""

    _devices: list[torch.device]

    @property
    @override
    def root_device(self) -> torch.device:
        """The one logical device of the user's code."""
        return self._devices[0] if self._devices else torch.device("cpu")

    @property
    def _torch_devices(self) -> list[torch.device]:
        """The devices behind it."""
        return self._devices or [self.root_device]

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The root device alone: the user's code sees one device."""
        return [self.root_device] if self._devices else None

    @parallel_devices.setter
    @override
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = list(devices or [])

    @property
    @override
    def world_size(self) -> int:
        """One process."""
        return 1

    @property
    @override
    def global_rank(self) -> int:
        """The only one."""
        return 0

    @property
    @override
    def local_rank(self) -> int:
        """The only one, whatever a cluster's environment says of the process."""
        return 0

    @property
    @override
    def node_rank(self) -> int:
        """The only one."""
        return 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The one process loads all data."""
        return {"num_replicas": 1, "rank": 0}

    def set_world_ranks(self) -> None:
        """Refuse to be one of several processes.

        Raises:
            ValueError: if a launcher started more than one process here, or several nodes are asked for.
        """
        refuse_several_processes(getattr(self, "num_nodes", 1))

    num_nodes: int = 1

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """One process: nothing to reduce."""
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """One process: nothing to gather."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One process: its own decision."""
        return decision

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """One process: nothing to wait for."""

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One process: nothing to send."""
        return obj

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """One process: nothing to block."""
        yield
