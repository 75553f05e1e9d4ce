"""Device memory of a model that is not swapped: what it holds there, and a watch on steps that may not fit beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.hidden_shortages import finding_shortages
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.engine.updates.device_step import ASSUMED_STATE_COPIES
from lightning_harmony.errors import CapacityError
from lightning_harmony.fit.state_aside import StateAside
from lightning_harmony.fit.user_steps import num_elements
from lightning_harmony.microbatches.fewest import Fewest
from lightning_harmony.microbatches.snapshot import Snapshot
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.updating.optimizer_state import expected_state_bytes

Result = TypeVar("Result")


@dataclass(frozen=True)
class LastingBytes:
    """What a model holds on its device from step to step.

    Attributes:
        weights: parameters and buffers.
        gradients: of the parameters that are trained.
        state: of the optimizers.
    """

    weights: int
    gradients: int = 0
    state: int = 0

    @classmethod
    def of(cls, module: nn.Module, optimizers: Sequence[Optimizer] | None) -> LastingBytes:
        """Count, each storage once.

        Args:
            module: the model.
            optimizers: those that train it; None where nothing is trained.
        """
        tensors = [part for tensor in (*module.parameters(), *module.buffers()) for part in parts_of(tensor)]
        strided = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if _has_storage(t)}
        others = sum(t.numel() * t.element_size() for t in tensors if not _has_storage(t))
        weights = sum(strided.values()) + others
        if optimizers is None:
            return cls(weights)
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        state = expected_state_bytes(optimizers)
        return cls(weights, gradients, ASSUMED_STATE_COPIES * gradients if state is None else state)

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.state


def fits(lasting: LastingBytes, devices: Sequence[Device]) -> bool:
    """Whether what lasts leaves room for anything else; whether a batch finds room beside it, its first step shows.

    Of several devices, others than the first hold no optimizer state, but gradients twice while they are added up.
    """
    return all(device.capacity_bytes is None or lasting.total < device.capacity_bytes for device in devices)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


class DoesNotFit(Exception):
    """A batch does not fit in device memory beside the model. What its step did is undone."""


class FitsInFewer(DoesNotFit):
    """A batch fits, but should fit in fewer microbatches, too. What its step did is undone."""


@dataclass
class MemoryWatch:
    """Counts what a step takes on a device of limited capacity, and undoes the step if that is too much.

    Attributes:
        tree: says what changes.
        trainer: whose steps they are.
        device: where the model is.
        lasting: what it holds there.
        peak_bytes: the most that was seen to be on the device; None where nothing is counted.
        state: of the optimizers; evaluation can do without.
    """

    tree: LightningTree
    trainer: Any
    device: Device
    lasting: LastingBytes
    peak_bytes: int | None = None
    # Elements of the largest batch that is known to fit, by the name of the step and whether the optimizer state was aside.
    _largest: dict[tuple[str, bool], int] = field(default_factory=dict)
    # Of the smallest that needs it aside.
    _needs_state_aside: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = StateAside(self.trainer)

    def knows_to_fit(self, name: str, args: Any) -> bool:
        """Whether a batch is no larger than one that fitted.

        Args:
            name: of the user's step.
            args: the batch, and more.
        """
        largest = max(self._largest.get((name, is_aside), -1) for is_aside in {False, self.state.is_aside})
        return self.device.capacity_bytes is None or num_elements(args) <= largest

    def run(
        self, name: str, args: Any, step: Callable[[], Result], stays: Callable[[int], bool] = lambda num_bytes: True
    ) -> Result:
        """Run a step on a batch that may not fit, and undo it if it does not.

        Args:
            name: of the user's step.
            args: the batch, and more.
            step: runs it on that.
            stays: whether a step that fits is not to be undone all the same, given the most bytes that it took.

        Raises:
            DoesNotFit: if there is no room for the batch.
            FitsInFewer: if there is, and it does not stay.
            CapacityError: if there is none, and the step has changed parameters, of which nobody keeps a copy, or has taken
                part in what other nodes do.
        """
        device, capacity = self.device, self.device.capacity_bytes
        assert capacity is not None
        before, parameters = Snapshot(self.trainer, [device], args), self._checksums()
        error, undone = "", DoesNotFit
        try:
            with self._counting() as most:
                result = step()
            if most() > capacity:
                error = f"{format_bytes(most())} are needed"
            elif not stays(most()):
                undone = FitsInFewer
            else:
                self.peak_bytes = max(self.peak_bytes or 0, most())
                self._largest[name, self.state.is_aside] = num_elements(args)
                before.let_go()
                return result
            # The device has had the room for it, but the user lets the process have less.
            del result
        except torch.OutOfMemoryError as shortage:
            error = str(shortage)
        if before.has_exchanged():
            raise self._cannot_undo("exchanges tensors with other nodes", error)
        left = before.restore()
        now = self._checksums()
        changed = next((name for name, sums in parameters.items() if not all(map(torch.equal, sums, now[name]))), None)
        if changed is not None:
            raise self._cannot_undo(f"changes parameter {changed!r}", error)
        raise undone(
            f"a batch does not fit into {format_bytes(capacity)} beside {format_bytes(self._here.total)} of weights, "
            f"gradients and optimizer state ({error}){left}"
        )

    def run_evaluation(self, name: str, args: Any, step: Callable[[], Result]) -> Result:
        """As `run`, where the step does without the optimizers' state: that leaves the device if the batch needs its room.

        Args:
            name: of the user's step.
            args: the batch, and more.
            step: runs it on that.

        Returns:
            What the step does. The state stays where it is until a step of training brings it back.

        Raises:
            DoesNotFit: if there is no room for the batch without it either.
            CapacityError: as of `run`.
        """
        elements = num_elements(args)
        if elements >= self._needs_state_aside.get(name, sys.maxsize):
            self.state.leave()
        try:
            return self.run(name, args, step)
        except DoesNotFit:
            if not self.lasting.state or not self.state.leave():
                raise
        if name not in self._needs_state_aside:
            self.tree.info(
                f"Harmony: a batch does not fit beside {format_bytes(self.lasting.state)} of optimizer state in {name}: the "
                "state waits in host memory until training goes on. Smaller batches there save its copies."
            )
        self._needs_state_aside[name] = elements
        # Not within the except clause: the error's frames hold what the attempt has allocated.
        return self.run(name, args, step)

    def train_in_fewest(
        self,
        args: Any,
        run: Callable[[int | None], Result],
        search: Callable[[int, int], Fewest | None],
        keeping: Callable[[], AbstractContextManager[None]],
    ) -> Result:
        """Run the training_step on a batch in as many microbatches as fit.

        Args:
            args: the batch, and more.
            run: runs it in a number of microbatches; at first, given None, in as many as are known to do.
            search: gives what finds the fewest that fit if those do not, by the bytes that last and the capacity; None if no
                others may be tried.
            keeping: gives the context of each attempt, which puts back what a failure leaves elsewhere.

        Raises:
            DoesNotFit: if there is room for none.
            CapacityError: as of `run`.
        """
        fewest, number = None, None
        assert self.device.capacity_bytes is not None
        while True:
            try:
                with keeping():
                    stays = (lambda num_bytes: True) if fewest is None else fewest.fits
                    return self.run("training_step", args, partial(run, number), stays)
            except FitsInFewer:
                assert fewest is not None
            except DoesNotFit:
                fewest = fewest or search(self.lasting.total, self.device.capacity_bytes)
                if fewest is None or not fewest.fails():
                    raise
            number = fewest.number

    @contextmanager
    def _counting(self) -> Iterator[Callable[[], int]]:
        """A context; what it gives tells the most bytes that the process had on the device in it, optimizer state included."""
        device, lasting = self.device, self._here
        if not isinstance(device, VirtualDevice):
            peak = device.watch_peak()
            # It comes when the optimizer first steps.
            missing = 0 if any(optimizer.state for optimizer in self.trainer.optimizers) else lasting.state
            yield lambda: peak() + missing
            return
        # Weights and optimizer state are where they always were: only what is allocated from here on is counted.
        gradients = [
            p.grad for p in self.trainer.lightning_module.parameters() if p.grad is not None and not device.owns(p.grad)
        ]
        uncounted = lasting.weights + lasting.state + sum(g.numel() * g.element_size() for g in gradients)
        capacity = device.capacity_bytes
        assert capacity is not None
        device.capacity_bytes = max(capacity - uncounted, 0)
        try:
            with device.computing(), finding_shortages():
                peak = device.watch_peak()
                yield lambda: peak() + uncounted
        finally:
            device.capacity_bytes = capacity

    @contextmanager
    def bounding(self) -> Iterator[None]:
        """The context of a step that nobody can undo: what exceeds the capacity is refused, with the way out.

        Raises:
            CapacityError: if the step exceeds it.
        """
        capacity = self.device.capacity_bytes
        assert capacity is not None
        try:
            with self._counting() as most:
                yield
            if most() > capacity:
                raise torch.OutOfMemoryError(f"{format_bytes(most())} were needed")
        except torch.OutOfMemoryError as error:
            does = "optimizes or fetches batches itself, or hooks between forward and backward are overridden"
            raise self._cannot_undo(does, error) from error

    @property
    def _here(self) -> LastingBytes:
        """What of all that lasts is on the device now, or comes when the optimizers first step."""
        return replace(self.lasting, state=0) if self.state.is_aside else self.lasting

    def _checksums(self) -> dict[str, list[Tensor]]:
        """What tells of each parameter whether its bits change, on the host. No version tells of changes through `data`."""
        named = self.trainer.lightning_module.named_parameters()
        return {name: [checksum(part).cpu() for part in parts_of(each)] for name, each in named}

    def _cannot_undo(self, does: str, error: object) -> CapacityError:
        capacity = self.device.capacity_bytes
        assert capacity is not None
        less = format_bytes(self.lasting.total * 9 // 10)
        return CapacityError(
            f"a batch exceeds the device's memory of {format_bytes(capacity)} beside {format_bytes(self.lasting.total)} "
            f"of weights, gradients and optimizer state. The step cannot be undone, as it {does}. Use smaller batches, or "
            f"have layers swapped from the start by giving less than that: HarmonyStrategy(device_memory={less!r}) ({error})"
        )
