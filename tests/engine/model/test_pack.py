"""Packs on a device."""

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.model.host_store import lay_out, views_in
from lightning_harmony.engine.model.pack import Residency
from support.composed import Lookup


def residency_of(*tensors: Tensor) -> tuple[Residency, list[nn.Parameter]]:
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    slots, num_bytes = lay_out(parameters)
    weights = torch.zeros(num_bytes, dtype=torch.uint8)
    leaves = {
        parameter: nn.Parameter(view)
        for parameter, view in views_in(weights, dict(zip(parameters, slots, strict=True))).items()
    }
    device = VirtualDevice(None)
    device.close()
    return Residency(device, weights, Happened(), leaves, {}), parameters


def test_a_view_of_a_weight_is_found_wherever_it_begins_in_it() -> None:
    residency, (first, second) = residency_of(torch.randn(4, 6), torch.randn(5, dtype=torch.float64))
    leaf = residency.leaves[first].detach()
    for view in (leaf, leaf.t(), leaf[1:], leaf[3, 5], leaf.view(torch.int32)):
        assert residency.parameter_at(view) is first
    assert residency.parameter_at(residency.leaves[second].detach()[4:]) is second


def test_a_tensor_elsewhere_or_behind_a_weight_is_no_view_of_it() -> None:
    residency, (first,) = residency_of(torch.randn(4, 6))
    assert residency.parameter_at(first) is None
    assert residency.parameter_at(residency.weights[96:]) is None
    assert residency.parameter_at(residency.weights[95:]) is first


def test_a_weight_that_is_composed_of_others_is_not_found_by_its_parts() -> None:
    composed = Lookup.of(torch.randn(8, 8))
    residency, (plain,) = residency_of(torch.randn(4))
    residency.leaves[nn.Parameter(composed, requires_grad=False)] = nn.Parameter(composed, requires_grad=False)
    assert residency.parameter_at(composed.codes) is None
    assert residency.parameter_at(residency.leaves[plain]) is plain
