"""The uses of a layer's inputs: each has a gradient of its own, and who sums them does so in the order of plain training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_harmony.engine.layers.handed_on import handing_on
from lightning_harmony.engine.structures.operations import detached
from lightning_harmony.engine.structures.tree import tensors_of


class Use(NamedTuple):
    """One use of an input.

    Attributes:
        number: of the input.
        tensor: what is used: a leaf with the input's memory.
    """

    number: int
    tensor: Tensor


class InputUses(TorchFunctionMode):
    """Gives each operation of a layer leaves of its own in the places of inputs.

    Autograd adds the gradients of a tensor's uses one by one, the last use first, and those of uses behind the layer before
    all of these. A sum of the layer's own uses that is made apart would round at other places.

    Args:
        inputs: those that need gradients, each with its number.
    """

    def __init__(self, inputs: Sequence[tuple[int, Tensor]]) -> None:
        super().__init__()
        self._inputs = {id(tensor): (number, tensor) for number, tensor in inputs}
        self._of_operations: list[list[Use]] = []

    @property
    def in_order(self) -> list[Use]:
        """The uses in the order in which a backward comes to them: those of one operation in that of its operands."""
        return [use for uses in reversed(self._of_operations) for use in uses]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation with leaves of its own."""
        kwargs = kwargs or {}
        if not any(id(tensor) in self._inputs for tensor in tensors_of(*args, *kwargs.values())):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            # What a tensor is, such as its shape; `mT` and the like are uses.
            found = func(*args, **kwargs)
            if not (isinstance(found, Tensor) and found.requires_grad):
                return found
        handing = handing_on(func)
        if handing is not None:
            with self:
                return handing(*args, **kwargs)
        uses: list[Use] = []

        def own(tensor: Tensor) -> Tensor:
            known = self._inputs.get(id(tensor))
            if known is None:
                return tensor
            uses.append(Use(known[0], detached(tensor).requires_grad_()))
            return uses[-1].tensor

        args, kwargs = tree_map_only(Tensor, own, (args, kwargs))
        result = func(*args, **kwargs)
        for place, use in enumerate(uses):
            if use.tensor is result:
                # What returns its operand as it is, such as `to`, is no use of it.
                del uses[place]
                result = next(tensor for number, tensor in self._inputs.values() if number == use.number)
                break
        self._of_operations.append(uses)
        return result
