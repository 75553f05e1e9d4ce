"""What a strategy answers where Lightning asks about processes: there is one on each node, with one logical device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from typing_extensions import override

from lightning_harmony.engine.nodes.division import Division
from lightning_harmony.setup import compat
from lightning_harmony.setup.refusals import refuse_other_processes
from lightning_harmony.setup.settings import Settings

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object


class Nodes(_Base):
    """A strategy of one process on each node, to whose code all devices of that are one."""

    num_nodes: int = 1
    _settings: Settings
    _devices: list[torch.device]
    # Whether a backward that comes leaves gradients of this node alone: others are added to them before the node averages.
    _is_accumulating: bool = False
    # Of updates, from the set-up on; None where there is one node.
    _division: Division | None = None

    # ---- devices -------------------------------------------------------------------------------------------------------

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

    # ---- ranks ---------------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether there are several nodes, each of which loads data of its own."""
        return self.num_nodes > 1

    @property
    @override
    def world_size(self) -> int:
        """One process on each node."""
        return self.num_nodes

    @property
    @override
    def global_rank(self) -> int:
        """The number of the node. A single one is the only one, whatever a cluster's environment says of the process."""
        if not self.is_distributed or self.cluster_environment is None:
            return 0
        return self.cluster_environment.global_rank()

    @property
    @override
    def local_rank(self) -> int:
        """The only one of the node, whatever a cluster's environment says of the process."""
        return 0

    @property
    @override
    def node_rank(self) -> int:
        """The number of the node."""
        return self.global_rank

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each node loads a share of the data."""
        return {"num_replicas": self.num_nodes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Take the place that the cluster has for this process.

        Raises:
            ValueError: if it has more than one on a node, or another number of nodes than the Trainer.
        """
        environment = self.cluster_environment
        refuse_other_processes(self.num_nodes, environment)
        if self.is_distributed and environment is not None:
            environment.set_global_rank(environment.node_rank())
            environment.set_world_size(self.num_nodes)
            compat.set_rank(environment, self.global_rank)

    @override
    def setup_environment(self) -> None:
        """Choose the device, and meet the other nodes."""
        super().setup_environment()
        if self.is_distributed:
            # Gradients of layers that are swapped, and what Lightning sends beside tensors, are on the host.
            backend = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
            compat.meet_other_processes(self.cluster_environment, backend, timeout=self._settings.timeout)

    # ---- what nodes have in common -------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """What the tensors of all nodes come to, in the place of this one's: their mean, or what else is asked for.

        Args:
            tensor: of this node; anything else is returned as it is.
            group: of processes; None for all.
            reduce_op: "mean", or one of those that torch has.
        """
        if not self.is_distributed or not isinstance(tensor, Tensor):
            return tensor
        is_mean = reduce_op in ("mean", "avg")
        named = "sum" if is_mean or reduce_op is None else reduce_op
        distributed.all_reduce(
            tensor, getattr(distributed.ReduceOp, named.upper()) if isinstance(named, str) else named, group
        )
        return tensor.copy_(tensor / distributed.get_world_size(group)) if is_mean else tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all nodes, one behind the other; of a single one the tensor itself."""
        return super().all_gather(tensor, group, sync_grads) if self.is_distributed else tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """What all nodes decide, or any of them; a single one decides by itself."""
        return super().reduce_boolean_decision(decision, all) if self.is_distributed else decision

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all other nodes."""
        if self.is_distributed and distributed.is_initialized():
            distributed.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What one node has, for all of them."""
        if not self.is_distributed or not distributed.is_initialized():
            return obj
        found = [obj]
        distributed.broadcast_object_list(found, src)
        return found[0]

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """The context of a backward to whose gradients those of further batches are added."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False
