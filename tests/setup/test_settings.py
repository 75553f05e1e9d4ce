"""Arguments of the strategy that are wrong, alone or beside another, are refused with what would be right."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_harmony import HarmonyStrategy

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both numbers": ({"num_microbatches": 2, "microbatch_size": 2}, "at most one of the two"),
    "no number": ({"num_microbatches": True}, "num_microbatches=True): a whole number"),
    "no size": ({"microbatch_size": 0}, "microbatch_size=0): a whole number"),
    "another update": ({"update": "never"}, "one of 'auto', 'just-in-time', 'deferred'"),
    "another reduction": ({"loss_reduction": "max"}, "one of 'mean', 'sum', None"),
    "no switch": ({"check_loss": "yes"}, "check_loss='yes'): True or False"),
    "no switch of graphs": ({"cuda_graphs": 1}, "cuda_graphs=1): True or False"),
    "no function": ({"split_batch": 3}, "split_batch=3): a function is needed"),
    "no options": ({"compile_layers": 3}, "the arguments of torch.compile"),
    "no amount": ({"device_memory": 1.5}, "1.5 is not an amount of memory"),
    "no folder of profiles": ({"profile_cache": ""}, "a folder to keep profiles in"),
    "a file of profiles": ({"profile_cache": __file__}, "this is not a folder"),
    "no folder for state": ({"offload_dir": "/nowhere"}, "offload_dir='/nowhere'): a folder is needed"),
    "state on disk and on the host": ({"offload_dir": ".", "update_on": "host"}, "leave one of the two out"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_named_beside_what_would_be_right(what: str) -> None:
    arguments, said = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(said)):
        HarmonyStrategy(**arguments)


def test_state_lives_on_disk_on_linux_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"offload_dir=\.\.\.\) needs Linux"):
        HarmonyStrategy(offload_dir=tmp_path)
