"""Tensors in a file: what is read past the page cache and what is mapped are the same, and places are used again."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_harmony import CapacityError
from lightning_harmony.engine.model.disk_store import BLOCK, DiskStore

NUMBERS = 4 * BLOCK


@pytest.fixture(params=[True, False], ids=["past the page cache", "through it"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[DiskStore]:
    if not request.param:
        monkeypatch.setattr(DiskStore, "_open_direct", lambda store: store._file.fileno())
    store = DiskStore(tmp_path)
    if request.param and not store.is_direct:
        pytest.skip("the file system of temporary files has no direct I/O")
    yield store
    store.close()


def empty(store: DiskStore, *shape: int) -> Tensor:
    like = torch.empty(shape, device="meta")
    return store.empty(like.shape, like.stride(), like.dtype)


def buffer(num_bytes: int) -> Tensor:
    """Memory that begins with a page."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def test_a_new_tensor_is_zero_and_has_its_own_storage(store: DiskStore) -> None:
    one, other = empty(store, 3, 2000), empty(store, 2000)
    assert not one.any()
    assert not other.any()
    assert one.untyped_storage().nbytes() == one.nbytes
    assert store.used_bytes == 6 * BLOCK + 2 * BLOCK
    assert store.place_of(one) != store.place_of(other)
    assert store.place_of(one.view(-1)[1024:2048]) == store.place_of(one) + BLOCK
    # What is not in one piece, or elsewhere.
    assert store.find(one[:, :3]) is None
    assert store.find(torch.empty(3)) is None


def test_copies_and_who_reads_the_tensor_see_the_same(store: DiskStore) -> None:
    tensor, memory = empty(store, NUMBERS), buffer(NUMBERS * 4)
    place, view = store.place_of(tensor), memory.numpy().data
    for number in range(20):
        tensor.fill_(number)
        store.read(view, place)
        assert (memory.view(torch.float32) == number).all()
        memory.view(torch.float32).fill_(-number)
        store.write(view, place)
        assert (tensor == -number).all()


@pytest.mark.parametrize(("begin", "end"), [(0, 12), (12, 20), (100, 9000), (BLOCK, 2 * BLOCK), (4, NUMBERS * 4)])
def test_a_part_is_written_and_nothing_around_it(store: DiskStore, begin: int, end: int) -> None:
    tensor, memory = empty(store, NUMBERS), buffer(NUMBERS * 4)
    expected = torch.arange(float(NUMBERS))
    tensor.copy_(expected)
    expected[begin // 4 : end // 4] = memory[begin:end].view(torch.float32).fill_(7)
    store.write(memory.numpy().data[begin:end], store.place_of(tensor) + begin)
    assert torch.equal(tensor, expected)
    store.read(memory.numpy().data, store.place_of(tensor))
    assert torch.equal(memory.view(torch.float32), expected)


def test_a_place_is_used_again_when_nobody_has_its_tensor(store: DiskStore) -> None:
    store.reserve(8 * BLOCK)
    kept, gone = empty(store, 4 * 1024), empty(store, 4 * 1024)
    kept.fill_(1)
    places, size = (store.place_of(kept), store.place_of(gone)), os.fstat(store._file.fileno()).st_size
    part = gone[:10]
    del gone
    gc.collect()
    other = empty(store, 1024)
    assert store.place_of(other) != places[1]
    del part
    gc.collect()
    again = empty(store, 4 * 1024)
    assert store.place_of(again) == places[1]
    again.fill_(2)
    assert (kept == 1).all()
    assert store.used_bytes == 9 * BLOCK
    # Beyond what was reserved, there is more.
    assert os.fstat(store._file.fileno()).st_size <= size + BLOCK


def test_tensors_outlast_the_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    tensor = empty(store, NUMBERS).fill_(3)
    store.close()
    assert (tensor == 3).all()
    assert list(tmp_path.iterdir()) == []


def test_space_that_is_not_there_is_refused_with_the_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(file: int, start: int, num_bytes: int) -> None:
        os.ftruncate(file, start + num_bytes)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = DiskStore(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        CapacityError, match=r"offload_dir='.*'\): 1 MiB of .* do not fit .*No space left .* are free\)"
    ):
        store.reserve(1 << 20)
    # What was found of it is free again.
    assert os.fstat(store._file.fileno()).st_size == BLOCK
    store.close()
    with pytest.raises(CapacityError, match="do not fit there"):
        DiskStore(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CapacityError, match=r"offload_dir='.*nowhere'\): no file can be made there"):
        DiskStore(tmp_path / "nowhere")


def test_a_file_system_that_refuses_direct_copies_gets_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        store = DiskStore(tmp_path)
    assert not store.is_direct
    tensor, memory = empty(store, 1024).fill_(5), buffer(BLOCK)
    store.read(memory.numpy().data, store.place_of(tensor))
    assert (memory.view(torch.float32) == 5).all()
    store.close()
