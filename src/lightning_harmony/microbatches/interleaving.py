"""Whether the microbatches of a step may take turns: only after a step ran one after the other, and nothing spoke against it.

Microbatches that take turns share one process. What one keeps while another runs, that one finds, unless lanes switch it:
the entries of the ambient registry, and attributes that `LaneAttributes` know how to tell apart. So the first step runs one
microbatch after the other, as plain accumulation does, and is watched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from lightning_harmony.engine.devices.recording import RecordingChangedError
from lightning_harmony.engine.layers.runtime import FoundAtCall, Listeners, ObjectsOfCall
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.errors import CapacityError, PlanError, UnsupportedModelError
from lightning_harmony.held.held_state import Held, Kind, is_plain
from lightning_harmony.held.places import Places
from lightning_harmony.held.walk import Other
from lightning_harmony.microbatches.collectives import num_collectives
from lightning_harmony.microbatches.fingerprints import Fingerprints
from lightning_harmony.microbatches.lane_attributes import (
    KnownChanges,
    LaneAttributes,
)
from lightning_harmony.microbatches.logs import MicrobatchLogs
from lightning_harmony.microbatches.metric_states import CountedOnce, metrics_of
from lightning_harmony.microbatches.microbatch_ends import MicrobatchEnds
from lightning_harmony.microbatches.remembered import KeptBatch
from lightning_harmony.microbatches.stale_reads import StaleReads
from lightning_harmony.microbatches.state_elsewhere import StateElsewhere
from lightning_harmony.microbatches.step_undo import Undo
from lightning_harmony.microbatches.watch import Watch, all_values
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree

_FLAGS = "the step says of parameters whether they need gradients, and leaves it at that"
_COLLECTIVE = "the step exchanges tensors with other nodes"


class _Unsafe(Exception):
    """Ends a step in which microbatches took turns, and may have seen what others keep."""


class _PassesOn(_Unsafe):
    """It is shown that microbatches would find something else one after the other."""


class _Turns(NamedTuple):
    """What sees to microbatches that take turns.

    Attributes:
        undo: takes back what they change.
        reads: watches what they find.
    """

    undo: Undo
    reads: StaleReads


class Interleaving:
    """Runs the microbatches of steps of one kind, and lets them take turns once that is shown to be safe.

    Args:
        tree: says what is found.
        trainer: whose module it is.
        engine: runs them.

    Attributes:
        places: all that steps may change.
    """

    def __init__(self, tree: LightningTree, trainer: Any, engine: Executor) -> None:
        self._tree, self._trainer, self._engine = tree, trainer, engine
        self._model: nn.Module = trainer.lightning_module
        self._known = KnownChanges()
        self._batch = SimpleNamespace(shared=[])
        self.places = Places(self._model, partial(_beside_the_model, trainer, self._batch))
        self._attributes = LaneAttributes(self.places, self._known)
        self._ends = MicrobatchEnds(self.places)
        of_layers = engine.modules_of_layers()
        own = {id(module) for modules in of_layers for module in modules}
        metrics = CountedOnce(metric for metric in metrics_of(self._model) if id(metric) not in own)
        self._elsewhere = StateElsewhere(self.places, of_layers, engine.objects_with_weights, metrics)
        # What layers change when they run again in the first step of one microbatch, of which nothing else tells.
        self._silent: Fingerprints | None = None
        self._is_shown = self._changes_batch = self._has_run_alone = False
        self._causes_of_repeats: set[str] = set()
        self.hazard: str | None = None

    @property
    def is_earned(self) -> bool:
        """Whether microbatches take turns from now on."""
        return self._is_shown and self.hazard is None

    def run(
        self, forward: Callable[[bool], None], sizes: Sequence[int], parts: Sequence[Any], shared: Sequence[Any]
    ) -> None:
        """Run microbatches up to their losses.

        Args:
            forward: does, given whether they may take turns.
            sizes: how many samples each has. What they log is logged as one batch's.
            parts: the microbatches.
            shared: what all of them have one of.

        Raises:
            UnsupportedModelError: if they may not, and what was changed until that was seen cannot be taken back.
        """
        self._batch.shared[:] = filter(_may_keep, shared)
        batch = KeptBatch(
            parts if len(parts) > 1 else (),
            copies=self._changes_batch and self.is_earned,
            watches=not (self._changes_batch or self.is_earned or self.hazard is not None),
        )
        self._run(forward, sizes, batch)
        self._changes_batch = self._changes_batch or batch.has_changed()

    def _run(self, forward: Callable[[bool], None], sizes: Sequence[int], batch: KeptBatch) -> None:
        engine = self._engine
        # Of a step that has failed.
        self._ends.finish()
        self._num_collectives = num_collectives()
        if len(sizes) == 1:
            self.listen(is_step=True)
            has_others = self._trainer.world_size > 1
            with MicrobatchLogs(compat.logged_results(self._trainer), sizes) if has_others else nullcontext():
                forward(False)
            return
        if not self.is_earned:
            self._run_microbatches(forward, sizes)
            return
        places = self._attributes.begin().places
        buffers = list(self._buffers_between_layers(places))
        turns = _Turns(
            Undo(self._model, places, self._known, [held.content for held, _ in buffers]),
            StaleReads(places, buffers, self._known),
        )
        passes_on: str | None = None
        error: BaseException | None = None
        try:
            self._run_microbatches(forward, sizes, turns)
            return
        except _PassesOn as unsafe:
            late = passes_on = str(unsafe)
        except (_Unsafe, RecordingChangedError) as unsafe:
            late = str(unsafe)
        except BaseException as raised:
            # Where an update has failed, parameters are half updated: to run the step again would hide that.
            may_repeat = isinstance(raised, Exception) and not isinstance(raised, PlanError)
            if not may_repeat or engine.updater.overlap.failure is not None:
                self._attributes.finish()
                raise
            late = f"it fails where they take turns ({type(raised).__name__}: {raised})"
            # The frames of the attempt hold what it has allocated.
            error = CapacityError(str(raised)) if isinstance(raised, CapacityError) else raised
        gc.collect()
        engine.step.gradient_flags.restore()
        engine.abandon()
        engine.take_back_parameters()
        self._attributes.undo()
        if not turns.undo.restore() or not batch.restore() or self._is_collective():
            raise error or UnsupportedModelError(
                f"microbatches took turns in a step, while {late}, and what they have changed cannot be taken back: use "
                "HarmonyStrategy(num_microbatches=1), or pass it to layers as an argument"
            )
        is_planned_anew = isinstance(error, CapacityError) and engine.note_shortage()
        self._run_microbatches(forward, sizes)
        if is_planned_anew:
            return
        if isinstance(error, CapacityError):
            self.end(f"they do not fit together ({error})", len(sizes), "use smaller batches, or more memory")
        elif (error is not None or passes_on is not None or late in self._causes_of_repeats) and self.hazard is None:
            # What a step that has run again does not show would have all that follow run twice.
            self._refuse_turns(late, len(sizes))
        elif self.hazard is None and not self._causes_of_repeats:
            self._tree.info(
                f"Harmony: a step has run twice: microbatches took turns in it, while {late}. Results are exact. So will "
                "be each step in which that is so for the first time; this is said once"
            )
        self._causes_of_repeats.add(late)

    @property
    def default_dtypes(self) -> Collection[torch.dtype]:
        """The default dtypes that were set within steps, and do not hold outside of them."""
        return self._elsewhere.default_dtypes

    def listen(self, *, is_step: bool = False) -> None:
        """Layers will be called whose code may run again: in a step of one microbatch, or between steps."""
        on_call = self._elsewhere.begin()
        if is_step and not self._has_run_alone:
            with DisableTorchFunction():
                silent = Fingerprints(all_values(self.places.look().places, self._buffers_between_layers))
            self._silent, own = silent, on_call

            def on_call(objects: ObjectsOfCall) -> FoundAtCall:
                return silent.checked(own(objects))

        self._engine.notify(Listeners(on_call=on_call))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The context of a step that runs forwards and backwards itself, and not in microbatches."""
        self.listen(is_step=True)
        try:
            yield
        finally:
            self.finish()

    def finish(self) -> None:
        """The step is over; layers are refused that have changed something when they ran again, and nobody else can tell."""
        self._ends.finish()
        self._attributes.finish()
        self._elsewhere.finish()
        self.places.let_go()
        silent, self._silent = self._silent, None
        if silent is not None:
            self._has_run_alone = True
            silent.refuse_changed_again()

    def _run_microbatches(
        self, forward: Callable[[bool], None], sizes: Sequence[int], turns: _Turns | None = None
    ) -> None:
        """Run microbatches in turns, where there is what sees to these; else, and if they are larger than ever, in sequence.

        Raises:
            _Unsafe: if something is found to speak against turns that were taken.
        """
        engine = self._engine
        logs = MicrobatchLogs(compat.logged_results(self._trainer), sizes)
        # Once there is a hazard, nothing that is seen would let them take turns again.
        is_watched = self.hazard is None
        watch = Watch(self._model, self.places, self._buffers_between_layers) if is_watched else None

        def switch(microbatch: int) -> None:
            logs.microbatch = microbatch
            if turns is not None and not engine.step.is_sequential:
                turns.undo.note_turn(microbatch)
                turns.reads.leave()
                self._attributes.switch(microbatch)
                turns.reads.enter(microbatch)
            elif not engine.step.runs_whole:
                self._ends.switch(microbatch)

        def note_given(given: Sequence[Tensor]) -> None:
            who = watch if turns is None or engine.step.is_sequential else turns.reads
            if who is not None:
                who.note_given(given)

        def set_by_layer(attributes: dict[str, Any], names: set[str]) -> None:
            self._attributes.set_by_layer(attributes, names)
            if watch is not None:
                watch.set_by_layer(attributes, names)

        on_call = self._elsewhere.begin()
        on_call = on_call if watch is None else watch.checking(on_call)
        engine.notify(Listeners(switch, set_by_layer, watch, note_given, on_call, self._elsewhere.changes))
        with ExitStack() as stack:
            stack.enter_context(logs)
            if watch is not None:
                stack.callback(watch.close)
            if turns is not None:
                stack.callback(turns.reads.close)
            forward(turns is not None)
            if turns is not None and not engine.step.is_sequential:
                self._check_turns(turns)
            # Not what is logged, which follows.
            is_collective = self._is_collective()
        if not engine.step.is_sequential:
            return
        if not engine.step.runs_whole:
            self._ends.end_forward()
        if watch is not None:
            self._conclude(watch, len(sizes), is_collective)
            if self.is_earned:
                engine.expect_turns(len(sizes))

    def _check_turns(self, turns: _Turns) -> None:
        """See whether microbatches that have taken turns may have found what others keep.

        Raises:
            _Unsafe: if they may.
        """
        engine = self._engine
        if (stale := turns.reads.stale()) is not None:
            raise _PassesOn(f"{stale} passes something on from one microbatch to the next")
        changed = turns.reads.early() or next(iter(self._attributes.late()), None)
        if changed is not None:
            raise _Unsafe(f"{changed} is changed")
        if (in_place := turns.undo.late()) is not None:
            raise _Unsafe(in_place)
        if (buffer := engine.buffer_of_several_visits()) is not None:
            raise _Unsafe(f"{buffer} is changed")
        if engine.step.gradient_flags.are_left or engine.step.read_buffer is not None:
            raise _Unsafe(_FLAGS if engine.step.read_buffer is None else f"{engine.step.read_buffer} is read outside")
        if (layer := engine.layer_with_wide_weights()) is not None:
            # Not for its values: the step was planned with less memory than its backward takes.
            raise _Unsafe(f"layer {layer!r} reads weights for the first time that autocast alone had read before")
        if self._is_collective():
            raise _Unsafe(f"{_COLLECTIVE} for the first time")

    def _is_collective(self) -> bool:
        """Whether the step has exchanged anything with other processes."""
        return num_collectives() != self._num_collectives

    def _buffers_between_layers(self, places: Sequence[Held]) -> Iterator[tuple[Held, list[str]]]:
        """The buffers that no layer has, which the code between layers may change."""
        of_layers = {(id(owner), name) for owner, name in self._engine.buffers_of_layers()}
        for held in places:
            module = held.owner
            if held.kind is Kind.MODULE and module._buffers:
                names = [each for each in module._buffers if (id(module), each) not in of_layers]
                if names:
                    yield Held(held.name, module._buffers, Kind.MODULE, module), names

    def _conclude(self, watch: Watch, num_microbatches: int, is_collective: bool) -> None:
        hazard, buffer = watch.conclude(self._known, num_microbatches), self._engine.buffer_of_several_visits()
        read = self._engine.step.read_buffer
        self._is_shown = True
        if hazard is not None:
            self._refuse_turns(hazard, num_microbatches)
        elif buffer is not None:
            changed = f"{buffer} is changed in one call, and found so in a later one"
            self.end(changed, num_microbatches, "give each call a module of its own")
        elif (changed_parameter := self._engine.step.changed_parameter) is not None:
            changed = f"the step changes parameter {changed_parameter!r}, or what is set on it"
            self.end(changed, num_microbatches, "change it in on_train_batch_start or on_train_batch_end")
        elif (again := self._engine.step.changed_in_backward) is not None:
            self.end(f"{again} is changed in the backward", num_microbatches, "leave out the checkpoint that does so")
        elif self._engine.step.gradient_flags.are_left:
            self.end(_FLAGS, num_microbatches, "do that in a hook")
        elif read is not None:
            found = f"{read} is read outside of its layer, where others that took turns would have changed it"
            self.end(found, num_microbatches, "return it from the layer's call")
        elif is_collective:
            found = f"{_COLLECTIVE}, which would take turns in another order"
            self.end(found, num_microbatches, "do that in a hook")

    def _refuse_turns(self, hazard: str, num_microbatches: int) -> None:
        found = f"{hazard}, where others that took turns would find it so"
        self.end(found, num_microbatches, "keep that in a local variable, or pass it to layers as an argument")

    def end(self, hazard: str, num_microbatches: int, way_out: str) -> None:
        """Microbatches take turns no more.

        Args:
            hazard: what speaks against it.
            num_microbatches: of a step.
            way_out: how the user could let them take turns.
        """
        self.hazard = hazard
        self._tree.info(
            f"Harmony: microbatches run one after the other: {hazard}. Results are exact, but each layer is swapped in "
            f"{num_microbatches} times as often. To let them take turns, {way_out}"
        )


def _may_keep(shared: Any) -> bool:
    """Whether a step may keep something in what is in a batch: as in an object of the user's own."""
    return not is_plain(type(shared)) and not isinstance(shared, Tensor)


def _beside_the_model(trainer: Any, batch: Any, names: Collection[str]) -> Iterator[Other]:
    """What else a step may change: callbacks keep what is theirs, unless the user's code names them."""
    yield Other("the profiler", trainer.profiler)
    yield Other("the batch", batch)
    yield Other("the trainer", trainer, leads=False)
    for name, parameter in trainer.lightning_module.named_parameters():
        # Of numbers that are set on it, calls see themselves.
        if not all(map(is_plain, map(type, vars(parameter).values()))):
            yield Other(name, parameter)
    if "callbacks" in names:
        yield from (Other(type(each).__name__, each) for each in trainer.callbacks)
