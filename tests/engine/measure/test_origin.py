"""What tells apart what is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.origin import kind_of, origin_of
from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.plan.values.record import Origin
from support.composed import Packed, Scaled


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def origin(module: nn.Module, *settings: str) -> Origin:
    layers = [Layer(name, child) for name, child in module.named_children()]
    device = VirtualDevice(None)
    try:
        return origin_of(module, layers, [device], settings)
    finally:
        device.close()


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *layers)


def test_the_same_model_built_anew_has_the_same_origin() -> None:
    assert origin(net(Doubled(4, 4))) == origin(net(Doubled(4, 4)))


def test_weights_do_not_matter_but_shapes_types_code_and_settings_do() -> None:
    layer: Any
    known = origin(net(Doubled(4, 4)), "32-true")
    assert known == origin(net(Doubled(4, 4)), "32-true")
    frozen = Doubled(4, 4).requires_grad_(False)
    for layer in (Doubled(4, 5), Doubled(4, 4, bias=False), Doubled(4, 4).double(), frozen, Tripled(4, 4)):
        assert origin(net(layer), "32-true").model != known.model
    assert origin(net(Doubled(4, 4)), "bf16-mixed").model != known.model


def test_numbers_on_modules_matter_such_as_strides() -> None:
    assert origin(net(nn.Conv2d(3, 3, 3))).model != origin(net(nn.Conv2d(3, 3, 3, stride=2))).model


def test_layers_are_alike_whatever_their_number_and_weights() -> None:
    one, other = Doubled(4, 4), Doubled(4, 4)
    one.number, other.number = 0, 1  # type: ignore[assignment]
    assert kind_of(one) == kind_of(other) != kind_of(Tripled(4, 4))


def test_versions_are_told() -> None:
    assert torch.__version__ in origin(net()).versions


def test_what_composes_weights_matters() -> None:
    layers = [nn.Linear(4, 4).requires_grad_(False) for _ in range(3)]
    for layer, kind in zip(layers[1:], (Packed, Scaled), strict=True):
        layer.weight = nn.Parameter(kind.of(torch.randn(4, 4)), requires_grad=False)
    assert len({kind_of(layer) for layer in layers}) == len(layers)
