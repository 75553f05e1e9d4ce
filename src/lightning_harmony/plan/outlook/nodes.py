"""What a step takes where several nodes train: each updates a part, and they send each other gradients and weights.

As the gradients of a pack become final, they are sent, one pack after the other, beside the backward of the next packs. What
is sent is updated, and is there when the next forward comes to the pack. What a message takes besides its bytes is not
counted, nor that nodes are not equally fast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.prediction import Prediction
from lightning_harmony.plan.values.task import Phase


@dataclass(frozen=True)
class Nodes:
    """The nodes of a training.

    Attributes:
        number: how many there are.
        own_share: of all optimizer state, and of the update, the share of the node that has most.
        bytes_per_second: that each node can send while it receives as much; None for a network that takes no time.
    """

    number: int = 1
    own_share: float = 1.0
    bytes_per_second: float | None = None

    def sent_bytes(self, gradient_bytes: int) -> int:
        """What each node sends in a step: gradients to their owners, and as many bytes of weights from these."""
        return 2 * gradient_bytes * (self.number - 1) // self.number

    def seconds(self, num_bytes: int) -> float:
        """How long a node sends for that many bytes of gradients."""
        return 0.0 if self.bytes_per_second is None else self.sent_bytes(num_bytes) / self.bytes_per_second


class Pack(NamedTuple):
    """What a step does with a pack on each node.

    Attributes:
        begins: when its forward does.
        final: when its gradients are.
        num_bytes: of these.
    """

    begins: float
    final: float
    num_bytes: int


def packs_of(prediction: Prediction, costs: Sequence[Cost]) -> list[Pack]:
    """The packs of a step of one node, in the order in which their gradients are final.

    Args:
        prediction: of the step.
        costs: of its packs.
    """
    begins: defaultdict[int, list[float]] = defaultdict(list)
    final: defaultdict[int, list[float]] = defaultdict(list)
    for device in prediction.devices:
        for span in device.spans:
            if span.task.kind is Phase.FORWARD:
                begins[span.task.pack].append(span.start_seconds)
            elif span.task.kind is Phase.BACKWARD:
                final[span.task.pack].append(span.end_seconds)
    packs = [
        Pack(min(begins[number]), max(final[number]), cost.gradient_bytes)
        for number, cost in enumerate(costs)
        if number in begins and number in final
    ]
    return sorted(packs, key=lambda pack: pack.final)


def seconds_on(nodes: Nodes, alone: float, packs: Sequence[Pack]) -> float:
    """What a step takes where it repeats.

    Args:
        nodes: that train.
        alone: what a step takes if nothing is sent.
        packs: of it, in the order in which their gradients are final.
    """
    free, seconds = 0.0, alone
    for pack in packs:
        free = max(free, pack.final) + nodes.seconds(pack.num_bytes)
        # In the next step.
        seconds = max(seconds, free - pack.begins)
    return max(seconds, sum(nodes.seconds(pack.num_bytes) for pack in packs))
