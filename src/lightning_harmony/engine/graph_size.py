"""The size of graphs: code that makes one of another size does something else than what was looked at."""

from __future__ import annotations

import torch


def num_nodes_made() -> int:
    """How many nodes autograd has made in this thread."""
    return torch._C._autograd._get_sequence_nr()
