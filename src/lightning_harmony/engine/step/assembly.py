"""Assembly: makes the parts of an executor, and tells each of the others that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lightning_harmony.engine.devices.cores import core_of_caller, siblings_of
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.glue.glue import Glue
from lightning_harmony.engine.lanes.lane import LanePool
from lightning_harmony.engine.layers.intercept import InterceptedForward
from lightning_harmony.engine.layers.recordings import Recordings
from lightning_harmony.engine.layers.surroundings import Surroundings
from lightning_harmony.engine.measure.profile import Profiler
from lightning_harmony.engine.measure.profile_cache import ProfileCache
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.stash import Stash
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.memory.transfer import Transfers
from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.parameter_places import places_of
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.step.fit_record import FitRecord
from lightning_harmony.engine.step.gradient_sums import GradientSums
from lightning_harmony.engine.step.granting import Granting
from lightning_harmony.engine.step.lone_calls import LoneCalls
from lightning_harmony.engine.step.measurements import Measurements
from lightning_harmony.engine.step.microbatch_runner import MicrobatchRunner
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.pack_preparation import PackPreparation
from lightning_harmony.engine.step.plan_making import PlanMaker, check_given
from lightning_harmony.engine.step.planning import Planner
from lightning_harmony.engine.step.runtime import Runtime
from lightning_harmony.engine.step.shortage import refuse_too_large
from lightning_harmony.engine.step.step import Step
from lightning_harmony.engine.step.swapped_model import SwappedModel
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.engine.updates.update import Updater
from lightning_harmony.plan.values.plan import Parallel, Plan


def assemble(
    model: nn.Module,
    layers: Sequence[Layer],
    *devices: Device,
    parallel: Parallel = "pipeline",
    compute_dtype: torch.dtype | None = None,
    compile_options: Mapping[str, Any] | None = None,
    updates_on_host: bool = False,
    disk: DiskHome | None = None,
    plan: Plan | None = None,
    progress: Callable[[int], None] = lambda done: None,
    records: ProfileCache | None = None,
    store: HostStore | None = None,
    in_files: Collection[nn.Parameter] = (),
    recomputing: Callable[[], AbstractContextManager[Sequence[str]]] = lambda: nullcontext(()),
    records_layers: bool = False,
    has_optimizer: Callable[[nn.Parameter], bool] = attrgetter("requires_grad"),
) -> Executor:
    """An executor for a model, whose layers are intercepted from now until it is closed.

    Args:
        model: the model.
        layers: those of its layers that are swapped, as `find_layers` returns them.
        devices: where they run, the root first: the one device that the model's own code sees.
        parallel: how packs are placed on several devices.
        compute_dtype: the type in which floating parameters and the layers' floating inputs are on the device, where it is
            narrower than the parameters' own; None to leave all types as they are.
        compile_options: of `torch.compile`, with which layers are compiled; None not to.
        updates_on_host: whether optimizers step there, and not on the devices.
        disk: where optimizer state and weights may live; None if they may not.
        plan: what to run by once work space is known; None to plan from what is measured.
        progress: told again and again how many bytes are in the host store.
        records: what earlier fits have measured; None to measure anew.
        store: one that was closed, where it has all of the model's parameters; None to make one.
        in_files: the parameters that stay in files, in a store that is made.
        recomputing: gives the context of a layer's own code when it runs again, and has been heard before.
        records_layers: whether work of layers is recorded, and run in the place of their code.
        has_optimizer: tells whether an optimizer has a parameter.

    Raises:
        CapacityError: if a layer's weights and gradients exceed the capacity.
        PlanError: if the plan is for another model, for other devices or for a larger capacity.
    """
    root, traffic = devices[0], Traffic()
    swapped_layers = [layer.swapped(index, compute_dtype) for index, layer in enumerate(layers)]
    refuse_too_large(swapped_layers, devices)
    names = {name for name, _ in model.named_parameters()}
    fingerprint = check_given(plan, swapped_layers, names, devices, parallel)
    in_order = dict.fromkeys([p for layer in swapped_layers for p in layer.parameters] + list(model.parameters()))
    companions = [layer.companions for layer in swapped_layers]
    if store is None:
        store = HostStore(list(in_order), root, progress, companions, in_files)
    else:
        store = store.reopened(root, companions)
    pool = HostPool(root.host_buffer, None if disk is None else disk.overflow)
    recorder = StepRecorder(devices)
    # Where a GPU computes, lanes only launch what it does, on a core that is spared for them. On the host they compute: on
    # the core that the system finds for their caller, which another process may need next time.
    launches = any(isinstance(device.torch_device.index, int) for device in devices)
    core = core_of_caller() if launches else None
    lanes = LanePool((lambda: core) if launches else core_of_caller, computes=not launches)
    updater = Updater(
        pool,
        [
            StreamedUpdate(each, store.__contains__, on_host=updates_on_host, traffic=traffic, disk=disk)
            for each in devices
        ],
        spared_cores=() if core is None else siblings_of(core),
        on_update=recorder.note_update,
    )
    swapped = SwappedModel(model, swapped_layers, store, root.torch_device, compute_dtype)
    recording = devices if records_layers else ()
    recordings = Recordings(recording, lambda device, size: residents[devices.index(device)].admit(size))
    residents = [
        Residents(
            device,
            Swapper(device, store, pool, traffic, updater.postponed, updater.streamed.disk),
            Sums(device, pool, traffic, swapped.is_shared, swapped.is_only_user),
            Stash(device, pool, traffic),
            number,
            partial(recordings.let_go, device),
        )
        for number, device in enumerate(devices)
    ]
    step, placement, profiler = Step(has_optimizer), Placement(store, residents), Profiler(traffic)
    observer = Observer(step, placement, traffic, profiler, pool)
    transfers = Transfers(devices, traffic, lambda to, size: residents[to].admit(size), observer.timing_transfer)
    measured = Measurements(devices, store, profiler, observer.works[True], updater)
    record = FitRecord(records, swapped.layers, measured)
    maker = PlanMaker(swapped.layers, devices, parallel, fingerprint, measured, plan)
    planner = Planner(swapped.layers, list(in_order), measured, maker, record)
    placement.use(planner.layer_by_layer(range(len(layers))), swapped.layers)
    sums = GradientSums(swapped, step, placement, transfers, updater, observer, profiler)
    preparation = PackPreparation(step, placement, observer, profiler, traffic, recorder, compute_dtype)
    lone_calls = LoneCalls(swapped, placement, sums, recorder, record.discard)
    surroundings = Surroundings(step.current, transfers, recorder)
    runtime = Runtime(
        swapped,
        step,
        placement,
        preparation,
        lone_calls,
        sums,
        transfers,
        observer,
        surroundings,
        recomputing,
        recordings,
    )
    glue = Glue(places_of(model, list(in_order)), root.torch_device, runtime, compute_dtype)
    granting = Granting(step, residents, preparation, sums, observer, recorder)
    runner = MicrobatchRunner(step, lanes, placement, transfers, granting, preparation, runtime, glue, record.discard)
    intercepted = [InterceptedForward(layer, runtime, compile_options) for layer in swapped_layers]
    return Executor(
        devices,
        swapped,
        intercepted,
        store,
        pool,
        traffic,
        recorder,
        updater,
        step,
        placement,
        observer,
        planner,
        sums,
        runtime,
        glue,
        runner,
        recordings,
    )
