"""The footprint: what each task takes on its device while it runs, what it leaves there, and how long it runs.

Each tensor counts once. What goes from one visit to the next is the output of one and the input of the other, whose graph
or stash holds it. So what a microbatch has on the device when it comes to a visit becomes a part of either.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan


@dataclass(frozen=True)
class Footprint:
    """Bytes and seconds of one visit of a pack, for one microbatch.

    Attributes:
        there_bytes: what the microbatch has on the device when its forward begins: the input, and what else its code keeps.
        forward_bytes: what a forward takes when it begins, beside that.
        forward_left_bytes: what of both is there when it ends: its graph or its stash, and its output.
        returning_bytes: what the microbatch has there when its backward begins, beside its graph or stash.
        backward_bytes: what a backward takes when it begins, beside gradients, and beside its stash or its graph.
        backward_left_bytes: what is there when it ends: the gradient of its input, and what else its code keeps.
        input_bytes: the input of the forward, which is as large as the gradient that the backward leaves.
        output_bytes: the output, as large as the gradient that the backward begins with.
        passed_bytes: what goes when the output has gone to another device.
        stash_bytes: what the forward leaves for the backward, and goes to the host.
        loaded_bytes: what comes back at once. Each layer of a pack loads its own.
        graph_bytes: what it leaves where graphs are kept, and goes when the backward has run.
        gradient_bytes: the sums of gradients, which are made for the first backward.
        is_gathered: whether the gradients of each microbatch are still to be added to the sums when its backward has ended.
        gathered_bytes: what they take until then.
        forward_seconds: of the forward.
        backward_seconds: of the backward, with the recompute where no graph is kept.
    """

    there_bytes: int
    forward_bytes: int
    forward_left_bytes: int
    returning_bytes: int
    backward_bytes: int
    backward_left_bytes: int
    input_bytes: int
    output_bytes: int
    passed_bytes: int
    stash_bytes: int
    loaded_bytes: int
    graph_bytes: int
    gradient_bytes: int
    is_gathered: bool
    gathered_bytes: int
    forward_seconds: float
    backward_seconds: float


def footprints(plan: Plan, packs: Sequence[Cost]) -> list[Footprint]:
    """One for each visit of a plan.

    Args:
        plan: the plan.
        packs: what each pack costs.
    """
    num_visits = Counter(plan.visits)
    costs = [packs[pack] for pack in plan.visits]
    inputs = [cost.input_bytes if position else 0 for position, cost in enumerate(costs)]
    outputs = [*inputs[1:], 0]
    # What else a microbatch has: for skip connections, masks, what is too small for the stash. The step begins without. Of
    # several devices, each may have a part of it, and keep it when the microbatch goes on: nothing tells how long.
    is_alone = plan.num_devices == 1
    arriving = [
        max(c.arriving_bytes - c.input_bytes, 0) if position and is_alone else 0 for position, c in enumerate(costs)
    ]
    returning = [
        max(c.returning_bytes - out, 0) if is_alone else 0 for c, out in zip(costs[:-1], outputs, strict=False)
    ] + arriving[-1:]
    found = []
    for position, cost in enumerate(costs):
        entering, leaving = inputs[position], outputs[position]
        keeps = plan.keeps_graph(position)
        of_layers = cost.graph_bytes // num_visits[plan.visits[position]]
        if keeps:
            # The code behind the layers keeps on the device what it would stash.
            behind = max(cost.stash_bytes - entering, 0)
            graph, stash, loaded = max(of_layers + behind, entering), 0, 0
            work = max(cost.forward_work_bytes - leaving, 0)
            # What was measured made the graph anew. With the last one came the loss, which comes before: what its code keeps
            # was loaded for it, and no graph was there yet.
            counted = of_layers if position < len(costs) - 1 else max(of_layers, cost.glue_stash_bytes)
        else:
            graph, stash, work = 0, cost.stash_bytes, 0
            counted = loaded = min(stash, cost.backward_work_bytes)
        beside = [*arriving, returning[-1]][position + 1]
        there, left = entering + arriving[position], graph + stash + leaving
        is_gathered = plan.visits[position] in plan.spread and cost.gradient_bytes > 0
        gathered = cost.gathered_bytes if is_gathered else 0
        back = entering + (returning[position - 1] if position else 0)
        found.append(
            Footprint(
                there_bytes=there,
                forward_bytes=max(left + beside - there + work, cost.forward_work_bytes),
                forward_left_bytes=left + beside,
                returning_bytes=leaving + returning[position],
                backward_bytes=max(
                    cost.backward_work_bytes - counted,
                    entering,
                    back - returning[position],
                    back + gathered - leaving - returning[position] - loaded - graph,
                ),
                backward_left_bytes=back,
                input_bytes=entering,
                output_bytes=leaving,
                passed_bytes=leaving + beside,
                stash_bytes=stash,
                loaded_bytes=loaded,
                graph_bytes=graph,
                gradient_bytes=cost.gradient_bytes,
                is_gathered=is_gathered,
                gathered_bytes=gathered,
                forward_seconds=cost.forward_seconds,
                backward_seconds=cost.spared_backward_seconds if keeps else cost.backward_seconds,
            )
        )
    return found
