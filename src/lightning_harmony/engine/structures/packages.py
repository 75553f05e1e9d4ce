"""Packages of Python by which code is told from the user's own."""

from __future__ import annotations

# Lightning's, and this one.
LIGHTNING = frozenset(("lightning", "pytorch_lightning", "lightning_fabric", "lightning_harmony"))
# In whose objects, functions and classes no step of the user's keeps anything.
LIBRARIES = LIGHTNING | {"torch", "torchmetrics", "builtins", "numpy"}
