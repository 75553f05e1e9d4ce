"""The host's budget: a fit takes no more of the host's memory than is free, or is refused before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_harmony.engine.devices.free_memory import host_memory
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.host_need import bytes_beside_state
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.updating.optimizer_state import expected_state_bytes, state_bytes

# What stays free, as a share of all: what the system wants for itself and for files, what allocators cannot use again, and
# what libraries take later. With 2 % of what was free, a host of 125 GiB ran out.
_SPARED_SHARE = 0.04


def room_on_host() -> int:
    """What a fit may take of the host's memory."""
    memory = host_memory()
    return max(memory.free - int(_SPARED_SHARE * memory.total), 0)


class HostBudget:
    """Keeps gradients and the stash within what the host has left beside weights and optimizer state.

    Args:
        engine: whose they are. As many packs' gradients may wait for their update there as there is room for; where the
            stash of all microbatches leaves none, microbatches run one after the other.
        trainer: of whose optimizers the state comes with their first step.
    """

    def __init__(self, engine: Executor, trainer: Any) -> None:
        self._engine, self._trainer = engine, trainer
        self._limited_for: tuple[Plan, bool] | None = None

    def refuse_too_little(self, layers: Iterable[Iterable[nn.Parameter]], *, is_deferred: bool) -> None:
        """Refuse to train where gradients and optimizer state will not fit, however few gradients wait.

        Args:
            layers: the parameters of each. Packs of several will need more, as far as there is more.
            is_deferred: whether no update runs just in time.

        Raises:
            CapacityError: saying how many bytes the host is short.
        """
        sizes = {p: p.numel() * p.element_size() for p in _trained(self._trainer.optimizers)}
        state = expected_state_bytes(self._trainer.optimizers) or 0
        # Each parameter in one layer; those of none, by themselves.
        gradients = [sum(sizes.pop(p, 0) for p in layer) for layer in layers]
        gradients += sizes.values()
        waiting = bytes_beside_state(gradients, state, is_deferred=is_deferred, ring=1)
        room = room_on_host()
        if state + waiting > room:
            raise CapacityError(
                f"the host is {format_bytes(state + waiting - room)} short: beside the weights, optimizer state takes "
                f"{format_bytes(state)} and gradients {format_bytes(waiting)}, {format_bytes(room)} are free. "
                + _ways_out(is_deferred)
            )

    def limit(self) -> None:
        """Before a step: what gradients and the stash may take, as long as nothing more is known of the plan."""
        known = self._engine.plan, self._engine.has_succeeded
        if self._limited_for == known:
            return
        self._limited_for = known
        room, pool = room_on_host(), self._engine.pool
        # The first step's gradients go as its state comes.
        to_come = self._state_to_come() if self._engine.has_succeeded else 0
        pool.limit = room + pool.num_bytes - to_come

    def check(self, *, is_deferred: bool) -> None:
        """After a forward, when all of the stash is there: see that the backward will have room for gradients.

        Args:
            is_deferred: whether its updates follow the backward.

        Raises:
            CapacityError: saying how many bytes the host is short.
        """
        pool, gradients = self._engine.pool, self._engine.gradient_bytes
        # Lightning zeroes what parameters still have of the step before.
        needed = sum(gradients) - self._engine.updater.buffers.kept_bytes if is_deferred else max(gradients, default=0)
        if not pool.has_room(needed):
            raise pool.shortage(needed)

    def _state_to_come(self) -> int:
        optimizers = self._trainer.optimizers
        return max((expected_state_bytes(optimizers) or 0) - state_bytes(optimizers), 0)


def _trained(optimizers: Sequence[Optimizer]) -> list[Any]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]


def _ways_out(is_deferred: bool) -> str:
    at_once = (
        'leave out what reads all gradients together (gradient_clip_val, update="deferred"), ' if is_deferred else ""
    )
    return (
        f"Add host memory, {at_once}train fewer parameters, choose an optimizer with less state, or "
        'Trainer(precision="bf16-true")'
    )
