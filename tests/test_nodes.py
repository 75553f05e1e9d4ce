"""Several nodes, of one process each, train as plain Lightning does with DDP: to the same bits."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

from lightning_harmony import HarmonyStrategy
from lightning_harmony.setup.refusals import refuse_batch_norm_over_nodes
from support.forks import Ended, Fork, Forks, forking
from support.on_nodes import CASES, NODES
from support.same_training import root
from support.sampling import IS_WHOLE

Start = Callable[..., list[Fork]]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Forks of an interpreter that has imported what nodes need. No import starts a GPU, which a fork could not do again."""
    with forking("from support import on_nodes", {"PYTHONPATH": os.pathsep.join(sys.path)}) as some:
        yield some


@pytest.fixture
def start(forks: Forks, tmp_path: Path) -> Iterator[Start]:
    """Starts processes, none of which outlives its test."""
    with ExitStack() as started:

        def start_some(*names: str, nodes: int = NODES) -> list[Fork]:
            processes = processes_of(forks, tmp_path, names, nodes)
            for process in processes:
                started.callback(process.kill)
            return processes

        yield start_some


def processes_of(forks: Forks, folder: Path, names: Sequence[str], nodes: int) -> list[Fork]:
    """The processes that `torchrun --nnodes=2 --nproc-per-node=1` starts on two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(nodes),
        "TORCHELASTIC_RUN_ID": "run",
    }
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    # On one machine each has a GPU of its own, if it has GPUs.
    number = torch.cuda.device_count() if root().type == "cuda" else 0
    if 0 < number < nodes:
        pytest.skip(f"needs {nodes} GPUs")
    gpus = [str(rank) if number else "" for rank in range(nodes)]
    code = f"from pathlib import Path; from support import on_nodes; on_nodes.main(Path({str(folder)!r}), {names!r})"
    return [
        forks.start(
            code,
            {**common, **own, "RANK": str(rank), "GROUP_RANK": str(rank), "CUDA_VISIBLE_DEVICES": gpus[rank]},
        )
        for rank in range(nodes)
    ]


def assert_without_errors(ended: Sequence[Ended]) -> None:
    assert [each.exit_code for each in ended] == [0] * len(ended), "\n".join(each.said for each in ended)[-5000:]


# Cases that find what others nearly always find, too: they run in whole matrices.
LIKE_OTHERS = {"seen", "first in memory", "narrow"}


def test_nodes_train_as_with_ddp(start: Start, tmp_path: Path) -> None:
    """All cases in a start of two processes, in which they have plain trainings in common."""
    cases = [name for name in CASES if IS_WHOLE or name not in LIKE_OTHERS]
    processes = start(*cases)
    ended = [process.end() for process in processes]
    assert_without_errors(ended)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(NODES)]
    for name, (rank, of_node) in product(cases, enumerate(found)):
        plain = of_node[name]["ddp"]
        for way, trained in of_node[name].items():
            if way == "ddp":
                continue
            case = f"{name}, {way}, node {rank}"
            is_swapped = trained.pop("is swapped")
            assert trained.pop("update") == _update(name, is_swapped=is_swapped), case
            assert trained.pop("sent") > 0, case
            assert is_swapped is (way != "fits" and CASES[name].memory[rank] is not None), case
            # The mean over an epoch is one of means over microbatches.
            torch.testing.assert_close(trained.pop("logged"), plain["logged"], msg=f"{case}: {{}}".format)
            # Of optimizer state, each node has a part.
            found_here, expected = ({key: of[key] for key in trained if key != "own"} for of in (trained, plain))
            torch.testing.assert_close(found_here, expected, rtol=0, atol=0, msg=f"{case}: {{}}".format)
        first, second = (each[name]["swapped"] for each in found)
        assert first["losses"] != second["losses"], name
        is_divided = None not in CASES[name].memory and name not in ("by_hand", "watched")
        for own, others, every in zip(first["own"], second["own"], first["optimizers"], strict=True):
            assert set(own) | set(others) == set(every), name
            assert (sorted(own + others) == sorted(every)) is is_divided or not every, name
        torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), pytest.param(2, 1, marks=pytest.mark.nightly), pytest.param(2, 3, marks=pytest.mark.nightly)],
)
def test_a_fit_goes_on_on_another_number_of_nodes(before: int, after: int, start: Start, tmp_path: Path) -> None:
    for what, nodes in (("save", before), ("resume", after)):
        processes = start(what, nodes=nodes)
        ended = [process.end() for process in processes]
        assert_without_errors(ended)

    def state(name: str) -> Any:
        found = torch.load(tmp_path / f"{name}.ckpt", weights_only=False, map_location="cpu")
        return {key: found[key] for key in ("state_dict", "optimizer_states", "epoch", "global_step")}

    saved = state("full")
    for kind in ("full", "sharded"):
        torch.testing.assert_close(state(f"{kind}, {after}, 1"), saved, rtol=0, atol=0)
    later, in_shards = (state(f"{kind}, {after}, 2") for kind in ("full", "sharded"))
    torch.testing.assert_close(in_shards, later, rtol=0, atol=0)
    assert later["global_step"] == 2 * saved["global_step"]
    # Weights and optimizer state, which are four times as many bytes with the numbers of steps, are divided.
    sizes = [(tmp_path / "sharded.ckpt" / f"__{node}_0.distcp").stat().st_size for node in range(before)]
    assert len(list((tmp_path / "sharded.ckpt").iterdir())) == before + 2
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.nightly
def test_where_a_node_cannot_write_all_end_and_the_checkpoint_before_stays(start: Start, tmp_path: Path) -> None:
    processes = start("fail to save")
    ended = [process.end() for process in processes]
    assert all("OSError: [Errno 28] No space left on device" in each.said for each in ended)
    assert all(each.exit_code == 1 for each in ended)
    assert [each.name for each in tmp_path.glob("last*")] == ["last.ckpt"]
    names = sorted(each.name for each in (tmp_path / "last.ckpt").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]


def _update(name: str, *, is_swapped: bool) -> str:
    """When a case's weights are updated."""
    if not is_swapped:
        return "in-memory"
    return (
        "deferred"
        if name in ("clipped", "seen", "seen by one", "watched", "accumulated", "by_hand")
        else "just-in-time"
    )


@pytest.mark.nightly
def test_sums_of_three_nodes_do_not_depend_on_their_plans(start: Start, tmp_path: Path) -> None:
    processes = start("of three", nodes=3)
    ended = [process.end() for process in processes]
    assert_without_errors(ended)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True)["of three"] for rank in range(3)]
    weights = [of_way["weights"] for of_node in found for way, of_way in of_node.items() if way != "ddp"]
    assert [of_node["swapped"]["is swapped"] for of_node in found] == [True, True, False]
    for each in weights[1:]:
        torch.testing.assert_close(each, weights[0], rtol=0, atol=0)
    # Those of plain Lightning are rounded otherwise.
    torch.testing.assert_close(weights[0], found[0]["ddp"]["weights"])


@pytest.mark.nightly
def test_buffers_do_not_wait_for_weights_that_are_under_way(start: Start, tmp_path: Path) -> None:
    processes = start("under way")
    ended = [process.end() for process in processes]
    assert_without_errors(ended)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True)["under way"] for rank in range(NODES)]
    for of_node in found:
        assert of_node["swapped"]["update"] == "just-in-time"
        torch.testing.assert_close(of_node["swapped"]["weights"], of_node["ddp"]["weights"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("case", "failing", "cause"),
    [
        ("Failing", 1, "the second node fails"),
        ("FailingInBackward", 1, "a node fails in its backward"),
        ("FirstFailingInBackward", 0, "a node fails in its backward"),
        ("DyingInBackward", 1, ""),
    ],
)
def test_a_node_that_fails_ends_the_others(case: str, failing: int, cause: str, start: Start) -> None:
    processes = start(case)
    ended = [process.end(60) for process in processes]
    assert cause in ended[failing].said
    # NCCL ends a process itself.
    is_of_nccl = case == "DyingInBackward" and root().type == "cuda"
    assert is_of_nccl or "where one has failed, its own output says why" in ended[1 - failing].said
    assert all(each.exit_code != 0 for each in ended)


def test_where_a_node_fails_in_its_update_no_node_makes_a_checkpoint(start: Start) -> None:
    processes = start("FailingInUpdate")
    ended = [process.end(60) for process in processes]
    assert "a node fails in its update" in ended[1].said
    assert "where one has failed, its own output says why" in ended[0].said
    assert not any("a checkpoint would be made" in each.said for each in ended)


@pytest.mark.nightly
def test_a_node_that_handles_its_error_ends_the_others(start: Start) -> None:
    first, second = start("GoingOn")
    exit_code, said = first.end(60)
    assert "the backward of one of them has failed" in said
    assert exit_code != 0
    assert not second.has_ended()


@pytest.mark.nightly
def test_one_of_three_nodes_that_dies_ends_both_others(start: Start) -> None:
    processes = start("DyingInBackward", nodes=3)
    ended = [process.end(60) for process in processes]
    assert all("where one has failed, its own output says why" in ended[node].said for node in (0, 2))


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


def test_how_long_to_wait_for_others_is_a_time() -> None:
    with pytest.raises(ValueError, match=r"timeout=30\): a datetime.timedelta is needed"):
        HarmonyStrategy(timeout=30)  # type: ignore[arg-type]


def test_processes_that_a_trainer_does_not_know_of_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them used to train by itself, and to write the same checkpoints."""
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"2 processes were started for Trainer\(num_nodes=1\)"):
        pl.Trainer(strategy="harmony", accelerator="cpu", devices=1, logger=False)


def test_batch_norm_over_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="sync_batchnorm=False"):
        refuse_batch_norm_over_nodes(TorchSyncBatchNorm())
