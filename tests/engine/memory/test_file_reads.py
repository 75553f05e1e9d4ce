"""Weights come from files to a device, in pieces, and a file that cannot be read ends the fit with the cause."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from lightning_harmony.engine.devices.stream import Event, Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.memory import file_reads
from lightning_harmony.engine.memory.file_reads import FileReads
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.plan.values.task import Errand

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is tried is Linux's")
SIZE = 50_000


class Apart(VirtualDevice):
    """A device that copies from page-locked memory alone."""

    computes_apart = True


def copied(reads: FileReads, device: VirtualDevice, path: Path, dtype: torch.dtype) -> tuple[torch.Tensor, Event]:
    source = torch.load(path, mmap=True)
    there = device.empty(SIZE * dtype.itemsize).view(dtype)
    event = reads.start(
        lambda: device.start_copy(Errand.SWAP_IN, "weights", there.nbytes, lambda: reads.copy(there, source))
    )
    return there, event


@pytest.mark.parametrize("kind", [VirtualDevice, Apart])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as they are", "narrow"])
def test_they_come_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[VirtualDevice], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(file_reads, "_PIECE_BYTES", 1024)
    content = torch.randn(SIZE)
    torch.save(content, tmp_path / "weights.pt")
    device = kind(None)
    reads = FileReads(device, DiskHome())
    for _ in range(2):
        there, event = copied(reads, device, tmp_path / "weights.pt", dtype)
        event.synchronize()
        assert event.done()
        assert torch.equal(there, content.to(dtype))
    reads.close()
    device.close()


@pytest.mark.parametrize("kind", [VirtualDevice, Apart])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as they are", "narrow"])
def test_those_that_live_on_disk_come_past_their_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[VirtualDevice], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(file_reads, "_PIECE_BYTES", 10_000)
    content = torch.randn(SIZE)
    parameter = torch.nn.Parameter(content.clone())
    device, disk = kind(None), DiskHome(tmp_path)
    disk.take_weights([parameter])
    reads = FileReads(device, disk)
    for _ in range(2):
        # Beginnings of pieces are no beginnings of blocks.
        there = device.empty(SIZE * dtype.itemsize).view(dtype)
        event = reads.start(
            lambda there=there: device.start_copy(  # type: ignore[misc]
                Errand.SWAP_IN, "weights", there.nbytes, lambda: reads.copy(there, parameter)
            )
        )
        event.synchronize()
        assert torch.equal(there, content.to(dtype))
    assert disk.take_moved_bytes() == (2 * content.nbytes, 0)
    reads.close()
    disk.close()
    device.close()
    assert torch.equal(parameter, content)


def test_what_waits_for_copies_waits_for_those_that_are_still_to_be_launched(tmp_path: Path) -> None:
    """Code between steps may write to the weights then."""
    device, may_begin, has_begun = Apart(None), threading.Event(), threading.Event()
    reads = FileReads(device, DiskHome())

    def launch() -> Event:
        may_begin.wait()
        has_begun.set()
        return Happened()

    reads.finish()
    reads.start(launch)
    waiting = threading.Thread(target=reads.finish)
    waiting.start()
    assert waiting.is_alive()
    may_begin.set()
    waiting.join()
    assert has_begun.is_set()
    reads.close()
    device.close()


@pytest.mark.parametrize("kind", [VirtualDevice, Apart])
def test_a_file_that_was_cut_off_is_an_error_with_its_cause(tmp_path: Path, kind: type[VirtualDevice]) -> None:
    """To look at what is gone would end the process without a word."""
    path = tmp_path / "weights.pt"
    torch.save(torch.randn(SIZE), path)
    device = kind(None)
    reads = FileReads(device, DiskHome())
    copied(reads, device, path, torch.float32)[1].synchronize()
    source = torch.load(path, mmap=True)
    os.truncate(path, 4096)
    there = device.empty(SIZE * 4).view(torch.float32)
    launched = reads.start(
        lambda: device.start_copy(Errand.SWAP_IN, "weights", there.nbytes, lambda: reads.copy(there, source))
    )
    with pytest.raises(
        OSError, match=r"could not be read from the file that they lie in .*: it was cut off or replaced"
    ):
        launched.synchronize()
    reads.close()
    device.close()
