"""Planning: by which plan steps run, as they are seen to go, or as an earlier fit has seen them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from torch import nn

from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.step.fit_record import FitRecord
from lightning_harmony.engine.step.measurements import Measurements
from lightning_harmony.engine.step.plan_making import CLEARLY_FASTER, PlanMaker
from lightning_harmony.plan.search.fitting import fitted
from lightning_harmony.plan.values.plan import Plan

# In how many steps by a plan updates are timed beside its copies, until what it takes is predicted anew.
TIMED_UPDATES = 3
# Which step by a plan is timed: by then lanes keep to their core, and the garbage collector spares what lasts.
TIMED_STEP = 5


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
        is_narrow: whether what was measured is the work with weights as narrow as autocast lets them be.
        has_shrunk: whether there turned out to be less device memory than plans had.
    """

    calls: list[int]
    num_microbatches: int
    num_elements: int
    is_measured: bool
    is_cast: bool
    is_timed: bool
    is_narrow: bool
    has_shrunk: bool


class Planner:
    """Says by which plan a step runs.

    The first step goes layer by layer. If its only microbatch finds out which weights may be narrow, so does the next one.
    What they are seen to do is planned. Where an earlier fit has seen as much, the first step runs by a plan at once; if it
    turns out to do something else, all is measured as if nothing had been known.

    Args:
        layers: of the model. Parameters that glue uses come to it as they are found.
        parameters: of the model.
        measured: what training steps were seen to take.
        maker: makes the plans.
        record: what earlier fits have seen.

    Attributes:
        measured_elements: the most of a microbatch whose work is known. More are run with care, and measured.
        is_planned: whether the plan in use rests on what was measured.
        takes_turns: whether there is room for microbatches to take turns, as far as is known.
        knows_casts: whether a step has shown which weights may be narrow.
    """

    def __init__(
        self,
        layers: Sequence[SwappedLayer],
        parameters: Sequence[nn.Parameter],
        measured: Measurements,
        maker: PlanMaker,
        record: FitRecord,
    ) -> None:
        self._layers, self._parameters = layers, parameters
        self._measured, self._maker, self._record = measured, maker, record
        self.measured_elements = -1
        self.is_planned = False
        self.takes_turns = True
        self.knows_casts = False
        # The step that has shown it, until the next one begins.
        self._cast: SeenStep | None = None
        self._calls: list[int] = []
        # Whether layers take more than the plan in use was made with.
        self._has_widened = False
        # Which parameters needed gradients in steps so far: in each of these sets, at the same time.
        self._trained: list[frozenset[nn.Parameter]] = []
        self._has_trained_more = False
        # Whether the step that runs rests on the record, and is to be checked; None before the first one.
        self._rests_on_record: bool | None = None
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
        self._plan, self.takes_turns = self._maker.layer_by_layer(calls), True
        return self._plan

    # ---- before and after a step ---------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Before a step, see whether parameters need gradients that did not before, as when a backbone is unfrozen.

        The backward then goes through layers that it never came to, and adds up gradients of what had none: that step is
        looked at, and measured, as a first one is.
        """
        trained = frozenset(parameter for parameter in self._parameters if parameter.requires_grad)
        if any(trained <= known for known in self._trained):
            return
        self._has_trained_more = bool(self._trained)
        self._trained = [*(known for known in self._trained if not known <= trained), trained]
        if self._has_trained_more:
            for layer in self._layers:
                layer.changes_inputs = layer.changes_inputs or None
            self._has_widened, self.measured_elements = True, -1

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
        if self._has_widened:
            self._has_widened, self.measured_elements = False, -1
            if self.is_planned:
                return self._measured_anew(self._calls)
        if cast is not None:
            # What was measured is the work with weights as they are: once more, with the narrow ones, which need less.
            if has_room():
                return self._measured_anew(cast.calls, is_cast=cast.is_cast)
            self._calls = cast.calls
            return self._planned(cast.num_elements, cast.num_microbatches)
        if self._rests_on_record is not None:
            return None
        self._rests_on_record = False
        record = self._record.read(num_elements, find)
        if record is None:
            return None
        self._rests_on_record = True
        index_of = {layer.name: layer.index for layer in self._layers}
        self._calls = [index_of[name] for name in record.calls]
        if not record.is_cast:
            return self._planned(num_elements, num_microbatches)
        # Which weights may be narrow is seen anew: they come as they are, and each pack has all memory to itself.
        self._plan = self._maker.with_fitting_packs(self._calls)
        return self._plan

    def after_step(self, seen: SeenStep) -> Plan | None:
        """What to run by from now on; None for the plan in use."""
        if self._rests_on_record:
            self._rests_on_record = False
            return self._checked(seen)
        if seen.is_measured:
            self.measured_elements = seen.num_elements
        if seen.is_cast and not self.knows_casts and any(layer.narrow for layer in self._layers):
            self.knows_casts = True
            if not seen.is_narrow:
                self._cast, self.measured_elements = seen, -1
                return self.layer_by_layer(seen.calls)
        if not self.is_planned:
            return self._from_measured(seen) if seen.calls else None
        if seen.has_shrunk:
            return self._planned(seen.num_elements, seen.num_microbatches)
        if seen.is_measured:
            # The packs stay, but the graphs of larger microbatches may no longer fit.
            return self._use(self._maker.of_packs(self._plan.packs, self._calls, seen.num_microbatches))
        self._num_steps += 1
        sees_faster_updates = self._sees_faster_updates()
        if not sees_faster_updates and self._has_timed_updates():
            self._measured.updater.speeds.settle(median(self._update_speeds))
        elif seen.is_timed:
            self._has_timed_turns = True
            self._measured.profiler.keep_faster_visits()
        elif not sees_faster_updates:
            return None
        self._record.renew_seconds(seen.num_elements)
        return self._use(self._maker.revised(self._plan, self._calls, searches=sees_faster_updates))

    def _sees_faster_updates(self) -> bool:
        """Whether updates are clearly faster than when the plan was made, or none had been seen by then."""
        profile, now = self._plan.profile, self._measured.updater.speeds.fastest.bytes_per_second
        if profile is None or now is None:
            return False
        known = profile.machine.update_bytes_per_second
        return known is None or now > CLEARLY_FASTER * known

    def _has_timed_updates(self) -> bool:
        """Whether it has just become known what updates take beside the copies of the plan. It is asked after each step."""
        profile, now = self._plan.profile, self._measured.updater.speeds.newest.bytes_per_second
        if profile is None or now is None or len(self._update_speeds) == TIMED_UPDATES:
            return False
        self._update_speeds.append(now)
        return len(self._update_speeds) == TIMED_UPDATES

    def start_over(self) -> Plan | None:
        """A step did not fit, and runs again in smaller microbatches: what to run it by; None for the plan in use."""
        if self.is_planned and not self._rests_on_record:
            return None
        self._rests_on_record = None
        self._record.set_aside()
        self._cast, self.is_planned, self.measured_elements = None, False, -1
        self._measured.forget_layers()
        return self.layer_by_layer(range(len(self._layers)))

    def note_widened(self) -> None:
        """Layers needed weights as they are that had come narrow: they take more than was planned with, as may the work."""
        self._has_widened = True

    def note_seconds(self, seconds: float) -> None:
        """How long a training step took."""
        predicted = self._plan.predicted
        self._record.note_seconds(seconds, None if predicted is None else predicted.seconds)

    def _checked(self, seen: SeenStep) -> Plan | None:
        """After a first step that ran by a record: whether it was like those that the record is of."""
        record = self._record.confirmed(seen.calls, is_cast=seen.is_cast)
        if record is None:
            return self._measured_anew(seen.calls, is_cast=seen.is_cast)
        if self.is_planned:
            return self._planned(seen.num_elements, seen.num_microbatches) if seen.has_shrunk else None
        self.knows_casts = True
        self._measured.forget_layers()
        self._record.recall(record, seen.num_elements)
        return self._planned(seen.num_elements, seen.num_microbatches)

    def _measured_anew(self, calls: list[int], *, is_cast: bool = False) -> Plan:
        """Measure anew, layer by layer."""
        self.knows_casts = self.knows_casts or is_cast
        self.is_planned, self.measured_elements = False, -1
        # Those that were trained may be so again, in turns with others.
        self._measured.forget_layers(keeps_work=self._has_trained_more)
        return self.layer_by_layer(calls)

    def _from_measured(self, seen: SeenStep) -> Plan:
        """Plan from what a step that went layer by layer was seen to do, and let later fits do so, too."""
        self._calls = seen.calls
        plan = self._planned(seen.num_elements, seen.num_microbatches)
        if self._has_trained_more:
            # It is of parameters that are trained at the start of a fit.
            return plan
        self._record.add(seen.calls, seen.num_elements, is_cast=self.knows_casts or seen.is_cast)
        return plan

    def _planned(self, num_elements: int, num_microbatches: int) -> Plan:
        """A plan from what is known of the layers."""
        self.is_planned, self.measured_elements = True, num_elements
        self._update_speeds.clear()
        self._num_steps, self._has_timed_turns = 0, False
        return self._use(self._maker.decided(self._calls, num_microbatches))

    def _use(self, plan: Plan) -> Plan:
        """Go by a plan from now on, as far as there is room for it."""
        self._plan, self.takes_turns = fitted(plan)
        return self._plan
