"""Several nodes, of one process each, train as plain Lightning does with DDP: to the same bits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

from lightning_harmony.setup.refusals import refuse_batch_norm_over_nodes
from support import on_nodes
from support.on_nodes import CASES, NODES
from support.same_training import root

SECONDS = 300


def start(folder: Path, *names: str) -> list[subprocess.Popen[str]]:
    """The processes that `torchrun --nnodes=2 --nproc-per-node=1` starts on two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(NODES),
        "TORCHELASTIC_RUN_ID": "run",
    }
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    path = os.pathsep.join(sys.path)
    # On one machine each has a GPU of its own, if it has GPUs.
    number = torch.cuda.device_count() if root().type == "cuda" else 0
    gpus = [str(rank % number) if number else "" for rank in range(NODES)]
    return [
        subprocess.Popen(
            [sys.executable, on_nodes.__file__, str(folder), *names],
            env={
                **os.environ,
                **common,
                **own,
                "RANK": str(rank),
                "GROUP_RANK": str(rank),
                "PYTHONPATH": path,
                "CUDA_VISIBLE_DEVICES": gpus[rank],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NODES)
    ]


def test_nodes_train_as_with_ddp(tmp_path: Path) -> None:
    processes = start(tmp_path, *CASES)
    printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * NODES, "\n".join(printed)[-5000:]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(NODES)]
    for name, (rank, of_node) in product(CASES, enumerate(found)):
        plain = of_node[name].pop("ddp")
        for way, trained in of_node[name].items():
            case = f"{name}, {way}, node {rank}"
            assert trained.pop("is swapped") is (way != "fits" and CASES[name].memory[rank] is not None), case
            # The mean over an epoch is one of means over microbatches.
            torch.testing.assert_close(trained.pop("logged"), plain["logged"], msg=f"{case}: {{}}".format)
            expected = {key: plain[key] for key in trained}
            torch.testing.assert_close(trained, expected, rtol=0, atol=0, msg=f"{case}: {{}}".format)
        first, second = (each[name]["swapped"] for each in found)
        assert first["losses"] != second["losses"], name
        torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0, msg=f"{name}: {{}}".format)


def test_a_node_that_fails_ends_the_others(tmp_path: Path) -> None:
    first, second = start(tmp_path, "failing")
    assert "the second node fails" in second.communicate(timeout=SECONDS)[0]
    assert "where one has failed, its own output says why" in first.communicate(timeout=SECONDS)[0]
    assert first.returncode != 0


@pytest.mark.parametrize(
    ("environment", "variables"),
    [
        (
            TorchElasticEnvironment,
            {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        ),
        (
            SLURMEnvironment,
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "job", "SLURM_NTASKS_PER_NODE": "2"},
        ),
    ],
)
def test_other_processes_than_one_on_each_node_are_refused(
    environment: Any, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"4 processes were started for Trainer\(num_nodes=2\).*--ntasks-per-node=1"):
        pl.Trainer(strategy="harmony", accelerator="cpu", devices=1, num_nodes=2, plugins=[environment()], logger=False)


def test_a_process_that_nothing_tells_of_others_does_not_wait_for_them() -> None:
    with pytest.raises(ValueError, match=r"where the others are.*--nproc-per-node=1.*NODE_RANK"):
        pl.Trainer(strategy="harmony", accelerator="cpu", devices=1, num_nodes=2, logger=False)


def test_processes_that_a_trainer_does_not_know_of_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them used to train by itself, and to write the same checkpoints."""
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"2 processes were started for Trainer\(num_nodes=1\)"):
        pl.Trainer(strategy="harmony", accelerator="cpu", devices=1, logger=False)


def test_batch_norm_over_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="sync_batchnorm=False"):
        refuse_batch_norm_over_nodes(TorchSyncBatchNorm())
