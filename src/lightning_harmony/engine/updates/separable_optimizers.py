"""Which optimizers update each parameter by itself, so that a step pack by pack is the same step; and such a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_harmony.engine.nodes.division import parameters_of
from lightning_harmony.engine.updates.optimizer_trial import Separability, is_installed, try_out

# Optimizers that update each parameter from its own gradient and state alone, so that a step pack by pack is the same
# step. (LBFGS is not one: it searches along all parameters together.) They are not tried out as others are: implementations
# for GPUs do not run on the CPU, fused ones round the last elements of a range otherwise, and what users put into groups is
# read by none of them.
SEPARABLE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip


# Those that update each element from its own gradient and state alone: a large parameter is updated in ranges.
_ELEMENTWISE = frozenset(kind for kind in SEPARABLE if kind.__name__ not in ("Adafactor", "Muon"))
# Those whose state has no numbers.
_WITHOUT_NUMBERS = frozenset(kind for kind in SEPARABLE if kind.__name__ in ("SGD", "Muon"))
# What torch puts around the step of a class when the first optimizer of it is made.
_TORCHS_OWN = Optimizer.profile_hook_step(lambda: None).__code__


def _steps_of(kind: type[Optimizer]) -> tuple[Any, Any]:
    """The step of a class, without what torch itself puts around it, and how it zeroes gradients."""
    step: Any = kind.step
    if getattr(step, "__code__", None) is _TORCHS_OWN:
        step = step.__wrapped__
    return step, kind.zero_grad


# As torch has them, and libraries, whatever replaces them later.
_GENUINE = {kind: _steps_of(kind) for kind in SEPARABLE}
# Of optimizers of libraries.
_tried: WeakKeyDictionary[Optimizer, Separability] = WeakKeyDictionary()


def _separability(optimizer: Optimizer) -> Separability:
    """What is known of an optimizer that is torch's, and was found of another one."""
    kind = type(optimizer)
    if kind in SEPARABLE:
        return Separability(of_parameters=True, of_elements=kind in _ELEMENTWISE)
    if (found := _tried.get(optimizer)) is None:
        found = Separability(of_parameters=False, of_elements=False)
        if is_installed(kind) and kind.zero_grad is Optimizer.zero_grad:
            _GENUINE.setdefault(kind, _steps_of(kind))
            found = try_out(optimizer, step_unheard)
        _tried[optimizer] = found
    return found


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer that `why_not_separable` finds nothing against updates each element by itself."""
    return _separability(optimizer).of_elements


def why_not_separable(optimizer: Optimizer) -> str | None:
    """The reason why an optimizer can't step pack by pack; None if it can."""
    name = type(optimizer).__name__
    if not _separability(optimizer).of_parameters:
        return f"{name} is not known to update each parameter on its own"
    if _has_other_step(optimizer):
        return f"{name}.step is replaced by a function of its own"
    return None


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step of an optimizer cannot be made without a closure, as none of LBFGS can."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def watcher_of(optimizer: Optimizer) -> str | None:
    """What sees gradients and parameters where an optimizer steps, or instead of being zeroed; None if nothing does."""
    name = type(optimizer).__name__
    if type(optimizer) in _GENUINE and _zeroes_otherwise(optimizer):
        return f"{name}.zero_grad is replaced by a function of its own"
    # One that wraps another may have none of its own.
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        return f"{name} has step hooks"
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "step hooks are registered for all optimizers"
    return None


def step_unheard(optimizer: Optimizer) -> None:
    """Make a step of an optimizer that `why_not_separable` finds nothing against. Its hooks are for who asked for the step."""
    _steps_of(type(optimizer))[0](optimizer)


def reads_default_dtype(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    """Whether the next step of an optimizer is another one while some dtype is the default.

    Args:
        optimizer: one of torch, or any.
        dtype: the default dtype, which is float32 else.
    """
    kind = type(optimizer)
    if kind not in SEPARABLE or kind is torch.optim.ASGD:
        return True
    if dtype is not torch.float64 or kind in _WITHOUT_NUMBERS:
        return False
    # Others make numbers of that type, such as the number of steps, when they make their state.
    return not all(optimizer.state.get(each) for each in parameters_of(optimizer) if each.requires_grad)


def _has_other_step(optimizer: Optimizer) -> bool:
    """Whether an optimizer has another step than torch's: code that replaced it expects one call for each step."""
    own = type(optimizer).step
    if _steps_of(type(optimizer))[0] is not _GENUINE[type(optimizer)][0]:
        return True
    step = vars(optimizer).get("step")
    # What only asks for an update, and then makes it, is ours.
    step = getattr(step, "asks_for", step)
    function = getattr(step, "__func__", step)
    if function is None or function is own:
        return False
    # A scheduler's. Objects that pass on what they are asked for have its mark, too.
    is_schedulers = isinstance(function, FunctionType) and hasattr(function, "_wrapped_by_lr_sched")
    return not (is_schedulers and getattr(function, "__wrapped__", None) is own)


def _zeroes_otherwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer may leave gradients to the next step, which are gone when they are used just in time."""
    zero_grad = vars(optimizer).get("zero_grad", optimizer.zero_grad)
    return getattr(zero_grad, "__func__", None) is not _GENUINE[type(optimizer)][1]


@contextmanager
def only(
    optimizer: Optimizer, groups_of: Mapping[nn.Parameter, int], parameters: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Let an optimizer have only these parameters for a moment, in which nobody else may look at it."""
    groups, chosen = optimizer.param_groups, frozenset(parameters)
    numbers = sorted({groups_of[parameter] for parameter in chosen if parameter in groups_of})
    full = {number: groups[number]["params"] for number in numbers}
    try:
        for number in numbers:
            groups[number]["params"] = [parameter for parameter in full[number] if parameter in chosen]
        optimizer.param_groups = [groups[number] for number in numbers]
        yield
    finally:
        optimizer.param_groups = groups
        for number, members in full.items():
            groups[number]["params"] = members
