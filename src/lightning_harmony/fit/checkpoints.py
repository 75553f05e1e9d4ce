"""Checkpoints: which can be written and read, from what memory, and that each has a whole state."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_harmony.engine.nodes.division import parameters_of
from lightning_harmony.fit import sharded
from lightning_harmony.fit.given import Given

if TYPE_CHECKING:
    from torch.optim import Optimizer


def refuse_directory(path: Any) -> None:
    """Refuse a directory that is no sharded checkpoint, such as DeepSpeed's.

    Raises:
        ValueError: naming the path and the way out.
    """
    if Path(path).is_dir() and not sharded.is_sharded(path):
        raise ValueError(
            f"{path} is a directory, but no sharded checkpoint of strategy='harmony' or of Lightning's FSDPStrategy, which "
            f"has the files .metadata and {sharded.META}. Convert one of DeepSpeed first, with "
            "`lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict`"
        )


def refuse_torn(torn: str | None) -> None:
    """Refuse to make a checkpoint of parameters a part of which a step has updated before it failed.

    Args:
        torn: what left it so; None if the state is that after a step.

    Raises:
        RuntimeError: saying that, and what to do.
    """
    if torn is not None:
        raise RuntimeError(
            f"{torn}, so that the state is of no one step, and no checkpoint is made of it: go on from one that was saved "
            "before. With HarmonyStrategy(update='deferred') parameters are updated when a backward has succeeded; so they "
            "are where a callback saves in on_exception, such as OnExceptionCheckpoint"
        )


class WholeStates(Given):
    """A strategy that completes the last step before it gives a state, and gives none of a step that is not complete.

    Attributes:
        checkpoint_folder: on a disk, where optimizer state may live of which checkpoints are made: local files of Lightning's
            own format, which has the whole of one in memory, go by pieces then; None if all is in memory.
    """

    checkpoint_folder: Path | None = None
    # What has left the state of a failed step as that of no one step: until another fit.
    _torn: str | None = None

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint: of one file, or a sharded one, to which all nodes come."""
        if not self._is_sharded:
            # A file cannot take the place of a folder.
            replaces = self.is_global_zero and sharded.is_sharded(filepath)
            with sharded.aside(Path(filepath)) if replaces else nullcontext():
                if storage_options is None and self._streams(filepath):
                    self._save_file(checkpoint, Path(filepath))
                else:
                    super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "storage_options are of plugins that write checkpoints: state_dict_type='sharded' takes none"
            )
        if "://" in str(filepath):
            raise ValueError(
                f"{filepath}: state_dict_type='sharded' writes to a file system that all machines have mounted"
            )
        assert self.lightning_module is not None
        is_first, path = self.is_global_zero, Path(self.broadcast(filepath))
        values = sharded.take_values(
            checkpoint,
            self.lightning_module,
            self.optimizers,
            is_first=is_first,
            all_agree=self.reduce_boolean_decision,
        )
        with sharded.replacing(path) if is_first else nullcontext(sharded.partial_of(path)) as folder:
            # What is left of a save that did not end is gone then.
            self.barrier()
            sharded.write(values, folder, None if self._division is None else self._division.exchange.host_group)
            if is_first:
                torch.save(checkpoint, folder / sharded.META)

    def _streams(self, path: str | Path) -> bool:
        is_lightnings = type(self.checkpoint_io).__name__ == "TorchCheckpointIO"
        return self.checkpoint_folder is not None and is_lightnings and "://" not in str(path)

    def _save_file(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a checkpoint of one file. One of that name is as it was until the new one is whole."""
        # The first node alone writes, as it does in Lightning's own.
        if not self.is_global_zero:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = sharded.partial_of(path)
        try:
            torch.save(checkpoint, partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @property
    def _is_sharded(self) -> bool:
        """Whether checkpoints are sharded now. While an exception unwinds, no other node comes to write its part."""
        module = self.lightning_module
        is_alone = self.is_distributed and module is not None and module.trainer.interrupted
        return self._settings.state_dict_type == "sharded" and not is_alone

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. Of a sharded one, the state of optimizers is read when it is known which part of it is needed.

        Raises:
            ValueError: if it is a directory of another kind.
        """
        refuse_directory(checkpoint_path)
        is_sharded = sharded.is_sharded(checkpoint_path)
        file = Path(checkpoint_path) / sharded.META if is_sharded else checkpoint_path
        checkpoint: dict[str, Any]
        if self._streams(file) and zipfile.is_zipfile(file):
            # Its tensors take no memory before they are copied to where they live.
            checkpoint = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)
        else:
            checkpoint = super().load_checkpoint(file, weights_only)
        if is_sharded:
            assert self.lightning_module is not None
            shards = sharded.Shards(checkpoint_path)
            checkpoint["state_dict"] = shards.weights(self.lightning_module)
            if states := shards.optimizers():
                checkpoint["optimizer_states"] = states
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state where the parameters are: on the host."""
        # As plain Lightning does: a checkpoint may have states of fewer optimizers, or of none.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(self._own_part(optimizer, state))

    def _own_part(self, optimizer: Optimizer, state: dict[str, Any] | sharded.SavedState) -> dict[str, Any]:
        """What this node keeps of an optimizer's state."""
        parameters, division = parameters_of(optimizer), self._division
        others = {
            number for number, each in enumerate(parameters) if division is not None and not division.is_own(each)
        }
        if isinstance(state, sharded.SavedState):
            return state.read(parameters, others, self.checkpoint_folder)
        if not others:
            return state
        return {**state, "state": {key: value for key, value in state["state"].items() if key not in others}}

    def _finish_update(self) -> None:
        """See to it that all parameters and the optimizer's state are those after the last step."""
        if self._swapped is not None:
            self._swapped.finish_update()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state after the last step, as far as this node writes it. All nodes come here."""
        self._refuse_torn()
        self._finish_update()
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._division is not None and self._division.is_divided and not self._is_sharded:
            states = self._division.states(optimizer, folder=self.checkpoint_folder)
            # In the order of parameters, whichever node has had which.
            state["state"] = {number: found for number, (_, found) in enumerate(states) if found}
        return state

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state after the last step; it is whole between steps only.

        Raises:
            RuntimeError: in the middle of a step, or after one that failed when a part of its updates had been made.
        """
        if self._swapped is not None and self._swapped.engine.step.is_driven:
            raise RuntimeError(
                "the state of the module was asked for in the middle of a step, in which layers are swapped and updated: "
                "save checkpoints in a hook such as on_train_batch_end, not in the step"
            )
        self._refuse_torn()
        self._finish_update()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def _refuse_torn(self) -> None:
        refuse_torn(self._torn if self._swapped is None else self._swapped.engine.updater.torn)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Lose no update that was asked for."""
        if self._swapped is not None:
            self._swapped.engine.updater.postponed.drain()
        super().on_exception(exception)
