"""What stands in a layer's code for a weight that is narrower on the device than the parameter is."""

from __future__ import annotations

from torch import Tensor


class ShownWide:
    """A tensor that looks as the parameter is, and is not: whoever is given it, and is no function of torch, takes `wide`."""

    def wide(self) -> Tensor:
        """The parameter as it is, on the device, differentiable where it needs gradients."""
        raise NotImplementedError
