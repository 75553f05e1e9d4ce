"""Private names of Lightning and of its torchmetrics: every one that harmony uses is in this module, and in no other.

A minor version of Lightning may rename them without notice. So harmony supports the minor versions that it was tested with,
and says so where another one is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from packaging.version import Version
from torch import nn

# What `pyproject.toml` says, too.
OLDEST, BELOW = "2.6.4", "2.7"

# Methods of precision plugins that see gradients, or the optimizer's step.
PLUGIN_HOOKS = ("_wrap_closure", "_after_closure", "_clip_gradients")


def untested_version(tree: str) -> str | None:
    """What is wrong with the version of Lightning that is installed; None if harmony was tested with it.

    Args:
        tree: "lightning.pytorch" or "pytorch_lightning".
    """
    version = import_module(tree).__version__
    # Of 2.7.0rc1, this is 2.7.0.
    released = Version(Version(version).base_version)
    if Version(OLDEST) <= released < Version(BELOW):
        return None
    return (
        f"harmony was not tested with {tree} {version}, so that results may differ from plain Lightning or steps may fail: "
        f"pip install 'lightning>={OLDEST},<{BELOW}'"
    )


# ---- what runs now -----------------------------------------------------------------------------------------------------


def is_backward_skipped(trainer: Any) -> bool:
    """Whether a fit runs no backward: in the last epoch of stochastic weight averaging, which gathers statistics."""
    return bool(trainer.fit_loop._skip_backward)


def is_accumulating(trainer: Any) -> bool:
    """Whether the running batch ends without a step of the optimizer."""
    return bool(trainer.fit_loop._should_accumulate())


def is_zeroing(trainer: Any) -> bool:
    """Whether the running batch is the first that its step accumulates, before whose backward gradients are zeroed."""
    return bool(trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0)


def active_loop(trainer: Any) -> Any:
    """The loop that runs; None between loops."""
    return trainer._active_loop


def data_loaders(loop: Any) -> list[Any]:
    """The data loaders from which a loop fetches batches."""
    return getattr(getattr(loop, "_combined_loader", None), "flattened", None) or []


def is_last_batch(trainer: Any) -> bool:
    """Whether the epoch of a fit ends with the running batch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def validates_by_time(trainer: Any) -> bool:
    """Whether a clock says when validation runs."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def validates_next(trainer: Any) -> bool:
    """Whether validation follows the running batch."""
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def trainer_of(module: Any) -> Any:
    """The Trainer that a LightningModule is attached to; None if there is none."""
    return getattr(module, "_trainer", None)


def is_compiled_by_lightning(module: nn.Module) -> bool:
    """Whether `torch.compile` was applied to a LightningModule."""
    return getattr(module, "_compiler_ctx", None) is not None


# ---- processes ---------------------------------------------------------------------------------------------------------


def set_rank(environment: Any, rank: int) -> None:
    """Tell Lightning's functions for the process of rank zero which one this is.

    Args:
        environment: Lightning's, of the cluster.
        rank: of this process.
    """
    _fabric(environment, "rank_zero").rank_zero_only.rank = rank


def meet_other_processes(environment: Any, backend: str, *, timeout: timedelta) -> None:
    """Make the group of all processes of a cluster's environment, if it is not made.

    Args:
        environment: Lightning's.
        backend: of `torch.distributed`.
        timeout: how long to wait for others.
    """
    _fabric(environment, "distributed")._init_dist_connection(environment, backend, timeout=timeout)


def _fabric(environment: Any, part: str) -> Any:
    """A module of the Fabric that a Trainer's environment is of, or is derived from."""
    kinds = (kind.__module__ for kind in type(environment).__mro__)
    tree = next(name.partition(".")[0] for name in kinds if name.startswith(("lightning.fabric.", "lightning_fabric.")))
    return import_module(f"{'lightning.fabric' if tree == 'lightning' else tree}.utilities.{part}")


# ---- what is logged ----------------------------------------------------------------------------------------------------


def logged_results(trainer: Any) -> Any:
    """What `self.log` collects in; None in loops that do not log."""
    return trainer._results


def fill_if_empty(results: Any) -> bool:
    """Have Lightning look for metrics in a collection that has none: it does not ask an empty one; whether it was empty.

    Args:
        results: of `logged_results`. What it gets is taken for a metric that was reset.
    """
    if is_empty := not results:
        results["nothing"] = SimpleNamespace(has_reset=True, is_tensor=False, meta=SimpleNamespace(fx=None))
    return is_empty


def logs_this_step(trainer: Any) -> bool:
    """Whether loggers get values of the running batch."""
    return bool(trainer._logger_connector.should_update_logs)


def logged_step(trainer: Any) -> int:
    """The number under which loggers get what a batch logs."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def computed_value(metric: Any) -> object:
    """What a metric of torchmetrics has computed of its states, as long as they are not updated; else None."""
    value: object = metric._computed
    return value


def running_hook(module: Any) -> str | None:
    """The name of the hook of a LightningModule that runs, under which `self.log` keeps values."""
    name: str | None = module._current_fx_name
    return name


def set_running_hook(module: Any, name: str | None) -> None:
    """Have `self.log` take another hook for the one that runs."""
    module._current_fx_name = name


def step_value(metric: Any) -> Any:
    """The value of a metric for the running step; None of what is no metric."""
    return getattr(metric, "_forward_cache", None)


def set_step_value(metric: Any, value: Any) -> None:
    """Change the value of a metric for the running step."""
    metric._forward_cache = value


# ---- what a strategy gives ----------------------------------------------------------------------------------------------

# The attribute of a strategy with its optimizers as `LightningModule.optimizers` returns them.
WRAPPED_OPTIMIZERS = "_lightning_optimizers"
# Where code of Lightning's gives optimizers and schedulers to who asks for them.
MODULES_THAT_GIVE_OPTIMIZERS = frozenset(
    f"{tree}.{part}"
    for tree in ("lightning.pytorch", "pytorch_lightning")
    for part in ("core.module", "trainer.trainer")
)


def layer_sync(strategy: Any) -> Any:
    """What makes layers of several processes wait for each other, as Lightning has told a strategy; None if nothing does."""
    return strategy._layer_sync


# ---- what a strategy sets ----------------------------------------------------------------------------------------------


def set_as_inherited(cls: type, instance: Any, name: str, value: Any) -> None:
    """Set a property as the classes behind one do that overrides it.

    Args:
        cls: the one that overrides it.
        instance: of it, or of a subclass.
        name: of the property.
        value: what to set.
    """
    setter: Callable[[Any, Any], None] = getattr(super(cls, type(instance)), name).fset
    setter(instance, value)
