"""Validity: what every plan has to be, whatever its layers cost."""

from collections import Counter
from itertools import chain

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.plan import Plan

# Of microbatches, and of devices: what is beyond would take longer to predict than to run.
_MOST = 65536


def refuse_invalid(plan: Plan) -> None:
    """Refuse a plan that contradicts itself.

    Raises:
        PlanError: naming what is wrong.
    """
    names = Counter(chain.from_iterable(plan.packs))
    problems = [f"layer {name!r} is in {number} places" for name, number in names.items() if number > 1]
    problems += [f"pack {index} has no layer" for index, pack in enumerate(plan.packs) if not pack]
    problems += [f"it visits pack {p}, which it doesn't have" for p in plan.visits if not 0 <= p < len(plan.packs)]
    if not 0 <= plan.first_fused <= len(plan.visits):
        problems.append(f"it fuses from visit {plan.first_fused} of {len(plan.visits)}")
    else:
        before = set(plan.visits[: plan.first_fused])
        problems += [f"pack {pack} is fused, but visited before" for pack in sorted(before & plan.fused)]
        problems += [f"pack {p} keeps its graphs, but isn't before the fused ones" for p in sorted(plan.kept - before)]
        problems += [
            f"the forward of visit {place} is joined to the one before, but isn't between the first one and the fused ones"
            for place in sorted(plan.joined - set(range(1, plan.first_fused)))
        ]
        once = {pack for pack in plan.visits if plan.visits.count(pack) == 1}
        problems += [
            f"pack {pack} is updated where its gradients are, but isn't visited once, or is spread"
            for pack in sorted(plan.device_updated - (once - plan.spread))
        ]
        if plan.device_updated and not plan.just_in_time:
            problems.append(
                f"it updates packs where their gradients are, but with reuse={plan.reuse!r} updates follow the whole backward"
            )
        if plan.device_updated and plan.num_devices > 1 and plan.parallel == "data":
            problems.append("it updates packs where their gradients are, but several devices sum these")
        problems += [
            f"the optimizer state of pack {pack} stays on its device, but the pack isn't visited"
            for pack in sorted(plan.state_on_device - set(plan.visits))
        ]
        if plan.joined and plan.num_devices > 1 and plan.parallel == "pipeline":
            problems.append("it joins forwards, but consecutive packs are on several devices")
        if plan.joined and not plan.just_in_time:
            problems.append(f"it joins forwards, but with reuse={plan.reuse!r} no weights stay for them")
        if not plan.just_in_time and (plan.first_fused < len(plan.visits) or plan.kept):
            problems.append(f"it keeps graphs, but with reuse={plan.reuse!r} no weights stay for them")
    if plan.spread and (plan.num_devices == 1 or plan.parallel == "data" or not plan.just_in_time):
        problems.append("it spreads packs, but not in a pipeline of several devices whose sums of gradients stay")
    problems += [f"it spreads pack {pack}, which it doesn't visit" for pack in sorted(plan.spread - set(plan.visits))]
    if plan.lookahead < 0 or (plan.lookahead and not plan.just_in_time):
        problems.append(f"it fetches {plan.lookahead} packs ahead, but with reuse={plan.reuse!r} none would stay")
    for name, number in (("microbatches", plan.num_microbatches), ("devices", plan.num_devices)):
        if number is not None and not 1 <= number <= _MOST:
            problems.append(f"it is for {number} {name}: from 1 to {_MOST} are possible")
    if problems:
        raise PlanError(f"this plan cannot be run: {'; '.join(problems)}")
