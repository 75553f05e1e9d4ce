"""What a layer computes, counted in operations, and how long a machine takes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.line import on_line
from lightning_harmony.plan.values.machine import Machine


@dataclass(frozen=True)
class Work:
    """Operations of one microbatch.

    Attributes:
        flops: of matrix products, convolutions and attention, by the type of their operands.
        moved_bytes: what all other operations read and write.
        num_operations: how many operations that is in all.
    """

    flops: Mapping[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    num_operations: int = 0

    def __add__(self, other: Work) -> Work:
        names = dict.fromkeys([*self.flops, *other.flops])
        flops = {name: self.flops.get(name, 0) + other.flops.get(name, 0) for name in names}
        return Work(flops, self.moved_bytes + other.moved_bytes, self.num_operations + other.num_operations)

    def device_seconds(self, machine: Machine) -> float:
        """How long the device computes."""
        products = sum(flops / machine.flops_per_second_of(dtype) for dtype, flops in self.flops.items())
        return products + self.moved_bytes / machine.memory_bytes_per_second

    def host_seconds(self, machine: Machine) -> float:
        """How long the host is busy having the device compute."""
        return self.num_operations * machine.operation_seconds


@dataclass(frozen=True)
class Held:
    """Bytes that one microbatch holds on the device around one layer, beside weights and gradients.

    Attributes:
        forward_bytes: most while the layer's forward runs.
        backward_bytes: most while its backward runs.
        waiting_bytes: while the microbatch waits for its turn in the layer.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    waiting_bytes: int = 0


@dataclass(frozen=True)
class LayerProfile:
    """What one layer takes and does for one microbatch, the code behind it included.

    Attributes:
        cost: its bytes on the device.
        first_cost: the same in a first step, which measures, with all weights as they are.
        swapped_bytes: what crosses the bus to bring it.
        trained_bytes: its parameters that an optimizer updates.
        num_trained: how many numbers those are.
        held: what a microbatch holds on the device.
        first_held: the same in a first step.
        input_bytes: what a call is made with, as far as it goes to the stash.
        stash_bytes: what goes to the stash.
        num_calls: how often a step calls it.
        forward: what its forward computes.
        backward: what its backward computes, with the recompute.
        recompute: what the recompute alone computes.
    """

    cost: Cost
    first_cost: Cost
    swapped_bytes: int
    trained_bytes: int
    num_trained: int
    held: Held
    first_held: Held
    input_bytes: int
    stash_bytes: int
    num_calls: int
    forward: Work
    backward: Work
    recompute: Work


@dataclass(frozen=True)
class StepProfile:
    """A step of one microbatch.

    Attributes:
        layers: in the order of the module tree.
        calls: the order in which the forward calls them, as indices into ``layers``.
        weight_bytes: all parameters, as the host store holds them.
        num_parameters: how many numbers those are.
        buffer_bytes: buffers that no layer owns, which stay on the device.
        microbatch_bytes: the microbatch itself.
        start_bytes: most that the code before the first layer allocates.
        loss_bytes: most that the microbatch has on the device in the backward of its loss, up to the last layer's.
    """

    layers: tuple[LayerProfile, ...]
    calls: tuple[int, ...]
    weight_bytes: int
    num_parameters: int
    buffer_bytes: int
    microbatch_bytes: int
    start_bytes: int
    loss_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What a microbatch has on the device at the end of its forward if all its layers keep what their backwards need."""
        return sum(self.layers[call].held.backward_bytes for call in self.calls) + self.loss_bytes


def between(one: StepProfile, other: StepProfile, factor: float) -> StepProfile:
    """The profile of another size of the microbatch: bytes and operations grow along a line with its samples.

    Args:
        one: the profile of one size.
        other: the profile of another.
        factor: where the size lies between the two; beyond 1 if it is larger than the other.
    """
    if one.calls != other.calls:
        return one if factor <= 0.5 else other
    return on_line(one, other, factor)
