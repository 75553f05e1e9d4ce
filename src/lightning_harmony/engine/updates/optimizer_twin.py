"""Parts of an optimizer that step by themselves: the user's own optimizer code, on some parameters, wherever these are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Changes the gradients of some parameters in place, whichever they are.
Clip = Callable[[list[nn.Parameter]], None]
# The optimizer's state of some parameters.
States = Mapping[nn.Parameter, dict[str, Any]]


def by_norm(max_norm: float, total_norm: Tensor, devices: Iterable[torch.device] = ()) -> Clip | None:
    """What `torch.nn.utils.clip_grad_norm_` does to gradients once it knows their norm; None where that changes nothing.

    Args:
        max_norm: of all gradients together.
        total_norm: theirs.
        devices: where they are clipped.
    """
    if max_norm / (total_norm + 1e-6) >= 1.0:
        # Every gradient times one: not to read and write them all for that.
        return None
    # Where it is needed: to copy it later, from device to device, these would wait for each other.
    there = {device: total_norm.to(device) for device in devices}

    def clip(parameters: list[nn.Parameter]) -> None:
        where = next((parameter.grad.device for parameter in parameters if parameter.grad is not None), None)
        total = total_norm if where is None else there.get(where, total_norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)

    return clip


def by_value(limit: float) -> Clip:
    """What `torch.nn.utils.clip_grad_value_` does to gradients."""
    return partial(torch.nn.utils.clip_grad_value_, clip_value=limit)


class Share:
    """Some parameters of an optimizer, which are updated by themselves.

    It takes what it needs when it is made: the gradients, if they are there, and the hyperparameters that a scheduler may
    change at once. The optimizer itself stays untouched, all but the tensors of its state.

    Args:
        optimizer: one that `why_not_separable` finds nothing against.
        groups: the parameters, with the number of the group that each is in.
        surroundings: makes the context in which an optimizer steps them: a manual training_step asks for that within autocast.

    Attributes:
        optimizer: whose.
        surroundings: the same.
        gradients: of the parameters that have one, wherever it is: nobody else takes these away.
        masters: parameters that are on a device already, as they are on the host.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Mapping[nn.Parameter, int],
        surroundings: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.optimizer, self.surroundings = optimizer, surroundings
        self.gradients: dict[nn.Parameter, Tensor] = {p: p.grad for p in groups if p.grad is not None}
        self.masters: dict[nn.Parameter, Tensor] = {}
        self._stand_ins = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in groups}
        self._twin = twin_of(optimizer, groups, self._stand_ins)
        self._groups = {parameter: optimizer.param_groups[number] for parameter, number in groups.items()}

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """What is updated, where it has a gradient."""
        return self._stand_ins.keys()

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of a parameter: what changes in it has changed for the optimizer."""
        state: dict[str, Any] = self._twin.state[self._stand_ins[parameter]]
        return state

    def group_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """The hyperparameters of a parameter, of which those that choose an implementation are as they were."""
        return self._groups[parameter]

    def elsewhere(
        self, tensors: Mapping[nn.Parameter, Tensor], gradients: Mapping[nn.Parameter, Tensor], states: States
    ) -> Optimizer:
        """An optimizer that makes the same step of some of the parameters where these tensors are.

        Args:
            tensors: where each parameter is that is stepped, or a part of it.
            gradients: theirs, and maybe others.
            states: of each parameter, the optimizer's state, and maybe of others. It is changed in place.
        """
        stand_ins = {self._stand_ins[p]: tensor for p, tensor in tensors.items()}
        # As it was when the update was asked for: a step may say otherwise for a while.
        there = {stand_in: nn.Parameter(tensor, stand_in.requires_grad) for stand_in, tensor in stand_ins.items()}
        numbers = {
            p: number for number, group in enumerate(self._twin.param_groups) for p in group["params"] if p in there
        }
        twin = twin_of(self._twin, numbers, there)
        for parameter in tensors:
            placed = there[self._stand_ins[parameter]]
            placed.grad = gradients.get(parameter)
            twin.state[placed] = states[parameter]
        return twin

    def keep_states(self) -> None:
        """Let the optimizer have the state that steps have made."""
        for parameter, stand_in in self._stand_ins.items():
            if self._twin.state.get(stand_in):
                self.optimizer.state[parameter] = self._twin.state[stand_in]


def twin_of(
    optimizer: Optimizer, groups: Mapping[nn.Parameter, int], stand_ins: Mapping[nn.Parameter, nn.Parameter]
) -> Optimizer:
    """An optimizer for some parameters, by the groups that they are in, with hyperparameters of its own."""
    chosen: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter, number in groups.items():
        chosen[number].append(stand_ins[parameter])
    twin: Optimizer = object.__new__(type(optimizer))
    # Without the `step` that a scheduler puts on the optimizer to see whether it is called.
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    twin.state = defaultdict(dict)
    twin.state.update({stand_in: optimizer.state[p] for p, stand_in in stand_ins.items() if p in optimizer.state})
    twin.param_groups = [
        {name: _kept(value) for name, value in optimizer.param_groups[number].items()}
        | _implementation(optimizer.param_groups[number])
        | {"params": members}
        for number, members in sorted(chosen.items())
    ]
    return twin


def _kept(value: Any) -> Any:
    """A hyperparameter as it is now: a scheduler writes into one that is a tensor."""
    return value.clone() if isinstance(value, Tensor) else value


def _implementation(group: Mapping[str, Any]) -> dict[str, Any]:
    """What torch chooses for all of a group because of some of its parameters: an implementation for one tensor at a time."""
    is_open = group.get("foreach", False) is None and group.get("fused") is None
    kinds = {type(parameter) for parameter in group["params"]}
    return {"foreach": False} if is_open and not kinds <= {Tensor, nn.Parameter} else {}
