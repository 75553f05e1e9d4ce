"""Merging what `self.log` is told by microbatches into what one step over the whole batch would have logged.

By itself, Lightning would keep the last microbatch's value as the step's, and weigh every microbatch's by the size of the
whole batch in the epoch's. So the calls are held back while the microbatches run, and then made once each. A step that
is undone has not logged: other nodes, to which `sync_dist=True` sends values, need not undo theirs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torchmetrics.aggregation import MaxMetric, MinMetric, SumMetric

from lightning_harmony.engine.structures.containers import attribute_replaced
from lightning_harmony.setup import compat

_Merge = Callable[[list[Tensor], list[Any]], Tensor]


@contextmanager
def unheard(trainer: Any) -> Iterator[Sequence[str]]:
    """The context in which a layer's code runs again: what it logs has been logged, by whatever way it came to `log`.

    Yields the names of what it logs.

    All ways end at Lightning's result collection, which hears nothing of this thread. On their way they find the name of the
    hook that ran when the code ran first: another one would begin the values of an epoch anew.

    Args:
        trainer: of the module.
    """
    results, module = compat.logged_results(trainer), trainer.lightning_module
    logged: list[str] = []
    if results is None:
        yield logged
        return
    heard, thread = results.log, threading.get_ident()

    def log(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            logged.append(name)
        else:
            heard(fx, name, *args, **kwargs)

    hook = compat.running_hook(module)
    with attribute_replaced(results, "log", log):
        if hook in (None, "backward"):
            compat.set_running_hook(module, "training_step")
        try:
            yield logged
        finally:
            compat.set_running_hook(module, hook)


@dataclass(frozen=True)
class _Call:
    """One call of `results.log`.

    Attributes:
        value: A tensor, or a torchmetrics object that was logged itself.
        step_value: What the value is on this microbatch; None for a metric that has no such value.
        batch_size: As given by the user, who may leave it out.
        weight: How much the value counts among those of the other microbatches.
        options: All other keyword arguments.
    """

    microbatch: int
    fx: str
    name: str
    value: Any
    step_value: Any
    batch_size: Any
    weight: Any
    options: dict[str, Any]


class MicrobatchLogs:
    """Holds back what microbatches log, and logs it merged when all have run.

    Entering replaces the method `log` of Lightning's result collection, on that instance. Leaving puts it back and logs
    each key once, in the order in which the first microbatch logged them; a key that a step logs twice, twice. After an
    exception nothing is logged. Calls of different microbatches may interleave, but not overlap: one thread at a time.
    Code of a microbatch that reads metrics, as from `trainer.callback_metrics`, finds what it has logged itself.

    Means are weighted by `batch_size` where it is given and else by the microbatch's size. A torchmetrics object keeps
    its state, which has seen every microbatch; only its value for the step is merged.

    The values are read on the current stream when the block is left without an error: that stream must wait before for
    those that the microbatches ran on.

    Attributes:
        microbatch: Which microbatch the running code belongs to. Set it whenever that changes.
    """

    def __init__(self, results: Any, sizes: Sequence[int]) -> None:
        """Prepare for one step.

        Args:
            results: Lightning's collection; None where Lightning refuses to log anyway, as in `predict_step`.
            sizes: The number of samples in each microbatch.
        """
        self.microbatch = 0
        self._results = results
        self._sizes = sizes
        self._calls: list[_Call] = []

    def __enter__(self) -> MicrobatchLogs:
        if self._results is not None:
            self._results.log, self._results.metrics = self._hold_back, self._metrics
            self._is_filled = compat.fill_if_empty(self._results)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._results is None:
            return
        del self._results.log, self._results.metrics
        if self._is_filled:
            self._results.clear()
        if kind is None:
            for calls in _corresponding(self._calls):
                self._replay(calls)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _hold_back(self, fx: str, name: str, value: Any, *, batch_size: Any = None, **options: Any) -> None:
        # A metric's value for the step is overwritten by the next microbatch, so it is read now.
        step_value = value if isinstance(value, Tensor) else compat.step_value(value)
        call = _Call(
            microbatch=self.microbatch,
            fx=fx,
            name=name,
            value=_detached(value),
            step_value=_detached(step_value),
            batch_size=batch_size,
            weight=self._sizes[self.microbatch] if batch_size is None else batch_size,
            options=options,
        )
        self._calls.append(call)

    def _metrics(self, on_step: bool) -> Any:
        """Return the metrics as Lightning does, with those that the running microbatch has logged in this step."""
        kind = type(self._results)
        own = kind(self._results.training)
        for call in self._calls:
            if call.microbatch == self.microbatch and isinstance(call.step_value, Tensor):
                own.log(call.fx, call.name, call.step_value, batch_size=call.weight, **call.options)
        metrics = kind.metrics(self._results, on_step)
        for values, logged in zip(metrics.values(), own.metrics(on_step).values(), strict=True):
            values.update(logged)
        return metrics

    def _replay(self, calls: list[_Call]) -> None:
        """Log corresponding calls of different microbatches as one, or as they are if they cannot be one."""
        merge = _merge_of(calls)
        if merge is None:
            # Lightning knows what is wrong with them and says so.
            for call in calls:
                self._results.log(call.fx, call.name, call.value, batch_size=call.batch_size, **call.options)
            return
        first = calls[0]
        step_value = _merged(calls, merge)
        if isinstance(first.value, Tensor):
            value = step_value
        else:
            value = first.value
            compat.set_step_value(value, step_value)
        self._results.log(first.fx, first.name, value, batch_size=self._batch_size(calls), **first.options)

    def _batch_size(self, calls: list[_Call]) -> Any:
        """Return the batch size that the step over the whole batch would have logged with."""
        if all(call.batch_size is None for call in calls):
            # The whole batch's, also when only some microbatches logged. Of one that is not split, Lightning knows it.
            return sum(self._sizes) if len(self._sizes) > 1 else None
        return sum(_on_one_device([call.weight for call in calls]))


def _corresponding(calls: Iterable[_Call]) -> list[list[_Call]]:
    """Group the calls that are one call of the step over the whole batch: equally often repeated calls for a key.

    A key that is logged twice in a step counts twice in the epoch's value, and its last value is the step's. Merging
    first calls with first calls and second with second keeps both.
    """
    groups: dict[tuple[str, str, int], list[_Call]] = {}
    repeats: Counter[tuple[int, str, str]] = Counter()
    # The sort is stable, so the calls of one microbatch stay in order.
    for call in sorted(calls, key=lambda call: call.microbatch):
        repeat = repeats[call.microbatch, call.fx, call.name]
        repeats[call.microbatch, call.fx, call.name] += 1
        groups.setdefault((call.fx, call.name, repeat), []).append(call)
    return list(groups.values())


def _merge_of(calls: list[_Call]) -> _Merge | None:
    """Return how to merge corresponding calls, None if Lightning would refuse them."""
    first = calls[0]
    if any(call.options != first.options for call in calls):
        return None
    if not isinstance(first.value, Tensor):
        return _merge_of_metric(first.value)
    reduce_fx = first.options.get("reduce_fx", "mean")
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    return _MERGES.get(name.lower())


def _merge_of_metric(metric: Any) -> _Merge:
    """Return how to merge a metric's values for the step. Most are means over samples, or close to it."""
    if isinstance(metric, SumMetric):
        return _sum
    if isinstance(metric, MaxMetric):
        return _max
    return _min if isinstance(metric, MinMetric) else _weighted_mean


def _merged(calls: list[_Call], merge: _Merge) -> Any:
    """Merge the calls' values for the step, as far as they can be."""
    known = [call for call in calls if call.step_value is not None]
    if not known:
        return None
    values = [call.step_value for call in known]
    # Only a metric can have values of other types or of unequal shapes, none of which Lightning can log.
    alike = all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values)
    if len(known) == 1 or not alike:
        return values[-1]
    return merge(_on_one_device(values), _on_one_device([call.weight for call in known]))


def _weighted_mean(values: list[Tensor], weights: list[Any]) -> Tensor:
    # A batch size of 0 often comes with a value of 0/0, which has no part in the mean. A batch size that is a tensor is
    # not looked into: that would wait for the device.
    pairs = [
        (value, weight) for value, weight in zip(values, weights, strict=True) if isinstance(weight, Tensor) or weight
    ]
    if not pairs:
        pairs = [(value, 1) for value in values]
    total = sum(weight for _, weight in pairs)
    return torch.stack([_wide(value) * weight for value, weight in pairs]).sum(0) / total


def _sum(values: list[Tensor], _: list[Any]) -> Tensor:
    return torch.stack([_wide(value) for value in values]).sum(0)


def _max(values: list[Tensor], _: list[Any]) -> Tensor:
    return torch.stack(values).amax(0)


def _min(values: list[Tensor], _: list[Any]) -> Tensor:
    return torch.stack(values).amin(0)


_MERGES: dict[str, _Merge] = {"mean": _weighted_mean, "avg": _weighted_mean, "sum": _sum, "max": _max, "min": _min}


def _wide(value: Tensor) -> Tensor:
    """Convert to a type in which sums neither overflow nor lose what Lightning, which sums in float32, would keep."""
    if not value.is_floating_point():
        return value.long()
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _on_one_device(values: list[Any]) -> list[Any]:
    """Move the tensors among the values to the device of the first: microbatches may have run on different ones."""
    devices = [value.device for value in values if isinstance(value, Tensor)]
    return [value.to(devices[0]) if isinstance(value, Tensor) else value for value in values]
