"""`HarmonyPrecision`: Lightning's precisions, and "bf16-compute"; and which other plugins can serve swapped layers."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from typing_extensions import override

from lightning_harmony.setup.argument_names import suggests_names
from lightning_harmony.setup.lightning_tree import classes_of

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as _Base
else:
    _Base = object

Precisions = Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "bf16-compute"]

# Each with the Lightning plugin that it is.
_PLUGINS = {
    "32-true": "Precision",
    "64-true": "DoublePrecision",
    "bf16-true": "HalfPrecision",
    "16-true": "HalfPrecision",
    "bf16-mixed": "MixedPrecision",
    "16-mixed": "MixedPrecision",
    "bf16-compute": "Precision",
}
_UNSUPPORTED = ("TransformerEnginePrecision", "BitsandbytesPrecision", "DeepSpeedPrecision", "FSDPPrecision")


class PrecisionMixin(_Base):
    """The precision in which a model trains while its layers are swapped, for `Trainer(plugins=...)`.

    All but "bf16-compute" do what Lightning's plugin of that name does, and `Trainer(precision=...)` is the usual way to ask
    for them. Each instance is one of that plugin, too.

    "bf16-compute" is `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` of FSDP2: on the device,
    floating parameters and the floating inputs of layers are bfloat16, while the host keeps float32 parameters, sums gradients
    in float32, and keeps optimizer state in it. Buffers, the batch, and what glue computes from them stay in their own types.

    Args:
        precision: "32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true" or "bf16-compute".

    Attributes:
        compute_dtype: the type in which layers compute, where the parameters are kept in another one.
    """

    tree: str
    compute_dtype: torch.dtype | None = None

    @suggests_names("HarmonyPrecision")
    def __new__(cls, precision: Precisions) -> Any:
        """Make an instance that is also one of Lightning's plugin for this precision."""
        return object.__new__(_kind(cls.tree, precision))

    def __init__(self, precision: Precisions) -> None:
        plugin, set_up = _PLUGINS[precision], cast(Any, super().__init__)
        if plugin == "HalfPrecision":
            set_up(precision)
        elif plugin == "MixedPrecision":
            # Gradients are on the host. The device of autocast is the strategy's, which isn't known yet.
            set_up(precision, "cpu", torch.amp.GradScaler("cpu") if precision == "16-mixed" else None)
        elif precision == "bf16-compute":
            self.precision: Any = precision
            self.compute_dtype = torch.bfloat16

    def __reduce__(self) -> tuple[Any, ...]:
        """By tree and precision: pickle would look for the class, which is made as it is asked for."""
        return _without_init, (self.tree, self.precision), self.__dict__

    @override
    def convert_module(self, module: Any) -> Any:
        """Refuse what "bf16-compute" could not train as it says; else what Lightning's plugin does.

        Raises:
            ValueError: naming the cause and the way out.
        """
        if hasattr(self, "device"):
            self.device = module.trainer.strategy.root_device.type
        if self.compute_dtype is not None:
            self._refuse_other_strategies(module.trainer.strategy)
            self._refuse_narrow_masters(module)
        return super().convert_module(module)

    def _refuse_other_strategies(self, strategy: Any) -> None:
        if getattr(strategy, "strategy_name", None) != "harmony":
            raise ValueError(
                f"HarmonyPrecision({self.precision!r}) needs Trainer(strategy='harmony'), which casts parameters as it swaps "
                f"them in: {type(strategy).__name__} would train in float32; choose another precision for it"
            )

    def _refuse_narrow_masters(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point() and parameter.element_size() < 4:
                raise ValueError(
                    f"HarmonyPrecision({self.precision!r}) updates parameters in float32, but {name!r} is {parameter.dtype}: "
                    "load the model in float32 (module.float()), or train with Trainer(precision='bf16-true')"
                )


@cache
def _kind(tree: str, precision: str) -> Any:
    """The class of instances for a precision: it is also Lightning's plugin for that."""
    if precision not in _PLUGINS:
        allowed = ", ".join(map(repr, _PLUGINS))
        raise ValueError(f"HarmonyPrecision({precision!r}): one of {allowed} is needed")
    base = getattr(import_module(f"{tree}.plugins.precision"), _PLUGINS[precision])
    # Lightning saves the state of a plugin, its scaler, under this name: other strategies are to find it there.
    names = {"__qualname__": base.__qualname__, "__module__": __name__}
    return type("HarmonyPrecision", (classes_of(tree).HarmonyPrecision, base), names)


def _without_init(tree: str, precision: str) -> Any:
    return object.__new__(_kind(tree, precision))


def keep_scale_on_host(scaler: Any) -> None:
    """Keep the scale of a gradient scaler where the gradients are.

    From a device, `unscale_` would bring it to them by a copy that it doesn't wait for.
    """
    if scaler is None or not scaler.is_enabled():
        return
    host = torch.device("cpu")
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(host)
    elif scaler._scale.device != host:
        scaler._scale, scaler._growth_tracker = scaler._scale.to(host), scaler._growth_tracker.to(host)


def refuse_unsupported(plugin: Any) -> None:
    """Refuse plugins that replace modules or shard parameters on their own.

    Raises:
        ValueError: naming the plugin and the way out.
    """
    for base in type(plugin).__mro__:
        if base.__name__ in _UNSUPPORTED:
            raise ValueError(
                f"{type(plugin).__name__} does not work with Trainer(strategy='harmony'): it manages parameters itself; "
                "choose Trainer(precision='32-true'), 'bf16-mixed', '16-mixed', 'bf16-true' or '64-true'"
            )
