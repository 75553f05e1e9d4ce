"""Parameters come to the host as a move to the device leaves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.fit.move_to_host import move_to_host
from support.same_training import Net, assert_same_training


class QuantizedWhenMoved(nn.Parameter):
    """Is of integers from its first move on, as parameters of bitsandbytes are."""

    codes: Tensor | None

    @staticmethod
    def of(values: Tensor) -> QuantizedWhenMoved:
        parameter: QuantizedWhenMoved = Tensor._make_subclass(QuantizedWhenMoved, values, False)
        parameter.codes = None
        return parameter

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.codes is None:
            self.data = self.codes = (self.data * 64).round().to(torch.int8)
            return self
        return super().to(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWhenMoved:
        assert self.codes is None
        return QuantizedWhenMoved.of(self.detach().clone())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = QuantizedWhenMoved.of(torch.randn(8, 8) / 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.codes is not None
        return self.out(torch.tanh(x @ self.weight.codes.to(x.dtype) / 64))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()  # type: ignore[no-any-return]


def test_parameters_that_quantize_when_they_are_moved_do_so_before_they_are_swapped() -> None:
    assert_same_training(Net(Stack()), torch.randn(24, 8))


def test_parameters_without_a_move_of_their_own_stay_as_they_are() -> None:
    module = Stack()
    plain = {name: (p, p.data_ptr()) for name, p in module.named_parameters() if type(p) is nn.Parameter}
    weights = [layer.weight for layer in module.layers]
    move_to_host(module, torch.device("cpu"))
    after = dict(module.named_parameters())
    assert all(after[name] is p and p.data_ptr() == address for name, (p, address) in plain.items())
    for layer, weight in zip(module.layers, weights, strict=True):
        assert layer.weight is weight
        assert weight.dtype is torch.int8
        assert weight.codes is not None
        assert weight.codes.data_ptr() == weight.data_ptr()
