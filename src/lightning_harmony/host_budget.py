"""The host's budget: a fit takes no more of the host's memory than is free, or is refused before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_harmony.engine.executor import Executor
from lightning_harmony.engine.free_memory import host_memory
from lightning_harmony.errors import CapacityError
from lightning_harmony.optimizer_state import expected_state_bytes, state_bytes
from lightning_harmony.plan.host_need import bytes_beside_state, ring_within, stash_bytes
from lightning_harmony.plan.memory_size import format_bytes
from lightning_harmony.plan.plan import Plan

# What stays free, as a share of all: what the system wants for itself and for files, what allocators cannot use again, and
# what libraries take later. With 2 % of what was free, a host of 125 GiB ran out.
_SPARED_SHARE = 0.04


def room_on_host() -> int | None:
    """What a fit may take of the host's memory; None where the system doesn't tell."""
    memory = host_memory()
    return None if memory is None else max(memory.free - int(_SPARED_SHARE * memory.total), 0)


class HostBudget:
    """Keeps gradients and the stash within what the host has left beside weights and optimizer state.

    Args:
        engine: whose they are. As many packs' gradients may wait for their update there as there is room for.
        trainer: of whose optimizers the state comes with their first step.
    """

    def __init__(self, engine: Executor, trainer: Any) -> None:
        self._engine, self._trainer = engine, trainer
        self._kept_to: tuple[Plan, int, bool] | None = None

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
        if room is not None and state + waiting > room:
            raise CapacityError(
                f"the host is {format_bytes(state + waiting - room)} short: beside the weights, optimizer state takes "
                f"{format_bytes(state)} and gradients {format_bytes(waiting)}, {format_bytes(room)} are free. "
                + _ways_out(is_deferred)
            )

    def keep(self, num_microbatches: int, *, is_deferred: bool) -> str | None:
        """Before microbatches take turns, let as many gradients wait as there is room for beside their stash.

        Args:
            num_microbatches: of the step.
            is_deferred: whether its updates follow the backward.

        Returns:
            What the host is short of, in words, where microbatches have to run one after the other; None if they need not.

        Raises:
            CapacityError: if it is short of as much then.
        """
        plan, pool = self._engine.plan, self._engine.pool
        if self._kept_to == (plan, num_microbatches, is_deferred) or plan.profile is None:
            return None
        self._kept_to = plan, num_microbatches, is_deferred
        room = room_on_host()
        if room is None:
            return None
        packs, stash = plan.profile.pack_costs(plan.packs), stash_bytes(plan, num_microbatches)
        gradients = sum(cost.gradient_bytes for cost in packs)
        if stash + gradients > room:
            # Buffers of another plan have other sizes.
            pool.release()
            room = room_on_host() or 0
        # What the pool has is for the same.
        room += pool.num_bytes - self._state_to_come()
        if is_deferred:
            # Those of the last step stay until its successor's backward, which the fused packs are ahead of.
            if stash + gradients + sum(packs[number].gradient_bytes for number in plan.fused) <= room:
                return None
            gradients *= 2
        else:
            self._engine.updater.ring = ring_within([cost.gradient_bytes for cost in packs], room - stash)
            if self._engine.updater.ring:
                return None
        of_one = stash // num_microbatches
        free = f"{format_bytes(max(room, 0))} are free beside weights and optimizer state"
        if of_one + gradients > room:
            raise CapacityError(
                f"the host is {format_bytes(of_one + gradients - room)} short: gradients take {format_bytes(gradients)} and "
                f"the stash of a microbatch {format_bytes(of_one)}, where {free}. {_ways_out(is_deferred)}"
            )
        return f"the stash of all takes {format_bytes(stash)} of the host, where {free}"

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
