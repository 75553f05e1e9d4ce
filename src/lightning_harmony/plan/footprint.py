"""The footprint: what each task takes on its device while it runs, what it leaves there, and how long it runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_harmony.plan.cost import Cost
from lightning_harmony.plan.plan import Plan


@dataclass(frozen=True)
class Footprint:
    """Bytes and seconds of one visit of a pack, for one microbatch.

    Attributes:
        forward_bytes: what a forward takes when it begins.
        forward_left_bytes: what of it stays when it ends: its graph or stash, and its output.
        backward_bytes: what a backward takes when it begins, beside gradients.
        backward_left_bytes: what of it stays: the gradient of its input.
        input_bytes: the input of the forward, which is as large as the gradient that the backward leaves.
        output_bytes: the output, as large as the gradient that the backward begins with.
        stash_bytes: what the forward leaves for the backward, and the stash takes to the host.
        graph_bytes: what it leaves where graphs are kept.
        gradient_bytes: the sums of gradients, which are made for the first backward.
        forward_seconds: of the forward.
        backward_seconds: of the backward, with the recompute where no graph is kept.
    """

    forward_bytes: int
    forward_left_bytes: int
    backward_bytes: int
    backward_left_bytes: int
    input_bytes: int
    output_bytes: int
    stash_bytes: int
    graph_bytes: int
    gradient_bytes: int
    forward_seconds: float
    backward_seconds: float


def footprints(plan: Plan, packs: Sequence[Cost]) -> list[Footprint]:
    """One for each visit of a plan.

    Args:
        plan: the plan.
        packs: what each pack costs.
    """
    num_visits = Counter(plan.visits)
    inputs = [packs[pack].input_bytes if position else 0 for position, pack in enumerate(plan.visits)]
    found = []
    for position, pack in enumerate(plan.visits):
        cost, entering = packs[pack], inputs[position]
        leaving = inputs[position + 1] if position + 1 < len(inputs) else 0
        keeps = plan.keeps_graph(position)
        graph = cost.graph_bytes // num_visits[pack] if keeps else 0
        stash = 0 if keeps else cost.stash_bytes
        found.append(
            Footprint(
                forward_bytes=max(cost.forward_work_bytes, leaving) + graph + stash,
                forward_left_bytes=leaving + graph + stash,
                backward_bytes=max(cost.backward_work_bytes, entering),
                backward_left_bytes=entering,
                input_bytes=entering,
                output_bytes=leaving,
                stash_bytes=stash,
                graph_bytes=graph,
                gradient_bytes=cost.gradient_bytes,
                forward_seconds=cost.forward_seconds,
                backward_seconds=cost.spared_backward_seconds if keeps else cost.backward_seconds,
            )
        )
    return found
