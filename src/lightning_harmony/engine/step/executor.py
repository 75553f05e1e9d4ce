"""The executor: conducts steps, from the first lane's first turn to the last update, and grants lanes pack by pack.

What layers need of it is in `runtime`: `pack_preparation` makes packs resident, `placement` knows where they are,
`gradient_sums` adds up their gradients, and `observer` measures what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from lightning_harmony.engine.lanes.lane import AnyLane, CallerLane, Lane, LanePool
from lightning_harmony.engine.lanes.rng import RandomStreams
from lightning_harmony.engine.layers.intercept import InterceptedForward
from lightning_harmony.engine.measure.measurements import Measurements
from lightning_harmony.engine.measure.profile import Profiler
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.residents import Place, Residents
from lightning_harmony.engine.memory.stash import LaneStash, Stash
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.memory.transfer import LaneTransfers, Transfers
from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.engine.model.derived import out_of_reach
from lightning_harmony.engine.model.host_store import HostPool, HostStore
from lightning_harmony.engine.model.layer import SwappedLayer, places_of
from lightning_harmony.engine.step.gradient_sums import GradientSums
from lightning_harmony.engine.step.lone_calls import LoneCalls
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.pack_preparation import PackPreparation
from lightning_harmony.engine.step.planning import Planner, Records, SeenStep, check_given
from lightning_harmony.engine.step.runtime import Runtime
from lightning_harmony.engine.step.shortage import exceeded_in_turn, refuse_too_large
from lightning_harmony.engine.step.step import Grant, Step, StepWatch
from lightning_harmony.engine.step.swapped_model import SwappedModel
from lightning_harmony.engine.step.turns import LaneProgress, Microbatch, Request
from lightning_harmony.engine.structures.operations import Unseen
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
        self.notify()
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
        self._planner = planner = Planner(swapped.layers, devices, parallel, fingerprint, measured, plan, records)
        self._sums = sums = GradientSums(swapped, step, placement, transfers, self.updater, observer, profiler)
        self._preparation = preparation = PackPreparation(
            step, placement, observer, profiler, self.traffic, self.recorder, compute_dtype
        )
        lone_calls = LoneCalls(swapped, placement, sums, self.recorder, planner.discard_record)
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
            self._note_set,
        )
        self._glue = Glue(places_of(model, list(in_order)), root.torch_device, runtime, compute_dtype)
        self._random = RandomStreams([], [])
        self._num_elements, self._evaluated_elements = 0, -1
        self._predicts = True
        self._is_driving = False
        self._upstream = torch.ones(())
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
        self._on_switch, self._on_set, self._watch = on_switch, on_set, watch

    @property
    def is_running(self) -> bool:
        """Whether lanes run, or wait for each other: parameters are then not what they are between hooks."""
        return self._lanes.is_driving or self._is_driving

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

    def read_buffer(self) -> str | None:
        """In a step, the buffer of a layer that the code between layers has read after a call had changed it."""
        return self._step.read_buffer

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
        step.watch = self._watch if step.is_sequential and not is_alone else None
        predicted = predicted_gradient if self._predicts else None
        # Where work space isn't known, a lane goes from pack to pack.
        step.fuses = predicted is not None and self._planner.is_planned and not is_measuring
        # A single microbatch has no other to wait for: its caller brings the gradient at once. But where its work is not
        # known, whether its backward fits shows here.
        waits = is_alone and not is_measuring
        step.predicted = None if waits or not (step.fuses or step.is_sequential) else predicted
        self._num_elements = num_elements
        self._random = RandomStreams([microbatch.seed for microbatch in microbatches], self._cuda_devices)
        self.updater.reclaim()
        step.in_backward = False
        self._model.begin_step(is_training=is_training)
        for residents in self._residents:
            residents.follows_moves = is_alone or not step.is_sequential
            residents.device.begin_lanes()
            for pack in residents.packs:
                pack.is_narrow = is_training
        numbers = range(len(microbatches))
        lanes: Sequence[AnyLane] = (
            [CallerLane(number, self._grant_here) for number in numbers]
            if step.is_sequential
            else self._lanes.lanes([partial(self._run_lane, number) for number in numbers])
        )
        self._start([self._begin(lane, each) for lane, each in zip(lanes, microbatches, strict=True)])
        with self._glue.stand_ins(), out_of_reach(self._model.derived), self._unwinding_on_error():
            self._drive(Phase.FORWARD)
            # Hooks before the backward draw as others do, not as a microbatch.
            self._random.switch_back()
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

    def _run_lane(self, number: int) -> None:
        """Run a microbatch whose lane takes turns with others."""
        progress = self._step.turns.running[number]
        assert isinstance(progress.lane, Lane)
        with self._working(progress):
            loss = self._run_forward(progress)
            if loss is None:
                return
            if self._step.predicted is None:
                progress.lane.park(Request(Phase.BACKWARD, None))
                # The gradient comes from the caller, who has computed since the lane began.
                for device in self.devices:
                    device.catch_up()
            else:
                self._preparation.enter_loss(progress)
            self._run_backward(progress, loss)

    def _run_here(self, progress: LaneProgress) -> None:
        """Run a microbatch in the calling thread, as far as its loss, or from there on."""
        lane = progress.lane
        assert isinstance(lane, CallerLane)
        with lane.entered():
            loss, progress.loss = progress.loss, None
            watch = self._step.watch
            if loss is None:
                self._grant_here(lane)
                if watch is not None:
                    watch.begin(lane.microbatch)
                with self._working(progress):
                    loss = self._run_forward(progress)
                    if watch is not None:
                        watch.end()
                    if loss is not None and self._step.predicted is not None:
                        if self._step.fuses:
                            self._preparation.enter_loss(progress)
                        else:
                            lane.park(Request(Phase.BACKWARD, None))
                        self._run_backward(progress, loss)
                        loss = None
                progress.loss = loss
            else:
                lane.park(Request(Phase.BACKWARD, None))
                with self._working(progress):
                    self._run_backward(progress, loss)
            lane.finished = progress.loss is None
            with Unseen():
                self._end_turn()

    @contextmanager
    def _working(self, progress: LaneProgress) -> Iterator[None]:
        """The context of a lane's own code."""
        with ExitStack() as stack:
            # The root last: it is the current one.
            for device in reversed(self.devices):
                stack.enter_context(device.lane(progress.lane.microbatch))
            stack.callback(self._runtime.open_call.leave)
            yield

    def _run_forward(self, progress: LaneProgress) -> Tensor | None:
        """Run a microbatch up to its loss; None if there is nothing to differentiate."""
        with self._glue.stashing(), progress.glue or nullcontext():
            loss = progress.microbatch.step()
        return None if loss is None or not loss.requires_grad else loss

    def _run_backward(self, progress: LaneProgress, loss: Tensor) -> None:
        """Differentiate the loss of a microbatch."""
        if self._step.predicted is None:
            upstream = self._runtime.sent(self._upstream, self._runtime.home(loss))
        else:
            # Made where it is needed: to copy it to a GPU, the host would wait for all that was launched there.
            upstream = torch.full((), self._step.predicted, device=loss.device)
        progress.differentiating = True
        gradient = (upstream.to(loss.device) * progress.microbatch.weight).to(loss.dtype)
        with ExitStack() as stack:
            # Glue's backward begins where its forward ended.
            if progress.glue is not None:
                stack.enter_context(self.devices[self._runtime.home(loss) or 0].selected())
                # Hooks, checkpoints and functions of the user's own run glue in it.
                stack.enter_context(progress.glue)
            torch.autograd.backward(loss, gradient.expand_as(loss))

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
        self._upstream = gradient.detach()
        self._step.in_backward = True
        self._sums.begin_backward(self._check_prediction(gradient), requested)
        # Gradients of the last step that were zeroed since.
        self.updater.reclaim()
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
        self._random.switch_back()
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

    # ---- granting ------------------------------------------------------------------------------------------------------

    def _drive(self, until: Phase) -> None:
        """Grant lanes, one at a time, until each has ended or waits for what comes after ``until``."""
        step = self._step
        try:
            # A compiled container around layers runs as it is written where its operations may be on several devices.
            whole = torch.compiler.set_stance("force_eager") if len(self.devices) > 1 else nullcontext()
            with whole, functions_as_operations():
                if step.is_sequential:
                    self._run_one_after_another()
                else:
                    self._lanes.drive(partial(self._next, until))
        except torch.OutOfMemoryError as error:
            if step.granted is None:
                raise
            raise exceeded_in_turn(step.granted, self.devices, error, self._planner.discard_record()) from error
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

    def _run_one_after_another(self) -> None:
        self._is_driving = True
        try:
            for progress in self._step.turns.running:
                if not progress.lane.finished:
                    self._run_here(progress)
        finally:
            self._is_driving = False

    def _next(self, until: Phase, previous: Lane | None) -> Lane | None:
        """The lane whose turn it is, everything ready for it. Called in whichever lane has the baton."""
        step = self._step
        # Modes that are active in the lane are not to see this.
        with Unseen():
            self._end_turn()
            progress = step.turns.next(until, step.of(previous))
            if progress is None:
                return None
            self._grant(progress)
            assert isinstance(progress.lane, Lane)
            return progress.lane

    def _grant_here(self, lane: CallerLane) -> None:
        """The turn of a lane is over, and its next one begins."""
        progress = self._step.of(lane)
        assert progress is not None
        with Unseen():
            self._end_turn()
            self._grant(progress)

    def _end_turn(self) -> None:
        granted, self._step.granted = self._step.granted, None
        if granted is not None:
            with self.devices[granted.device].scheduling():
                self._note_turn(granted)

    def _grant(self, progress: LaneProgress) -> None:
        number = self._step.turns.device_of(progress)
        with self.devices[number].scheduling():
            self._step.granted = self._granted(progress, number)

    def _granted(self, progress: LaneProgress, number: int) -> Grant:
        request = progress.lane.request
        self._random.switch_to(progress.lane.microbatch)
        pack = None
        if request is not None and request.pack is not None:
            pack = self._residents[number].packs[request.pack]
            self._preparation.enter(progress, Place(pack, request.phase, request.position))
            self._step.turns.take(progress, number)
        elif request is not None:
            self._preparation.enter_loss(progress)
        if self._on_switch is not None:
            self._on_switch(progress.lane.microbatch)
        phase = Phase.FORWARD if request is None else request.phase
        self._observer.begin_turn(self.devices[number], phase, pack)
        self._preparation.note_task(number, progress, phase, pack)
        return Grant(progress, number, phase, pack)

    def _note_set(self, attributes: dict[str, Any], names: set[str]) -> None:
        if self._on_set is not None:
            self._on_set(attributes, names)

    def _note_turn(self, granted: Grant) -> None:
        """After a lane's turn: what it took, what can go now, and which gradients are final."""
        self._observer.end_turn(granted)
        self.recorder.leave()
        residents = self._residents[granted.device]
        residents.stash.retire()
        residents.device.retire()
        if self._step.in_backward and granted.pack is not None:
            self._sums.deliver_final([granted.pack.index])

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
