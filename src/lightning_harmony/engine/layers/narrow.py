"""Narrow weights: which parameters a layer only ever reads through autocast's cast, so that the cast can be swapped in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.operations import is_view, run_as_without_mode
from lightning_harmony.engine.structures.parts import have_composed, is_composed


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to in this thread; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def may_be_narrow(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight could come in a narrower type."""
    is_wider = weight.is_floating_point() and weight.element_size() > dtype.itemsize and weight.numel() > 0
    return is_wider and not is_composed(weight)


class CastWatch(TorchDispatchMode):
    """Watches what a layer's operations do with its weights.

    Below autocast and autograd each use of a weight is an operation on memory of the residency: a cast to the narrow
    type, a view, or anything else, which needs the weight as it is.

    Args:
        residency: the weights.
        dtype: the narrow type.

    Attributes:
        dtype: the narrow type.
    """

    def __init__(self, residency: Residency, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._residency = residency
        self._watched = {parameter for parameter, leaf in residency.leaves.items() if may_be_narrow(leaf, dtype)}
        self._num_casts: Counter[nn.Parameter] = Counter()
        self._used: set[nn.Parameter] = set()

    def narrow(self) -> set[nn.Parameter]:
        """The parameters that were cast, once, and not used in any other way.

        The gradients of two casts are summed after they are widened; those of two uses of a narrow weight would be before.
        """
        return {parameter for parameter, times in self._num_casts.items() if times == 1} - self._used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if have_composed(types):
            # It comes again, with the parts.
            return NotImplemented
        kwargs = kwargs or {}
        result = run_as_without_mode(func, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (parameter := self._parameter(leaf)) is not None:
                self._note(parameter, func, kwargs, result)
        return result

    def _parameter(self, tensor: Tensor) -> nn.Parameter | None:
        parameter = self._residency.parameter_at(tensor) if tensor.layout is torch.strided else None
        return parameter if parameter in self._watched else None

    def _note(self, parameter: nn.Parameter, func: Any, kwargs: Any, result: Any) -> None:
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is self.dtype:
            self._num_casts[parameter] += 1
        elif not (isinstance(result, Tensor) and self._parameter(result) is parameter and is_view(func)):
            self._used.add(parameter)
