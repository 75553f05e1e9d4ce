"""The executor: conducts steps, from the first lane's first turn to the last update, and grants lanes pack by pack.

What layers need of it is in `runtime`: `pack_preparation` makes packs resident, `placement` knows where they are,
`gradient_sums` adds up their gradients, and `observer` measures what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.devices.cores import core_of_caller, siblings_of
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.glue.functions import functions_as_operations
from lightning_harmony.engine.glue.glue import Glue
from lightning_harmony.engine.glue.host_operands import BringsHostOperands
from lightning_harmony.engine.glue.one_device import OneDevice
from lightning_harmony.engine.lanes.lane import AnyLane, CallerLane, LanePool
from lightning_harmony.engine.lanes.rng import RandomStreams
from lightning_harmony.engine.layers.intercept import InterceptedForward
from lightning_harmony.engine.measure.measurements import Measurements
from lightning_harmony.engine.measure.profile import Profiler
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.stash import LaneStash, Stash
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.memory.transfer import LaneTransfers, Transfers
from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.engine.model.derived import out_of_reach
from lightning_harmony.engine.model.host_store import HostPool, HostStore
from lightning_harmony.engine.model.layer import SwappedLayer, places_of
from lightning_harmony.engine.step.fit_record import FitRecord, Records
from lightning_harmony.engine.step.given_plan import check_given
from lightning_harmony.engine.step.gradient_sums import GradientSums
from lightning_harmony.engine.step.granting import Granting
from lightning_harmony.engine.step.lone_calls import LoneCalls
from lightning_harmony.engine.step.microbatch_runner import MicrobatchRunner
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.pack_preparation import PackPreparation
from lightning_harmony.engine.step.plan_making import PlanMaker
from lightning_harmony.engine.step.planning import Planner, SeenStep
from lightning_harmony.engine.step.runtime import Runtime
from lightning_harmony.engine.step.shortage import exceeded_in_turn, refuse_too_large
from lightning_harmony.engine.step.step import Listeners, Step, StepWatch
from lightning_harmony.engine.step.swapped_model import SwappedModel
from lightning_harmony.engine.step.turns import LaneProgress, Microbatch
from lightning_harmony.engine.updates.optimizer_twin import Clip
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.engine.updates.update import Updater
from lightning_harmony.plan.values.plan import Parallel, Plan, merge_calls
from lightning_harmony.plan.values.task import Phase, Task


class Executor:
    """Runs the steps of a model whose layers are swapped.

    A step is `forward`, then `backward` with the gradient of its loss, or `abandon`. Outside of steps, layers are swapped
    in for one call at a time.

    Args:
        model: the module whose layers are intercepted from now until `close`.
        layers: those layers, as `find_layers` returns them.
        devices: where they run, the root first: the one device that the model's own code sees.
        parallel: how packs are placed on several devices.
        compute_dtype: the type in which floating parameters and the layers' floating inputs are on the device, where it is
            narrower than the parameters' own; None to leave all types as they are.
        compile_options: of `torch.compile`, with which layers are compiled; None not to.
        updates_on_host: whether optimizers step there, and not on the devices.
        plan: what to run by once work space is known; None to plan from what is measured.
        progress: told again and again how many bytes are in the host store.
        records: what earlier fits have measured; None to measure anew.
        store: one that was closed, where it has all of the model's parameters; None to make one.

    Raises:
        CapacityError: if a layer's weights and gradients exceed the capacity.
        PlanError: if the plan is for another model, for other devices or for a larger capacity.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *devices: Device,
        parallel: Parallel = "pipeline",
        compute_dtype: torch.dtype | None = None,
        compile_options: Mapping[str, Any] | None = None,
        updates_on_host: bool = False,
        plan: Plan | None = None,
        progress: Callable[[int], None] = lambda done: None,
        records: Records | None = None,
        store: HostStore | None = None,
    ) -> None:
        self.devices = devices
        root = devices[0]
        self._cuda_devices = [d.torch_device.index for d in devices if isinstance(d.torch_device.index, int)]
        self.traffic = Traffic()
        # Whether a step has come to its end: the first one changes nothing before.
        self.has_succeeded = False
        swapped_layers = [
            SwappedLayer(index, layer.name, layer.module, list(layer.module.parameters()), compute_dtype)
            for index, layer in enumerate(layers)
        ]
        refuse_too_large(swapped_layers, devices)
        names = {name for name, _ in model.named_parameters()}
        fingerprint = check_given(plan, swapped_layers, names, devices, parallel)
        in_order = dict.fromkeys([p for layer in swapped_layers for p in layer.parameters] + list(model.parameters()))
        self.store = HostStore(list(in_order), root, progress) if store is None else store.reopened(root)
        self.pool = HostPool(root.host_buffer)
        self.recorder = StepRecorder(devices)
        # Where a GPU computes, lanes only launch what it does, on a core that is spared for them. On the host they compute: on
        # the core that the system finds for their caller, which another process may need next time.
        launches = bool(self._cuda_devices)
        core = core_of_caller() if launches else None
        self._lanes = LanePool((lambda: core) if launches else core_of_caller, computes=not launches)
        self.updater = Updater(
            self.pool,
            StreamedUpdate(devices, self.store.__contains__, on_host=updates_on_host, traffic=self.traffic),
            spared_cores=() if core is None else siblings_of(core),
            on_update=self.recorder.note_update,
        )
        self._model = swapped = SwappedModel(
            model, swapped_layers, self.store, self.updater.postponed, root.torch_device, compute_dtype
        )
        self._residents = residents = [self._residents_on(number) for number in range(len(devices))]
        self._step = step = Step()
        self._placement = placement = Placement(self.store, residents)
        self._profiler = profiler = Profiler(self.traffic)
        self._observer = observer = Observer(step, placement, self.traffic, profiler, self.pool)
        self._transfers = transfers = Transfers(
            devices, self.traffic, lambda to, size: residents[to].admit(size), observer.timing_transfer
        )
        measured = Measurements(
            devices,
            self.store,
            profiler,
            observer.works[True],
            self.updater.speeds,
        )
        self._record = record = FitRecord(records, swapped.layers, measured)
        maker = PlanMaker(swapped.layers, devices, parallel, fingerprint, measured, plan)
        self._planner = planner = Planner(swapped.layers, measured, maker, record)
        self._sums = sums = GradientSums(swapped, step, placement, transfers, self.updater, observer, profiler)
        preparation = PackPreparation(step, placement, observer, profiler, self.traffic, self.recorder, compute_dtype)
        lone_calls = LoneCalls(swapped, placement, sums, self.recorder, record.discard)
        self._runtime = runtime = Runtime(
            swapped,
            step,
            placement,
            preparation,
            lone_calls,
            sums,
            transfers,
            observer,
            self.recorder,
        )
        self._glue = glue = Glue(places_of(model, list(in_order)), root.torch_device, runtime, compute_dtype)
        self._granting = granting = Granting(step, placement, preparation, sums, observer, self.recorder)
        self._runner = MicrobatchRunner(step, devices, granting, preparation, runtime, glue)
        self._num_elements, self._evaluated_elements = 0, -1
        self._predicts = True
        self._use(planner.layer_by_layer(range(len(layers))))
        self.step_plan = self.plan
        self._start([])
        self._intercepted = [InterceptedForward(layer, runtime, compile_options) for layer in swapped_layers]

    def _residents_on(self, number: int) -> Residents:
        device = self.devices[number]
        swapper = Swapper(device, self.store, self.pool, self.traffic, self._model.is_shared, self.updater.postponed)
        return Residents(device, swapper, Stash(device, self.pool, self.traffic), number)

    @property
    def plan(self) -> Plan:
        """What steps run by from now on."""
        return self._placement.plan

    @property
    def gradient_bytes(self) -> list[int]:
        """What the gradients of each pack take on the host."""
        return [pack.gradient_layout()[1] for pack in self._placement.packs]

    @property
    def reentrant(self) -> bool:
        """Whether layers were called in a backward, as reentrant checkpointing does."""
        return self._sums.reentrant

    def notify(
        self,
        *,
        on_switch: Callable[[int], None] | None = None,
        on_set: Callable[[dict[str, Any], set[str]], None] | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        """Say who is told of the steps from now on: nobody else than these.

        Args:
            on_switch: told which microbatch has its turn.
            on_set: told what attributes the own code of a layer has set.
            watch: told of microbatches that run one after the other, if there are several.
        """
        self._step.listeners = Listeners(on_switch, on_set, watch)

    @property
    def is_running(self) -> bool:
        """Whether lanes run, or wait for each other: parameters are then not what they are between hooks."""
        return self._lanes.is_driving or self._runner.is_running_here

    @property
    def is_sequential(self) -> bool:
        """Whether the microbatches of the step run one after the other, in the calling thread."""
        return self._step.is_sequential

    def buffer_of_several_visits(self) -> str | None:
        """In a step, a buffer that a microbatch changes in one visit of a layer and finds in another; None if none is."""
        for progress in self._step.turns.running:
            found = self._model.buffer_of_several_visits(progress.calls)
            if found is not None:
                return found
        return None

    def _use(self, plan: Plan) -> None:
        self._placement.use(plan, self._model.layers)

    # ---- between steps -------------------------------------------------------------------------------------------------

    def is_outdated(self) -> bool:
        """Whether the model has other parameters than when it was set up, or has them elsewhere, as pruning leaves it."""
        return self._glue.is_outdated() or self._model.has_other_parameters()

    def catch_up(self) -> None:
        """Before a step, see to what was done to parameters since the last one.

        Raises:
            UnsupportedModelError: if one has another type or shape.
        """
        self._model.catch_up()

    def recompute_in(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """From now on, run layers' own code in a context when it runs again, and has been heard before."""
        self._runtime.recomputing = context

    def outside_of_lanes(self) -> AbstractContextManager[Any]:
        """The context of a step whose own code finds parameters on the host."""
        return BringsHostOperands(self.devices[0].torch_device) if self._cuda_devices else nullcontext()

    def to_root(self, tensor: Tensor) -> Tensor:
        """What a lane leaves behind, where the model's own code expects it."""
        return self._runtime.sent(tensor, 0).detach()

    # ---- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A training step begins: what is counted and noted from now on is its own."""
        self.traffic.reset()
        self.step_plan = self.plan
        self.recorder.begin(self.plan, self._placement.packs)

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        *,
        num_elements: int,
        predicted_gradient: float | None,
        is_training: bool = True,
        interleave: bool = True,
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
            interleave: whether several microbatches may take turns: their code must not notice.
        """
        self.abandon()
        if is_training:
            self._plan_step(num_elements, len(microbatches))
        is_measuring = self.measures(num_elements, is_training=is_training)
        is_watching = is_training and self._planner.watches and self._model.compute_dtype is None
        self._observer.begin_step(
            num_elements,
            is_training=is_training,
            is_measuring=is_measuring,
            is_watching=is_watching,
            is_timing=is_training and self._planner.times_turns_of(num_elements),
        )
        step, is_alone = self._step, len(microbatches) == 1
        step.is_sequential = is_alone or is_measuring or not interleave
        step.watch = step.listeners.watch if step.is_sequential and not is_alone else None
        predicted = predicted_gradient if self._predicts else None
        # Where work space isn't known, a lane goes from pack to pack.
        step.fuses = predicted is not None and self._planner.is_planned and not is_measuring
        # A single microbatch has no other to wait for: its caller brings the gradient at once. But where its work is not
        # known, whether its backward fits shows here.
        waits = is_alone and not is_measuring
        step.predicted = None if waits or not (step.fuses or step.is_sequential) else predicted
        self._num_elements = num_elements
        step.random = RandomStreams([microbatch.seed for microbatch in microbatches], self._cuda_devices)
        self.updater.buffers.reclaim()
        step.in_backward = False
        self._model.begin_step(is_training=is_training)
        for residents in self._residents:
            residents.follows_moves = is_alone or not step.is_sequential
            residents.device.begin_lanes()
            for pack in residents.packs:
                pack.is_narrow = is_training
        numbers = range(len(microbatches))
        lanes: Sequence[AnyLane] = (
            [CallerLane(number, self._granting.go_on) for number in numbers]
            if step.is_sequential
            else self._lanes.lanes([partial(self._runner.run_lane, number) for number in numbers])
        )
        self._start([self._begin(lane, each) for lane, each in zip(lanes, microbatches, strict=True)])
        with self._glue.stand_ins(), out_of_reach(self._model.derived), self._unwinding_on_error():
            self._drive(Phase.FORWARD)
            # Hooks before the backward draw as others do, not as a microbatch.
            self._step.random.switch_back()
            # What comes next is user code that sees parameters, and gradients that take the place of those it uses.
            self.updater.postponed.finish()

    def _plan_step(self, num_elements: int, num_microbatches: int) -> None:
        plan = self._planner.before_step(
            num_elements,
            num_microbatches,
            self._runtime.find_glue_layer,
            lambda: self.pool.has_room(sum(self.gradient_bytes)),
        )
        if plan is not None:
            self._use(plan)
            self.step_plan = plan
            self.recorder.run_by(plan, self._placement.packs)

    def _start(self, running: list[LaneProgress]) -> None:
        """These lanes run from now on."""
        self._step.start(running, self.plan, {pack.index for pack in self._placement.packs if pack.buffers})

    def _begin(self, lane: AnyLane, microbatch: Microbatch) -> LaneProgress:
        stashes = [LaneStash(residents.stash) for residents in self._residents]
        transfers = LaneTransfers(self._transfers, lane.microbatch)
        glue = OneDevice(transfers, self._transfers) if len(self.devices) > 1 else None
        return LaneProgress(lane, microbatch, stashes, transfers, glue)

    def backward(
        self,
        gradient: Tensor,
        optimizer: Optimizer | None,
        *,
        requested: frozenset[nn.Parameter] | None = None,
        clip: Clip | None = None,
        with_norms: bool = False,
        may_outlast: bool = False,
    ) -> None:
        """Run the backward of all microbatches, and the update of each pack behind it.

        Args:
            gradient: of the loss of the batch.
            optimizer: the one to step just in time; None if gradients are only collected. In the first step of all it is
                stepped when the backward has succeeded.
            requested: the parameters whose gradients are summed; None for all. Fused packs must not have summed others.
            clip: changes gradients before they are used just in time.
            with_norms: whether the norm of each collected gradient will be asked for.
            may_outlast: whether updates just in time may go on until the next forward, as one does that is postponed.
        """
        self._step.upstream = gradient.detach()
        self._step.in_backward = True
        self._sums.begin_backward(self._check_prediction(gradient), requested)
        # Gradients of the last step that were zeroed since.
        self.updater.buffers.reclaim()
        for device in self.devices:
            device.begin_lanes()
        self.updater.begin(
            optimizer,
            [pack.parameters for pack in self._placement.in_order()],
            clip=clip,
            with_norms=with_norms,
            hold_back=optimizer is not None and not self.has_succeeded,
            # A recorded step is whole.
            may_outlast=may_outlast and not self.recorder.is_recording,
        )
        with self._glue.stand_ins(), out_of_reach(self._model.derived), self._unwinding_on_error():
            self._sums.deliver_final(range(len(self._placement.packs)))
            self._drive(Phase.BACKWARD)
            self._sums.deliver_rest()
            self._model.refuse_changed_buffers()
            self.updater.finish()
        self._end()

    def update(self, optimizer: Optimizer, clip: Clip | None, *, waits: bool) -> None:
        """Update all parameters that have gradients, pack by pack, before the next forward comes to each.

        Args:
            optimizer: the one to step. What a step would do now is done, whatever is changed meanwhile.
            clip: changes gradients before they are used.
            waits: whether to return when all are updated.
        """
        postponed = self.updater.postponed
        update = postponed.make_at_once if waits else postponed.start
        update(optimizer, [pack.parameters for pack in self._placement.in_order()], clip)

    def _check_prediction(self, gradient: Tensor) -> float:
        """What gradients have to be multiplied with because another gradient was predicted. Then never predict again."""
        predicted = self._step.predicted
        if predicted is None:
            return 1.0
        actual = float(gradient)
        if actual == predicted:
            return 1.0
        self._predicts = False
        return actual / predicted

    def _end(self) -> None:
        """Nothing outlives a step on the device: its weights are stale after an update, whoever makes it."""
        observer = self._observer
        calls = merge_calls([progress.calls for progress in self._step.turns.running])
        num_microbatches = len(self._step.turns.running)
        for progress in self._step.turns.running:
            observer.work.note_calls(progress.calls)
        seen = SeenStep(
            calls,
            num_microbatches,
            self._num_elements,
            is_measured=observer.is_measuring,
            is_cast=observer.has_seen_casts,
            is_timed=observer.is_timing,
        )
        self._reset()
        if observer.is_profiling:
            observer.work.occupied_bytes = max(device.allocated_bytes() for device in self.devices)
        self.pool.trim()
        self.has_succeeded = True
        plan = self._planner.after_step(seen)
        if plan is not None:
            self._use(plan)

    def note_seconds(self, seconds: float) -> None:
        """How long the training step took that has ended."""
        self._planner.note_seconds(seconds)

    def abandon(self) -> None:
        """End a step that has no backward, or whose backward never came."""
        if self._step.is_running:
            if self._observer.is_measuring and not self._observer.is_training:
                self._evaluated_elements = self._num_elements
            self._lanes.abort()
            self.recorder.drop()
            self._reset()

    def measures(self, num_elements: int, *, is_training: bool) -> bool:
        """Whether so many elements in a microbatch are more than ever before."""
        return num_elements > (self._planner.measured_elements if is_training else self._evaluated_elements)

    def start_over(self) -> None:
        """A training step did not fit, and is to run again in smaller microbatches."""
        plan = self._planner.start_over()
        if plan is not None:
            self._use(plan)

    def forget_evaluations(self) -> None:
        """Forget the work space of evaluations: a batch that failed is not run again."""
        self._observer.works[False].clear()
        self._evaluated_elements = -1

    def _reset(self) -> None:
        self._observer.forget_turns()
        self._sums.reset()
        self._transfers.shared.clear()
        self._start([])
        self._step.random.switch_back()
        self._model.end_step()
        for residents in self._residents:
            residents.reset()

    @contextmanager
    def _unwinding_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._lanes.abort()
            self.recorder.drop()
            # Whoever handles the error may save a checkpoint: no update may run meanwhile, and none be lost.
            self.updater.postponed.drain()
            self.updater.drain()
            for residents in self._residents:
                residents.stash.clear()
            self._reset()
            raise

    def _drive(self, until: Phase) -> None:
        """Grant lanes, one at a time, until each has ended or waits for what comes after ``until``."""
        step = self._step
        try:
            # A compiled container around layers runs as it is written where its operations may be on several devices.
            whole = torch.compiler.set_stance("force_eager") if len(self.devices) > 1 else nullcontext()
            with whole, functions_as_operations():
                if step.is_sequential:
                    self._runner.run_one_after_another()
                else:
                    self._lanes.drive(partial(self._granting.next, until))
        except torch.OutOfMemoryError as error:
            if step.granted is None:
                raise
            raise exceeded_in_turn(step.granted, self.devices, error, self._record.discard()) from error
        except Exception as error:
            granted = step.granted
            if granted is not None and granted.pack is not None and hasattr(error, "add_note"):
                task = Task(granted.pack.index, granted.phase, granted.progress.lane.microbatch)
                on_device = f" on device {granted.device}" if len(self.devices) > 1 else ""
                error.add_note(f"in task {task} ({granted.pack.name}){on_device}")
            raise
        finally:
            step.granted = None
            for device in self.devices:
                device.join_lanes()

    def close(self) -> None:
        """Join all threads, give the model its own forward methods back, and release host memory from the device."""
        self._lanes.close()
        self._reset()
        for intercepted in self._intercepted:
            intercepted.remove()
        self._model.close()
        self.updater.close()
        for device in self.devices:
            device.close()
        self.store.close()
