"""Which checkpoints can be written and read: Lightning's own, of one file."""

from pathlib import Path
from typing import Any

_SHARDED = ("XLACheckpointIO", "DistributedCheckpointIO")


def refuse_sharded(plugin: Any) -> None:
    """Refuse plugins that write one part of the state for each of several processes.

    Raises:
        ValueError: naming the plugin and the way out.
    """
    while plugin is not None:
        if any(base.__name__ in _SHARDED for base in type(plugin).__mro__):
            raise ValueError(
                f"{type(plugin).__name__} writes a part of the state for each of several processes, but "
                "strategy='harmony' is one process with all of it: leave it out of Trainer(plugins=...), or use "
                "TorchCheckpointIO or AsyncCheckpointIO"
            )
        # What a plugin such as AsyncCheckpointIO wraps.
        plugin = getattr(plugin, "checkpoint_io", None)


def refuse_directory(path: Any) -> None:
    """Refuse a directory of shards, as FSDP and DeepSpeed write it.

    Raises:
        ValueError: naming the path and the way out.
    """
    if Path(path).is_dir():
        raise ValueError(
            f"{path} is a directory, as distributed checkpoints are; strategy='harmony' reads those of one file: convert it "
            "first, with `python -m lightning.pytorch.utilities.consolidate_checkpoint` (FSDP) or "
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
