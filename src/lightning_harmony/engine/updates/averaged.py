"""Gradients that are averaged over nodes, beside the backward, before they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.nodes.averaging import Averaging
from lightning_harmony.engine.nodes.weights import DividedUpdate
from lightning_harmony.engine.updates.gradient_buffers import Contribution, total

# Does something with some parameters, given what packs have contributed to the gradient of each.
Use = Callable[[Sequence[nn.Parameter], Sequence[list[Contribution]]], Any]


class AveragedGradients:
    """The gradients of a step, from the packs that have summed them to their use as means.

    Args:
        averaging: of the step.
        collect: lets parameters have what packs contributed as their ``grad``; None if an update uses it.
        update: of parameters whose gradients are means, and that this node updates, with what packs contributed to these,
            summed up in the first one.
        free: told each contribution that has been added to another one.
    """

    def __init__(
        self, averaging: Averaging, collect: Use | None, update: Use, free: Callable[[Contribution], None]
    ) -> None:
        self._averaging = averaging
        self._collect, self._update, self._free = collect, update, free
        self._sums: dict[nn.Parameter, Contribution] = {}
        averaging.start(self._gradient_of, self._take)

    def add(
        self,
        ready: Sequence[nn.Parameter],
        parts: Sequence[list[Contribution]],
        without: Sequence[nn.Parameter],
        after: Sequence[Event],
    ) -> None:
        """Take what packs have contributed.

        Args:
            ready: the parameters whose gradients are final.
            parts: the contributions to each.
            without: the parameters that have got no gradient.
            after: the events that have to happen before.
        """
        self._averaging.add([*ready, *without], after, lambda: self._sum_up(ready, parts))

    def finish(self) -> DividedUpdate | None:
        """Wait until all gradients are means; raise what failed.

        Returns:
            The update of the parameters that have owners; None if all nodes update all.
        """
        self._averaging.finish()
        division = self._averaging.division
        return DividedUpdate(division, self._averaging.divided) if division.is_divided else None

    def abandon(self) -> None:
        """The step has failed."""
        self._averaging.abandon()

    def _sum_up(self, parameters: Sequence[nn.Parameter], parts: Sequence[list[Contribution]]) -> None:
        if self._collect is not None:
            self._collect(parameters, parts)
            return
        for parameter, contributions in zip(parameters, parts, strict=True):
            summed, _ = total(parameter, contributions, parameter.grad)
            parameter.grad = None
            first, *rest = contributions
            first.gradient = summed
            self._sums[parameter] = first
            for each in rest:
                self._free(each)

    def _gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        summed = self._sums.get(parameter)
        return parameter.grad if summed is None else summed.gradient

    def _take(self, means: Mapping[nn.Parameter, Tensor | None]) -> None:
        sums = {parameter: self._sums.pop(parameter, None) for parameter in means}
        for parameter, mean in means.items():
            contribution = sums[parameter]
            if contribution is None or mean is None:
                parameter.grad = mean
            if contribution is not None and mean is None:
                # Its owner updates it.
                self._free(contribution)
        own = [parameter for parameter, mean in means.items() if mean is not None]
        if self._collect is None and own:
            parts = [sums[parameter] for parameter in own]
            self._update(own, [[] if each is None else [each] for each in parts])
