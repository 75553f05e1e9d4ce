"""The strategy: translates between Lightning's loop and the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.measure.report import StepReport
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.nodes.division import Division, Need
from lightning_harmony.engine.nodes.exchange import exchange_of
from lightning_harmony.fit import tracebacks
from lightning_harmony.fit.checkpoints import WholeStates
from lightning_harmony.fit.device_memory import DoesNotFit, LastingBytes, fits
from lightning_harmony.fit.in_memory import InMemory
from lightning_harmony.fit.loop_ends import LoopEnds
from lightning_harmony.fit.moves import move_to_host, move_unregistered, moved_to_device
from lightning_harmony.fit.nodes import average_behind, take_from_first_node
from lightning_harmony.fit.state_aside import move_optimizer_state
from lightning_harmony.fit.swapped import Swapped
from lightning_harmony.plan.values.plan import Parallel, Plan
from lightning_harmony.plan.values.profile import Profile
from lightning_harmony.precision import keep_scale_on_host
from lightning_harmony.reporting.step_reports import StepReports
from lightning_harmony.setup import compat
from lightning_harmony.setup.argument_names import suggests_names
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.refusals import (
    refuse_batch_norm_over_nodes,
    refuse_scripted,
    refuse_uninitialized,
    refuse_windows,
)
from lightning_harmony.setup.settings import Settings
from lightning_harmony.updating.divided_update import divide

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StrategyMixin(WholeStates):
    """Trains a LightningModule that may be larger than device memory: `Trainer(strategy=HarmonyStrategy(...))`.

    Args:
        device_memory: the capacity of each device, in bytes or as text such as "16GiB", or a list with that of each;
            None for what is free on it (on the CPU: no limit).
        num_microbatches: how many microbatches a batch is split into; None or "auto" for the fewest that fit, which the first
            step finds; if layers are swapped between several devices, for twice as many as devices at least.
        microbatch_size: how many samples a microbatch has. Give at most one of the two.
        layers: the classes of the modules to schedule as layers, or a predicate on name and module; None to find them.
        update: when parameters are updated: "just-in-time", pack by pack in the backward; "deferred", after it, under the
            forward of the next batch unless something looks at parameters before; or "auto", just in time unless something
            reads all gradients.
        update_on: where parameters are updated: on the "device", to which optimizer state comes for it, so that results are
            those of plain Lightning on that device; or on the "host", which moves fewer bytes over the bus, but is slow for
            parameters in 16 bits and rounds as the host does.
        loss_reduction: whether the loss of a batch is the "mean" or the "sum" of its samples' losses; None for the mean.
        check_loss: whether to check that after the first step, whose code runs three times more for it on a part of a
            microbatch; a warning says what was found.
        split_batch: a function that takes a batch and the samples of each microbatch, such as ``(2, 2, 2, 2)``, and returns
            the microbatches; None to split where it is certain what belongs to a sample, and to run other batches whole.
        parallel: how several devices share the work: "pipeline", where packs go round the devices and microbatches from
            one to the next, or "data", where each device takes its share of the microbatches through all packs.
        compile_layers: whether to compile each layer, as `torch.compile` does; or the arguments to call it with.
        plan: a plan of an earlier run, or its JSON file, to run by. It tells the number of microbatches where none is given.
        profile_cache: whether what was measured of a model is kept for later fits, whose first step is planned then; or the
            folder to keep it in. By default it is one below ``$XDG_CACHE_HOME`` or ``~/.cache``. Results do not depend on it.
        offload_dir: a folder on a fast disk, where optimizer state lives, and then weights do, that the host has no room for.
        cuda_graphs: whether layers are recorded as CUDA graphs on GPUs, so that their code runs once a step and no longer for
            each microbatch. Results have the same bits.
        timeout: how long a machine waits for others.
        state_dict_type: "full" for checkpoints of one file each, "sharded" for folders that all machines write to.
    """

    strategy_name = "harmony"
    tree: str

    @suggests_names("HarmonyStrategy")
    def __init__(
        self,
        device_memory: int | str | list[int | str] | None = None,
        num_microbatches: int | Literal["auto"] | None = None,
        microbatch_size: int | None = None,
        layers: Collection[type] | Callable[[str, nn.Module], bool] | None = None,
        update: Literal["auto", "just-in-time", "deferred"] = "auto",
        update_on: Literal["device", "host"] = "device",
        loss_reduction: Literal["mean", "sum"] | None = None,
        check_loss: bool = False,
        split_batch: Callable[[Any, Sequence[int]], Sequence[Any]] | None = None,
        parallel: Parallel = "pipeline",
        compile_layers: bool | dict[str, Any] = False,
        plan: Plan | str | Path | None = None,
        profile_cache: bool | str | Path = True,
        offload_dir: str | Path | None = None,
        cuda_graphs: bool = True,
        timeout: timedelta = timedelta(minutes=30),
        state_dict_type: Literal["full", "sharded"] = "full",
        *,
        # Of either tree: LightningCLI would refuse those of the one that a type named.
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        refuse_windows()
        self._settings = Settings(
            device_memory=device_memory,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            layers=layers,
            update=update,
            update_on=update_on,
            loss_reduction=loss_reduction,
            check_loss=check_loss,
            split_batch=split_batch,
            parallel=parallel,
            compile_layers=compile_layers,
            plan=plan,
            profile_cache=profile_cache,
            offload_dir=offload_dir,
            cuda_graphs=cuda_graphs,
            timeout=timeout,
            state_dict_type=state_dict_type,
        )
        self.checkpoint_folder = self._settings.offload_dir
        self._lightning = LightningTree(self.tree)
        untested = compat.untested_version(self.tree)
        if untested is not None:
            self._lightning.warn(untested)
        self._reports = StepReports()
        self._loop_ends = LoopEnds()
        self._last_plan: Plan | None = None
        # From `setup` to `teardown`: a model that fits is in memory, another one is swapped.
        self._in_memory: InMemory | None = None
        self._swapped: Swapped | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Without what a fit that runs has set up, threads among it: the fit of a copy sets up its own."""
        state: dict[str, Any] = super().__getstate__()
        return {
            **state,
            "_in_memory": None,
            "_swapped": None,
            "_division": None,
            "_loop_ends": LoopEnds(),
            "_last_plan": self.plan,
        }

    # ---- what Lightning asks when it is set up -------------------------------------------------------------------------

    @property
    def step_report(self) -> StepReport | None:
        """What the last training step did; None before the first."""
        return self._reports.last

    @property
    def plan(self) -> Plan | None:
        """The packs, in the order in which a step visits them, those in brackets forth and back at once; None before setup.

        The first step goes from layer to layer; what it was seen to do is planned from the next one on. After a fit, it is
        the one that was in use: its `to_json` may be kept, for `HarmonyStrategy(plan=...)` and `lightning-harmony plan`.
        """
        return self._last_plan if self._swapped is None else self._swapped.engine.plan

    @property
    def profile(self) -> Profile | None:
        """What layers and copies were seen to take, and what the plan in use was made from; None before the first step."""
        return None if self.plan is None else self.plan.profile

    @property
    def recorder(self) -> StepRecorder | None:
        """Measures and records steps for those who ask, as `HarmonyMonitor` does; None outside of a fit."""
        return None if self._swapped is None else self._swapped.engine.recorder

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build the model on the host, whatever the device."""
        with self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        """Bring the model to its device if it fits there; else have its layers swapped. Create the optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        refuse_uninitialized(self._module)
        self.accelerator.setup(trainer)
        if self.is_distributed:
            refuse_batch_norm_over_nodes(compat.layer_sync(self))
            # All nodes make it at this time.
            exchange = exchange_of(self.root_device, self._settings.timeout)
            take_from_first_node([*self._module.parameters(), *self._module.buffers()], exchange, exchange.device)
            self._division = Division(exchange)
        self.model = self.precision_plugin.convert_module(self.model)
        devices = self._settings.open_devices(self._torch_devices)
        trains, has_optimizers = trainer.state.fn == "fit", False
        if trains:
            self._torn = None
        may_fit = self._may_be_in_memory(devices) and fits(
            LastingBytes.of(self._module, [] if trains else None), devices
        )
        if may_fit and moved_to_device(self._module, self.model, self.root_device):
            if trains:
                self.setup_optimizers(trainer)
                has_optimizers = True
            lasting = LastingBytes.of(self._module, self.optimizers if trains else None)
            if fits(lasting, devices):
                self._in_memory = InMemory(self._lightning, trainer, self._settings, devices, lasting)
                self._in_memory.start()
                if trains and self._division is not None:
                    self._division.agree(Need.WHOLE)
        if self._in_memory is None:
            self._swap_layers(trainer, devices, sets_up_optimizers=trains and not has_optimizers, divides=trains)
        self.setup_precision_plugin()

    def _may_be_in_memory(self, devices: Sequence[Device]) -> bool:
        """Whether nothing was asked for that takes swapping, or there is nothing to swap."""
        if next(self._module.parameters(), None) is None:
            return self._settings.plan is None
        # Several parts of the host's memory are there to try what several devices do.
        is_simple = len(devices) == 1 or devices[0].computes_apart
        return is_simple and self._settings.plan is None and not getattr(self.precision_plugin, "compute_dtype", None)

    def _swap_layers(
        self, trainer: Trainer, devices: Sequence[Device], *, sets_up_optimizers: bool, divides: bool = False
    ) -> None:
        """From now on, layers are swapped.

        Args:
            trainer: the Trainer.
            devices: where layers run.
            sets_up_optimizers: whether there are none yet.
            divides: whether all nodes come here, and may divide updates from now on.
        """
        refuse_scripted(self._module)
        move_to_host(self._module, self.root_device)
        self.model_to_device()
        self._swapped = Swapped(
            self._lightning,
            trainer,
            self._settings,
            self._torch_devices,
            devices,
            self._reports,
            self._division,
        )
        policy = self._swapped.training.deferred.policy
        if trainer.state.fn == "fit":
            if sets_up_optimizers:
                self.setup_optimizers(trainer)
            if divides and self._division is not None and self._division.agree(policy.need()) is not Need.WHOLE:
                divide(policy)
            self._swapped.training.start()
            self._loop_ends.begin(trainer, after_batch=self._release_signals, after_epoch=self._end_epoch)

    def _leave_memory(self, reason: DoesNotFit) -> None:
        """A batch does not fit beside the model: have layers swapped for the rest."""
        in_memory, self._in_memory = self._in_memory, None
        assert in_memory is not None
        in_memory.end()
        if self.root_device.type == "cuda":
            torch.cuda.empty_cache()
        self._lightning.info(f"Harmony: {reason}: layers are swapped from now on.")
        move_optimizer_state(self.optimizers, torch.device("cpu"))
        self._swap_layers(in_memory.trainer, in_memory.devices, sets_up_optimizers=False)
        assert self._swapped is not None
        self._swapped.engine.catch_up()

    @override
    def model_to_device(self) -> None:
        """Leave parameters on the host; move what layers don't own, and tell the module its device."""
        move_unregistered(self._module, self.root_device)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device."""
        batch = batch if self._in_memory is None else self._in_memory.locked(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def teardown(self) -> None:
        """Give the module back as an ordinary one on the host. Also called when `setup` never was."""
        self._loop_ends.end()
        in_memory, self._in_memory = self._in_memory, None
        swapped, self._swapped = self._swapped, None
        if in_memory is not None:
            in_memory.end()
            for device in in_memory.devices:
                device.close()
            super().teardown()
            return
        try:
            if swapped is not None:
                self._last_plan = swapped.engine.plan
                self._torn = self._torn or swapped.engine.updater.torn
                swapped.end()
            if self.lightning_module is not None:
                move_unregistered(self.lightning_module, torch.device("cpu"))
            self.precision_plugin.teardown()
            if self.accelerator is not None:
                self.accelerator.teardown()
            self.checkpoint_io.teardown()
        finally:
            if swapped is not None:
                # What a handler raises must not keep threads alive.
                swapped.signals.release()

    # ---- the training step ---------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's training_step on each microbatch; the backward runs when that of the result does."""
        step = super().training_step
        if self._in_memory is not None:
            self._reports.begin(None)
        return self._run(lambda loop: loop.training_step(step, args, kwargs), step, args, kwargs)

    def _run(self, run: Callable[[InMemory | Swapped], Any], step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one of the user's steps.

        Args:
            run: runs it, in memory or swapped.
            step: the step as it is: the loops may be over, and the module an ordinary one.
            args: its arguments.
            kwargs: more of them.
        """
        if self._division is not None and self._module.trainer.state.fn == "fit":
            # Layers may have changed them by what each node has seen: as DDP does, all go on from the first one's.
            exchange, on_host = self._division.exchange, torch.device("cpu")
            # Weights may be under way between devices. Nodes that exchange in two groups of these may wait for each other.
            way = on_host if self._division.is_divided else exchange.device
            take_from_first_node(self._module.buffers(), exchange, way)
        try:
            if self._in_memory is not None:
                try:
                    return run(self._in_memory)
                except DoesNotFit as reason:
                    shortage = reason
                self._leave_memory(shortage)
            return step(*args, **kwargs) if self._swapped is None else run(self._swapped)
        except Exception as error:
            raise error.with_traceback(tracebacks.of_user(error))  # noqa: B904

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of the batch's loss."""
        try:
            with nullcontext() if self._swapped is None else self._swapped.restoring_buffers():
                return super().backward(*args, **kwargs)
        except Exception as error:
            raise error.with_traceback(tracebacks.of_user(error))  # noqa: B904

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before the loss is scaled, see to it that gradients can be unscaled where they are."""
        if self._in_memory is None:
            keep_scale_on_host(getattr(self.precision_plugin, "scaler", None))
        if self._division is not None and not self._is_accumulating and closure_loss.requires_grad:
            parameters, by_hand = list(self._module.parameters()), not self._module.automatic_optimization
            average_behind(
                closure_loss,
                parameters,
                self._division,
                by_hand=by_hand,
                **({} if self._swapped is None else {"hear": self._swapped.training.hear_of}),
            )
        super().pre_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Complete what the backward left to be done."""
        if self._swapped is not None:
            self._swapped.training.after_backward()
        elif self._in_memory is not None:
            self._in_memory.report(self._reports)
        super().post_backward(closure_loss)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """Run the closure and all that Lightning does before the update; postpone the update where nobody can tell."""
        # The first step may go over to swapping in its closure: its update, if it is deferred, is Lightning's own then.
        with nullcontext() if self._swapped is None else self._swapped.training.deferred.around(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # ---- between steps --------------------------------------------------------------------------------------------------

    def _release_signals(self) -> None:
        """A step is over, and its state whole."""
        if self._swapped is not None:
            self._swapped.signals.release()

    def _end_epoch(self) -> None:
        """No further batch follows in this epoch."""
        if self._swapped is not None:
            self._swapped.end_epoch()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """See to what was done to the model since the last batch."""
        if self._swapped is not None:
            self._swapped.catch_up()

    # ---- evaluation ----------------------------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's validation_step, its layers swapped in one after the other."""
        return self._evaluate("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's test_step, its layers swapped in one after the other."""
        return self._evaluate("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's predict_step, its layers swapped in one after the other."""
        return self._evaluate("predict_step", super().predict_step, args, kwargs)

    def _evaluate(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._run(lambda loop: loop.evaluate(name, step, args, kwargs), step, args, kwargs)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module
