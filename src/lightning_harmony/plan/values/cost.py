"""What a layer or a pack costs: the bytes and seconds that deciding needs, counted by the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_harmony.plan.values.document import Count, Seconds

# What is timed of a layer; all else is counted.
SECONDS = ("forward_seconds", "backward_seconds", "recompute_seconds")


@dataclass(frozen=True)
class Cost:
    """Bytes and seconds of one layer, or of one pack, on a device.

    Attributes:
        name: qualified name of the layer in the model.
        weight_bytes: parameters and buffers, as they are swapped in.
        gradient_bytes: the accumulator of its trainable parameters.
        forward_work_bytes: most that its forward, with the glue behind it, allocates for one microbatch.
        backward_work_bytes: the same of recompute and backward.
        graph_bytes: what its graph holds for one microbatch, from its forward to its backward, if it is kept: the input and
            what it saves, but no output.
        copied_bytes: what crosses from the host when its weights swap in: more than they take where they are cast.
        input_bytes: what it is called with, for one microbatch: what a microbatch has on the device when it comes to it.
        stash_bytes: what is stashed for its backward, for one microbatch: its input, and what the code behind it keeps. An
            input that several take is stashed once.
        glue_stash_bytes: of a pack, what glue behind its last layer stashes of that.
        master_bytes: what its weights take besides if they stay as they are on the host, where they are cast on their way.
        forward_seconds: of its forward, for one microbatch.
        backward_seconds: of its recompute and backward, for one microbatch.
        recompute_seconds: of the recompute alone, which ends with the last tensor that the backward needs.
        staging_bytes: what its weights take besides while they come, where they are cast on their way.
        disk_bytes: what of its optimizer state and weights lives on disk, and comes and goes at its update.
        optimizer_bytes: its optimizer state that lives on the host, and may stay on a device between updates.
        arriving_bytes: what a microbatch has on the layer's device when it comes to its forward: the input, and what else
            code keeps.
        returning_bytes: the same when it comes to its backward.
    """

    name: str
    weight_bytes: Count
    gradient_bytes: Count
    forward_work_bytes: Count = 0
    backward_work_bytes: Count = 0
    graph_bytes: Count = 0
    copied_bytes: Count = 0
    input_bytes: Count = 0
    stash_bytes: Count = 0
    forward_seconds: Seconds = 0.0
    backward_seconds: Seconds = 0.0
    recompute_seconds: Seconds = 0.0
    staging_bytes: Count = 0
    arriving_bytes: Count = 0
    returning_bytes: Count = 0
    glue_stash_bytes: Count = 0
    master_bytes: Count = 0
    disk_bytes: Count = 0
    optimizer_bytes: Count = 0

    @property
    def seconds(self) -> dict[str, Any]:
        """What is timed of it, by name."""
        return {name: getattr(self, name) for name in SECONDS}

    @property
    def state_bytes(self) -> int:
        """Weights and gradients."""
        return self.weight_bytes + self.gradient_bytes

    @property
    def gathered_bytes(self) -> int:
        """At most what gradients of one microbatch take before they are summed: they are as narrow as the weights."""
        return min(self.weight_bytes, self.gradient_bytes)

    @property
    def kept_bytes(self) -> int:
        """What stays for one microbatch where its graph is kept: that, and what the code behind it would stash."""
        return self.graph_bytes + max(self.stash_bytes - self.input_bytes, 0)

    @property
    def spared_backward_seconds(self) -> float:
        """Of its backward alone, where its graph was kept."""
        return max(self.backward_seconds - self.recompute_seconds, 0.0)

    @property
    def work_bytes(self) -> int:
        """Work space for forward and backward together, as where one follows the other at once."""
        return self.forward_work_bytes + self.backward_work_bytes


def pack_cost(costs: Sequence[Cost]) -> Cost:
    """What a pack of layers costs, of which one works at a time."""
    return Cost(
        costs[0].name if len(costs) == 1 else f"{costs[0].name} … {costs[-1].name}",
        sum(cost.weight_bytes for cost in costs),
        sum(cost.gradient_bytes for cost in costs),
        max(cost.forward_work_bytes for cost in costs),
        max(cost.backward_work_bytes for cost in costs),
        sum(cost.graph_bytes for cost in costs),
        sum(cost.copied_bytes for cost in costs),
        costs[0].input_bytes,
        sum(cost.stash_bytes for cost in costs),
        sum(cost.forward_seconds for cost in costs),
        sum(cost.backward_seconds for cost in costs),
        sum(cost.recompute_seconds for cost in costs),
        max(cost.staging_bytes for cost in costs),
        costs[0].arriving_bytes,
        costs[-1].returning_bytes,
        max(costs[-1].stash_bytes - costs[-1].input_bytes, 0),
        sum(cost.master_bytes for cost in costs),
        sum(cost.disk_bytes for cost in costs),
        sum(cost.optimizer_bytes for cost in costs),
    )
