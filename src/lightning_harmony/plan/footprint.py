"""The footprint: what each task takes on its device while it runs, what it leaves there, and how long it runs.

Each tensor counts once. What goes from one visit to the next is the input of one and the output of the other. A graph holds
both; a stash holds the input. So what a microbatch has on the device when it comes to a visit becomes a part of either.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_harmony.plan.cost import Cost
from lightning_harmony.plan.plan import Plan


@dataclass(frozen=True)
class Footprint:
    """Bytes and seconds of one visit of a pack, for one microbatch.

    Attributes:
        there_bytes: what the microbatch has on the device when its forward begins: the input, unless a graph there holds it.
        forward_bytes: what a forward takes when it begins, beside that.
        forward_left_bytes: what of both is there when it ends: its graph, or its stash and its output.
        backward_bytes: what a backward takes when it begins, beside gradients, and beside its stash or its graph.
        backward_left_bytes: what of it stays: the gradient of its input.
        input_bytes: the input of the forward, which is as large as the gradient that the backward leaves.
        output_bytes: the output, as large as the gradient that the backward begins with.
        passed_bytes: what goes when the output has gone to another device: all of it, unless the graph holds it.
        stash_bytes: what the forward leaves for the backward, and goes to the host.
        stashed_bytes: what goes from the device then: what a graph holds stays.
        loaded_bytes: what comes back at once. Each layer of a pack loads its own.
        graph_bytes: what it leaves where graphs are kept, and goes when the backward has run.
        gradient_bytes: the sums of gradients, which are made for the first backward.
        forward_seconds: of the forward.
        backward_seconds: of the backward, with the recompute where no graph is kept.
    """

    there_bytes: int
    forward_bytes: int
    forward_left_bytes: int
    backward_bytes: int
    backward_left_bytes: int
    input_bytes: int
    output_bytes: int
    passed_bytes: int
    stash_bytes: int
    stashed_bytes: int
    loaded_bytes: int
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
    found: list[Footprint] = []
    for position, pack in enumerate(plan.visits):
        cost, entering = packs[pack], inputs[position]
        leaving = inputs[position + 1] if position + 1 < len(inputs) else 0
        keeps = plan.keeps_graph(position)
        there = found[-1].passed_bytes if found and _stays(plan, position) else entering
        held = entering - there
        of_layers = cost.graph_bytes // num_visits[pack]
        if keeps:
            # The code behind the layers keeps on the device what it would stash.
            behind = max(cost.stash_bytes - entering, 0)
            graph, stash = max(of_layers + behind - held, there + leaving), 0
            left, work = graph, max(cost.forward_work_bytes - leaving, 0)
        else:
            graph, stash = 0, cost.stash_bytes
            left, work = leaving + max(stash - held, 0), 0
        loaded = min(stash, cost.backward_work_bytes)
        found.append(
            Footprint(
                there_bytes=there,
                forward_bytes=max(left - there + work, cost.forward_work_bytes),
                forward_left_bytes=left,
                backward_bytes=max(cost.backward_work_bytes - (of_layers if keeps else loaded), entering),
                backward_left_bytes=entering,
                input_bytes=entering,
                output_bytes=leaving,
                passed_bytes=0 if keeps else leaving,
                stash_bytes=stash,
                stashed_bytes=max(stash - held, 0),
                loaded_bytes=loaded,
                graph_bytes=graph,
                gradient_bytes=cost.gradient_bytes,
                forward_seconds=cost.forward_seconds,
                backward_seconds=cost.spared_backward_seconds if keeps else cost.backward_seconds,
            )
        )
    return found


def _stays(plan: Plan, position: int) -> bool:
    """Whether a microbatch is on one device for a visit and the one before."""
    visits = plan.visits
    return plan.parallel == "data" or plan.device_of(visits[position - 1], 0) == plan.device_of(visits[position], 0)
