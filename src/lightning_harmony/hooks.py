"""Who looks: hooks that see gradients, and what runs between one update and the next training_step."""

from __future__ import annotations

from typing import Any

from lightning_harmony.lightning_tree import LightningTree

# Hooks that see gradients or the optimizer's step: with them, no pack may be updated before the backward has ended.
_MODULE_HOOKS = (
    "configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward", "optimizer_step",
    "optimizer_zero_grad", "backward",
)  # fmt: skip
_CALLBACK_HOOKS = ("on_before_optimizer_step", "on_after_backward")
# Hooks between a step of the optimizer and the next training_step: what overrides them may look at parameters, so that a
# deferred update must be over before. `optimizer_step` goes on after it has called the optimizer.
_DATA_HOOKS_BETWEEN = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_MODULE_HOOKS_BETWEEN = (
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start", *_DATA_HOOKS_BETWEEN,
)  # fmt: skip
_CALLBACK_HOOKS_BETWEEN = ("on_train_batch_end", "on_train_batch_start", "on_exception")
# Lightning's own callbacks that look at none in these, or only through the strategy when they save.
_BLIND_CALLBACKS = frozenset({
    "ProgressBar", "TQDMProgressBar", "RichProgressBar", "LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor",
    "ModelCheckpoint", "OnExceptionCheckpoint",
})  # fmt: skip


def gradient_readers(tree: LightningTree, trainer: Any) -> list[str]:
    """Hooks that are overridden and see gradients, or may change them."""
    module = trainer.lightning_module
    own = [f"{type(module).__name__}.{hook} is overridden" for hook in _MODULE_HOOKS if tree.overrides(module, hook)]
    return own + [
        f"callback {type(callback).__name__} has {hook}"
        for callback in trainer.callbacks
        for hook in _CALLBACK_HOOKS
        if tree.overrides(callback, hook)
    ]


def onlooker(tree: LightningTree, trainer: Any) -> str | None:
    """Code of the user's, or of a callback, that runs between two training batches; None if there is none."""
    for owner, hooks in (
        (trainer.lightning_module, _MODULE_HOOKS_BETWEEN),
        (trainer.datamodule, (*_DATA_HOOKS_BETWEEN, "on_exception")),
    ):
        for hook in hooks:
            if tree.overrides(owner, hook):
                return f"{type(owner).__name__}.{hook} is overridden"
    for callback in trainer.callbacks:
        for hook in _CALLBACK_HOOKS_BETWEEN:
            if tree.overrides(callback, hook) and not _is_blind(tree, callback, hook):
                return f"callback {type(callback).__name__} has {hook}"
    return None


def _is_blind(tree: LightningTree, callback: Any, hook: str) -> bool:
    """Whether a hook is one of Lightning's, or that of `HarmonyMonitor`, which reads reports; and nobody has wrapped it."""
    kind = type(callback)
    if hook in vars(callback):
        return False
    if kind.__name__ in _BLIND_CALLBACKS and kind.__module__.startswith(f"{tree.name}.callbacks."):
        return True
    return getattr(getattr(kind, hook), "__module__", None) == "lightning_harmony.monitor"


def end_of_batches(trainer: Any) -> str | None:
    """Why no training batch follows this one at once; None if one does."""
    loop = trainer.fit_loop
    if loop.epoch_loop._num_ready_batches_reached():
        return "the epoch ends"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return "validation may follow at any time"
    if loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
        return "validation follows"
    if trainer.should_stop or (trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps):
        return "the fit ends"
    return None
