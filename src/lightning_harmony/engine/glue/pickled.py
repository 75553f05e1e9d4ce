"""Pickles of parameters that code between layers makes, such as those of a file that a step saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.glue.runtime import Runtime
from lightning_harmony.engine.memory.tensor_class import parameter_like
from lightning_harmony.engine.model.layer import layer_of_caller
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.plan.values.task import Phase


class Pickled(Tensor):
    """What stands in for a parameter, and is pickled as that is."""

    __slots__ = ()
    _parameter: nn.Parameter
    _runtime: Runtime
    _is_detached: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Give a copy in host memory: `torch.save` writes elements when it has seen all tensors, which may need more room."""
        parameter, runtime = self._parameter, self._runtime
        layer = runtime.glue_layer(parameter)
        if layer_of_caller() is not None or parameter in layer.held or is_composed(parameter):
            return super().__reduce_ex__(protocol)
        with (
            runtime.visit(layer, Phase.FORWARD) as residency,
            torch.inference_mode(False),
            torch.no_grad(),
            residency.device.on_host(),
        ):
            value = residency.leaves[parameter].detach().to("cpu", copy=True)
        if self._is_detached:
            return value.__reduce_ex__(protocol)
        return parameter_like(parameter, value).requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        """Give a tensor where the parameter is computed with."""
        function, arguments = super().__reduce_ex__(2)[:2]
        return function(*arguments)
