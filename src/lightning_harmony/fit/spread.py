"""Spreading: whether the microbatches of a model that fits run on all devices, which is shown before it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.replicas.replica import NotReplicableError
from lightning_harmony.engine.replicas.replicas import Replicas
from lightning_harmony.engine.replicas.runs import Runs, Watched
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.microbatches.snapshot import Snapshot
from lightning_harmony.setup.lightning_tree import LightningTree

Result = TypeVar("Result")


class Spread:
    """Runs steps on one device until it is shown that several do the same.

    The first step of its kind runs on the first device, where it is seen which tensors it changes in place. The next one is
    tried on all devices: if its code fails there, because it meets a tensor of another device, all that it did is undone, and
    steps run on the first one.

    Args:
        tree: of the trainer.
        trainer: whose steps they are.
        devices: on which they run; the model is on the first.
    """

    def __init__(self, tree: LightningTree, trainer: Any, devices: Sequence[Device]) -> None:
        self._tree, self._trainer, self._devices = tree, trainer, devices
        self._torch_devices = [device.torch_device for device in devices]
        self._is_refused = self._has_run = False
        self._kind: list[Any] | None = None
        self._replicas: Replicas | None = None

    def run(
        self,
        run: Callable[[Runs | None], Result],
        undoing: Callable[[], AbstractContextManager[None]],
        parts: Sequence[Any],
    ) -> Result:
        """Run a step of several microbatches.

        Args:
            run: runs it, given how its microbatches run; None for one after the other where the model is.
            undoing: makes a context that leaves gradients as they were if it ends with an error.
            parts: the microbatches.

        Raises:
            UnsupportedModelError: if it does on other devices what no step before has done.
        """
        if self._is_refused:
            return run(None)
        kind = self._kind_of_step()
        if kind != self._kind:
            self.end()
            return self._watch(run, kind)
        assert self._replicas is not None
        try:
            self._replicas.prepare()
        except NotReplicableError as error:
            self._refuse(str(error))
            return run(None)
        if not self._has_run:
            return self._try(run, self._replicas, undoing, parts)
        try:
            return run(self._replicas)
        except NotReplicableError as error:
            raise UnsupportedModelError(f"{error}, as no step before has done: use Trainer(devices=1)") from error

    def _watch(self, run: Callable[[Runs | None], Result], kind: list[Any]) -> Result:
        module = self._trainer.lightning_module
        watched = Watched(module, self._torch_devices[0])
        result = run(watched)
        if watched.refused is not None:
            self._refuse(watched.refused)
        else:
            self._kind, self._replicas = kind, Replicas(module, self._torch_devices, watched.changing)
        return result

    def _try(
        self,
        run: Callable[[Runs | None], Result],
        replicas: Replicas,
        undoing: Callable[[], AbstractContextManager[None]],
        parts: Sequence[Any],
    ) -> Result:
        before = Snapshot(self._trainer, self._devices, parts)
        try:
            with undoing():
                result = run(replicas)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotReplicableError) as error:
            if before.has_exchanged():
                raise
            reason = str(error).partition("\n")[0]
        else:
            before.let_go()
            self._has_run = True
            return result
        self._refuse(reason + before.restore())
        return run(None)

    def _refuse(self, reason: str) -> None:
        self._is_refused, self._replicas = True, None
        self._tree.info(
            f"Harmony: microbatches run on {self._torch_devices[0]} alone, where the model fits, and not on all "
            f"{len(self._torch_devices)} devices: {reason}. Results are the same."
        )

    def end(self) -> None:
        """The fit is over, or a step of another kind begins."""
        replicas, self._replicas = self._replicas, None
        if replicas is not None:
            replicas.end()

    def _kind_of_step(self) -> list[Any]:
        """What decides what a step does to its tensors, such as whether normalizations take statistics."""
        module = self._trainer.lightning_module
        modes = [each.training for each in module.modules()]
        return [modes, [(id(parameter), parameter.requires_grad) for parameter in module.parameters()]]
