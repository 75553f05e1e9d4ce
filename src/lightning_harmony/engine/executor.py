"""The executor: grants lanes pack by pack, and sees to it that what they ask for resides on the device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch

from lightning_harmony.engine.decompose import Layer
from lightning_harmony.engine.derived import DerivedWeight, derived_weights, out_of_reach
from lightning_harmony.engine.device import Device
from lightning_harmony.engine.glue import Glue
from lightning_harmony.engine.host_store import HostPool, HostStore, lies_in
from lightning_harmony.engine.intercept import InterceptedForward, LayerCall
from lightning_harmony.engine.lane import Lane, LanePool, current_lane
from lightning_harmony.engine.layer import BufferKey, SwappedLayer, buffers_of, move_buffers, places_of
from lightning_harmony.engine.narrow import CastWatch, autocast_dtype
from lightning_harmony.engine.planning import Planner, Records, SeenStep, check_given
from lightning_harmony.engine.postponed import Clip
from lightning_harmony.engine.profile import Profiler
from lightning_harmony.engine.report import Traffic
from lightning_harmony.engine.residents import Place, Residents
from lightning_harmony.engine.rng import RandomStreams
from lightning_harmony.engine.stash import Alias, LaneStash, Stash, Stashed, is_small
from lightning_harmony.engine.step_recorder import StepRecorder
from lightning_harmony.engine.stream import Moment
from lightning_harmony.engine.swap import HostGradients, Residency, SwappedPack, Swapper
from lightning_harmony.engine.transfer import LaneTransfers, OneDevice, Transfers
from lightning_harmony.engine.turns import LaneProgress, Microbatch, Request, Turns
from lightning_harmony.engine.update import Updater
from lightning_harmony.engine.verify import verify_layer
from lightning_harmony.engine.workspace import WorkSpace
from lightning_harmony.errors import CapacityError, UnsupportedModelError
from lightning_harmony.plan.lowering import weight_moves
from lightning_harmony.plan.memory_size import format_bytes
from lightning_harmony.plan.plan import Parallel, Plan, merge_calls
from lightning_harmony.plan.task import Errand, Phase, Task

# Threads that a GPU machine's host keeps for the lanes and the data loader while it updates.
SPARED_THREADS = 2


@dataclass(frozen=True)
class Observation:
    """What is measured of a turn.

    Attributes:
        peak: gives the most bytes that were allocated since it began.
        bytes_before: what was allocated before it.
        stashed_before: what had been stashed before it.
        summing: whether the pack had gradients before it.
        began: when it began, where that is measured.
        granted_seconds: the same on the host's clock.
    """

    peak: Callable[[], int]
    bytes_before: int
    stashed_before: int
    summing: bool
    began: Moment | None
    granted_seconds: float


class LastTurn(NamedTuple):
    """A turn that was observed.

    Attributes:
        pack: the pack that ran, if any.
        phase: its phase.
        seconds: what it took of the host.
        ended_seconds: the host's clock when it was over, and all of it noted.
    """

    pack: SwappedPack | None
    phase: Phase
    seconds: float
    ended_seconds: float


@dataclass
class Grant:
    """A lane's turn.

    Attributes:
        progress: whose it is.
        device: the number of the device where it runs.
        phase: the phase of the pack.
        pack: the one that it runs; None for the code before the first layer.
        observation: what is measured of it.
    """

    progress: LaneProgress
    device: int
    phase: Phase
    pack: SwappedPack | None
    observation: Observation | None


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
        plan: what to run by once work space is known; None to plan from what is measured.
        progress: told again and again how many bytes are in the host store.
        records: what earlier fits have measured; None to measure anew.
        store: one that was closed, where it has all of the model's parameters; None to make one.

    Raises:
        CapacityError: if a layer's weights and gradients exceed the capacity.
        PlanError: if the plan is for another model, for other devices or for a larger capacity.
    """

    # The context of a layer's code that runs again, and has been heard before.
    recomputing: Callable[[], AbstractContextManager[None]] = nullcontext
    _flushed_backward: int | None = None
    _asked_for: frozenset[nn.Parameter] | None = None

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *devices: Device,
        parallel: Parallel = "pipeline",
        compute_dtype: torch.dtype | None = None,
        compile_options: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        progress: Callable[[int], None] = lambda done: None,
        records: Records | None = None,
        store: HostStore | None = None,
    ) -> None:
        self.devices = devices
        self._root = devices[0]
        self._cuda_devices = [d.torch_device.index for d in devices if isinstance(d.torch_device.index, int)]
        self.traffic = Traffic()
        self.reentrant = False
        # Whether a step has come to its end: the first one changes nothing before.
        self.has_succeeded = False
        self.on_switch: Callable[[int], None] | None = None
        self._model = model
        self._compute_dtype = compute_dtype
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._layers = [
            SwappedLayer(index, layer.name, layer.module, list(layer.module.parameters()), compute_dtype)
            for index, layer in enumerate(layers)
        ]
        self._num_owners = Counter(p for layer in self._layers for p in layer.parameters)
        self._refuse_too_large()
        model_fingerprint = check_given(plan, self._layers, set(self._names.values()), devices, parallel)
        self._glue_layers: dict[nn.Parameter, SwappedLayer] = {}
        in_order = dict.fromkeys([p for layer in self._layers for p in layer.parameters] + list(model.parameters()))
        self.store = HostStore(list(in_order), self._root, progress) if store is None else store.reopened(self._root)
        self.pool = HostPool(self._root.host_buffer)
        self.recorder = StepRecorder(devices)
        self.updater = Updater(
            self.pool, devices, SPARED_THREADS if self._cuda_devices else 0, self.recorder.note_update
        )
        self._residents = [self._residents_on(number) for number in range(len(devices))]
        self._transfers = Transfers(devices, self.traffic, lambda number, size: self._residents[number].admit(size))
        self._glue = Glue(places_of(model, list(in_order)), self._root.torch_device, self, compute_dtype)
        self._profiler = Profiler(self.traffic)
        self._lanes = LanePool()
        self._progress: dict[Lane, LaneProgress] = {}
        self._random = RandomStreams([], [])
        self._pack_of: dict[int, int] = {}
        self._is_training = True
        self._works = {is_training: WorkSpace() for is_training in (True, False)}
        self._delivered: set[int] = set()
        self._verified: set[int] = set()
        self._evaluated_elements = -1
        self._measuring = True
        self._is_watching = self._has_watched = False
        self._watched: set[int] = set()
        self._predicted: float | None = None
        self._fuses = True
        self._planner = Planner(
            self._layers,
            self.store,
            devices,
            parallel,
            model_fingerprint,
            self._profiler,
            self._works[True],
            self.updater.speed,
            plan,
            records,
        )
        self._use(self._planner.layer_by_layer(range(len(self._layers))))
        self.step_plan = self.plan
        self._start([])
        self._granted: Grant | None = None
        self._last_turn: LastTurn | None = None
        self._num_elements = 0
        self._in_backward = False
        self._factor, self._upstream = 1.0, torch.ones(())
        self._glue_buffers = self._move_glue_buffers()
        self._derived = self._derived_weights()
        self._intercepted = [InterceptedForward(layer, self, compile_options) for layer in self._layers]

    def _derived_weights(self) -> dict[str, DerivedWeight]:
        """The weights that hooks of layers compute, by their qualified names."""
        names = {id(owner): name for name, owner in self._model.named_modules()}
        modules = [layer.module for layer in self._layers if layer.module is not None]
        weights = [weight for module in modules for weight in derived_weights(module)]
        return {f"{names[id(weight.owner)]}.{weight.name}": weight for weight in weights}

    def _residents_on(self, number: int) -> Residents:
        device = self.devices[number]
        swapper = Swapper(
            device, self.store, self.pool, self.traffic, lambda p: self._num_owners[p] > 1, self.updater.postponed
        )
        return Residents(device, swapper, Stash(device, self.pool, self.traffic), number)

    def _refuse_too_large(self) -> None:
        capacity = min((d.capacity_bytes for d in self.devices if d.capacity_bytes is not None), default=None)
        for layer in self._layers if capacity is not None else []:
            weights = sum(p.numel() * layer.narrow.get(p, p.dtype).itemsize for p in layer.parameters)
            gradients = sum(p.numel() * p.element_size() for p in layer.parameters if p.requires_grad)
            short = weights + gradients - (capacity or 0)
            if short > 0:
                raise CapacityError(
                    f"layer {layer.name!r} needs {format_bytes(weights)} for its weights and {format_bytes(gradients)} for "
                    f"its gradients, {format_bytes(short)} more than the device's {format_bytes(capacity or 0)}: raise "
                    "HarmonyStrategy(device_memory=...), or name smaller modules with HarmonyStrategy(layers=...)"
                )

    def _move_glue_buffers(self) -> list[BufferKey]:
        """Buffers that no layer owns stay on the device throughout."""
        owned = {key for layer in self._layers for key in layer.buffers}
        keys = [key for key in buffers_of(self._model) if key not in owned]
        move_buffers(keys, self._root.torch_device)
        return keys

    # ---- plan ----------------------------------------------------------------------------------------------------------

    def _use(self, plan: Plan) -> None:
        """Run by a plan from now on."""
        self.plan = plan
        by_name = {layer.name: layer for layer in self._layers}
        packs = [[by_name[name] for name in pack] for pack in plan.packs]
        # Anew even where they are the same: their weights may be narrow by now.
        for residents, moves in zip(self._residents, weight_moves(plan), strict=True):
            residents.packs = [SwappedPack(index, layers, self.store) for index, layers in enumerate(packs)]
            residents.plan, residents.moves = plan, moves
        self._pack_of = {layer.index: index for index, layers in enumerate(packs) for layer in layers}

    def _find_glue_layer(self, name: str) -> SwappedLayer | None:
        """The layer that a parameter with a name is when glue uses it."""
        return next((self.glue_layer(parameter) for parameter, own in self._names.items() if own == name), None)

    @property
    def _work(self) -> WorkSpace:
        """Of the kind of step that runs: an evaluation may have other batches."""
        return self._works[self._is_training]

    @property
    def _is_profiling(self) -> bool:
        """Whether times and copies are measured, too: in the step that is to be planned, while it goes layer by layer."""
        return self._measuring and self._is_training

    @property
    def _packs(self) -> list[SwappedPack]:
        """The packs as they are on the root device; other devices have the same ones."""
        return self._residents[0].packs

    def _device_of(self, pack: int) -> int:
        """The number of the device where a pack runs for the current lane; outside of lanes, the root."""
        lane = current_lane()
        return 0 if lane is None else self.plan.device_of(pack, lane.microbatch)

    @property
    def is_running(self) -> bool:
        """Whether lanes run, or wait for each other: parameters are then not what they are between hooks."""
        return self._lanes.is_driving

    # ---- between steps -------------------------------------------------------------------------------------------------

    def is_outdated(self) -> bool:
        """Whether the model has other parameters than when it was set up, or has them elsewhere, as pruning leaves it."""
        return self._glue.is_outdated() or any(parameter not in self.store for parameter in self._model.parameters())

    def catch_up(self) -> None:
        """Before a step, see to what was done to parameters since the last one.

        Raises:
            UnsupportedModelError: if one has another type or shape.
        """
        self._follow(self._names)
        for parameter, name in self._names.items():
            if parameter._post_accumulate_grad_hooks:
                raise UnsupportedModelError(
                    f"parameter {name!r} has a hook that waits for its gradient (register_post_accumulate_grad_hook), but "
                    "gradients are summed elsewhere: use on_after_backward, or leave the update just in time to the strategy"
                )
        if self._derived:
            self.updater.postponed.finish()
            for weight in self._derived.values():
                weight.compute()

    def _follow(self, parameters: Iterable[nn.Parameter]) -> None:
        misfits = self.store.follow(parameters)
        if misfits:
            raise UnsupportedModelError(
                f"parameter {self._names[misfits[0]]!r} was given another type or shape during the fit, but layers are "
                "swapped as they were at its start; do that before the fit"
            )

    # ---- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A training step begins: what is counted and noted from now on is its own."""
        self.traffic.reset()
        self.step_plan = self.plan
        self.recorder.begin(self.plan, self._packs)

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        *,
        num_elements: int,
        predicted_gradient: float | None,
        is_training: bool = True,
    ) -> None:
        """Run the user's step on all microbatches, up to their losses.

        Args:
            microbatches: one for each lane.
            is_training: whether it is the step that is run again and again. What is learned from that, such as which
                weights may be narrow, holds for no other.
            num_elements: elements of the largest microbatch. More than ever before are run with care, and measured.
            predicted_gradient: the gradient of the batch's loss that `backward` will bring, if it is known. The backward of
                the last packs then follows each loss at once.
        """
        self.abandon()
        self._is_training = is_training
        plan = (
            self._planner.before_step(num_elements, len(microbatches), self._find_glue_layer) if is_training else None
        )
        if plan is not None:
            self._use(plan)
            self.step_plan = plan
            self.recorder.run_by(plan, self._packs)
        self._measuring = self.measures(num_elements, is_training=is_training)
        if self._is_profiling:
            self._profiler.begin(num_elements)
        # Where work space isn't known, a lane goes from pack to pack.
        self._predicted = (
            predicted_gradient if self._fuses and self._planner.is_planned and not self._measuring else None
        )
        self._num_elements = num_elements
        self._random = RandomStreams([microbatch.seed for microbatch in microbatches], self._cuda_devices)
        self.updater.reclaim()
        self._in_backward = False
        self._delivered = set()
        host_buffers: dict[BufferKey, tuple[Tensor, int]] = {}
        for layer in self._layers:
            layer.is_training, layer.host_buffers = is_training, host_buffers
        self._is_watching = is_training and self._planner.watches and self._compute_dtype is None
        for residents in self._residents:
            residents.device.begin_lanes()
            for pack in residents.packs:
                pack.is_narrow = is_training
        jobs = [lambda number=number: self._run_lane(number) for number in range(len(microbatches))]
        lanes = self._lanes.lanes(jobs)
        running = [self._begin(lane, each) for lane, each in zip(lanes, microbatches, strict=True)]
        self._start(running)
        with self._glue.stand_ins(), out_of_reach(self._derived), self._unwinding_on_error():
            self._drive(Phase.FORWARD)
            # What comes next is user code that sees parameters, and gradients that take the place of those it uses.
            self.updater.postponed.finish()

    def _start(self, running: list[LaneProgress]) -> None:
        """These lanes run from now on."""
        self._progress = {progress.lane: progress for progress in running}
        having_buffers = {pack.index for pack in self._packs if pack.buffers}
        self._turns = Turns(running, self.plan, having_buffers, fuses=self._predicted is not None)

    def _begin(self, lane: Lane, microbatch: Microbatch) -> LaneProgress:
        stashes = [LaneStash(residents.stash) for residents in self._residents]
        transfers = LaneTransfers(self._transfers, lane.microbatch)
        glue = OneDevice(transfers, self._transfers, self._draw_on) if len(self.devices) > 1 else None
        return LaneProgress(lane, microbatch, stashes, transfers, glue)

    def _run_lane(self, number: int) -> None:
        progress = self._turns.running[number]
        with ExitStack() as stack:
            # The root last: it is the current one.
            for device in reversed(self.devices):
                stack.enter_context(device.lane(number))
            with self._glue.stashing(), progress.glue or nullcontext():
                loss = progress.microbatch.step()
            if loss is None or not loss.requires_grad:
                return
            if self._predicted is None:
                progress.lane.park(Request(Phase.BACKWARD, None))
                # The gradient comes from the caller, who has computed since the lane began.
                for device in self.devices:
                    device.catch_up()
                upstream = self.sent(self._upstream, self.home(loss))
            else:
                upstream = torch.tensor(self._predicted)
            progress.differentiating = True
            gradient = (upstream.to(loss.device) * progress.microbatch.weight).to(loss.dtype)
            # Glue's backward begins where its forward ended.
            with self.devices[self.home(loss) or 0].selected() if len(self.devices) > 1 else nullcontext():
                torch.autograd.backward(loss, gradient.expand_as(loss))

    def backward(
        self,
        gradient: Tensor,
        optimizer: Optimizer | None,
        *,
        asked_for: frozenset[nn.Parameter] | None = None,
        clip: Clip | None = None,
        with_norms: bool = False,
    ) -> None:
        """Run the backward of all microbatches, and the update of each pack behind it.

        Args:
            gradient: of the loss of the batch.
            asked_for: the parameters whose gradients are summed; None for all. Fused packs must not have summed
                others.
            optimizer: the one to step just in time; None if gradients are only collected. In the first step of all it is
                stepped when the backward has succeeded.
            clip: changes gradients before they are used just in time.
            with_norms: whether the norm of each collected gradient will be asked for.
        """
        self._upstream = gradient.detach()
        self._asked_for = asked_for
        self._in_backward = True
        factor = self._check_prediction(gradient)
        # Gradients of the last step that were zeroed since.
        self.updater.reclaim()
        for device in self.devices:
            device.begin_lanes()
        self.updater.begin(
            optimizer,
            [pack.parameters for pack in self._packs],
            clip=clip,
            with_norms=with_norms,
            hold_back=optimizer is not None and not self.has_succeeded,
        )
        self._factor = factor
        with self._glue.stand_ins(), out_of_reach(self._derived), self._unwinding_on_error():
            self._deliver_final(range(len(self._packs)))
            self._drive(Phase.BACKWARD)
            self._deliver(pack.index for pack in self._packs if pack.index not in self._delivered)
            for layer in self._layers:
                layer.refuse_changed_buffers()
            self.updater.finish()
        self._end()

    def postpone_update(self, optimizer: Optimizer, clip: Clip | None) -> None:
        """Update all parameters that have gradients, pack by pack, before the next forward comes to each.

        Args:
            optimizer: the one to step. What a step would do now is done, whatever is changed meanwhile.
            clip: changes gradients before they are used.
        """
        packs = [self._packs[index] for index in dict.fromkeys(self.plan.visits)]
        self.updater.postponed.start(optimizer, [pack.parameters for pack in packs], clip)

    def _check_prediction(self, gradient: Tensor) -> float:
        """What gradients have to be multiplied with because another gradient was predicted. Then never predict again."""
        if self._predicted is None:
            return 1.0
        actual = float(gradient)
        if actual == self._predicted:
            return 1.0
        self._fuses = False
        return actual / self._predicted

    def _end(self) -> None:
        """Nothing outlives a step on the device: its weights are stale after an update, whoever makes it."""
        calls = merge_calls([progress.calls for progress in self._turns.running])
        num_microbatches = len(self._turns.running)
        for progress in self._turns.running:
            self._work.note_calls(progress.calls)
        is_cast = self._is_watching and bool(self._watched)
        seen = SeenStep(calls, num_microbatches, self._num_elements, is_measured=self._measuring, is_cast=is_cast)
        self._reset()
        if self._is_profiling:
            self._work.occupied_bytes = max(device.allocated_bytes() for device in self.devices)
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
        if self._progress:
            if self._measuring and not self._is_training:
                self._evaluated_elements = self._num_elements
            self._lanes.abort()
            self.recorder.drop()
            self._reset()

    def measures(self, num_elements: int, *, is_training: bool) -> bool:
        """Whether so many elements in a microbatch are more than ever before."""
        return num_elements > (self._planner.measured_elements if is_training else self._evaluated_elements)

    def choose_number(self, batch_size: int, num_elements: int, usual: int) -> int | None:
        """The number of microbatches that is predicted to make a training step fastest; None as long as nothing is known.

        Args:
            batch_size: samples of a batch.
            num_elements: of its tensors.
            usual: the number to use where nothing is known.
        """
        return self._planner.choose_number(batch_size, num_elements, usual)

    def forget_evaluations(self) -> None:
        """Forget the work space of evaluations: a batch that failed is not run again."""
        self._works[False].clear()
        self._evaluated_elements = -1

    def _reset(self) -> None:
        self._last_turn = None
        self._asked_for = None
        self._transfers.shared.clear()
        self._start([])
        self._random.switch_back()
        for layer in self._layers:
            layer.is_training, layer.host_buffers = False, {}
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
        try:
            self._lanes.drive(partial(self._next, until))
        except torch.OutOfMemoryError as error:
            if self._granted is None:
                raise
            raise self._out_of_memory(self._granted, error) from error
        except Exception as error:
            granted = self._granted
            if granted is not None and granted.pack is not None and hasattr(error, "add_note"):
                task = Task(granted.pack.index, granted.phase, granted.progress.lane.microbatch)
                on_device = f" on device {granted.device}" if len(self.devices) > 1 else ""
                error.add_note(f"in task {task} ({granted.pack.name}){on_device}")
            raise
        finally:
            self._granted = None
            for device in self.devices:
                device.join_lanes()

    def _next(self, until: Phase, previous: Lane | None) -> Lane | None:
        """The lane whose turn it is, everything ready for it. Called in whichever lane has the baton."""
        # Modes that are active in that lane are not to see this.
        with torch.no_grad(), no_dispatch():
            granted, self._granted = self._granted, None
            if granted is not None:
                with self.devices[granted.device].scheduling():
                    self._take_stock(granted)
            progress = self._turns.next(until, None if previous is None else self._progress.get(previous))
            if progress is None:
                return None
            number = self._turns.device_of(progress)
            with self.devices[number].scheduling():
                self._granted = self._grant(progress, number)
            return progress.lane

    def _grant(self, progress: LaneProgress, number: int) -> Grant:
        request = progress.lane.request
        device = self.devices[number]
        self._random.switch_to(progress.lane.microbatch)
        self._draw_on(number)
        pack = None
        if request is not None and request.pack is not None:
            pack = self._residents[number].packs[request.pack]
            self._enter(progress, Place(pack, request.phase, request.position))
            self._turns.take(progress, number)
        if self.on_switch is not None:
            self.on_switch(progress.lane.microbatch)
        phase = Phase.FORWARD if request is None else request.phase
        self._note_period(pack, phase)
        granted = Grant(progress, number, phase, pack, self._observe(device, pack) if self._measuring else None)
        self._note_task(number, progress, phase, pack)
        return granted

    def _note_task(self, number: int, progress: LaneProgress, phase: Phase, pack: SwappedPack | None) -> None:
        """Record what a lane does: before the first layer, and from its loss to the last, something to that layer's pack."""
        if not self.recorder.is_recording:
            return
        ends = self.plan.visits or (0,)
        index = pack.index if pack is not None else ends[0 if phase is Phase.FORWARD else -1]
        self.recorder.enter(number, Task(index, phase, progress.lane.microbatch), pack)

    def _observe(self, device: Device, pack: SwappedPack | None) -> Observation:
        peak = device.watch_peak()
        summing = pack is not None and bool(pack.accumulators)
        began = device.moment() if self._is_profiling else None
        stashed, now = self.traffic.swapped_out["stash"], time.perf_counter()
        return Observation(peak, device.allocated_bytes(), stashed, summing, began, now)

    def _draw_on(self, number: int) -> None:
        """Random numbers are drawn on another device from now on."""
        if len(self._cuda_devices) > 1:
            self._random.follow(self._cuda_devices[number])

    def _enter(self, progress: LaneProgress, place: Place) -> None:
        """A lane comes to a pack: make it ready."""
        progress.position[place.phase] = place.position
        progress.task = place.phase, place.pack.index
        residents = self._residents[self.plan.device_of(place.pack.index, progress.lane.microbatch)]
        residents.pinned = frozenset() if self._predicted is None else self._pinned()
        work_bytes = self._needed_bytes(place.pack, place.phase)
        if self._is_profiling and place.pack.residency is None and len(place.pack.layers) == 1:
            self._time_swap_in(residents, place, work_bytes)
            self._note_found(residents, place)
        else:
            residents.enter(place, work_bytes, alone=self._measuring)
        if place.pack.buffers and place.phase is Phase.FORWARD and len(self.devices) > 1:
            self._pass_buffers_on(residents, place.pack)

    def _pass_buffers_on(self, residents: Residents, pack: SwappedPack) -> None:
        """A microbatch finds the buffers of a pack as the one before it left them, on whichever device that was."""
        for others in self._residents:
            copy = others.packs[pack.index]
            if copy is not pack and copy.residency is not None:
                with others.device.scheduling():
                    others.swapper.write_back(copy, copy.residency)
        residents.swapper.read_again(pack)

    def _time_swap_in(self, residents: Residents, place: Place, work_bytes: int) -> None:
        """Bring a layer to an empty device, and time its copy."""
        pack = place.pack
        residents.evict_all_but(pack)
        with self._profiler.swapping_in(pack.layers[0], residents.device):
            residents.enter(place, work_bytes, alone=True)
            assert pack.residency is not None
            pack.residency.ready.synchronize()

    def _note_found(self, residents: Residents, place: Place) -> None:
        """Keep what all lanes have on the device when the first comes to a layer; on several devices each may be anywhere."""
        pack = place.pack
        if len(self.devices) > 1 or (place.phase is Phase.BACKWARD and (pack.index,) == self.plan.visits[-1:]):
            return
        state = pack.layout.num_bytes + pack.buffer_bytes + sum(a.buffer.numel() for a in pack.accumulators.values())
        num_bytes = residents.device.allocated_bytes() - state
        self._work.note_found(pack.layers, place.phase, num_bytes, len(self._turns.running))

    def _pinned(self) -> frozenset[int]:
        """The fused packs, until all lanes came through them."""
        return frozenset() if self._turns.have_come_to_their_losses() else self.plan.fused

    def _take_stock(self, granted: Grant) -> None:
        """After a lane's turn: what it took, what can go now, and which gradients are final."""
        pack = granted.pack
        if granted.observation is not None:
            taken = time.perf_counter() - granted.observation.granted_seconds
            self._note_seconds(granted, granted.observation)
            self._note_work(granted, granted.observation)
            self._last_turn = LastTurn(granted.pack, granted.phase, taken, time.perf_counter())
        self.recorder.leave()
        residents = self._residents[granted.device]
        residents.stash.retire()
        residents.device.retire()
        if self._in_backward and pack is not None:
            self._deliver_final([pack.index])

    def _note_period(self, pack: SwappedPack | None, phase: Phase) -> None:
        """Keep what the last turn took of the host, up to one of another lane in the same layer; not what it took to observe.

        Where that is more than what the device computed, launching bounds the step.
        """
        last, self._last_turn = self._last_turn, None
        if last is None or pack is None or (last.pack, last.phase) != (pack, phase) or len(pack.layers) > 1:
            return
        if self._is_profiling:
            self._profiler.note_period(pack.layers[0], phase, last.seconds + time.perf_counter() - last.ended_seconds)

    def _note_seconds(self, granted: Grant, observation: Observation) -> None:
        """Keep how long a turn in a layer took, and what it stashed."""
        pack = granted.pack
        if observation.began is None or pack is None or len(pack.layers) > 1:
            return
        ended, stashed = self.devices[granted.device].moment(), self.traffic.swapped_out["stash"]
        self._profiler.note_turn(pack.layers[0], granted.phase, observation.began, ended)
        if granted.phase is Phase.FORWARD:
            self._profiler.note_stash(pack.layers[0], stashed - observation.stashed_before)

    def _note_work(self, granted: Grant, observation: Observation) -> None:
        """Keep the most that was allocated in a pack."""
        pack, num_bytes = granted.pack, observation.peak() - observation.bytes_before
        if pack is None and granted.phase is Phase.BACKWARD and self.plan.visits:
            # From the loss back to the last layer: glue counts to the layer before it.
            pack = self._packs[self.plan.visits[-1]]
            left = self.devices[granted.device].allocated_bytes() - observation.bytes_before
            self._work.loss_bytes = max(self._work.loss_bytes, left)
        elif pack is not None and granted.phase is Phase.BACKWARD and (pack.index,) == self.plan.visits[-1:]:
            num_bytes += self._work.loss_bytes
        has_watched, self._has_watched = self._has_watched, False
        if pack is None or (has_watched and len(self._turns.running) > 1):
            return
        if pack.accumulators and not observation.summing:
            # They were made in this turn, and count as gradients. Where others follow, those tell what the work takes.
            if len(self._turns.running) > 1:
                return
            num_bytes -= pack.gradient_layout()[1]
        self._work.note(pack.layers, granted.phase, num_bytes)

    def _out_of_memory(self, granted: Grant, error: BaseException) -> CapacityError:
        pack = granted.pack
        outside = "the code before the first layer" if granted.phase is Phase.FORWARD else "the backward of the loss"
        where = f"pack {pack.index} ({pack.name})" if pack is not None else outside
        on_device = f" on device {granted.device}" if len(self.devices) > 1 else ""
        what = f"{where} with microbatch {granted.progress.lane.microbatch}{on_device}"
        return self._exceeded(what, self.devices[granted.device], error)

    def _exceeded(
        self,
        what: str,
        device: Device,
        error: BaseException,
        smaller: str = "microbatches with HarmonyStrategy(num_microbatches=...)",
    ) -> CapacityError:
        capacity = device.capacity_bytes
        limit = "the device" if capacity is None else f"the capacity of {format_bytes(capacity)}"
        short = getattr(error, "short_bytes", None)
        missing = "" if short is None else f" by {format_bytes(short)}"
        return CapacityError(
            f"{what} exceeds {limit}{missing}: weights, gradients and work space together do not fit. Use smaller "
            f"{smaller}, more memory with HarmonyStrategy(device_memory=...), or smaller layers with "
            f"HarmonyStrategy(layers=...). ({error}){self._planner.discard_record()}"
        )

    # ---- memory --------------------------------------------------------------------------------------------------------

    def _is_fused(self, pack: SwappedPack, phase: Phase) -> bool:
        """Whether a lane that comes to a pack goes on to its loss and comes back through it, all in one turn."""
        return self._predicted is not None and phase is Phase.FORWARD and pack.index in self.plan.fused

    def _needed_bytes(self, pack: SwappedPack, phase: Phase, layers: Sequence[SwappedLayer] | None = None) -> int:
        """What a pack will allocate in a phase: work, kept graphs, and sums of gradients; of the former, for some layers."""
        layers = layers or pack.layers
        fused = self._is_fused(pack, phase)
        work, graphs = self._work.bytes(layers, phase), self._work.graph_bytes(layers)
        if phase is Phase.BACKWARD:
            residents = self._residents[self._device_of(pack.index)]
            gradients = 0 if pack.accumulators else pack.gradient_layout()[1]
            # What was measured made the graph anew.
            return gradients + (max(work - graphs, 0) if residents.has_graphs(pack) else work)
        if fused or pack.index in self.plan.kept:
            work += graphs
        if fused and pack.index == self.plan.visits[-1]:
            # A fused lane comes to its backward by itself, but the loss's is a part of this turn.
            work = max(work, self._work.bytes(layers, Phase.BACKWARD))
        return work

    # ---- gradients -----------------------------------------------------------------------------------------------------

    def _deliver_final(self, packs: Iterable[int]) -> None:
        """Hand over the gradients of those packs of which no further backward is expected."""
        if self.reentrant or not self.plan.just_in_time:
            return
        self._deliver(
            index
            for index in packs
            if index not in self._delivered
            and any(pack.accumulators or pack.parked for pack in self._copies(index))
            and not self._turns.expects_backward(index)
        )

    def _copies(self, index: int) -> list[SwappedPack]:
        """A pack as it is on each device."""
        return [residents.packs[index] for residents in self._residents]

    def _deliver(self, packs: Iterable[int]) -> None:
        for index in packs:
            self._delivered.add(index)
            self.updater.await_room()
            gradients: list[HostGradients] = []
            summing = self._summing(index)
            if self.plan.just_in_time:
                self._add_up(index, summing)
            for residents in (self._residents[number] for number in summing):
                pack = residents.packs[index]
                with residents.device.scheduling():
                    if self._factor != 1.0:
                        residents.swapper.scale_gradients(pack, self._factor)
                    gradients += self._swap_out_gradients(residents, pack)
            self.updater.deliver(self._packs[index].parameters, gradients)

    def _swap_out_gradients(self, residents: Residents, pack: SwappedPack) -> list[HostGradients]:
        if not self._is_profiling:
            return residents.swapper.swap_out_gradients(pack)
        # To register a buffer takes longer than the copy, and is done once.
        residents.swapper.provide_buffers(pack)
        with self._profiler.swapping_out(residents.device):
            gradients = residents.swapper.swap_out_gradients(pack)
            for copy in gradients:
                copy.event.synchronize()
        return gradients

    def _summing(self, index: int) -> list[int]:
        """The devices that have sums of a pack, in the order in which these are added.

        The first one takes the others'. It is another one for each pack, so that the swaps of what comes of it are spread.
        """
        having = [number for number, pack in enumerate(self._copies(index)) if pack.accumulators or pack.parked]
        if not having:
            return []
        first = having[index % len(having)]
        return [first, *(number for number in having if number != first)]

    def _add_up(self, index: int, summing: Sequence[int]) -> None:
        """Add the sums that several devices have of a pack on the first of them."""
        for number in summing[1:]:
            target, source = summing[0], self._residents[number]
            residents = self._residents[target]
            accumulators, source.packs[index].accumulators = source.packs[index].accumulators, {}
            for use, accumulator in accumulators.items():
                with source.device.scheduling(), residents.device.scheduling():
                    buffer = self._transfers.copy(accumulator.buffer, target, Task(index, Errand.REDUCE, number))
                    residents.swapper.add(residents.packs[index], use, accumulator, buffer)

    # ---- what layers and glue ask for ----------------------------------------------------------------------------------

    @contextmanager
    def visit(self, layer: SwappedLayer, phase: Phase) -> Iterator[Residency]:
        """Wait for a layer's turn; within the context it resides on the device."""
        lane = current_lane()
        progress = self._progress.get(lane) if lane is not None else None
        if progress is None:
            with self._alone(self._pack_of[layer.index], phase) as alone:
                yield alone
            return
        index = self._pack_of[layer.index]
        residents = self._residents[self._device_of(index)]
        pack = residents.packs[index]
        if phase is Phase.FORWARD:
            progress.calls.append(layer.index)
        if progress.task != (phase, index) or pack.residency is None:
            position = self.plan.position(phase, index, progress.position[phase])
            if self._may_go_on(progress, phase, pack):
                with torch.no_grad(), no_dispatch(), residents.device.scheduling():
                    self.recorder.leave()
                    self._enter(progress, Place(pack, phase, position))
                    self._note_task(self._device_of(index), progress, phase, pack)
                if self._granted is not None:
                    self._granted = replace(self._granted, pack=pack, phase=phase)
            else:
                progress.lane.park(Request(phase, index, position))
        else:
            # Between the layers of a pack, what the last one left to be swapped out may still be there.
            place = Place(pack, phase, progress.position[phase])
            with residents.device.scheduling():
                residents.ensure_room(self._needed_bytes(pack, phase, [layer]), place)
        if phase is Phase.FORWARD and pack.layout.casts and not self._casts_as_known(pack):
            self._widen(residents, Place(pack, phase, progress.position[phase]))
        residency = pack.residency
        assert residency is not None
        # Not known while it lasts. Nor afterwards, where an error ended it, or where glue uses its parameters later on.
        residency.last_use = None
        if layer.module is None:
            # Glue reads its parameters in the lane's own work, which has only heard of the layers it came through.
            with residents.device.selected():
                residency.ready.wait()
        stashed = self.traffic.swapped_out["stash"]
        yield residency
        if self._is_profiling and phase is Phase.FORWARD:
            # The code behind the layer stashes, too.
            self._profiler.note_input(layer, self.traffic.swapped_out["stash"] - stashed)
        if layer.module is not None:
            residency.last_use = residents.device.record()

    def _casts_as_known(self, pack: SwappedPack) -> bool:
        """Whether autocast does now what it did when the pack's layers were watched."""
        if self._compute_dtype is not None:
            return True
        dtype = autocast_dtype(self._root.torch_device)
        return all(narrow == dtype for narrow in pack.narrow_parameters().values())

    def _widen(self, residents: Residents, place: Place) -> None:
        """Give a pack its weights as they are."""
        with torch.no_grad(), no_dispatch(), residents.device.scheduling():
            residents.evict(place.pack)
            for pack in self._copies(place.pack.index):
                pack.widen()
            residents.begin_visit(place, self._needed_bytes(place.pack, place.phase), alone=self._measuring)

    def _may_go_on(self, progress: LaneProgress, phase: Phase, pack: SwappedPack) -> bool:
        """Whether a lane enters a pack without parking: within the fused ones, forth and back."""
        if self._predicted is None or self._in_backward or pack.index not in self.plan.fused:
            return False
        if progress.task is None or progress.task[1] not in self.plan.fused:
            return False
        if phase is Phase.FORWARD:
            return not progress.differentiating
        return not self._turns.is_overtaking(progress, pack.index)

    @contextmanager
    def _alone(self, index: int, phase: Phase) -> Iterator[Residency]:
        """A call outside of any step: the pack comes for it alone, for between two calls anyone may change weights."""
        residents = self._residents[0]
        pack = residents.packs[index]
        for layer in pack.layers:
            if layer.is_outdated():
                raise UnsupportedModelError(
                    f"layer {layer.name!r} is called outside of a step, after its parameters were replaced, as pruning does, "
                    "and before the next step: call it in a later hook"
                )
            layer.derive()
        self._follow(pack.parameters)
        try:
            residents.swapper.swap_in(pack)
            assert pack.residency is not None
            pack.residency.ready.wait()
            self.recorder.enter(0, Task(index, phase, 0), pack)
            with residents.device.computing():
                yield pack.residency
        except torch.OutOfMemoryError as error:
            what = f"layer {pack.name!r}, called outside of a step or in manual optimization,"
            raise self._exceeded(what, residents.device, error, smaller="batches") from error
        finally:
            self.recorder.leave()
            residents.swapper.park_gradients(pack)
            residents.evict(pack)
            residents.drain()

    def home(self, tensor: Tensor) -> int | None:
        """The number of the device where a tensor is."""
        return self._transfers.home(tensor) if len(self.devices) > 1 else 0

    def brought(self, tensors: Sequence[Tensor], residency: Residency) -> list[Tensor]:
        """The tensors on the device of a layer: those from elsewhere as copies without their graph."""
        if len(self.devices) == 1:
            return list(tensors)
        number = self.devices.index(residency.device)
        lane = current_lane()
        progress = self._progress.get(lane) if lane is not None else None
        transfers = self._transfers if progress is None else progress.transfers
        return [transfers.copy(tensor, number) for tensor in tensors]

    def hand_out(self, tensors: Sequence[Tensor], residency: Residency) -> None:
        """What a layer made goes to the lane."""
        residency.device.hand_out(tensors)
        lane = current_lane()
        if len(self.devices) > 1 and lane in self._progress:
            self._progress[lane].transfers.made(tensors)

    def sent(self, tensor: Tensor, home: int | None) -> Tensor:
        """The tensor at another one's home."""
        return tensor if home is None or len(self.devices) == 1 else self._transfers.copy(tensor, home)

    def to_root(self, tensor: Tensor) -> Tensor:
        """What a lane leaves behind, where the model's own code expects it."""
        return self.sent(tensor, 0).detach()

    def calling(self) -> AbstractContextManager[None]:
        """The context of a layer's call."""
        glue = self._current_glue()
        return nullcontext() if glue is None else glue.off()

    def running(self, residency: Residency) -> AbstractContextManager[None]:
        """The context of a layer's own code."""
        return nullcontext() if len(self.devices) == 1 else self.recorder.computing(residency.device)

    def _current_glue(self) -> OneDevice | None:
        if len(self.devices) == 1:
            return None
        lane = current_lane()
        return self._progress[lane].glue if lane in self._progress else None

    def on_one_device(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation of the glue whose operands may be on several devices."""
        glue = self._current_glue()
        return func(*args, **kwargs) if glue is None else glue.run(func, args, kwargs)

    def device_of(self, layer: SwappedLayer) -> torch.device:
        """Where a layer runs for the current lane."""
        return self.devices[self._device_of(self._pack_of[layer.index])].torch_device

    def glue_layer(self, parameter: nn.Parameter) -> SwappedLayer:
        """The layer that a parameter is when glue uses it; made when it is first used."""
        layer = self._glue_layers.get(parameter)
        if layer is None:
            layer = SwappedLayer(len(self._layers), self._names[parameter], None, [parameter], self._compute_dtype)
            self._glue_layers[parameter] = layer
            self._layers.append(layer)
            self._num_owners[parameter] += 1
            self._pack_of[layer.index] = len(self._packs)
            for residents in self._residents:
                residents.packs.append(SwappedPack(len(residents.packs), [layer], self.store))
        return layer

    def token(self, parameter: nn.Parameter) -> Tensor | None:
        """The token of a parameter in the current microbatch."""
        return self._current().tokens.get(parameter)

    def keep_token(self, parameter: nn.Parameter, token: Tensor) -> None:
        """Use a token for the rest of the microbatch's forward."""
        self._current().tokens[parameter] = token

    def resident_parameter(self, tensor: Tensor) -> tuple[SwappedLayer, Tensor] | None:
        """The glue layer, and its parameter on the device, of which a tensor is a view."""
        for layer in self._glue_layers.values():
            for pack in self._copies(self._pack_of[layer.index]):
                if pack.residency is not None and lies_in(tensor, pack.residency.weights):
                    return layer, pack.residency.leaves[layer.parameters[0]]
        return None

    def stash(self, tensor: Tensor) -> Stashed:
        """Keep what a layer takes for the backward: on the host, unless it is small or needed again at once."""
        if is_small(tensor):
            # Counters and the like, which code between layers may change afterwards.
            tensor = tensor.detach().clone()
        return self.stash_unchanged(tensor)

    def stash_unchanged(self, tensor: Tensor) -> Stashed:
        """Keep a tensor that nobody may change, such as those that autograd saves."""
        lane = current_lane()
        progress = self._progress.get(lane) if lane is not None else None
        number = self.home(tensor) or 0
        if progress is None:
            return self._residents[number].stash.put(tensor) or Alias(tensor)
        if self._keeps_graph_in(progress.task):
            return Alias(tensor)
        return progress.stashes[number].put(tensor) or Alias(tensor)

    def _keeps_graph_in(self, task: tuple[Phase, int] | None) -> bool:
        """Whether a task keeps graphs on the device, and with them what would go to the stash."""
        if task is None or task[0] is not Phase.FORWARD or self._measuring:
            return False
        return task[1] in self.plan.kept or self._is_fused(self._packs[task[1]], Phase.FORWARD)

    def expect_backward(self, layer: SwappedLayer) -> int:
        """Announce a backward of a layer."""
        lane = current_lane()
        progress = self._progress.get(lane) if lane is not None else None
        if progress is None:
            return 0
        if progress.differentiating:
            self._refuse_late_call(layer)
        progress.pending[self._pack_of[layer.index]] += 1
        use = progress.uses[layer.index]
        progress.uses[layer.index] += 1
        return use

    def watch(self, layer: SwappedLayer, residency: Residency) -> CastWatch | None:
        """What a layer does with its weights, if that isn't known yet: the watch, to be active during its call."""
        dtype = autocast_dtype(self._root.torch_device)
        if not self._is_watching or layer.index in self._watched or dtype is None:
            return None
        self._watched.add(layer.index)
        self._has_watched = True
        return CastWatch(residency, dtype)

    def is_last_backward(self) -> bool:
        """Whether the current lane differentiates its loss."""
        lane = current_lane()
        return lane in self._progress and self._progress[lane].differentiating

    def keep_graph(self, layer: SwappedLayer, call: LayerCall) -> bool:
        """Whether a call may keep its graph, where there is room, and while its pack stays."""
        index = self._pack_of[layer.index]
        if not self._keeps_graph_in((Phase.FORWARD, index)):
            return False
        residents = self._residents[self._device_of(index)]
        if not residents.device.room_for(self._work.graph_bytes([layer]) + self._work.bytes([layer], Phase.FORWARD)):
            return False
        residents.keep_graph(residents.packs[index], call)
        return True

    @contextmanager
    def measuring_graph(self, layer: SwappedLayer) -> Iterator[None]:
        """The context in which a layer's graph is made again."""
        device = self.devices[self._device_of(self._pack_of[layer.index])]
        before = device.allocated_bytes()
        yield
        if self._measuring:
            self._work.note_graph(layer, device.allocated_bytes() - before)

    def _refuse_late_call(self, layer: SwappedLayer) -> None:
        """A layer that is called in backward (reentrant checkpointing) has gradients of which nobody knows the last."""
        self.reentrant = True
        if self._pack_of[layer.index] in self._delivered:
            raise UnsupportedModelError(
                f"layer {layer.name!r} is called again during the backward, after its update; "
                'use HarmonyStrategy(update="deferred"), or checkpoint(..., use_reentrant=False)'
            )

    def accumulate(self, layer: SwappedLayer, use: int, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Take the gradients of one announced backward."""
        lane, index = current_lane(), self._pack_of[layer.index]
        if lane in self._progress:
            if gradients and not self._progress[lane].differentiating:
                raise UnsupportedModelError(
                    "the step runs a backward of its own, whose gradients of parameters must not add to those of the batch's "
                    "loss: ask for the gradients of inputs alone with torch.autograd.grad(loss, inputs), or optimize manually "
                    "(self.automatic_optimization = False)"
                )
            self._progress[lane].pending[index] -= 1
        elif gradients:
            self._flush_after_this_backward()
        if self._asked_for is not None:
            gradients = [(p, gradient) for p, gradient in gradients if p in self._asked_for]
        if gradients:
            if any(parameter._backward_hooks for parameter, _ in gradients):
                gradients = [(p, self._after_hooks(p, gradient, use)) for p, gradient in gradients]
            residents = self._residents[self._device_of(index)]
            # Those of glue come in a lane's own work; all lanes' sums are made in one order.
            with residents.device.computing():
                # Before the backward proper, which a fused pack runs ahead of, Lightning has not zeroed gradients yet.
                residents.swapper.accumulate(
                    residents.packs[index], layer, use, gradients, add_to_earlier=self._in_backward
                )

    def _after_hooks(self, parameter: nn.Parameter, gradient: Tensor, use: int) -> Tensor:
        """What the user's hooks of a parameter make of the gradient of one microbatch."""
        hooks = list((parameter._backward_hooks or {}).values())
        if hooks and (use > 0 or self._num_owners[parameter] > 1):
            raise UnsupportedModelError(
                f"parameter {self._names[parameter]!r} has a hook (register_hook) and is used several times in a step: the "
                "hook would see the gradient of each use apart; change the gradients in on_after_backward instead"
            )
        if hooks:
            gradient = gradient.to(parameter.dtype)
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def verify(self, layer: SwappedLayer, outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Check a layer when it first runs backward."""
        if layer.index in self._verified:
            return
        self._verified.add(layer.index)
        index = self._pack_of[layer.index]
        residents = self._residents[self._device_of(index)]
        residency = residents.packs[index].residency
        assert residency is not None
        with residents.device.on_host():
            verify_layer(layer, residency, outputs, known)

    def _current(self) -> LaneProgress:
        lane = current_lane()
        assert lane is not None
        return self._progress[lane]

    # ---- ends ----------------------------------------------------------------------------------------------------------

    def _flush_after_this_backward(self) -> None:
        """Whoever calls a backward outside of a step, or in manual optimization, finds its gradients as soon as it returns."""
        backward = torch._C._current_graph_task_id()
        if backward != self._flushed_backward:
            self._flushed_backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._flush_gradients)

    def _flush_gradients(self) -> None:
        """Bring gradients that calls outside of a step left on the device into the parameters' ``grad``."""
        self.updater.begin(None, [pack.parameters for pack in self._packs])
        for pack in self._packs:
            self.updater.deliver(pack.parameters, self._residents[0].swapper.swap_out_gradients(pack))
        self.updater.finish()
        self.updater.reclaim()

    def close(self) -> None:
        """Join all threads, give the model its own forward methods back, and release host memory from the device."""
        self._lanes.close()
        self._reset()
        for intercepted in self._intercepted:
            intercepted.remove()
        move_buffers(self._glue_buffers, torch.device("cpu"))
        self.updater.close()
        for device in self.devices:
            device.close()
        self.store.close()
