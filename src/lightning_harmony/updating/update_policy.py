"""When parameters are updated, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.layers.intercept import InterceptedForward
from lightning_harmony.engine.model.attributes import OF_TORCH
from lightning_harmony.engine.nodes.division import Division, Need, parameters_of
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.structures.packages import LIGHTNING
from lightning_harmony.engine.structures.parts import storages_of
from lightning_harmony.engine.structures.spans import Spans, span_of
from lightning_harmony.engine.updates.separable_optimizers import (
    needs_closure,
    reads_default_dtype,
    watcher_of,
    why_not_separable,
)
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.updating.hooks import (
    between_passes,
    end_of_batches,
    gradient_readers,
    has_optimizer_after_step,
    savers_on_exception,
    state_readers,
    zeroed_parameters,
)
from lightning_harmony.updating.lookout import Lookout, is_out_of_sight
from lightning_harmony.updating.reach import code_of, reaches

_SHARED = "code keeps tensors in the memory of parameters"
# Whose code asks for optimizers where it needs them.
_OURS = (*LIGHTNING, "torch", "builtins")


@dataclass
class UpdatePolicy:
    """Decides for each step anew: callbacks, optimizers and hooks may change during a fit.

    Attributes:
        wish: what the user asked for, "auto", "just-in-time" or "deferred".
        step_reader: what lets code that Lightning does not announce read optimizer state; None if nothing does.
        backward_reader: the same of code that runs again in the backward.
        default_dtypes: those that steps set and that do not hold when an optimizer steps in plain Lightning.
        was_asked: whether the user's code has asked for optimizers.
        was_asked_between: whether some did that does not belong to a step.
        lookout: kept between steps.
        division: of updates between nodes; None where there is one node.
        others_defer: whether another node's update follows its backward, so that this one's does, too.
    """

    tree: LightningTree
    trainer: Any
    engine: Executor
    wish: str
    step_reader: str | None = None
    backward_reader: str | None = None
    default_dtypes: Collection[torch.dtype] = ()
    was_asked: bool = False
    was_asked_between: bool = False
    division: Division | None = None
    others_defer: bool = False
    # What was looked into: callbacks, loggers, data and hooks of the module; whether they have the optimizer, or what it has,
    # without asking for it; and what may look at parameters out of sight.
    _holders: Sequence[Any] = ()
    _holds_state: bool = False
    _out_of_sight: str | None = None

    def __post_init__(self) -> None:
        self.lookout = Lookout(self.engine.updater.postponed.finish_parameters, self.tree.calls_hooks)

    def choose(self) -> tuple[str, str]:
        """When this step's parameters are updated, "just-in-time" or "deferred", and why."""
        if self.wish == "deferred":
            return "deferred", 'update="deferred"'
        if self.others_defer:
            return "deferred", "another node's update follows its backward"
        if (reason := self._why_all_gradients()) is not None:
            return "deferred", reason
        if (reason := why_not_separable(self._optimizers[0])) is None:
            return "just-in-time", "nothing reads the gradients of all packs together"
        if self.wish == "just-in-time":
            return "just-in-time", f'update="just-in-time", although {reason}'
        return "deferred", reason

    def need(self) -> Need:
        """What this node needs of a step's gradients, which are averaged over nodes."""
        tree, trainer = self.tree, self.trainer
        steps_otherwise = (
            tree.runs_alone(trainer.lightning_module)
            or len(self._optimizers) != 1
            or self.why_whole(self._optimizers[0]) is not None
            or watcher_of(self._optimizers[0]) is not None
            or has_optimizer_after_step(tree, trainer) is not None
        )
        # While an exception unwinds, no other node sends its optimizer state.
        if steps_otherwise or savers_on_exception(tree, trainer):
            return Need.WHOLE
        if self.choose()[0] == "just-in-time":
            return Need.OWN
        is_read = (
            self.wish == "deferred"
            or (trainer.gradient_clip_val and not self.clips_late())
            or self.scaler is not None
            or self.engine.step.is_reentrant
            or self.backward_reader is not None
            or gradient_readers(tree, trainer)
        )
        return Need.ALL if is_read else Need.OWN_AND_NORMS

    def _why_all_gradients(self) -> str | None:
        """What forbids the update just in time, even when the user insists; None if nothing does."""
        trainer = self.trainer
        if len(self._optimizers) != 1:
            return f"there are {len(self._optimizers)} optimizers"
        if trainer.accumulate_grad_batches > 1:
            return f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        if trainer.gradient_clip_val and not self._clips_by_value():
            return f"gradient_clip_val={trainer.gradient_clip_val} needs all gradients"
        if self.scaler is not None:
            return "the gradient scaler checks all gradients"
        if self.engine.step.is_reentrant:
            return "layers are called during the backward (reentrant checkpointing)"
        if self.engine.shares_weights:
            return _SHARED
        if needs_closure(self._optimizers[0]):
            return f"{type(self._optimizers[0]).__name__}.step needs a closure"
        reason = self.backward_reader or self._why_default_dtype() or watcher_of(self._optimizers[0])
        if reason is not None:
            return reason
        return next(iter(gradient_readers(self.tree, trainer) + savers_on_exception(self.tree, trainer)), None)

    def why_at_once(self) -> str | None:
        """What may look at parameters before the forward of the next batch; None if nothing does."""
        return self.why_never_later() or end_of_batches(self.trainer)

    def why_never_later(self) -> str | None:
        """What may look at parameters or optimizer state between any two batches, or in a step; None if nothing does."""
        reason = self.why_whole(self._optimizers[0]) or has_optimizer_after_step(self.tree, self.trainer)
        if reason is None and self.trains_others():
            # No forward would wait for them.
            reason = "the optimizer has parameters that the module does not have"
        reason = reason or (_SHARED if self.engine.shares_weights else None)
        reason = reason or self.step_reader or self._why_default_dtype() or watcher_of(self._optimizers[0])
        return reason or self._why_out_of_sight() or self.lookout.why_at_once()

    def trains_others(self) -> bool:
        """Whether an optimizer has parameters that the module has not, such as latents of samples."""
        own = frozenset(self.trainer.lightning_module.parameters())
        return any(parameter not in own for one in self._optimizers for parameter in parameters_of(one))

    def _why_out_of_sight(self) -> str | None:
        """What may look at parameters or optimizer state where the lookout does not see it; None if nothing does."""
        if self.was_asked_between:
            return "the user's code has asked for optimizers"
        self._look_at_holders()
        return self._out_of_sight

    def hides_state(self) -> bool:
        """Whether nobody looks at optimizer state from this step's update to the next one's."""
        if len(self._optimizers) != 1 or any(why(self._optimizers[0]) for why in (self.why_whole, watcher_of)):
            return False
        if self.was_asked or self.step_reader is not None or self.backward_reader is not None:
            return False
        # Schedulers step with an epoch's last batch. Behind it, all is brought to the host.
        if compat.is_last_batch(self.trainer) or any(state_readers(self.tree, self.trainer)):
            return False
        self._look_at_holders()
        return not self._holds_state

    def look_again(self) -> None:
        """Code has run that no lookout sees, such as hooks of an epoch's end: it may hold something else by now."""
        self._holders = ()

    def _look_at_holders(self) -> None:
        """See what is held by those whose code runs between steps, if they are others than were looked at."""
        trainer, module, optimizer = self.trainer, self.trainer.lightning_module, self._optimizers[0]
        owners = [*trainer.callbacks, *trainer.loggers, trainer.datamodule, trainer.train_dataloader]
        # What the user's code has set there, beside Lightning's own.
        owners += filter(_is_users, vars(trainer).values())
        known = [optimizer, *owners]
        if self.lookout.gives_memory:
            self.look_again()
            self.lookout.gives_memory = False
        if len(known) == len(self._holders) and all(map(is_, known, self._holders)):
            return
        self._holders = known
        states = list(optimizer.state.values())
        values = [value for state in states if isinstance(state, dict) for value in list(state.values())]
        tensors = [value for value in values if isinstance(value, Tensor)]
        wanted = set(map(id, [optimizer, optimizer.state, *states, *tensors]))
        code = [code_of(each, apart_from=_OURS) for each in [*owners, module]]
        apart_from = [trainer, module, trainer.strategy]

        def has_state(each: Any) -> bool:
            return id(each) in wanted

        holds_state = reaches([owners, code], has_state, apart_from=apart_from)
        self._holds_state = holds_state is not False
        spans = Spans(span_of(part) for parameter in module.parameters() for part in storages_of(parameter))

        def has_memory(each: Any) -> bool:
            # The lookout hears of tensors.
            return not issubclass(type(each), Tensor) and spans.meet([span_of(each)])

        held = [each for part in module.modules() for name, each in vars(part).items() if name not in OF_TORCH]
        held = [each.own if isinstance(each, InterceptedForward) else each for each in held]
        self._out_of_sight = None
        if holds_state:
            self._out_of_sight = "something that runs between batches holds the optimizer"
        elif reaches([owners, code, held], has_memory, apart_from=apart_from):
            self._out_of_sight = "an array has the memory of parameters"
        elif (owner := self._owner_out_of_sight()) is not None:
            self._out_of_sight = f"{type(owner).__name__} may run code in other threads or processes, or compiled code"

    def _owner_out_of_sight(self) -> Any:
        """One of those whose code runs between steps, and may do so where no lookout sees it; None if there is none."""
        trainer, module = self.trainer, self.trainer.lightning_module
        wanted = set(map(id, module.modules()))
        # Loggers and data need no model.
        others = [each for each in [*trainer.loggers, *_parts_of(trainer.train_dataloader)] if _is_users(each)]
        others = [each for each in others if reaches(each, lambda found: id(found) in wanted, apart_from=[trainer])]
        for owner in [module, trainer.datamodule, *trainer.callbacks, *others]:
            has = list(getattr(owner, "__dict__", {}).values()) if _is_users(owner) else []
            # And what it has of classes that are written with its own.
            helpers = [each for each in has if type(each).__module__ == type(owner).__module__]
            code = [each for part in (owner, *helpers) for each in code_of(part, apart_from=_OURS)]
            if any(map(is_out_of_sight, [*code, *has])):
                return owner
        return None

    def why_whole(self, optimizer: Any) -> str | None:
        """Why an optimizer steps as the user wrote it, all at once; None if its update may be made in shares."""
        if (reason := why_not_separable(optimizer)) is not None:
            return reason
        if getattr(optimizer, "_step_supports_amp_scaling", False) and self.scaler is not None:
            return "the optimizer unscales gradients itself"
        return None

    def _why_default_dtype(self) -> str | None:
        """The default dtype that a step sets, which all threads share, where an update beside it would be another one."""
        for dtype in self.default_dtypes:
            for optimizer in self._optimizers:
                if reads_default_dtype(optimizer, dtype):
                    return f"{type(optimizer).__name__} reads the default dtype, which a step sets to {dtype}"
        return None

    def lightning_clips(self) -> bool:
        """Whether gradients are clipped by Lightning's own functions."""
        plugin, base = type(self.trainer.precision_plugin), self.tree.part("plugins.precision").Precision
        names = ("clip_grad_by_norm", "clip_grad_by_value")
        return (
            self.tree.is_known(plugin)
            and all(getattr(plugin, name) is getattr(base, name) for name in names)
            and _torch_clips()
        )

    def clips_late(self) -> bool:
        """Whether Lightning alone clips gradients, and nobody sees them between that and their use."""
        module = self.trainer.lightning_module
        return (
            (self.trainer.gradient_clip_val or 0) > 0
            and self.lightning_clips()
            and not self.tree.overrides(module, "configure_gradient_clipping")
            and not self.tree.overrides(module, "clip_gradients")
        )

    def needs_norms(self) -> bool:
        """Whether Lightning will ask for the norm of the gradients as this backward leaves them."""
        return (
            self.clips_late()
            and not self._clips_by_value()
            and self.trainer.world_size == 1
            and self.scaler is None
            and not gradient_readers(self.tree, self.trainer)
            and not compat.is_accumulating(self.trainer)
        )

    def _clips_by_value(self) -> bool:
        """Whether each gradient is clipped by itself, so that a pack's need not wait for the others."""
        algorithm = self.trainer.gradient_clip_algorithm
        return algorithm is not None and algorithm.value == "value" and self.clips_late()

    @property
    def scaler(self) -> Any:
        """Lightning's gradient scaler, if there is one."""
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def loss_scale(self) -> float:
        """What Lightning's scaler multiplies losses by; 1 where there is none."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def predicted_gradient(self, *, adds_to_earlier: bool) -> float | None:
        """The gradient that Lightning will bring to the sum over all batches of a step.

        None where it may add to earlier gradients, where gradients come to tensors that are none of the module's, for
        Lightning zeroes those when it knows the loss, or where the user's own `backward` may bring any other, or ask for some
        parameters: to rescale what was computed from a wrong prediction would round otherwise.

        Args:
            adds_to_earlier: whether it is known that it adds to them, as they are.
        """
        zeroed, parameters = zeroed_parameters(self.tree, self.trainer), self.trainer.lightning_module.parameters()
        # In the first batches of a step there is nothing to add to.
        adds = not adds_to_earlier and any(p.grad is not None and p not in zeroed for p in parameters)
        is_unknown = adds or not self.tree.calls_backward(self.trainer) or self.trains_others()
        return None if is_unknown else self.loss_scale()

    def adds_to_earlier(self) -> bool:
        """Whether this batch's gradients are added to those of earlier ones as these are now, before its forward."""
        is_known = self.tree.calls_backward(self.trainer) and self.tree.is_known(type(self.trainer.precision_plugin))
        return is_known and not compat.is_zeroing(self.trainer) and not between_passes(self.tree, self.trainer)

    @property
    def _optimizers(self) -> Any:
        return self.trainer.optimizers


def _torch_clips() -> bool:
    """Whether the functions of torch that Lightning clips with are torch's own: the user's code may replace them."""
    used = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)
    return all(getattr(each, "__globals__", {}).get("__name__") == "torch.nn.utils.clip_grad" for each in used)


def _is_users(owner: Any) -> bool:
    return type(owner).__module__.partition(".")[0] not in LIGHTNING


def _parts_of(loader: Any) -> list[Any]:
    """What of a loader may be of the user's own: its data, samplers and functions, and itself."""
    return [loader, *(getattr(loader, "__dict__", None) or {}).values()]
