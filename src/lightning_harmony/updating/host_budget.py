"""The host's budget: a fit takes no more of the host's memory than is free, or is refused before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lightning_harmony.engine.devices.free_memory import host_memory
from lightning_harmony.engine.model.disk_store import BLOCK
from lightning_harmony.engine.model.mapped_files import files_of, is_plain
from lightning_harmony.engine.nodes.division import parameters_of
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.structures.parts import num_bytes_of
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.host_need import bytes_beside_state, num_on_disk, spread_on_disk, waiting_bytes
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.updating.optimizer_state import bytes_by_parameter, expected_state_bytes, state_bytes
from lightning_harmony.updating.update_policy import UpdatePolicy

# What stays free, as a share of all: what the system wants for itself and for files, what allocators cannot use again, and
# what libraries take later. With 2 % of what was free, a host of 125 GiB ran out.
_SPARED_SHARE = 0.04


def room_on_host() -> int:
    """What a fit may take of the host's memory."""
    memory = host_memory()
    return max(memory.free - int(_SPARED_SHARE * memory.total), 0)


# What is left of the host's memory for the stash, where weights could take all of it.
_OTHER_SHARE = 0.25
# Bytes of a gradient and of Adam's state for each byte of a weight, and of a gradient where that state can live on disk.
_COPIES_TO_TRAIN, _COPIES_BESIDE_DISK = 3, 1


class Elsewhere(NamedTuple):
    """Weights for which the host has no room.

    Attributes:
        in_files: those that stay in the files that they were loaded from, each with its file: the last ones.
        to_disk: those that are trained, and have to go to disk.
    """

    in_files: dict[nn.Parameter, Path]
    to_disk: list[nn.Parameter]


def weights_elsewhere(
    module: nn.Module, layers: Iterable[Iterable[nn.Parameter]], disk: DiskHome, *, trains: bool
) -> Elsewhere:
    """The weights for which the host has no room.

    A loaded model may lie in its files, mapped into memory. What no optimizer writes can stay there: the system has as much
    of it in memory as there is room for, and reads the rest when a pack comes to its turn. Where there is a disk for them,
    weights that are trained make way for gradients, and optimizer state has done so before.

    Args:
        module: the model, of which nothing has come to the host store yet.
        layers: the parameters of each that is swapped, in the order of the forward.
        disk: where weights may live, and some may already.
        trains: whether an optimizer changes those that need gradients.

    Raises:
        CapacityError: if those that cannot stay in their files, or go to disk, have no room.
    """
    there, has_disk = set(disk.weights), trains and disk.folder is not None
    files = files_of(each for each in module.parameters() if each not in there)
    if not files and not has_disk:
        return Elsewhere({}, [])
    frozen = [each for each in files if not (trains and each.requires_grad)]
    trained = [each for each in module.parameters() if trains and each.requires_grad]
    movable = _movable_weights(layers, disk.weights) if has_disk else []
    room = room_on_host()
    of_host = room + sum(each.nbytes for each in chain(*movable) if each not in files)
    copies = _COPIES_BESIDE_DISK if has_disk else _COPIES_TO_TRAIN
    beside = int(_OTHER_SHARE * of_host) + copies * sum(map(num_bytes_of, trained))
    excess = sum(map(num_bytes_of, files)) + beside - room
    chosen: dict[nn.Parameter, Path] = {}
    while excess > 0 and frozen:
        parameter = frozen.pop()
        chosen[parameter] = files[parameter]
        excess -= parameter.nbytes
    numbers = spread_on_disk([sum(each.nbytes for each in layer) for layer in movable], excess)
    to_disk = [parameter for number in numbers for parameter in movable[number]]
    to_come = sum(each.nbytes for each in files.keys() - chosen.keys() - set(to_disk))
    if to_come > room:
        on_disk = "" if has_disk else "let some live in HarmonyStrategy(offload_dir='/a/fast/disk'), "
        raise CapacityError(
            f"the host is {format_bytes(to_come - room)} short: {format_bytes(to_come)} of weights that are trained come to "
            f"its memory from the files in which they lie, {format_bytes(room)} are free. Add host memory, {on_disk}train "
            "fewer parameters (LoRA leaves the base in its files), or load the model in bfloat16 for "
            'Trainer(precision="bf16-true")'
        )
    return Elsewhere(chosen, to_disk)


def _movable_weights(
    layers: Iterable[Iterable[nn.Parameter]], there: Iterable[nn.Parameter] = ()
) -> list[list[nn.Parameter]]:
    """Of each layer, the trained weights that may go to disk, each once; not those that are there."""
    movable, seen = list[list[nn.Parameter]](), set(there)
    for layer in layers:
        own = [each for each in layer if each.requires_grad and each not in seen]
        movable.append([each for each in own if is_plain(each) and each.nbytes >= BLOCK])
        seen.update(own)
    return movable


def _gradient_bytes(layers: Iterable[Iterable[nn.Parameter]], trained: Iterable[nn.Parameter]) -> list[int]:
    """What the gradients of each layer take, each parameter's once, and of those of no layer."""
    sizes = {parameter: num_bytes_of(parameter) for parameter in trained}
    of_layers = [sum(sizes.pop(parameter, 0) for parameter in layer) for layer in layers]
    return [*of_layers, *sizes.values()]


def describe_left(files: Mapping[nn.Parameter, Path]) -> str:
    """What stays in files."""
    folders = sorted({str(path.parent) for path in files.values()})
    return (
        f"{format_bytes(sum(each.nbytes for each in files))} of weights that are not trained stay in their files in "
        f"{' and '.join(folders)}, from which each step reads what the host has no room for. The files are not to change "
        "until the fit has ended"
    )


class HostBudget:
    """Keeps gradients and the stash within what the host has left beside weights and optimizer state.

    Where there is a folder for it, optimizer state that leaves them no room lives on disk, and gradients that still have none
    wait there for their update, such as all those of the first step. Weights live there by now.

    Args:
        engine: whose they are. As many packs' gradients may wait for their update there as there is room for; where the
            stash of all microbatches leaves none, microbatches run one after the other.
        trainer: of whose optimizers the state comes with their first step.
        policy: says which of them may be updated on devices.
    """

    def __init__(self, engine: Executor, trainer: Any, policy: UpdatePolicy) -> None:
        self._engine, self._trainer, self._policy = engine, trainer, policy
        self._limited_for: tuple[Plan, bool] | None = None
        # The parameters of each, in the order of the forward. Packs of several will need more, as far as there is more.
        module, packs = trainer.lightning_module, engine.plan.packs
        self._layers = [list(module.get_submodule(name).parameters()) for pack in packs for name in pack]

    @property
    def _is_deferred(self) -> bool:
        """Whether no update runs just in time. On nodes, a pack's gradients may wait for those of a slower one."""
        return self._trainer.world_size > 1 or self._policy.choose()[0] == "deferred"

    @property
    def _has_folder(self) -> bool:
        """Whether what has no room may be on disk."""
        return self._engine.updater.streamed.disk.folder is not None

    def refuse_too_little(self, *, runs_alone: bool) -> None:
        """Refuse to train where gradients and optimizer state will not fit, however few gradients wait.

        Args:
            runs_alone: whether the training_step runs as it is, and the update behind it.

        Raises:
            CapacityError: saying how many bytes the host, or the disk, is short.
        """
        is_deferred = runs_alone or self._is_deferred
        updated = (p for one in self._trainer.optimizers for p in parameters_of(one))
        gradients = _gradient_bytes(self._layers, [p for p in updated if p.requires_grad])
        # That few gradients wait would hold up the device: where state may make way, there is room for more.
        self._move_to_disk(waiting_bytes(gradients, is_deferred=is_deferred))
        streamed = self._engine.updater.streamed
        state, room, least = self._state_to_come(), room_on_host(), max(gradients, default=0)
        waiting = least if self._has_folder else bytes_beside_state(gradients, state, is_deferred=is_deferred, ring=1)
        short = state + waiting - room
        if short > 0:
            rest = max(state - sum(self._movable().values()), 0)
            # With a folder, as many weights as that takes are there by now.
            has_choice = streamed.is_on_device and not self._has_folder
            movable = sum(map(num_bytes_of, chain(*_movable_weights(self._layers)))) if has_choice else 0
            would_fit = rest + least <= room + movable
            raise CapacityError(
                f"the host is {format_bytes(short)} short: beside the weights, optimizer state takes "
                f"{format_bytes(state)} and gradients {format_bytes(waiting)}, {format_bytes(room)} are free. "
                + _ways_out(is_deferred, short if would_fit else 0)
            )

    def limit(self) -> None:
        """Before a step, and when it is planned: what gradients and the stash may take, as long as no more is known of that.

        Raises:
            CapacityError: if optimizer state is to make way for them, or gradients are to wait there, and it has no room.
        """
        engine, known = self._engine, (self._engine.plan, self._engine.has_succeeded)
        if self._limited_for == known:
            return
        self._limited_for = known
        if engine.updater.streamed.disk.is_in_use:
            # A checkpoint may have brought some state since.
            engine.updater.postponed.finish()
            engine.updater.streamed.bring_to_disk(self._states())
        if engine.has_succeeded:
            waiting = waiting_bytes(engine.gradient_bytes, is_deferred=self._is_deferred)
            self._move_to_disk(waiting + engine.plan.stash_bytes)
        # The first step's gradients go as its state comes.
        to_come = self._state_to_come() if engine.has_succeeded else 0
        engine.pool.limit = room_on_host() + engine.pool.num_bytes - to_come
        overflow, excess = engine.updater.streamed.disk.overflow, sum(engine.gradient_bytes) - engine.pool.limit
        if overflow is not None and excess > 0 and (self._is_deferred or not engine.has_succeeded):
            overflow.reserve(excess)
        elif overflow is not None:
            overflow.close()
        engine.pool.reserved_bytes = self._least_gradient_bytes() if engine.has_succeeded else 0

    def _move_to_disk(self, other_bytes: int) -> None:
        """Let as much optimizer state live on disk as the host has no room for.

        Args:
            other_bytes: what is to be on the host beside.
        """
        streamed = self._engine.updater.streamed
        excess = self._state_to_come(assumes=True) + other_bytes - room_on_host() - self._engine.pool.num_bytes
        if not self._has_folder or excess <= 0:
            return
        movable = self._movable()
        states = [sum(movable.get(p, 0) for p in layer) for layer in self._layers]
        number = num_on_disk(states, excess + streamed.disk_buffer_bytes)
        chosen = [p for layer in self._layers[len(states) - number :] for p in layer if p in movable]
        if chosen:
            # What lives on the host by now moves.
            self._engine.updater.postponed.finish()
            streamed.move_to_disk({p: movable[p] for p in chosen}, self._states())

    def _states(self) -> dict[nn.Parameter, Any]:
        return {parameter: state for one in self._trainer.optimizers for parameter, state in one.state.items()}

    def _movable(self) -> dict[nn.Parameter, int]:
        """The parameters whose state lives on the host and may live on disk, and what it takes."""
        streamed = self._engine.updater.streamed
        if not streamed.is_on_device:
            return {}
        optimizers = [one for one in self._trainer.optimizers if self._policy.why_whole(one) is None]
        of_layers = {parameter for layer in self._layers for parameter in layer}
        return {
            parameter: num_bytes
            for optimizer in optimizers
            for parameter, num_bytes in bytes_by_parameter(optimizer, self._policy.division).items()
            if parameter in of_layers and num_bytes and not streamed.disk.is_home_of(parameter)
        }

    def check(self) -> None:
        """After a forward, when all of the stash is there: see that the backward will have room for gradients.

        Raises:
            CapacityError: saying how many bytes the host is short.
        """
        pool, needed = self._engine.pool, self._least_gradient_bytes()
        if not pool.has_room(needed):
            raise pool.shortage(needed)

    def _least_gradient_bytes(self) -> int:
        """What a backward cannot do without on the host."""
        gradients = self._engine.gradient_bytes
        if self._has_folder:
            # Others wait there.
            return max(gradients, default=0)
        # Lightning zeroes what parameters still have of the step before.
        kept = self._engine.updater.buffers.kept_bytes
        return max(sum(gradients) - kept, 0) if self._is_deferred else max(gradients, default=0)

    def _state_to_come(self, *, assumes: bool = False) -> int:
        """What optimizer state will take of the host beside what it takes now.

        Args:
            assumes: whether to take it as large as Adam's where that cannot be told before; else as none.
        """
        optimizers, disk = self._trainer.optimizers, self._engine.updater.streamed.disk
        if expected_state_bytes(optimizers, self._policy.division) is None and not assumes:
            return 0
        expected = Counter[nn.Parameter]()
        for optimizer in optimizers:
            expected.update(bytes_by_parameter(optimizer, self._policy.division))
        on_host = sum(num_bytes for parameter, num_bytes in expected.items() if not disk.is_home_of(parameter))
        return max(on_host - state_bytes(optimizers) + disk.used_bytes, 0)


def _ways_out(is_deferred: bool, disk_bytes: int) -> str:
    """What to do about it.

    Args:
        is_deferred: whether all gradients wait for each other.
        disk_bytes: what could live on disk instead; 0 where that would not help.
    """
    on_disk = (
        f"HarmonyStrategy(offload_dir='/a/fast/disk') for {format_bytes(disk_bytes)} of it, " if disk_bytes else ""
    )
    at_once = (
        'leave out what reads all gradients together (gradient_clip_val, update="deferred"), ' if is_deferred else ""
    )
    return (
        f"Add host memory, {on_disk}{at_once}train fewer parameters, choose an optimizer with less state, or "
        'Trainer(precision="bf16-true")'
    )
