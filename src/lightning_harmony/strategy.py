"""The strategy: translates between Lightning's loop and the engine."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_harmony.checkpoints import refuse_directory, refuse_sharded
from lightning_harmony.engine.batch import merge_evaluations, merge_outputs, microbatch_sizes, split_batch
from lightning_harmony.engine.decompose import find_layers
from lightning_harmony.engine.device import CudaDevice, Device, VirtualDevice, free_device_bytes, free_host_bytes
from lightning_harmony.engine.executor import Executor
from lightning_harmony.engine.opaque import without_caches
from lightning_harmony.engine.postponed import Clip, by_norm, by_value
from lightning_harmony.engine.report import StepReport
from lightning_harmony.engine.rng import stream_seed
from lightning_harmony.engine.turns import Microbatch
from lightning_harmony.engine.update import fuse, why_not_separable
from lightning_harmony.errors import CapacityError, PlanError, UnsupportedModelError
from lightning_harmony.logs import MicrobatchLogs
from lightning_harmony.plan.given import read_plan
from lightning_harmony.plan.memory_size import format_bytes, parse_bytes
from lightning_harmony.plan.plan import Parallel, Plan
from lightning_harmony.plan.profile import Profile
from lightning_harmony.precision import keep_scale_on_host, refuse_unsupported
from lightning_harmony.separability import explain_difference
from lightning_harmony.signals import HeldSignals
from lightning_harmony.snapshot import Snapshot
from lightning_harmony.unregistered import move_unregistered

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object

# Hooks that see gradients or the optimizer's step: with them, no pack may be updated before the backward has ended.
_MODULE_HOOKS = (
    "configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward", "optimizer_step",
    "optimizer_zero_grad", "backward",
)  # fmt: skip
_CALLBACK_HOOKS = ("on_before_optimizer_step", "on_after_backward")
# Hooks between a step of the optimizer and the next training_step: what overrides them may look at parameters, so that a
# deferred update must be over before. `optimizer_step` goes on after it has called the optimizer.
_MODULE_HOOKS_BETWEEN = (
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start",
)  # fmt: skip
_DATA_HOOKS_BETWEEN = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_CALLBACK_HOOKS_BETWEEN = ("on_train_batch_end", "on_train_batch_start", "on_exception")
# Lightning's own callbacks that look at none in these, or only through the strategy when they save.
_BLIND_CALLBACKS = frozenset({
    "ProgressBar", "TQDMProgressBar", "RichProgressBar", "LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor",
    "ModelCheckpoint", "OnExceptionCheckpoint",
})  # fmt: skip
# Host bytes of optimizer state per parameter byte, where it is known before the first step.
STATE_COPIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "RMSprop": 1, "Adagrad": 1}


class HarmonyStrategyMixin(_Base):
    """Everything of `HarmonyStrategy` but the Lightning tree that it belongs to.

    Args:
        device_memory: the capacity of each device, in bytes or as text such as "16GiB", or a list with that of each;
            None for what is free on it (on the CPU: no limit).
        num_microbatches: how many microbatches a batch is split into.
        microbatch_size: how many samples a microbatch has. Give at most one of the two; with neither, a batch is split
            into 4 microbatches, or as many as it has samples.
        layers: the classes of the modules to schedule as layers, or a predicate on name and module; None to find them.
        update: when parameters are updated: "just-in-time", pack by pack in the backward; "deferred", after it, under the
            forward of the next batch unless something looks at parameters before; or "auto", just in time unless something
            reads all gradients.
        loss_reduction: whether the loss of a batch is the "mean" or the "sum" of its samples' losses; None for the mean, with
            a check after the first step, which runs on a part of a microbatch once more.
        parallel: how several devices share the work: "pipeline", where packs go round the devices and microbatches from
            one to the next, or "data", where each device takes its share of the microbatches through all packs.
        compile_layers: whether to compile each layer, as `torch.compile` does; or the arguments to call it with.
        plan: a plan of an earlier run, or a JSON file that holds one, to run by instead of planning. It tells the number of
            microbatches, too, where that is not given.
    """

    strategy_name = "harmony"
    tree: str

    def __init__(
        self,
        device_memory: int | str | list[int | str] | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        layers: Collection[type] | Callable[[str, nn.Module], bool] | None = None,
        update: Literal["auto", "just-in-time", "deferred"] = "auto",
        loss_reduction: Literal["mean", "sum"] | None = None,
        parallel: Parallel = "pipeline",
        compile_layers: bool | dict[str, Any] = False,
        plan: Plan | str | Path | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        if num_microbatches is not None and microbatch_size is not None:
            raise ValueError(
                f"HarmonyStrategy(num_microbatches={num_microbatches}, microbatch_size={microbatch_size}): "
                "give at most one of the two, the other follows from the batch"
            )
        for name, number in (("num_microbatches", num_microbatches), ("microbatch_size", microbatch_size)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise ValueError(f"HarmonyStrategy({name}={number!r}): a whole number of at least 1 is needed")
        _one_of("update", update, ("auto", "just-in-time", "deferred"))
        _one_of("loss_reduction", loss_reduction, ("mean", "sum", None))
        _one_of("parallel", parallel, ("pipeline", "data"))
        self._device_memory: list[int | None] = [None]
        if isinstance(device_memory, list | tuple):
            self._device_memory = [parse_bytes(each) for each in device_memory]
        elif device_memory is not None:
            self._device_memory = [parse_bytes(device_memory)]
        self._parallel = parallel
        self._num_microbatches = num_microbatches
        self._microbatch_size = microbatch_size
        self._layer_choice = layers
        self._update = update
        self._loss_reduction = loss_reduction or "mean"
        self._checks_split = loss_reduction is None
        self._split_check: Callable[[], None] | None = None
        self._too_large: dict[str, int] = {}
        if not isinstance(compile_layers, bool | Mapping):
            raise ValueError(
                f"HarmonyStrategy(compile_layers={compile_layers!r}): True, False, or the arguments of torch.compile, such as "
                "{'mode': 'max-autotune-no-cudagraphs'}, are needed"
            )
        options = compile_layers if isinstance(compile_layers, Mapping) else {}
        self._compile_options = None if compile_layers is False else options
        self._signals = HeldSignals()
        self._given_plan = None if plan is None else read_plan(plan)
        self._refuse_other_number()
        self._executor: Executor | None = None
        self._report: StepReport | None = None
        self._last_plan: Plan | None = None
        self._fused: set[int] = set()
        self._state_bytes = 0
        self._steps_late = False
        self._late_clip: Clip | None = None
        self._has_warned = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def _refuse_other_number(self) -> None:
        planned = None if self._given_plan is None else self._given_plan.num_microbatches
        if None not in (planned, self._num_microbatches) and planned != self._num_microbatches:
            raise PlanError(
                f"HarmonyStrategy(plan=...) is for {planned} microbatches, but num_microbatches={self._num_microbatches}: "
                "leave one of the two out"
            )

    # ---- what Lightning asks when it is set up -------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name; `lightning_harmony.registration` does it for both trees."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__doc__)

    @property
    def step_report(self) -> StepReport | None:
        """What the last training step did; None before the first."""
        return self._report

    @property
    def plan(self) -> Plan | None:
        """The packs, in the order in which a step visits them, those in brackets forth and back at once; None before setup.

        The first step goes from layer to layer; what it was seen to do is planned from the next one on. After a fit, it is
        the one that was in use: its `to_json` may be kept, for `HarmonyStrategy(plan=...)` and `lightning-harmony plan`.
        """
        return self._last_plan if self._executor is None else self._executor.plan

    @property
    def profile(self) -> Profile | None:
        """What layers and copies were seen to take, and what the plan in use was made from; None before the first step."""
        return None if self.plan is None else self.plan.profile

    @property
    def root_device(self) -> torch.device:
        """The one logical device of the user's code."""
        return self._devices[0] if self._devices else torch.device("cpu")

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The root device alone: the user's code sees one device."""
        return [self.root_device] if self._devices else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = list(devices or [])

    @property
    def accelerator(self) -> Any:
        """Lightning's accelerator."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        name = None if accelerator is None else type(accelerator).__name__
        if name not in (None, "CPUAccelerator", "CUDAAccelerator"):
            raise ValueError(
                f"strategy='harmony' cannot serve {name}: use Trainer(accelerator='gpu') with CUDA, or accelerator='cpu'"
            )
        self._accelerator = accelerator

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plugin."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            refuse_unsupported(plugin)
        self._precision_plugin = plugin

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's plugin that writes and reads checkpoints."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        refuse_sharded(plugin)
        self._checkpoint_io = plugin

    @property
    def world_size(self) -> int:
        """One process."""
        return 1

    @property
    def global_rank(self) -> int:
        """The only one."""
        return 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The one process loads all data."""
        return {"num_replicas": 1, "rank": 0}

    def set_world_ranks(self) -> None:
        """Refuse to be one of several processes.

        Raises:
            ValueError: if a launcher started more than one process here, or several nodes are asked for.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if local > 1:
            raise ValueError(
                f"LOCAL_WORLD_SIZE={local}: strategy='harmony' runs all devices of a machine from one process; start it "
                "with plain `python` (or `torchrun --nproc-per-node=1`)"
            )
        if getattr(self, "num_nodes", 1) > 1:
            raise ValueError("strategy='harmony' runs on one machine so far: use Trainer(num_nodes=1)")

    num_nodes: int = 1

    def _configure_launcher(self) -> None:
        """Nothing is launched."""

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """One process: nothing to reduce."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """One process: nothing to gather."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One process: its own decision."""
        return decision

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """One process: nothing to wait for."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One process: nothing to send."""
        return obj

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """One process: nothing to block."""
        yield

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build the model on the host, whatever the device."""
        with self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Any) -> None:
        """Find the layers, build the host store, intercept the layers, and create the optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        self._refuse_pruning(trainer)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._executor = self._build_executor()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            self._refuse_too_little_host_memory()
        self.setup_precision_plugin()

    def _build_executor(self) -> Executor:
        module = self._module
        _refuse_sparse(module)
        devices = self._open_devices()
        smallest = min((d.capacity_bytes for d in devices if d.capacity_bytes is not None), default=None)
        layers = find_layers(module, max_layer_bytes=smallest, layers=self._layer_choice)
        if not layers:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no submodule with parameters that could be swapped as a layer: hold the "
                "network in a submodule, or train with Trainer(strategy='auto')"
            )
        compute_dtype = getattr(self.precision_plugin, "compute_dtype", None)
        return Executor(
            module,
            layers,
            *devices,
            parallel=self._parallel,
            compute_dtype=compute_dtype,
            compile_options=self._compile_options,
            plan=self._given_plan,
        )

    def _open_devices(self) -> list[Device]:
        several = len(self._devices) > 1
        return [
            CudaDevice(device, capacity or free_device_bytes(device), is_one_of_several=several)
            if device.type == "cuda"
            else VirtualDevice(capacity)
            for device, capacity in zip(self._devices or [self.root_device], self._capacities(), strict=True)
        ]

    def _capacities(self) -> list[int | None]:
        """Of each device."""
        num_devices = max(len(self._devices), 1)
        if len(self._device_memory) == 1:
            return self._device_memory * num_devices
        if len(self._device_memory) != num_devices:
            raise ValueError(
                f"HarmonyStrategy(device_memory=...) has {len(self._device_memory)} entries for {num_devices} devices: "
                "give one for each of Trainer(devices=...), or a single one for all"
            )
        return self._device_memory

    def _refuse_too_little_host_memory(self) -> None:
        trainable = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        gradient_bytes = sum(p.numel() * p.element_size() for p in trainable if p.requires_grad)
        copies = 1 + max((STATE_COPIES.get(type(o).__name__, 0) for o in self.optimizers), default=0)
        free = free_host_bytes()
        if free is not None and copies * gradient_bytes > free:
            raise CapacityError(
                f"the host is {format_bytes(copies * gradient_bytes - free)} short: gradients and optimizer state take "
                f"{format_bytes(copies * gradient_bytes)}, {format_bytes(free)} are free. Add host memory, train fewer "
                "parameters, or choose an optimizer with less state"
            )

    def _refuse_pruning(self, trainer: Any) -> None:
        pruning = self._lightning("callbacks").ModelPruning
        if trainer.state.fn == "fit" and any(isinstance(callback, pruning) for callback in trainer.callbacks):
            raise UnsupportedModelError(
                "ModelPruning replaces parameters by others during the fit, but layers are swapped as they were at its "
                "start: set pruned weights to zero in a hook instead, or train with Trainer(strategy='auto')"
            )

    def model_to_device(self) -> None:
        """Leave parameters on the host; move what layers don't own, and tell the module its device."""
        move_unregistered(self._module, self.root_device)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of one file.

        Raises:
            ValueError: if it is the directory of a sharded one.
        """
        refuse_directory(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state where the parameters are: on the host."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Give the module back as an ordinary one on the host. Also called when `setup` never was."""
        self._signals.release()
        executor, self._executor = self._executor, None
        if executor is not None:
            self._last_plan = executor.plan
            executor.close()
        module = self.lightning_module
        if module is not None:
            move_unregistered(module, torch.device("cpu"))
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- the training step ---------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's training_step on each microbatch; the backward runs when that of the result does."""
        module = self._module
        start = time.perf_counter()
        self._signals.hold()
        if self._runs_alone():
            self._engine.traffic.reset()
            self._fuse_optimizers()
            output = super().training_step(*args, **kwargs)
            does = "fetches its batches" if module.automatic_optimization else "steps its optimizers"
            self._write_report(start, 1, "deferred", f"the training_step {does} itself")
            return output
        batch, *rest = args
        sizes = self._sizes(batch)
        steps = [
            _Step(self, module.training_step, (part, *rest), kwargs) for part in split_batch(batch, sum(sizes), sizes)
        ]
        weights = self._weights(sizes)
        self._warn_of_batch_statistics(sizes)
        if self._checks_split and len(sizes) > 1:
            self._split_check = partial(self._check_split, batch, rest, kwargs, sizes)
        self._run(steps, weights, sizes)
        output = merge_outputs([step.output for step in steps], sizes)
        losses = [step.loss for step in steps if step.loss is not None]
        if len(losses) < len(steps):
            self._engine.abandon()
            return output
        value = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()
        # The last epoch of stochastic weight averaging has no backward: what it is for, statistics, must reach the host.
        if module.trainer.fit_loop._skip_backward or not any(step.requires_grad for step in steps):
            self._engine.abandon()
        else:
            value = _DeferredBackward.apply(torch.zeros((), requires_grad=True), value, self._finish, start, len(sizes))
        return {**output, "loss": value} if isinstance(output, Mapping) else value

    def _runs_alone(self) -> bool:
        """Whether the training_step runs as it is: each call of a layer brings its weights, its gradients stay for later."""
        module = self._module
        return not module.automatic_optimization or self._takes_iterator(module.training_step)

    def _run(self, steps: Sequence[_Step], weights: Sequence[float], sizes: Sequence[int]) -> None:
        module, engine = self._module, self._engine
        trainer = module.trainer
        batch_number = trainer.fit_loop.epoch_loop.total_batch_idx
        seed = torch.initial_seed()
        seeds = [stream_seed(seed, batch_number, number) if len(steps) > 1 else None for number in range(len(steps))]
        microbatches = [
            Microbatch(step, weight, each) for step, weight, each in zip(steps, weights, seeds, strict=True)
        ]
        engine.traffic.reset()
        logs = MicrobatchLogs(trainer._results if len(steps) > 1 else None, sizes)
        engine.on_switch = lambda number: setattr(logs, "microbatch", number)
        with logs, without_caches(module):
            engine.forward(
                microbatches,
                num_elements=max(step.num_elements() for step in steps),
                predicted_gradient=self._predicted_gradient(),
            )

    def _sizes(self, batch: Any) -> tuple[int, ...]:
        if self._num_microbatches == 1:
            return (1,)
        try:
            batch_size = self._lightning("utilities.data").extract_batch_size(batch)
        except Exception as error:
            raise ValueError(
                f"the size of a batch of type {type(batch).__name__} cannot be told, so it cannot be split into "
                "microbatches: return tensors, or use HarmonyStrategy(num_microbatches=1)"
            ) from error
        number = self._num_microbatches
        planned = None if self._given_plan is None else self._given_plan.num_microbatches
        if number is None and self._microbatch_size is None and planned is not None:
            # As with the default, a short last batch is split into fewer.
            number = min(planned, max(batch_size, 1))
        return microbatch_sizes(batch_size, num_microbatches=number, microbatch_size=self._microbatch_size)

    def _weights(self, sizes: Sequence[int]) -> list[float]:
        if self._loss_reduction == "sum":
            return [1.0] * len(sizes)
        return [size / sum(sizes) for size in sizes]

    def _warn_of_batch_statistics(self, sizes: Sequence[int]) -> None:
        """Say once what a split batch changes: it is what accumulation over microbatches gives, not one whole batch."""
        if self._has_warned or len(sizes) == 1:
            return
        self._has_warned = True
        names = [
            name
            for name, child in self._module.named_modules()
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training
        ]
        if names:
            self._warn(
                f"{names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''} normalize with the statistics of "
                f"microbatches of {sizes[0]} samples, not with those of the batch of {sum(sizes)}, as they do under "
                "accumulate_grad_batches; HarmonyStrategy(num_microbatches=1) keeps the batch whole"
            )

    def _check_split(self, batch: Any, rest: Sequence[Any], kwargs: dict[str, Any], sizes: Sequence[int]) -> None:
        """See whether the loss of a microbatch follows from those of its halves, in evaluation mode and leaving no trace.

        Says nothing where it cannot tell: if the step draws random numbers, or fails when it is run so. Where microbatches
        have one sample, two are taken.
        """
        module, trainer = self._module, self._module.trainer
        if _is_compiled(module):
            return
        size = max(sizes[0], 2)
        whole_batch = (size, sum(sizes) - size) if size < sum(sizes) else (size,)
        microbatch = split_batch(batch, sum(sizes), whole_batch)[0]
        halves = (size - size // 2, size // 2)
        parts = [microbatch, *split_batch(microbatch, size, halves)]
        steps = [_Step(self, module.training_step, (part, *rest), kwargs) for part in parts]
        before = self._remember()
        loggers, trainer.loggers = (
            trainer.loggers,
            [self._lightning("loggers.logger").DummyLogger()] * len(trainer.loggers),
        )
        try:
            module.eval()
            module._current_fx_name = "training_step"
            with torch.no_grad(), without_caches(module):
                runs = [Microbatch(step, 1.0, None) for step in steps]
                self._run_without_backward(runs, steps[0].num_elements())
            whole, *losses = [math.nan if step.loss is None else float(step.loss) for step in steps]
            has_drawn = before.has_drawn()
        except Exception:
            return
        finally:
            trainer.loggers = loggers
            before.restore()
        is_narrow = "16" in str(self.precision_plugin.precision)
        found = explain_difference(whole, losses, halves, reduction=self._loss_reduction, is_narrow=is_narrow)
        if found is not None and not has_drawn and math.isfinite(whole + sum(losses)):
            self._warn(found)

    def _predicted_gradient(self) -> float | None:
        """The gradient that Lightning will bring to the batch's loss.

        None where it adds to earlier gradients, or where the user's own `backward` may bring any other: to rescale what
        was computed from a wrong prediction would round otherwise.
        """
        module = self._module
        trainer = module.trainer
        if trainer.accumulate_grad_batches > 1:
            return None
        if self._lightning("utilities.model_helpers").is_overridden("backward", module):
            return None
        scaler = self._scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _finish(self, gradient: Tensor, start: float, num_microbatches: int) -> None:
        engine, module = self._engine, self._module
        self._fuse_optimizers()
        update, reason = self._update_policy()
        if update == "just-in-time" and not self._steps_late:
            if not engine.has_succeeded:
                update, reason = "deferred", "the first step measures, and changes nothing until it has succeeded"
            clip = by_value(module.trainer.gradient_clip_val) if module.trainer.gradient_clip_val else None
            engine.backward(gradient, self.optimizers[0], clip=clip)
        else:
            engine.backward(gradient, None, with_norms=self._needs_norms())
            if self._steps_late:
                waits = self._reason_to_wait()
                reason += f"; before the next batch, as {waits}" if waits else "; under the forward of the next batch"
        self._write_report(start, num_microbatches, update, reason)

    def _write_report(self, start: float, num_microbatches: int, update: str, reason: str) -> None:
        engine = self._engine
        # In the first step, buffers go as the optimizer's state comes: what they took together is no more than either end.
        optimizer_bytes, before = self._optimizer_bytes(), self._state_bytes
        most = max(engine.pool.take_peak_bytes() + before, engine.pool.num_bytes + optimizer_bytes)
        self._state_bytes = optimizer_bytes
        self._report = StepReport(
            seconds=time.perf_counter() - start,
            swapped_in_bytes=dict(engine.traffic.swapped_in),
            swapped_out_bytes=dict(engine.traffic.swapped_out),
            transferred_bytes=engine.traffic.transferred,
            peak_device_bytes=[device.peak_bytes() for device in engine.devices],
            host_bytes=engine.store.num_bytes + most,
            num_microbatches=num_microbatches,
            num_packs=len(engine.plan.packs),
            update=update,
            update_reason=reason if not self._fused else f"{reason}; fused on the host",
            update_hidden=engine.updater.overlap.take_hidden(),
        )

    def _fuse_optimizers(self) -> None:
        """On a GPU machine's host, where the user left it open; on the CPU arithmetic stays as the user wrote it."""
        if self.root_device.type == "cuda":
            self._fused |= {id(group) for optimizer in self.optimizers for group in fuse(optimizer)}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state, as it would be without the strategy's own choice of implementation."""
        self._finish_update()
        state: dict[str, Any] = super().optimizer_state(optimizer)
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            if id(group) in self._fused:
                saved["fused"] = None
        return state

    def _optimizer_bytes(self) -> int:
        tensors = [leaf for o in self.optimizers for state in o.state.values() for leaf in tree_leaves(dict(state))]
        return sum(leaf.numel() * leaf.element_size() for leaf in tensors if isinstance(leaf, Tensor))

    # ---- when to update ------------------------------------------------------------------------------------------------

    def _update_policy(self) -> tuple[str, str]:
        """When this step's parameters are updated, and why."""
        reasons = self._reasons_to_defer()
        if self._update == "deferred":
            return "deferred", 'update="deferred"'
        if reasons and self._update == "just-in-time" and not reasons[0][1]:
            return "just-in-time", f'update="just-in-time", although {reasons[0][0]}'
        if reasons:
            return "deferred", reasons[0][0]
        return "just-in-time", "nothing reads the gradients of all packs together"

    def _reasons_to_defer(self) -> list[tuple[str, bool]]:
        """What forbids the update just in time: each reason, and whether it holds even when the user insists."""
        module = self._module
        trainer = module.trainer
        reasons: list[tuple[str, bool]] = []
        if len(self.optimizers) != 1:
            reasons.append((f"there are {len(self.optimizers)} optimizers", True))
        if trainer.accumulate_grad_batches > 1:
            reasons.append((f"accumulate_grad_batches={trainer.accumulate_grad_batches}", True))
        if trainer.gradient_clip_val and not self._clips_by_value():
            reasons.append((f"gradient_clip_val={trainer.gradient_clip_val} needs all gradients", True))
        if self._scaler() is not None:
            reasons.append(("the gradient scaler checks all gradients", True))
        if self._engine.reentrant:
            reasons.append(("layers are called during the backward (reentrant checkpointing)", True))
        reasons += [(reader, True) for reader in self._gradient_readers()]
        if self.optimizers and (reason := why_not_separable(self.optimizers[0])) is not None:
            reasons.append((reason, False))
        return reasons

    def _gradient_readers(self) -> list[str]:
        """Hooks that are overridden and see gradients, or may change them."""
        module = self._module
        is_overridden = self._lightning("utilities.model_helpers").is_overridden
        callback_class = self._lightning("callbacks").Callback
        return [
            f"{type(module).__name__}.{hook} is overridden" for hook in _MODULE_HOOKS if is_overridden(hook, module)
        ] + [
            f"callback {type(callback).__name__} has {hook}"
            for callback in module.trainer.callbacks
            for hook in _CALLBACK_HOOKS
            if is_overridden(hook, callback, callback_class)
        ]

    # ---- the deferred update -------------------------------------------------------------------------------------------

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """Run the closure and all that Lightning does before the update; postpone the update where nobody can tell."""
        if not self._module.automatic_optimization or why_not_separable(optimizer) is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        is_deferred = self._update_policy()[0] == "deferred"
        with self._clipping_late(), self._stepping_late(optimizer) if is_deferred else nullcontext():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    def _stepping_late(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Within the context, the optimizer's step only asks for the update, where nothing looks at parameters soon."""
        step = optimizer.step

        def ask(closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                result = None if closure is None else closure()
            if self._reason_to_wait() is None:
                self._engine.postpone_update(optimizer, self._late_clip)
                # Schedulers look whether a step came before theirs.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            else:
                step()
            return result

        self._steps_late, self._late_clip = True, None
        try:
            with _replaced(optimizer, "step", ask):
                yield
        finally:
            self._steps_late, self._late_clip = False, None

    @contextmanager
    def _clipping_late(self) -> Generator[None, None, None]:
        """Within the context, Lightning's clipping uses the norms that are known, and waits for the update."""

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            clip(optimizer, by_norm(clip_val, self._engine.updater.norms.total(_parameters(optimizer))))

        def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
            clip(optimizer, by_value(clip_val))

        def clip(optimizer: Optimizer, how: Clip) -> None:
            parameters = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
            if self._steps_late and self._reason_to_wait() is None:
                self._late_clip = how
            elif parameters:
                how(parameters)

        plugin = self.precision_plugin
        if self._clips_late():
            with (
                _replaced(plugin, "clip_grad_by_norm", clip_grad_by_norm),
                _replaced(plugin, "clip_grad_by_value", clip_grad_by_value),
            ):
                yield
        else:
            yield

    def _clips_late(self) -> bool:
        """Whether Lightning alone clips gradients, and nobody sees them between that and their use."""
        plugin, base = type(self.precision_plugin), self._lightning("plugins.precision").Precision
        is_overridden = self._lightning("utilities.model_helpers").is_overridden
        return (
            (self._module.trainer.gradient_clip_val or 0) > 0
            and plugin.__module__.startswith((f"{self.tree}.plugins.", "lightning_harmony."))
            and all(getattr(plugin, n) is getattr(base, n) for n in ("clip_grad_by_norm", "clip_grad_by_value"))
            and not is_overridden("configure_gradient_clipping", self._module)
            and not is_overridden("clip_gradients", self._module)
        )

    def _clips_by_value(self) -> bool:
        """Whether each gradient is clipped by itself, so that a pack's need not wait for the others."""
        algorithm = self._module.trainer.gradient_clip_algorithm
        return algorithm is not None and algorithm.value == "value" and self._clips_late()

    def _needs_norms(self) -> bool:
        """Whether Lightning will ask for the norm of the gradients as this backward leaves them."""
        return (
            self._clips_late()
            and not self._clips_by_value()
            and self._scaler() is None
            and not self._gradient_readers()
            and not self._module.trainer.fit_loop._should_accumulate()
        )

    def _reason_to_wait(self) -> str | None:
        """What may look at parameters before the forward of the next batch; None if nothing does."""
        if (reason := why_not_separable(self.optimizers[0])) is not None:
            return reason
        if getattr(self.optimizers[0], "_step_supports_amp_scaling", False) and self._scaler() is not None:
            return "the optimizer unscales gradients itself"
        return self._onlooker() or self._end_of_batches()

    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    def _onlooker(self) -> str | None:
        """Code of the user's, or of a callback, that runs between two training batches."""
        module = self._module
        trainer = module.trainer
        is_overridden = self._lightning("utilities.model_helpers").is_overridden
        for hook in (*_MODULE_HOOKS_BETWEEN, *_DATA_HOOKS_BETWEEN):
            if is_overridden(hook, module):
                return f"{type(module).__name__}.{hook} is overridden"
        for hook in (*_DATA_HOOKS_BETWEEN, "on_exception"):
            if is_overridden(hook, trainer.datamodule):
                return f"{type(trainer.datamodule).__name__}.{hook} is overridden"
        callback_class = self._lightning("callbacks").Callback
        for callback in trainer.callbacks:
            kind = type(callback)
            if kind.__name__ in _BLIND_CALLBACKS and kind.__module__.startswith(f"{self.tree}.callbacks."):
                continue
            for hook in _CALLBACK_HOOKS_BETWEEN:
                if is_overridden(hook, callback, callback_class):
                    return f"callback {kind.__name__} has {hook}"
        return None

    def _end_of_batches(self) -> str | None:
        """Why no training batch follows this one at once."""
        trainer = self._module.trainer
        loop = trainer.fit_loop
        if loop.epoch_loop._num_ready_batches_reached():
            return "the epoch ends"
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            return "validation may follow at any time"
        if loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            return "validation follows"
        if trainer.should_stop or (trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps):
            return "the fit ends"
        return None

    def _finish_update(self) -> None:
        """See to it that all parameters and the optimizer's state are those after the last step."""
        if self._executor is not None:
            self._executor.updater.postponed.finish()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state after the last step; it is whole between steps only.

        Raises:
            RuntimeError: in the middle of a step.
        """
        if self._executor is not None and self._executor.is_running:
            raise RuntimeError(
                "the state of the module was asked for in the middle of a step, in which layers are swapped and updated: "
                "save checkpoints in a hook such as on_train_batch_end, not in the step"
            )
        self._finish_update()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def on_exception(self, exception: BaseException) -> None:
        """Lose no update that was asked for."""
        if self._executor is not None:
            self._executor.updater.postponed.drain()
        super().on_exception(exception)

    # ---- between steps -------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """The last batch is done with: signals that came meanwhile are delivered."""
        self._signals.release()

    def on_validation_start(self) -> None:
        """The last batch is done with, as for the next one."""
        self._signals.release()

    def on_train_end(self) -> None:
        """The last batch is done with, as for the next one."""
        self._signals.release()

    # ---- other steps ---------------------------------------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's validation_step, its layers swapped in one after the other."""
        return self._evaluate("validation_step", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's test_step, its layers swapped in one after the other."""
        return self._evaluate("test_step", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's predict_step, its layers swapped in one after the other."""
        return self._evaluate("predict_step", super().predict_step, args, kwargs)

    def _evaluate(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a batch whole, which is exact whatever the step does with it; in microbatches if it is too large for that."""
        with self._signals.held():
            return self._evaluate_batch(name, step, args, kwargs)

    def _evaluate_batch(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        engine, num_elements = self._engine, _num_elements(args)
        sizes = self._evaluation_sizes(name, args)
        if sizes and num_elements >= self._too_large.get(name, sys.maxsize):
            return self._evaluate_in_microbatches(name, step, sizes, args, kwargs)
        before = None
        if sizes and engine.measures(num_elements, is_training=False):
            before = self._remember()
        outputs: list[Any] = []
        engine.on_switch = None
        whole = Microbatch(lambda: outputs.append(self._on_root(step(*args, **kwargs))), 1.0, None)
        try:
            self._run_without_backward([whole], num_elements)
            return outputs[0]
        except CapacityError:
            if before is None:
                raise
        # Not within the except clause: the error's frames hold what the attempt has allocated.
        gc.collect()
        before.restore()
        engine.forget_evaluations()
        self._too_large[name] = num_elements
        self._warn(
            f"a batch of {sum(sizes)} samples exceeds the device's memory in {name}, which is run again in {len(sizes)} "
            "microbatches: what it logs and returns is averaged and joined over them"
        )
        return self._evaluate_in_microbatches(name, step, sizes, args, kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before the loss is scaled, see to it that gradients can be unscaled where they are."""
        keep_scale_on_host(getattr(self.precision_plugin, "scaler", None))
        super().pre_backward(closure_loss)

    def _evaluation_sizes(self, name: str, args: Any) -> tuple[int, ...]:
        """The microbatches into which a batch can be split if it must; empty if it cannot."""
        if self._takes_iterator(getattr(self._module, name)):
            return ()
        try:
            batch_size = self._lightning("utilities.data").extract_batch_size(args[0])
        except Exception:
            return ()
        number = None if self._num_microbatches is None else min(self._num_microbatches, max(batch_size, 1))
        sizes = microbatch_sizes(batch_size, num_microbatches=number, microbatch_size=self._microbatch_size)
        return sizes if len(sizes) > 1 else ()

    def _evaluate_in_microbatches(
        self, name: str, step: Callable[..., Any], sizes: Sequence[int], args: Any, kwargs: Any
    ) -> Any:
        batch, batch_number, *rest = args
        trainer, engine = self._module.trainer, self._engine
        parts = split_batch(batch, sum(sizes), sizes)
        outputs: dict[int, Any] = {}

        def run(number: int) -> None:
            outputs[number] = self._on_root(step(parts[number], batch_number, *rest, **kwargs))

        # No key of a training step: those are not negative.
        key = (torch.initial_seed(), -1, trainer.global_step, batch_number, *rest)
        microbatches = [
            Microbatch(partial(run, number), 1.0, stream_seed(*key, number)) for number in range(len(sizes))
        ]
        logs = MicrobatchLogs(trainer._results, sizes)
        engine.on_switch = lambda number: setattr(logs, "microbatch", number)
        with logs:
            self._run_without_backward(microbatches, max(map(_num_elements, parts)))
        try:
            ordered = [outputs[number] for number in range(len(sizes))]
            return merge_evaluations(ordered, sizes, averages=name != "predict_step")
        except ValueError as error:
            raise CapacityError(
                f"a batch of {sum(sizes)} samples exceeds the device's memory in {name}, and cannot be split either. {error}"
            ) from error

    def _on_root(self, output: Any) -> Any:
        """What a step returns, where the model's own code expects it."""
        return output if len(self._devices) < 2 else tree_map_only(Tensor, self._engine.to_root, output)

    def _remember(self) -> Snapshot:
        cuda_devices = [device for device in self._devices if device.type == "cuda"]
        return Snapshot(self._module, self._module.trainer._results, cuda_devices)

    def _run_without_backward(self, microbatches: Sequence[Microbatch], num_elements: int) -> None:
        self._engine.forward(microbatches, num_elements=num_elements, predicted_gradient=None, is_training=False)
        self._engine.abandon()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Where layers run alone, bring the gradients of this backward to the host; once, check that the batch splits."""
        if self._runs_alone():
            self._engine.flush_gradients()
        split_check, self._split_check = self._split_check, None
        if split_check is not None:
            self._checks_split = False
            split_check()
        super().post_backward(closure_loss)

    def _warn(self, message: str) -> None:
        self._lightning("utilities.rank_zero").rank_zero_warn(message)

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _engine(self) -> Executor:
        assert self._executor is not None, "the strategy is not set up"
        return self._executor

    def _takes_iterator(self, step: Any) -> bool:
        signature = self._lightning("utilities.signature_utils")
        return bool(signature.is_param_in_hook_signature(step, "dataloader_iter", explicit=True))

    def _lightning(self, name: str) -> Any:
        return import_module(f"{self.tree}.{name}")


class _Step:
    """The user's step on one microbatch, with what it returned."""

    def __init__(self, strategy: Any, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._strategy = strategy
        self._step = step
        self._args = args
        self._kwargs = kwargs
        self.output: Any = None
        self.loss: Tensor | None = None
        self.requires_grad = False

    def num_elements(self) -> int:
        """Elements of the microbatch."""
        return _num_elements(self._args)

    def __call__(self) -> Tensor | None:
        """Run it; return the loss with its graph."""
        with self._strategy.precision_plugin.train_step_context():
            output = self._step(*self._args, **self._kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            self.output = output
            return None
        to_root = self._strategy._engine.to_root
        self.loss, self.requires_grad = to_root(loss), loss.requires_grad
        self.output = tree_map_only(Tensor, to_root, output)
        return loss


class _DeferredBackward(torch.autograd.Function):
    """The loss of a batch: its backward runs those of the microbatches."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, finish: Any, *args: Any) -> Tensor:
        ctx.finish, ctx.args = finish, args
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                "double backward (create_graph=True) through the loss is not possible while layers are swapped: no graph "
                "of the backward is kept; use Trainer(strategy='auto')"
            )
        ctx.finish(gradient, *ctx.args)
        return None, None, None, *(None for _ in ctx.args)


def _is_compiled(module: nn.Module) -> bool:
    """Whether other batch sizes may make something be compiled again."""
    return getattr(module, "_compiler_ctx", None) is not None or any(
        child._compiled_call_impl is not None or type(child).__name__ == "OptimizedModule" for child in module.modules()
    )


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    """Within the context, an instance has another method."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _num_elements(value: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _one_of(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        raise ValueError(f"HarmonyStrategy({name}={value!r}): one of {', '.join(map(repr, allowed))} is needed")


def _refuse_sparse(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) is True:
            raise UnsupportedModelError(
                f"module {name!r} has sparse gradients, which are summed as dense ones here: set sparse=False"
            )


@cache
def strategy_class(tree: str) -> Any:
    """The strategy of a Lightning tree, "lightning.pytorch" or "pytorch_lightning"."""
    strategies = import_module(f"{tree}.strategies")
    names = {"tree": tree, "__doc__": HarmonyStrategyMixin.__doc__, "__module__": __name__}
    cls = type("HarmonyStrategy", (HarmonyStrategyMixin, strategies.ParallelStrategy), names)
    # Lightning compiles models only for strategies that it knows: this one, too, has one logical device.
    strategies.SingleDeviceStrategy.register(cls)
    return cls


def __getattr__(name: str) -> Any:
    if name == "HarmonyStrategy":
        return strategy_class("lightning.pytorch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
