"""The executor: conducts steps, from the first lane's first turn to the last update.

Its parts are made in `assembly`. `microbatch_runner` runs microbatches, and `granting` gives them their turns. What layers
ask for is in `runtime`: `pack_preparation` makes packs resident, `placement` knows where they are, `gradient_sums` adds up
their gradients, and `observer` measures what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.glue.glue import Glue
from lightning_harmony.engine.glue.one_device import BringsHostOperands
from lightning_harmony.engine.lanes.rng import RandomStreams
from lightning_harmony.engine.layers.intercept import InterceptedForward
from lightning_harmony.engine.layers.recordings import Recordings
from lightning_harmony.engine.layers.runtime import Listeners
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.model.derived import out_of_reach
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import BufferKey
from lightning_harmony.engine.step.gradient_sums import GradientSums
from lightning_harmony.engine.step.microbatch_runner import MicrobatchRunner
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.planning import Planner, SeenStep
from lightning_harmony.engine.step.runtime import Runtime
from lightning_harmony.engine.step.shortage import naming_shortages
from lightning_harmony.engine.step.step import Step
from lightning_harmony.engine.step.swapped_model import SwappedModel
from lightning_harmony.engine.step.turns import Microbatch
from lightning_harmony.engine.updates.update import StepUpdate, Updater
from lightning_harmony.plan.values.plan import Plan, merge_calls
from lightning_harmony.plan.values.task import Phase


@dataclass(eq=False, repr=False)
class Executor:
    """Runs the steps of a model whose layers are swapped.

    A step is `forward`, then `backward` with the gradient of its loss, or `abandon`. Outside of steps, layers are swapped
    in for one call at a time.

    Args:
        devices: where layers run, the root first: the one device that the model's own code sees.
        model: the model. Its layers are intercepted until `close`.
        intercepted: their forward methods.
        store: where its parameters live.
        pool: of memory on the host.
        traffic: counts what is copied.
        recorder: notes what runs when.
        updater: updates parameters.
        step: the step that runs.
        placement: of its packs.
        observer: of what turns take.
        planner: says by which plan steps run.
        sums: of gradients.
        runtime: serves layers and glue.
        glue: the code between layers.
        runner: runs microbatches.
        recordings: of the work of layers.

    Attributes:
        has_succeeded: whether a step has come to its end: the first one changes nothing before.
        step: the step that runs, or the last one.
        step_plan: by which it runs, or did.
    """

    devices: Sequence[Device]
    _model: SwappedModel
    _intercepted: Sequence[InterceptedForward]
    store: HostStore
    pool: HostPool
    traffic: Traffic
    recorder: StepRecorder
    updater: Updater
    step: Step
    _placement: Placement
    _observer: Observer
    planner: Planner
    _sums: GradientSums
    _runtime: Runtime
    _glue: Glue
    _runner: MicrobatchRunner
    recordings: Recordings

    def __post_init__(self) -> None:
        self._cuda_devices = [d.torch_device.index for d in self.devices if isinstance(d.torch_device.index, int)]
        self.has_succeeded, self._is_short, self._num_expected = False, False, 0
        self._evaluated_elements, self._shares_weights = -1, False
        self.step_plan = self.plan

    @property
    def plan(self) -> Plan:
        """What steps run by from now on."""
        return self._placement.plan

    @property
    def gradient_bytes(self) -> list[int]:
        """What the gradients of each pack take on the host."""
        return [pack.gradient_layout()[1] for pack in self._placement.packs]

    def parameters_in_order(self) -> list[Sequence[nn.Parameter]]:
        """The parameters of each pack, those first that a forward needs first."""
        return [pack.parameters for pack in self._placement.in_order()]

    def notify(self, listeners: Listeners | None = None) -> None:
        """Say who is told of the steps from now on: nobody else than these."""
        self.step.listeners = listeners or Listeners()

    def buffer_of_several_visits(self) -> str | None:
        """In a step, a buffer that a microbatch changes in one visit of a layer and finds in another; None if none is."""
        found = (self._model.buffer_of_several_visits(progress.calls) for progress in self.step.turns.running)
        return next((each for each in found if each is not None), None)

    def buffers_of_layers(self) -> Iterator[BufferKey]:
        """The buffers of layers, which their own code alone changes."""
        return (key for layer in self._model.layers for key in layer.buffers)

    def modules_of_layers(self) -> list[list[nn.Module]]:
        """The modules of each layer, which its own code alone calls."""
        return [list(layer.whole.modules()) for layer in self._model.layers if layer.whole is not None]

    def objects_with_weights(self) -> set[int]:
        """The attributes of objects that keep weights of layers, by their identities."""
        return {each for layer in self._model.layers for each in layer.companions.objects()}

    def layer_with_wide_weights(self) -> str | None:
        """In a step, the name of a layer that needed weights as they are that had come narrow; None if none did."""
        return next((layer.name for layer in self._model.layers if layer.read_wide), None)

    def parameters_in_graph(self) -> set[nn.Parameter]:
        """In a step, the parameters that its backward reads."""
        held, layers = self._model.held, self._model.layers
        return {each for layer in layers if layer.is_in_graph for each in layer.parameters if each not in held}

    # ---- between steps -------------------------------------------------------------------------------------------------

    def is_outdated(self) -> bool:
        """Whether the model has other parameters than when it was set up, or has them elsewhere, as pruning leaves it."""
        return self._glue.is_outdated() or self._model.has_other_parameters()

    def catch_up(self) -> None:
        """Before a step, see to what was done to parameters since the last one. Those that are trained anew are measured.

        Raises:
            UnsupportedModelError: if one has another type or shape.
        """
        self._model.catch_up()
        self.planner.catch_up()

    @property
    def shares_weights(self) -> bool:
        """Whether code has tensors in the memory of parameters, and may look at them at any time."""
        return bool(self._shares_weights or self.store.elsewhere - self.store.in_files)

    def end_update(self) -> None:
        """An optimizer has stepped: what layers have left of their weights follows these."""
        if self._model.keeps_copies():
            self.updater.postponed.finish()
            for device in self.devices:
                device.record().synchronize()
            self._model.bring_copies_up()

    @contextmanager
    def outside_of_lanes(self) -> Iterator[None]:
        """The context of a step that runs as it is: its own code finds parameters on the host, and runs backwards."""
        brings = BringsHostOperands(self.devices[0].torch_device) if self._cuda_devices else nullcontext()
        with brings, self._runtime.open_call.leaving_on_error():
            yield

    def to_root(self, tensor: Tensor) -> Tensor:
        """What a lane leaves behind, where the model's own code expects it."""
        return self._runtime.sent(tensor, 0).detach()

    # ---- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A training step begins: what is counted and noted from now on is its own."""
        if not self.has_succeeded:
            # Updates have such tensors of their own later on.
            self._shares_weights = self.store.shares_memory()
        self.traffic.reset()
        self.step_plan = self.plan
        self.recorder.begin(self.plan, self._placement.packs)

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        *,
        num_elements: int,
        predicted_gradient: float | None,
        adds_to_earlier: bool = False,
        is_training: bool = True,
        interleave: bool = True,
        on_plan: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the user's step on all microbatches, up to their losses.

        A single microbatch, and those whose work is not known, run one after the other, in the calling thread.

        Args:
            microbatches: one for each lane.
            is_training: whether it is the step that is run again and again. What is learned from that, such as which
                weights may be narrow, holds for no other.
            num_elements: elements of the largest microbatch. More than ever before are run with care, and measured.
            predicted_gradient: the gradient of the batch's loss that `backward` will bring, if it is known. The backward of
                the last packs then follows each loss at once; where one microbatch runs after the other, all of it does.
            adds_to_earlier: whether that adds to the gradients of earlier batches, as they are now.
            interleave: whether several microbatches may take turns: their code must not notice.
            on_plan: called when it is known by which plan a training step runs.
        """
        self.abandon()
        if is_training:
            if not self.recorder.is_recording:
                # An attempt at this step was undone, or what is abandoned here was taken for it.
                self.recorder.begin(self.plan, self._placement.packs)
            self._plan_step(num_elements, len(microbatches))
            on_plan()
        is_measuring = self.measures(num_elements, is_training=is_training)
        is_watching = is_training and self.planner.watches and self._model.compute_dtype is None
        self._observer.begin_step(
            num_elements,
            is_training=is_training,
            is_measuring=is_measuring,
            is_watching=is_watching,
            is_timing=is_training and self.planner.times_turns_of(num_elements),
        )
        step, is_alone = self.step, len(microbatches) == 1
        step.is_sequential = is_alone or is_measuring or not interleave
        step.watch = step.listeners.watch if step.is_sequential and not is_alone else None
        predicted = predicted_gradient if step.predicts else None
        # Where work space isn't known, a lane goes from pack to pack.
        step.fuses = predicted is not None and self.planner.is_planned and not is_measuring
        # A single microbatch has no other to wait for: its caller brings the gradient at once. But where its work is not
        # known, whether its backward fits shows here.
        waits = is_alone and not is_measuring
        step.predicted = None if waits or not (step.fuses or step.is_sequential) else predicted
        step.adds_to_earlier = adds_to_earlier
        step.random = RandomStreams([microbatch.seed for microbatch in microbatches], self._cuda_devices)
        self.updater.buffers.reclaim()
        if is_measuring or not is_training:
            # It gets all memory there is: no plan tells what it needs.
            self.updater.postponed.finish()
        step.in_backward = False
        self._model.begin_step(is_training=is_training, runtime=self._runtime)
        self._placement.begin_step(None if is_training else self._observer.works[False])
        for residents in self._placement.residents:
            agenda = residents.agenda
            agenda.follows_moves = is_alone or not step.is_sequential
            agenda.ends_with_forward = agenda.follows_moves and not is_training
            for pack in residents.packs:
                pack.is_narrow = is_training
        # A step that is timed is as those that follow.
        self.recordings.begin_step(is_on=is_training and not (step.is_sequential or is_measuring or is_watching))
        self._runner.begin(microbatches)
        with self._glue.stand_ins(), out_of_reach(self._model.derived), self._unwinding_on_error():
            self._runner.drive(Phase.FORWARD)
            self._end_forward(is_training=is_training)
            # Hooks before the backward draw as others do, not as a microbatch.
            self.step.random.switch_back()
            # What comes next is user code that sees parameters, and gradients that take the place of those it uses.
            self.updater.postponed.finish_parameters()

    def _plan_step(self, num_elements: int, num_microbatches: int) -> None:
        plan = self.planner.before_step(
            num_elements,
            num_microbatches,
            self._runtime.find_glue_layer,
            lambda: self.pool.has_room(sum(self.gradient_bytes)),
        )
        if plan is not None:
            self._go_by(plan)
            self.step_plan = plan
            self.recorder.run_by(plan, self._placement.packs)

    def backward(
        self,
        gradient: Tensor,
        update: StepUpdate,
        *,
        requested: frozenset[nn.Parameter] | None = None,
    ) -> None:
        """Run the backward of all microbatches, and the update of each pack behind it.

        Args:
            gradient: of the loss of the batch.
            update: what is asked of the update of each pack. In the first step of all the optimizer is stepped when the
                backward has succeeded.
            requested: the parameters whose gradients are summed; None for all. Fused packs must not have summed others.
        """
        self.step.upstream = gradient.detach()
        self.step.in_backward = True
        self._sums.begin_backward(self.step.correction(gradient), requested)
        # Gradients of the last step that were zeroed since.
        self.updater.buffers.reclaim()
        self.updater.begin(
            self.parameters_in_order(),
            # A recorded step is whole.
            replace(update, may_outlast=update.may_outlast and not self.recorder.is_recording),
            hold_back=not self.has_succeeded and (update.optimizer is not None or self.step.averaging is not None),
            is_tight=self._observer.is_measuring,
            averaging=self.step.averaging,
        )
        with self._glue.stand_ins(), out_of_reach(self._model.derived), self._unwinding_on_error():
            self._sums.deliver_final(range(len(self._placement.packs)))
            self._runner.drive(Phase.BACKWARD)
            self._sums.deliver_rest()
            self._model.refuse_changed_buffers()
            self.updater.finish()
        self._end()

    def _end(self) -> None:
        """Nothing outlives a step on the device: its weights are stale after any update."""
        observer = self._observer
        called = [progress.calls for progress in self.step.turns.running]
        for calls in called:
            observer.work.note_calls(calls)
        self._reset()
        self._runner.prepare_lanes(self._num_expected)
        self._num_expected = 0
        seen = SeenStep(
            merge_calls(called),
            len(called),
            observer.num_elements,
            is_measured=observer.is_measuring,
            is_cast=observer.has_seen_casts,
            is_timed=observer.is_timing,
            is_narrow=observer.has_seen_narrow,
            has_shrunk=self._is_short or (not self.has_succeeded and sum(d.note_kernels() for d in self.devices) > 0),
        )
        self._is_short = False
        if observer.is_profiling:
            self.recordings.set_aside(self._model.layers, lambda layer: observer.work.bytes([layer], Phase.BACKWARD))
            observer.work.occupied_bytes = [device.allocated_bytes() for device in self.devices]
        self.pool.trim()
        self.has_succeeded = self.step.has_trained = True
        plan = self.planner.after_step(seen)
        if plan is not None:
            self._go_by(plan)

    def _go_by(self, plan: Plan) -> None:
        """Steps run by a plan from now on."""
        self._placement.use(plan, self._model.layers)
        self.updater.keep_on_devices(self._placement.parameters_with_state_there())

    def _end_forward(self, *, is_training: bool) -> None:
        for residents in self._placement.residents:
            with residents.device.scheduling():
                residents.end_forward()
        if is_training:
            self.recordings.end_forward()
        else:
            # Nothing else will come. In training, gradients that are handed over have to wait for it.
            self.refuse_changed_weights()

    def refuse_changed_weights(self) -> None:
        """Refuse a forward in which layers have changed weights.

        Raises:
            UnsupportedModelError: naming the pack.
        """
        self._placement.refuse_changed_weights()

    def abandon(self) -> None:
        """End a step that has no backward, or whose backward never came."""
        if self.step.is_running:
            if self._observer.is_measuring and not self._observer.is_training:
                self._evaluated_elements = self._observer.num_elements
            self._runner.abort()
            self.recorder.drop()
            self._reset()

    def expect_turns(self, num_microbatches: int) -> None:
        """So many microbatches take turns from the next step on: it is planned when libraries have what they keep for them."""
        self._num_expected = num_microbatches

    def note_shortage(self) -> bool:
        """Turns by a plan ran out of memory: whether those of later steps are to be planned with less, and tried again."""
        self._is_short = sum(device.note_shortage() for device in self.devices) > 0
        return self._is_short

    def take_back_parameters(self) -> None:
        """After a step that microbatches took turns in was abandoned: make parameters what they were that layers have set."""
        self._model.take_back_parameters()

    def measures(self, num_elements: int, *, is_training: bool) -> bool:
        """Whether so many elements in a microbatch are more than ever before."""
        return num_elements > (self.planner.measured_elements if is_training else self._evaluated_elements)

    def start_over(self) -> None:
        """A training step did not fit, and is to run again in smaller microbatches."""
        if (plan := self.planner.start_over()) is not None:
            self._go_by(plan)

    def forget_evaluations(self) -> None:
        """Forget the work space of evaluations: a batch that failed is not run again."""
        self._observer.works[False].clear()
        self._evaluated_elements = -1

    def _reset(self) -> None:
        self._observer.forget_turns()
        self._sums.reset()
        self._runner.end()
        self.step.random.switch_back()
        self._model.end_step()
        for residents in self._placement.residents:
            residents.reset()
        # Also where the step has failed, and is run again.
        if self._placement.widen_read():
            self.planner.note_widened()

    @contextmanager
    def _unwinding_on_error(self) -> Iterator[None]:
        try:
            with naming_shortages(self.devices):
                yield
        except BaseException:
            self._runner.abort()
            self.recorder.drop()
            # Code that handles the error may save a checkpoint: no update may run meanwhile, and none be lost.
            self.updater.postponed.drain()
            self.updater.drain()
            for residents in self._placement.residents:
                residents.stash.clear()
            self._reset()
            raise

    def close(self) -> None:
        """Join all threads, give the model its own forward methods back, and release host memory from the device."""
        self._runner.close()
        self._runtime.open_call.leave()
        self._reset()
        for intercepted in self._intercepted:
            intercepted.remove()
        self._model.close()
        self.updater.close()
        for residents in self._placement.residents:
            residents.weight_checks.close()
            residents.swapper.close()
            residents.device.close()
        self.store.close()
