"""The name "harmony" in the strategy registries of Lightning.

`pip install lightning` brings two trees, `lightning.pytorch` and `pytorch_lightning`, whose classes and registries have
nothing in common. Each tree gets a strategy of its own, built only when a Trainer asks for it.
"""

import sys
from functools import partial
from importlib import import_module
from typing import Any

NAME = "harmony"
TREES = ("lightning.pytorch", "pytorch_lightning")


def strategies_module(tree: str) -> str:
    """Name the module of a tree that holds its `StrategyRegistry`."""
    return f"{tree}.strategies"


def register(tree: str) -> None:
    """Make `Trainer(strategy="harmony")` work in one tree; does nothing where the name is taken already.

    Args:
        tree: "lightning.pytorch" or "pytorch_lightning". It is imported if it was not yet.
    """
    registry = import_module(strategies_module(tree)).StrategyRegistry
    if NAME not in registry:
        description = "Trains models larger than device memory by swapping layers"
        registry.register(NAME, partial(_build, tree), description=description)


def register_loaded_trees() -> None:
    """Register in every tree that is imported already, and import none."""
    for tree in TREES:
        module = sys.modules.get(strategies_module(tree))
        # A module that is still executing is listed before it has a registry.
        if hasattr(module, "StrategyRegistry"):
            register(tree)


def _build(tree: str, **kwargs: Any) -> Any:
    from lightning_harmony.setup.lightning_tree import classes_of

    return classes_of(tree).HarmonyStrategy(**kwargs)
