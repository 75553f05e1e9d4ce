"""Training a model that does not fit on its devices: its layers are swapped, from the set-up of a Trainer to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.measure.origin import origin_of
from lightning_harmony.engine.measure.profile_cache import ProfileCache
from lightning_harmony.engine.model.decompose import Layer, find_layers
from lightning_harmony.engine.model.findings import Findings
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import part_buffers
from lightning_harmony.engine.nodes.division import Division, parameters_of
from lightning_harmony.engine.step.assembly import assemble
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.structures.operations import version_of
from lightning_harmony.engine.structures.parts import num_bytes_of
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.errors import BorrowsModuleError, UnsupportedModelError, UnswappableBufferError
from lightning_harmony.fit.evaluation import Evaluation
from lightning_harmony.fit.garbage import LastingObjects
from lightning_harmony.fit.signals import HeldSignals
from lightning_harmony.fit.training import Training
from lightning_harmony.fit.user_steps import num_elements
from lightning_harmony.microbatches.logs import unheard
from lightning_harmony.microbatches.remembered import KeptBatch
from lightning_harmony.microbatches.snapshot import Snapshot
from lightning_harmony.microbatches.split_check import SplitCheck
from lightning_harmony.plan.search.packing import smallest
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.reporting.fit_summary import FitSummary
from lightning_harmony.reporting.step_reports import StepReports
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.progress import store_progress
from lightning_harmony.setup.refusals import (
    refuse_composed,
    refuse_scripted,
    refuse_shared_memory,
    refuse_sparse,
    refuse_uninitialized,
)
from lightning_harmony.setup.settings import Settings
from lightning_harmony.updating.deferred_update import DeferredUpdate
from lightning_harmony.updating.host_budget import describe_left, weights_elsewhere
from lightning_harmony.updating.optimizer_state import key_by_parameters
from lightning_harmony.updating.update_policy import UpdatePolicy


class Swapped:
    """Runs the user's steps on a model whose layers are swapped.

    Where the model gets other parameters between steps, all is set up anew.

    Args:
        tree: the Trainer's.
        trainer: whose module is trained or evaluated. The module is on the host.
        settings: the strategy's.
        torch_devices: where layers run.
        devices: the same, opened. They are closed with the engine.
        reports: where steps are reported.
        division: of updates between nodes; None where there is one node.

    Attributes:
        engine: runs the steps.
        training: what the strategy does for a training step.
        signals: held back in the middle of a step.
    """

    training: Training

    def __init__(
        self,
        tree: LightningTree,
        trainer: Any,
        settings: Settings,
        torch_devices: Sequence[torch.device],
        devices: Sequence[Device],
        reports: StepReports,
        division: Division | None = None,
    ) -> None:
        self._tree, self._trainer, self._settings = tree, trainer, settings
        self._split_check, self._reports = SplitCheck(tree, trainer, settings), reports
        self._torch_devices, self._division = torch_devices, division
        self.signals = HeldSignals()
        self._lasting = LastingObjects()
        self._buffers_before: KeptBatch | None = None
        self._disk = DiskHome(settings.offload_dir)
        self._findings, self._has_seen_buffers = Findings(), False
        # Closes the engine, once: where another set-up is refused, there is none when the Trainer ends.
        self._closing = ExitStack()
        if torch_devices[0].type != "cpu":
            part_buffers(self._module)
        try:
            self._use(self._build_engine(settings.plan, devices, None), None)
        except BaseException:
            self._disk.close()
            raise

    def _use(self, engine: Executor, summary: FitSummary | None) -> None:
        """This engine runs steps from now on."""
        tree, trainer, settings = self._tree, self._trainer, self._settings
        self.engine, self._has_stepped = engine, False
        self._closing.callback(engine.close)
        policy = UpdatePolicy(tree, trainer, engine, settings.update, division=self._division)
        if summary is None:
            deferred = DeferredUpdate(policy, engine)
            summary = FitSummary(tree, trainer, engine, policy)
        else:
            # Who has asked for optimizers may have kept them.
            policy.was_asked, policy.was_asked_between = summary.policy.was_asked, summary.policy.was_asked_between
            deferred = self.training.deferred.follow(policy, engine)
            summary = replace(summary, engine=engine, policy=policy)
        self.training = Training(tree, trainer, engine, settings, deferred, self._split_check, self._reports, summary)
        self._evaluation = Evaluation(tree, trainer, engine, settings, self._split_check.splitting)

    def catch_up(self) -> None:
        """Before a step, see to what was changed since the last one: other parameters need another set-up."""
        self._leave_lookout()
        self._note_seen_buffers()
        if self.engine.is_outdated():
            # A plan that was given is for the model as it was.
            self._set_up_anew(None)
        self.engine.catch_up()

    def _note_seen_buffers(self) -> None:
        """Before the first step, which may have begun in memory, note which buffers others have, too."""
        if not self._has_seen_buffers and self._torch_devices[0].type == "cpu":
            # Elsewhere plain Lightning has others in the places of buffers.
            self._findings.note_seen_buffers()
        self._has_seen_buffers = True

    def _set_up_anew(self, plan: Plan | None) -> None:
        before = self.engine
        self.finish_update()
        self._closing.close()
        refuse_uninitialized(self._module)
        refuse_scripted(self._module)
        known = all(parameter in before.store for parameter in self._module.parameters())
        devices = self._settings.open_devices(self._torch_devices)
        engine = self._build_engine(plan, devices, before.store if known else None)
        engine.recorder.take_over(before.recorder)
        self._use(engine, self.training.summary)

    def _leave_lookout(self) -> None:
        """What comes next is code of our own."""
        self.training.deferred.policy.lookout.leave()

    def end_epoch(self) -> None:
        """No further batch follows in this epoch: what runs now, and processes that it starts, finds updates done."""
        self._leave_lookout()
        self.finish_update()

    def finish_update(self) -> None:
        """See to it that all parameters and the optimizer's state are those after the last step."""
        self.engine.updater.postponed.finish()
        self.training.deferred.policy.look_again()

    def end(self) -> None:
        """Give the module back as an ordinary one on the host. Signals are still held if they were."""
        self._leave_lookout()
        self._lasting.end()
        self._closing.close()
        self._disk.close()

    # ---- steps ---------------------------------------------------------------------------------------------------------

    def training_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a batch in microbatches; the backward runs when that of the result does.

        Args:
            step: runs the user's training_step as it is.
            args: the batch and its number, and perhaps more.
            kwargs: more of the same.
        """
        self._leave_lookout()
        self._note_seen_buffers()
        self.signals.hold()
        self._lasting.begin_step()
        is_first = self._module.automatic_optimization and not self.engine.has_succeeded
        self._buffers_before = self._kept_buffers() if is_first else None
        with self.restoring_buffers():
            output = self._run_until_known(
                lambda: self.training.run(step, args, kwargs), (args, kwargs), may_repeat=not self._has_stepped
            )
        self._has_stepped = True
        key_by_parameters(self._trainer.optimizers)
        return output

    def _run_until_known(self, run: Callable[[], Any], given: Any, *, may_repeat: bool) -> Any:
        """Run a step, and again from its beginning where it shows of layers what must be known before.

        Args:
            run: does it.
            given: what it is called with.
            may_repeat: whether it may run again.
        """
        parameters = list(self._module.parameters()) if may_repeat else []
        while True:
            before = Snapshot(self._trainer, self.engine.devices, given) if may_repeat else None
            flags = [parameter.requires_grad for parameter in parameters]
            weights = [(version_of(parameter), parameter.grad) for parameter in parameters]
            try:
                output = run()
                if before is not None:
                    before.let_go()
                return output
            except (BorrowsModuleError, UnswappableBufferError) as error:
                # What a step has changed of parameters would be changed once more.
                now = [(version_of(parameter), parameter.grad) for parameter in parameters]
                is_changed = self.engine.step.changed_parameter is not None or any(
                    one[0] != two[0] or one[1] is not two[1] for one, two in zip(weights, now, strict=True)
                )
                if before is None or before.has_exchanged() or is_changed:
                    raise
                if not self._findings.note(self._module, error):
                    raise
                begins_anew = _begins_anew(error)
            self.training.leave()
            left = before.restore()
            for parameter, flag in zip(parameters, flags, strict=True):
                parameter.requires_grad_(flag)
            self._set_up_anew(self._settings.plan)
            self.engine.catch_up()
            self._tree.info(f"Harmony: {begins_anew}. Results are the same{left}")

    @contextmanager
    def restoring_buffers(self) -> Iterator[None]:
        """A context in which an error of the first step leaves buffers as they were before it."""
        try:
            yield
        except BaseException:
            if self._buffers_before is not None:
                if torch.cuda.is_initialized():
                    # Copies to the host may be under way.
                    torch.cuda.synchronize()
                self._buffers_before.restore()
            raise

    def _kept_buffers(self) -> KeptBatch:
        """Copies of all buffers, such as the statistics of batch normalization, on the host."""
        # Those of TorchScript cannot be replaced.
        of_owners = [owner._buffers for owner in self._module.modules()]
        return KeptBatch([each if isinstance(each, dict) else list(each.values()) for each in of_owners], copies=True)

    def evaluate(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a validation, test or prediction step."""
        self.catch_up()
        with self.signals.held():
            output = self._run_until_known(
                lambda: self._evaluation.run(name, step, args, kwargs),
                (args, kwargs),
                may_repeat=self.engine.measures(num_elements(args), is_training=False),
            )
        self.training.deferred.policy.look_again()
        key_by_parameters(self._trainer.optimizers)
        return output

    # ---- the engine ----------------------------------------------------------------------------------------------------

    def _build_engine(self, plan: Plan | None, devices: Sequence[Device], store: HostStore | None) -> Executor:
        """An engine for the module as it is. Where it is refused, the module is as it was, and the devices are closed."""
        try:
            return self._engine(plan, devices, store)
        except BaseException:
            for device in devices:
                device.close()
            raise

    def _engine(self, plan: Plan | None, devices: Sequence[Device], store: HostStore | None) -> Executor:
        module, settings = self._module, self._settings
        refuse_composed(module)
        if store is None:
            refuse_shared_memory(module)
        capacity = smallest(device.capacity_bytes for device in devices)
        layers = self._findings.applied(find_layers(module, max_layer_bytes=capacity, layers=settings.layers))
        if not layers:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no submodule with parameters that could be swapped as a layer: hold the "
                "network in a submodule, or train with Trainer(strategy='auto')"
            )
        refuse_sparse(module, layers)
        in_files: list[nn.Parameter] = []
        if store is None:
            trains, of_layers = self._trainer.state.fn == "fit", [layer.whole.parameters() for layer in layers]
            left, to_disk = weights_elsewhere(module, of_layers, self._disk, trains=trains)
            if left:
                self._tree.info(f"Harmony: {describe_left(left)}")
            if to_disk:
                self._disk.take_weights(to_disk)
            in_files = [*left, *self._disk.weights]
        moved = () if store is not None else set(module.parameters()).difference(in_files)
        num_bytes = sum(map(num_bytes_of, moved))
        with store_progress(self._tree, self._trainer, num_bytes) as progress:
            return assemble(
                module,
                layers,
                *devices,
                parallel=settings.parallel,
                compute_dtype=getattr(self._trainer.precision_plugin, "compute_dtype", None),
                compile_options=settings.compile_options,
                updates_on_host=settings.update_on == "host",
                disk=self._disk,
                plan=plan,
                progress=progress,
                records=self._records(layers, devices),
                store=store,
                in_files=in_files,
                recomputing=partial(unheard, self._trainer),
                records_layers=settings.cuda_graphs,
                has_optimizer=self._has_optimizer,
            )

    def _has_optimizer(self, parameter: nn.Parameter) -> bool:
        return any(each is parameter for one in self._trainer.optimizers for each in parameters_of(one))

    def _records(self, layers: list[Layer], devices: Sequence[Device]) -> ProfileCache | None:
        settings, plugin = self._settings, self._trainer.precision_plugin
        folder = settings.profile_folder()
        if folder is None:
            return None
        taken = [type(plugin).__qualname__, str(plugin.precision), repr(settings.compile_options)]
        origin = origin_of(self._module, layers, devices, taken)
        return ProfileCache(folder, origin, self._tree.warn, is_chosen=settings.profile_cache is not True)

    @property
    def _module(self) -> Any:
        return self._trainer.lightning_module


def _begins_anew(error: BorrowsModuleError | UnswappableBufferError) -> str:
    """What a step has shown, and what follows from that."""
    if isinstance(error, UnswappableBufferError):
        return f"{error.does}: a step begins again, and from now on that buffer is not swapped"
    return (
        f"{str(error).partition(': ')[0]}: a step begins again, and from now on each layer of that class has these weights, "
        "too, while it runs"
    )
