"""Which weights may be narrow: those that autocast alone reads, through one cast."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.layers.narrow import CastWatch, autocast_dtype
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from support.queues import postponed_update

CPU = torch.device("cpu")
Use = Callable[[Tensor, Tensor], Tensor]
USES: dict[str, tuple[Use, bool]] = {
    "linear": (lambda w, x: F.linear(x, w), True),
    "transposed": (lambda w, x: x @ w.t(), True),
    "a part": (lambda w, x: F.linear(x[:, :2], w[:, :2]), True),
    "cast by hand": (lambda w, x: w.to(torch.bfloat16).sum(), True),
    "added": (lambda w, x: x + w, False),
    "normalized": (lambda w, x: F.layer_norm(x, (4,), w[0]), False),
    "cast and added": (lambda w, x: F.linear(x, w) + w, False),
    "cast twice": (lambda w, x: F.linear(F.linear(x, w), w), False),
    "cast to another type": (lambda w, x: w.to(torch.float16).sum(), False),
    "written": (lambda w, x: w.detach().mul_(1.0), False),
    "not used": (lambda w, x: x, False),
}


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other, self.weight = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4, 4))


def packed(module: Module, dtype: torch.dtype | None = None) -> tuple[SwappedPack, Swapper, VirtualDevice]:
    device = VirtualDevice(None)
    layer = SwappedLayer(0, "layer", module, list(module.parameters()), dtype)
    store = HostStore(list(module.parameters()), device)
    update = postponed_update(device)
    swapper = Swapper(device, store, HostPool(device.host_buffer), Traffic(), update)
    return SwappedPack(0, [layer], store), swapper, device


@pytest.mark.parametrize("use", USES)
def test_a_weight_is_narrow_if_one_cast_is_all_that_reads_it(use: str) -> None:
    module = Module()
    pack, swapper, device = packed(module)
    swapper.swap_in(pack)
    assert pack.residency is not None
    pack.residency.ready.wait()
    weight = pack.residency.leaves[module.weight]
    function, expected = USES[use]
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        watch = CastWatch(pack.residency, torch.bfloat16)
        with watch:
            function(weight, torch.randn(4, 4))
    assert watch.narrow() == ({module.weight} if expected else set())
    device.close()


def test_a_narrow_weight_arrives_cast_and_takes_less_room() -> None:
    module = Module()
    pack, swapper, device = packed(module)
    pack.layers[0].narrow = {module.weight: torch.bfloat16}
    pack.is_narrow = True
    swapper.swap_in(pack)
    assert pack.residency is not None
    pack.residency.ready.wait()
    leaves = pack.residency.leaves
    assert leaves[module.weight].dtype is torch.bfloat16
    assert torch.equal(leaves[module.weight], module.weight.to(torch.bfloat16))
    assert torch.equal(leaves[module.other], module.other)
    assert pack.layout.casts == [module.weight]
    device.close()


def test_a_weight_comes_in_pieces_through_the_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_harmony.engine.model.pack.STAGING_BYTES", 20)
    test_a_narrow_weight_arrives_cast_and_takes_less_room()


def test_a_weight_that_a_layer_of_the_pack_reads_as_it_is_stays_wide() -> None:
    module = Module()
    pack, _, device = packed(module)
    sharing = SwappedLayer(1, "sharing", module, [module.weight])
    pack = SwappedPack(0, [*pack.layers, sharing], pack._store)
    pack.layers[0].narrow = {module.weight: torch.bfloat16}
    assert pack.narrow_parameters() == {}
    sharing.narrow = {module.weight: torch.bfloat16}
    assert pack.narrow_parameters() == {module.weight: torch.bfloat16}
    device.close()


def test_with_a_type_to_compute_in_all_floating_weights_are_narrow_at_all_times() -> None:
    module = Module()
    module.counts = nn.Parameter(torch.arange(3), requires_grad=False)
    module.sixteen = nn.Parameter(torch.randn(3, dtype=torch.float16))
    pack, swapper, device = packed(module, torch.bfloat16)
    swapper.swap_in(pack)
    assert pack.residency is not None
    pack.residency.ready.wait()
    for parameter, leaf in pack.residency.leaves.items():
        narrowed = parameter in {module.weight, module.other}
        assert leaf.dtype is (torch.bfloat16 if narrowed else parameter.dtype)
        assert torch.equal(leaf, parameter.to(leaf.dtype))
    # Gradients arrive narrow, and are summed in the type of the master.
    sums = Sums(device, HostPool(device.host_buffer), Traffic(), lambda parameter: False, lambda layer, parameter: True)
    for gradient in (torch.ones(4, 4), torch.full((4, 4), 2**-10)):
        sums.accumulate(pack, pack.layers[0], 0, [(module.weight, gradient.bfloat16())], add_to_earlier=False)
    (gradients,) = sums.swap_out(pack)
    gradients.event.synchronize()
    assert torch.equal(gradients.sums[pack.layers[0], module.weight], torch.full((4, 4), 1 + 2**-10))
    device.close()


def test_autocast_tells_its_type() -> None:
    assert autocast_dtype(CPU) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_dtype(CPU) is torch.bfloat16
