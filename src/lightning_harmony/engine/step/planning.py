"""Planning: by which plan steps run, as they are seen to go, or as an earlier fit has seen them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.measure.measurements import Measurements
from lightning_harmony.engine.measure.origin import kind_of
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.plan.search.deciding import decide, foreseen, improved
from lightning_harmony.plan.search.device_updates import with_device_updates
from lightning_harmony.plan.search.rules import Packs, fitting_packs, packed, with_graphs
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel, Plan
from lightning_harmony.plan.values.profile import MachineLimits, share_seconds
from lightning_harmony.plan.values.record import NarrowWeights, Origin, Record, SeenSize

# After how many steps a plan that rests on a record is held against them, of which the first ones warm up.
CHECKED_STEPS, WARM_UP_STEPS = 8, 3
# How many times as long, or as short, as predicted steps may be.
FAR_OFF = 2.0
# How many times as fast as before updates or layers have to be for a plan to be looked at again.
CLEARLY_FASTER = 1.25
# In how many steps by a plan updates are timed beside its copies, until what it takes is foreseen anew.
TIMED_UPDATES = 3
# Which step by a plan is timed: by then lanes keep to their core, and the garbage collector spares what lasts.
TIMED_STEP = 5


class Records(Protocol):
    """Where records are kept from one fit to the next."""

    @property
    def origin(self) -> Origin:
        """Of what they are."""

    def read(self) -> Record | None:
        """What earlier fits have seen; None if nothing is known of that."""

    def write(self, record: Record) -> None:
        """Keep what was seen."""

    def discard(self) -> str:
        """Keep nothing: what was read is wrong. Return what to call it."""


@dataclass(frozen=True)
class SeenStep:
    """A training step that has ended.

    Attributes:
        calls: the layers in the order in which a microbatch called them, by their indices.
        num_microbatches: of the batch.
        num_elements: of the largest microbatch.
        is_measured: whether the step was measured.
        is_cast: whether autocast was seen at work, and watched.
        is_timed: whether its turns, by the plan, were timed.
    """

    calls: list[int]
    num_microbatches: int
    num_elements: int
    is_measured: bool
    is_cast: bool
    is_timed: bool


def _capacities(devices: Sequence[Device]) -> list[int | None]:
    return [device.capacity_bytes for device in devices]


def _is_clearly_faster(plan: Plan, other: Plan) -> bool:
    """Whether a plan is foreseen to be."""
    ours, theirs = plan.predicted, other.predicted
    return ours is not None and theirs is not None and theirs.seconds > CLEARLY_FASTER * ours.seconds


class Planner:
    """Says by which plan a step runs.

    The first step goes layer by layer, and so does the next one where the first finds out which weights may be narrow. What
    they are seen to do is planned. Where an earlier fit has seen as much, the first step runs by a plan at once; if it turns
    out to do something else, all is measured as if nothing had been known.

    Args:
        layers: of the model. Parameters that glue uses come to it as they are found.
        devices: where they run.
        parallel: how packs are placed on several devices.
        fingerprint: of the model.
        measured: what training steps were seen to take.
        given: what to run by instead of planning.
        records: of earlier fits; None to begin anew and keep nothing.

    Attributes:
        measured_elements: the most of a microbatch whose work is known. More are run with care, and measured.
        is_planned: whether the plan in use rests on what was measured.
        knows_casts: whether a step has shown which weights may be narrow.
    """

    def __init__(
        self,
        layers: Sequence[SwappedLayer],
        devices: Sequence[Device],
        parallel: Parallel,
        fingerprint: str,
        measured: Measurements,
        given: Plan | None,
        records: Records | None,
    ) -> None:
        self._layers, self._devices, self._parallel = layers, devices, parallel
        self._fingerprint, self._measured, self._given, self._records = fingerprint, measured, given, records
        self.measured_elements = -1
        self.is_planned = False
        self.knows_casts = False
        # The step that has shown it, until the next one begins.
        self._cast: SeenStep | None = None
        self._calls: list[int] = []
        self._kinds: dict[int, str] = {}
        self._has_begun = self._has_read = False
        # What earlier fits have seen, whether all that is known is known from there, and whether that is yet to be checked.
        self._record: Record | None = None
        self._rests_on_record = self._is_to_be_checked = False
        self._seconds: list[float] = []
        # In the first steps by the plan, of which there were so many.
        self._update_speeds: list[float] = []
        self._num_steps, self._has_timed_turns = 0, False
        self._plan = self.layer_by_layer(range(len(layers)))

    @property
    def watches(self) -> bool:
        """Whether a step is to show which weights may be narrow."""
        return not self.is_planned and not self.knows_casts

    def times_turns_of(self, num_elements: int) -> bool:
        """Whether the turns of the next step are timed, with so many elements in the largest microbatch."""
        is_due = self.is_planned and self._num_steps >= TIMED_STEP - 1 and not self._has_timed_turns
        return is_due and num_elements == self.measured_elements

    def layer_by_layer(self, calls: Sequence[int]) -> Plan:
        """Each layer a pack of its own, called in an order."""
        self._plan = self._packed([], calls)
        return self._plan

    # ---- before and after a step ---------------------------------------------------------------------------------------

    def before_step(
        self,
        num_elements: int,
        num_microbatches: int,
        find: Callable[[str], SwappedLayer | None],
        has_room: Callable[[], bool],
    ) -> Plan | None:
        """What to run a training step by; None for the plan in use.

        Args:
            num_elements: of the largest microbatch.
            num_microbatches: of the batch.
            find: makes a layer of a parameter, given by its name, that glue used in an earlier fit; None if there is none.
            has_room: whether the host has room for all gradients, which a step that is measured leaves there.
        """
        cast, self._cast = self._cast, None
        if cast is not None:
            # What was measured is the work with weights as they are: once more, with the narrow ones, which need less.
            if has_room():
                return self._measured_anew(cast)
            self._calls = cast.calls
            return self._planned(cast.num_elements, cast.num_microbatches)
        if self._has_begun or self._records is None:
            return None
        self._has_begun = True
        record = self._read()
        # What a larger microbatch allocates is nobody's guess.
        if record is None or num_elements > record.most_elements:
            return None
        known = {layer.name for layer in self._layers}
        if any(find(cost.name) is None for cost in record.sizes[0].layers if cost.name not in known):
            return None
        self._rests_on_record = self._is_to_be_checked = True
        index_of = {layer.name: layer.index for layer in self._layers}
        self._calls = [index_of[name] for name in record.calls]
        self._recall(record, num_elements)
        if not record.is_cast:
            return self._planned(num_elements, num_microbatches)
        # Which weights may be narrow is seen anew: they come as they are, and each pack has all memory to itself.
        self._plan = self._packed(self._fitting_packs(), self._calls)
        return self._plan

    def after_step(self, seen: SeenStep) -> Plan | None:
        """What to run by from now on; None for the plan in use."""
        if self._is_to_be_checked:
            self._is_to_be_checked = False
            return self._checked(seen)
        if seen.is_measured:
            self.measured_elements = seen.num_elements
        if seen.is_cast and not self.knows_casts and any(layer.narrow for layer in self._layers):
            self._cast, self.knows_casts, self.measured_elements = seen, True, -1
            return self.layer_by_layer(seen.calls)
        if not self.is_planned:
            return self._from_measured(seen) if seen.calls else None
        if seen.is_measured:
            # The packs stay, but the graphs of larger microbatches may no longer fit.
            self._plan = self._with_its_packs(self._packed(self._plan.packs, self._calls), seen.num_microbatches)
            return self._plan
        self._num_steps += 1
        sees_faster_updates = self._sees_faster_updates()
        if not sees_faster_updates and self._has_timed_updates():
            self._measured.update_speeds.settle(median(self._update_speeds))
        elif seen.is_timed:
            self._has_timed_turns = True
            self._measured.profiler.keep_faster_visits()
        elif not sees_faster_updates:
            return None
        known = self._plan
        if self._given is None:
            # Who updates which packs is decided last, for whatever packs these are.
            known = replace(known, device_updated=frozenset())
        plan = foreseen(known, self._costs(), self._measured.machine())
        if self._given is None:
            if sees_faster_updates or _is_clearly_faster(plan, self._plan):
                plan = improved(plan, self._names(self._calls))
            plan = with_device_updates(plan)
        self._plan = plan
        self._write(self._with_newest_seconds(self._record, seen.num_elements))
        return plan

    def _sees_faster_updates(self) -> bool:
        """Whether updates are clearly faster than when the plan was made, or none had been seen by then."""
        profile, now = self._plan.profile, self._measured.update_speeds.fastest.bytes_per_second
        if profile is None or now is None:
            return False
        known = profile.machine.update_bytes_per_second
        return known is None or now > CLEARLY_FASTER * known

    def _has_timed_updates(self) -> bool:
        """Whether it has just become known what updates take beside the copies of the plan. It is asked after each step."""
        profile, now = self._plan.profile, self._measured.update_speeds.newest.bytes_per_second
        if profile is None or now is None or len(self._update_speeds) == TIMED_UPDATES:
            return False
        self._update_speeds.append(now)
        return len(self._update_speeds) == TIMED_UPDATES

    def start_over(self) -> Plan | None:
        """A step did not fit, and runs again in smaller microbatches: what to run it by; None for the plan in use."""
        if self.is_planned and not self._is_to_be_checked:
            return None
        self._has_begun = self._rests_on_record = self._is_to_be_checked = False
        self._cast, self.is_planned, self.measured_elements = None, False, -1
        self._measured.forget_layers()
        return self.layer_by_layer(range(len(self._layers)))

    def discard_record(self) -> str:
        """What did not fit was planned from what an earlier fit saw: do not use that again. Return a word on it."""
        if not self._rests_on_record or self._records is None:
            return ""
        return f". The step was planned from {self._records.discard()}, which is discarded: run again to measure anew"

    def note_seconds(self, seconds: float) -> None:
        """How long a training step took.

        Where steps turn out to be far from what the record of earlier fits predicts, it is of a machine that was busy with
        something else, or has changed: later fits measure anew.
        """
        predicted = self._plan.predicted
        if not self._rests_on_record or self._records is None or predicted is None:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == CHECKED_STEPS:
            ratio = median(self._seconds[WARM_UP_STEPS:]) / predicted.seconds if predicted.seconds else 1.0
            if not 1 / FAR_OFF <= ratio <= FAR_OFF:
                self._records.discard()

    # ---- what earlier fits have seen -----------------------------------------------------------------------------------

    def _read(self) -> Record | None:
        """What is known by now; what earlier fits have seen is read once."""
        if not self._has_read and self._records is not None:
            self._record = self._records.read()
        self._has_read = True
        return self._record

    def _recall(self, record: Record, num_elements: int) -> None:
        """Take over what an earlier fit has seen."""
        self._measured.recall(record, num_elements, {layer.name: layer for layer in self._layers})

    def _checked(self, seen: SeenStep) -> Plan | None:
        """After a first step that ran by a record: whether it was like those that the record is of."""
        record = self._record
        assert record is not None
        names = self._names(seen.calls)
        called = set(names)
        # What is not called now may be called in other steps.
        if (
            names != [name for name in record.calls if name in called]
            or seen.is_cast != record.is_cast
            or self._narrow() != record.narrow
        ):
            self._record, self._rests_on_record = None, False
            return self._measured_anew(seen)
        if self.is_planned:
            return None
        self.knows_casts = True
        self._measured.forget_layers()
        self._recall(record, seen.num_elements)
        return self._planned(seen.num_elements, seen.num_microbatches)

    def _measured_anew(self, seen: SeenStep) -> Plan:
        """Measure anew, layer by layer."""
        self.knows_casts = self.knows_casts or seen.is_cast
        self.is_planned, self.measured_elements = False, -1
        self._measured.forget_layers()
        return self.layer_by_layer(seen.calls)

    def _from_measured(self, seen: SeenStep) -> Plan:
        """Plan from what a step that went layer by layer was seen to do, and let later fits do so, too."""
        self._calls = seen.calls
        plan = self._planned(seen.num_elements, seen.num_microbatches)
        self._rests_on_record = False
        size = SeenSize(seen.num_elements, tuple(map(self._measured.cost, self._layers)))
        calls = tuple(self._names(seen.calls))
        is_cast = self.knows_casts or seen.is_cast
        origin = Origin("", "", "") if self._records is None else self._records.origin
        record = Record(origin, calls, is_cast, self._narrow(), (size,), MachineLimits())
        known = self._record
        if known is not None and replace(known, sizes=record.sizes, machine=record.machine) == record:
            record = known.with_size(size)
        self._write(record)
        return plan

    def _with_newest_seconds(self, record: Record | None, num_elements: int) -> Record | None:
        """A record with what layers are known to take by now, if they were measured with so many elements."""
        if record is None:
            return None
        newest = {layer.name: self._measured.cost(layer) for layer in self._layers}
        sizes = [
            replace(size, layers=tuple(replace(cost, **newest[cost.name].seconds) for cost in size.layers))
            for size in record.sizes
            if size.num_elements == num_elements
        ]
        return record.with_size(*sizes) if sizes else record

    def _write(self, record: Record | None) -> None:
        if record is None:
            return
        self._record = replace(record, machine=replace(self._measured.machine(), capacity_bytes=None, occupied_bytes=0))
        if self._records is not None:
            self._records.write(self._record)

    def _narrow(self) -> tuple[NarrowWeights, ...]:
        """Which weights were found to be read through a cast alone."""
        return tuple(
            NarrowWeights(layer.name, tuple(n for n, p in enumerate(layer.parameters) if p in layer.narrow))
            for layer in self._layers
            if layer.narrow and layer.compute_dtype is None
        )

    # ---- plans ---------------------------------------------------------------------------------------------------------

    def _planned(self, num_elements: int, num_microbatches: int) -> Plan:
        """A plan from what is known of the layers."""
        self.is_planned, self.measured_elements = True, num_elements
        self._update_speeds.clear()
        self._num_steps, self._has_timed_turns = 0, False
        if self._given is not None:
            packs = self._given_packs(self._given)
            self._plan = self._with_its_packs(self._packed(packs, self._calls), num_microbatches)
            return self._plan
        plan = decide(
            self._costs(),
            self._names(self._calls),
            num_microbatches,
            self._measured.machine(),
            num_devices=len(self._devices),
            parallel=self._parallel,
        )
        self._plan = replace(plan, fingerprint=self._fingerprint)
        return self._plan

    def _fitting_packs(self) -> Packs:
        return fitting_packs(self._costs(), self._names(self._calls), _capacities(self._devices), self._parallel)

    def _given_packs(self, given: Plan) -> Packs:
        """The packs of a given plan. Parameters that glue used when it was made may not have been used yet."""
        known = {layer.name for layer in self._layers}
        packs = [[name for name in pack if name in known] for pack in given.packs]
        return [pack for pack in packs if pack]

    def _packed(self, packs: Packs, calls: Sequence[int]) -> Plan:
        """A plan of packs, and of one for each layer that is in none; nothing is decided on graphs."""
        layers = [layer.name for layer in self._layers]
        plan = packed(packs, layers, self._names(calls), len(self._devices), self._parallel)
        return replace(plan, fingerprint=self._fingerprint)

    def _names(self, calls: Sequence[int]) -> list[str]:
        return [self._layers[call].name for call in calls]

    def _with_its_packs(self, plan: Plan, num_microbatches: int) -> Plan:
        """A plan for a number of microbatches, with whose graphs are kept, and what is foreseen."""
        given, costs, machine = self._given, self._costs(), self._measured.machine()
        if given is not None:
            is_placed = (plan.packs, plan.visits) == (given.packs, given.visits)
            spread: frozenset[int] = given.spread if is_placed else frozenset()
            plan = replace(plan, reuse=given.reuse, lookahead=given.lookahead, spread=spread)
        plan = with_graphs(plan, costs, num_microbatches, [machine.free_bytes] * len(self._devices))
        if given is None:
            return improved(foreseen(plan, costs, machine), self._names(self._calls), with_its_packs=True)
        # A step that differs from what a given plan foresees goes by its packs, but decides on graphs anew.
        if all(getattr(given, name) == getattr(plan, name) for name in ("packs", "visits", "num_microbatches")):
            fields = ("first_fused", "kept", "joined", "device_updated")
            plan = replace(plan, **{name: getattr(given, name) for name in fields})
        elif not plan.just_in_time:
            plan = replace(plan, first_fused=len(plan.visits), kept=frozenset())
        return foreseen(plan, costs, machine)

    # ---- costs ---------------------------------------------------------------------------------------------------------

    def _costs(self) -> dict[str, Cost]:
        """The cost of each layer by its name, layers that are alike sharing what was timed."""
        kinds = [self._kind(layer) for layer in self._layers]
        return {cost.name: cost for cost in share_seconds(list(map(self._measured.cost, self._layers)), kinds)}

    def _kind(self, layer: SwappedLayer) -> str:
        if layer.index not in self._kinds:
            self._kinds[layer.index] = "a parameter" if layer.module is None else kind_of(layer.module)
        return self._kinds[layer.index]
