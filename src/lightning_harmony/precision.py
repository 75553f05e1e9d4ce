"""Which precision plugins can run while layers are swapped."""

from typing import Any

_UNSUPPORTED = ("TransformerEnginePrecision", "BitsandbytesPrecision", "DeepSpeedPrecision", "FSDPPrecision")


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
