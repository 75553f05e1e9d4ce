"""Who looks: hooks that see gradients, and what runs between one update and the next training_step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_harmony.engine.nodes.division import parameters_of
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.updating.reach import functions_of, names_in

# Hooks that see gradients or the optimizer's step: with them, no pack may be updated before the backward has ended.
_MODULE_HOOKS = (
    "configure_gradient_clipping", "clip_gradients", "on_before_optimizer_step", "on_after_backward", "optimizer_step",
    "optimizer_zero_grad", "backward",
)  # fmt: skip
_CALLBACK_HOOKS = ("on_before_optimizer_step", "on_after_backward")
_PLUGIN_HOOKS = (
    "backward", "post_backward", "optimizer_step", "clip_gradients", *compat.PLUGIN_HOOKS,
)  # fmt: skip
_STEPS = ("optimizer_step",)
# Hooks that are given an optimizer, or a scheduler, which has one: they may read its state.
_MODULE_HOOKS_WITH_OPTIMIZER = (
    "on_before_zero_grad", "on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients", "optimizer_step",
    "optimizer_zero_grad", "lr_scheduler_step",
)  # fmt: skip
_CALLBACK_HOOKS_WITH_OPTIMIZER = ("on_before_zero_grad", "on_before_optimizer_step")
# Between a step of the optimizer and the next backward, gradients are still there, unless each pack's went with its update.
_HOOKS_AFTER = ("on_train_batch_end", "on_train_epoch_end", "on_train_batch_start", "on_before_zero_grad")
_GRADIENTS = frozenset({"grad", "grad_norm", "clip_grad_norm_", "clip_grad_value_", "get_total_norm"})
# Hooks between the forward of a batch and its backward. An overridden `backward` may do something before it calls Lightning's.
_HOOKS_BETWEEN_PASSES = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward")


def savers_on_exception(tree: LightningTree, trainer: Any) -> list[str]:
    """Hooks that may save the state while an exception unwinds: it must be of one step, also where the backward raises."""
    named = [
        f"callback {type(callback).__name__} has on_exception"
        for callback in trainer.callbacks
        if tree.overrides(callback, "on_exception")
        and (
            type(callback).__name__ == "OnExceptionCheckpoint"
            or getattr(callback, "save_on_exception", False)
            or not _is_lightnings(tree, callback)
        )
    ]
    return named + _overridden(tree, trainer.datamodule, ("on_exception",))


def _overridden(tree: LightningTree, owner: Any, hooks: Iterable[str]) -> list[str]:
    """Those hooks of a module or of data that are overridden, in words."""
    return [f"{type(owner).__name__}.{hook} is overridden" for hook in hooks if tree.overrides(owner, hook)]


def gradient_readers(tree: LightningTree, trainer: Any) -> list[str]:
    """Hooks that are overridden and see gradients, or may change them."""
    module = trainer.lightning_module
    readers = _overridden(tree, module, _MODULE_HOOKS) + _of_users(tree, trainer.precision_plugin, _PLUGIN_HOOKS)
    readers += [
        f"callback {type(callback).__name__} has {hook}"
        for callback in trainer.callbacks
        for hook in _CALLBACK_HOOKS
        if tree.overrides(callback, hook)
    ]
    return readers + [
        f"{type(owner).__name__}.{hook} {reason}"
        for owner in (module, *trainer.callbacks)
        for hook in _HOOKS_AFTER
        if tree.overrides(owner, hook) and (reason := _why_reader(getattr(owner, hook))) is not None
    ]


def state_readers(tree: LightningTree, trainer: Any) -> list[str]:
    """Hooks that are overridden, and are given an optimizer."""
    found = _of_users(tree, trainer.precision_plugin, _PLUGIN_HOOKS) + _of_users(tree, trainer.strategy, _STEPS)
    found += _overridden(tree, trainer.lightning_module, _MODULE_HOOKS_WITH_OPTIMIZER)
    callbacks = trainer.callbacks
    return found + [each for one in callbacks for each in _overridden(tree, one, _CALLBACK_HOOKS_WITH_OPTIMIZER)]


def _of_users(tree: LightningTree, owner: Any, hooks: Iterable[str]) -> list[str]:
    """Those hooks of a precision plugin, or a strategy, in words, that neither Lightning nor this package has written."""
    kind = type(owner)
    found = ((hook, getattr(kind, hook, None)) for hook in hooks)
    return [
        f"{kind.__name__}.{hook} is overridden"
        for hook, function in found
        if function is not None and not tree.is_known(function)
    ]


def _why_reader(hook: Any) -> str | None:
    """Why a hook may see gradients; None if it does not."""
    functions = list(functions_of(hook))
    if not functions:
        return "is no Python function, so that it may read gradients"
    names_none = all(_GRADIENTS.isdisjoint(names_in(each.__code__)) for each in functions)
    return None if names_none else "reads gradients"


def between_passes(tree: LightningTree, trainer: Any) -> list[str]:
    """Hooks that are overridden and run between the forward of a batch and its backward."""
    owners = (trainer.lightning_module, *trainer.callbacks)
    return [found for owner in owners for found in _overridden(tree, owner, _HOOKS_BETWEEN_PASSES)]


def zeroed_parameters(tree: LightningTree, trainer: Any) -> frozenset[nn.Parameter]:
    """The parameters whose gradients Lightning zeroes between the forward of this batch and its backward."""
    if tree.overrides(trainer.lightning_module, "optimizer_zero_grad") or not compat.is_zeroing(trainer):
        return frozenset()
    return frozenset(each for one in trainer.optimizers if zeroes_as_torch(one) for each in parameters_of(one))


def zeroes_as_torch(optimizer: Optimizer) -> bool:
    """Whether nobody has given an optimizer another `zero_grad`."""
    return "zero_grad" not in vars(optimizer) and type(optimizer).zero_grad is Optimizer.zero_grad


def has_optimizer_after_step(tree: LightningTree, trainer: Any) -> str | None:
    """Code of the user's that is given an optimizer, or what has one, and goes on when that has stepped; None without any."""
    found = _overridden(tree, trainer.lightning_module, ("optimizer_step", "lr_scheduler_step"))
    found += _of_users(tree, trainer.precision_plugin, _STEPS) + _of_users(tree, trainer.strategy, _STEPS)
    return next(iter(found), None)


def _is_lightnings(tree: LightningTree, callback: Any) -> bool:
    """Whether `on_exception` of a callback is Lightning's, or of this package; and nobody has wrapped it."""
    # A proxy or a mock has hooks that its class has not.
    is_wrapped = "on_exception" in getattr(callback, "__dict__", ())
    own = None if is_wrapped else getattr(type(callback), "on_exception", None)
    return tree.is_known(own, "callbacks")


def end_of_batches(trainer: Any) -> str | None:
    """Why no training batch follows this one at once; None if one does."""
    if compat.is_last_batch(trainer):
        return "the epoch ends"
    if compat.validates_by_time(trainer):
        return "validation may follow at any time"
    if compat.validates_next(trainer):
        return "validation follows"
    if trainer.should_stop or (trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps):
        return "the fit ends"
    return None
