"""What layers were seen to allocate, and what follows for a pack."""

import torch
from torch import nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.workspace import WorkSpace
from lightning_harmony.engine.model.host_store import ALIGNMENT, HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.plan.values.task import Phase


def layers(number: int) -> list[SwappedLayer]:
    modules = [nn.Linear(4, 4, bias=False) for _ in range(number)]
    return [SwappedLayer(i, f"layer {i}", module, list(module.parameters())) for i, module in enumerate(modules)]


def test_the_most_that_was_seen_counts() -> None:
    one, other = layers(2)
    work = WorkSpace()
    for num_bytes in (5, 9, 7):
        work.note([one], Phase.FORWARD, num_bytes)
    work.note([other], Phase.FORWARD, 6)
    assert work.bytes([one], Phase.FORWARD) == 9
    assert work.bytes([one, other], Phase.FORWARD) == 9
    assert work.bytes([other], Phase.BACKWARD) == 0


def test_graphs_of_all_layers_are_kept_together_where_work_is_done_one_after_the_other() -> None:
    one, other = layers(2)
    work = WorkSpace()
    work.note_graph(one, 5)
    work.note_graph(other, 6)
    assert work.graph_bytes([one, other]) == 11
    work.clear()
    assert work.graph_bytes([one, other]) == 0


def test_a_graph_is_kept_for_each_call_of_a_layer() -> None:
    one, other = layers(2)
    work = WorkSpace()
    work.note_graph(one, 5)
    work.note_graph(other, 6)
    # Two microbatches, of which one calls the first layer twice.
    work.note_calls([0, 1])
    work.note_calls([0, 1, 0])
    assert work.graph_bytes([one, other]) == 2 * 5 + 6
    assert work.graph_bytes([other]) == 6


def test_a_layer_costs_its_weights_as_they_are_swapped_in() -> None:
    (layer,) = layers(1)
    (weight,) = layer.parameters
    device = VirtualDevice(None)
    store = HostStore([weight], device)
    work = WorkSpace()
    work.note([layer], Phase.FORWARD, 5)
    work.note([layer], Phase.BACKWARD, 7)
    work.note_graph(layer, 3)
    cost = work.cost(layer, store)
    assert (cost.weight_bytes, cost.gradient_bytes) == (ALIGNMENT, ALIGNMENT)
    assert (cost.forward_work_bytes, cost.backward_work_bytes, cost.graph_bytes) == (5, 7, 3)
    layer.narrow = {weight: torch.bfloat16}
    # Narrow weights need staging on their way in.
    cost = work.cost(layer, store)
    assert (cost.weight_bytes, cost.staging_bytes) == (ALIGNMENT, weight.numel() * 4)
    device.close()


def test_what_lanes_come_with_is_what_was_there_beside_what_a_step_finds_taken() -> None:
    (layer,) = layers(1)
    store = HostStore(layer.parameters, VirtualDevice(None))
    work = WorkSpace()
    work.note_found([layer], Phase.FORWARD, 10 + 4 * 7, 4)
    # It is called once more, by fewer.
    work.note_found([layer], Phase.FORWARD, 10 + 7, 1)
    work.note_found([layer], Phase.BACKWARD, 10 + 4 * 9, 4)
    work.occupied_bytes = [10]
    cost = work.cost(layer, store)
    assert (cost.arriving_bytes, cost.returning_bytes) == (7, 9)
    # Another device, where a step finds nothing taken.
    work.note_found([layer], Phase.BACKWARD, 60, 1, device=1)
    work.occupied_bytes = [10, 0]
    assert work.cost(layer, store).returning_bytes == 60
    again = WorkSpace()
    again.recall(layer, cost, 1)
    assert again.cost(layer, store) == cost
    again.clear()
    assert again.cost(layer, store).arriving_bytes == 0
