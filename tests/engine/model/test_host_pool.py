"""Buffers of the host are used again, and given back."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.model.disk_store import DiskBuffers, folder_of
from lightning_harmony.engine.model.host_pool import KEPT_STEPS, HostPool
from lightning_harmony.errors import CapacityError


class TestHostPool:
    def test_makes_a_buffer_only_when_none_of_its_size_is_free(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        first, _ = pool.take(100)
        second, _ = pool.take(100)
        assert first.data_ptr() != second.data_ptr()
        pool.give(first, None)
        assert pool.take(100)[0] is first
        assert pool.num_bytes == 200

    def test_sizes_are_exact(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        large, _ = pool.take(100)
        pool.give(large, None)
        small, _ = pool.take(99)
        assert small.numel() == 99
        assert pool.num_bytes == 199

    def test_takes_no_more_than_its_limit(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        pool.limit = 300
        kept, _ = pool.take(200)
        assert pool.has_room(100)
        assert not pool.has_room(101)
        with pytest.raises(CapacityError, match=r"host is at least .* short: gradients and the stash may take 300 "):
            pool.take(101)
        pool.provide(60, 4)
        assert pool.num_bytes == kept.numel() + 60

    def test_what_has_no_room_goes_elsewhere_if_it_may_and_comes_to_no_other(self, tmp_path: Path) -> None:
        disk = DiskBuffers(tmp_path)
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), disk)
        pool.limit = 300
        kept, _ = pool.take(200, may_overflow=True)
        with pytest.raises(CapacityError, match="short"):
            pool.take(101)
        elsewhere, _ = pool.take(101, may_overflow=True)
        assert folder_of(elsewhere) == tmp_path
        assert folder_of(kept) is None
        assert pool.num_bytes == 200
        pool.give(elsewhere, None)
        pool.give(kept, None)
        del kept
        assert folder_of(pool.take(101)[0]) is None
        disk.close()

    def test_what_nobody_uses_is_not_counted_as_short(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        pool.limit = 300
        kept, _ = pool.take(200)
        pool.provide(50)
        assert pool.num_bytes == kept.numel() + 50
        assert "host is at least 50 " in str(pool.shortage(150))

    def test_buffers_of_other_sizes_go_where_room_is_short(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        pool.limit = 300
        pool.provide(50, 6)
        assert pool.has_room(300)
        large, _ = pool.take(290)
        assert pool.num_bytes == large.numel()

    def test_buffers_of_a_pool_end_with_the_pool(self) -> None:
        """What counted them kept it, and all free buffers with it, until the process ended."""
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        taken, _ = pool.take(100)
        pool.provide(100)
        ended: list[str] = []
        weakref.finalize(pool._free[100][0].buffer.untyped_storage(), ended.append, "free")
        del pool
        gc.collect()
        assert ended == ["free"]
        assert taken.numel() == 100

    def test_a_buffer_comes_with_the_event_of_its_last_use(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        buffer, free = pool.take(10)
        assert free == []
        last_use = Happened()
        pool.give(buffer, last_use)
        assert pool.take(10)[1] == [last_use]
        pool.give(buffer, None)
        assert pool.take(10)[1] == []

    def test_provides_one_where_none_is_free(self) -> None:
        made: list[int] = []

        def allocate(num_bytes: int) -> torch.Tensor:
            made.append(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8)

        pool = HostPool(allocate)
        pool.provide(100)
        pool.provide(100)
        taken, _ = pool.take(100)
        assert made == [100]
        assert pool.num_bytes == taken.numel()

    def test_tells_what_it_had_not_and_provides_several(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        pool.provide(100, 2)
        taken = [pool.take(num_bytes)[0] for num_bytes in (100, 100, 100, 50)]
        assert pool.take_missed() == {100: 1, 50: 1}
        assert pool.take_missed() == {}
        assert pool.num_bytes == sum(buffer.numel() for buffer in taken)

    def test_counts_what_exists_and_the_most_that_did(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        kept, _ = pool.take(100)
        part = pool.take(50)[0][10:20]
        assert pool.num_bytes == 150
        del part
        assert pool.num_bytes == 100
        assert pool.take_peak_bytes() == 150
        assert pool.take_peak_bytes() == 100
        del kept

    def test_lets_go_of_what_several_steps_did_not_take(self) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        pool.give(pool.take(100)[0], None)
        pool.give(pool.take(50)[0], None)
        for _ in range(2 * KEPT_STEPS):
            pool.give(pool.take(50)[0], None)
            pool.trim()
        assert pool.num_bytes == 50

    def test_keeps_what_a_copy_still_reads(self) -> None:
        class Copying(Happened):
            is_done = False

            def done(self) -> bool:
                return self.is_done

        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        copying = Copying()
        pool.give(pool.take(100)[0], copying)
        for _ in range(2 * KEPT_STEPS):
            pool.trim()
        assert pool.num_bytes == 100
        copying.is_done = True
        pool.trim()
        assert pool.num_bytes == 0

    def test_a_peak_every_sixth_step_makes_its_buffers_a_few_times_and_not_each_time(self) -> None:
        """An evaluation took them, five training steps did not: 0.8 GB were page-locked and given back each time."""
        made = 0

        def allocate(num_bytes: int) -> Tensor:
            nonlocal made
            made += num_bytes == 100
            return torch.empty(num_bytes, dtype=torch.uint8)

        pool = HostPool(allocate)
        for _ in range(10):
            pool.give(pool.take(100)[0], None)
            for _ in range(6):
                pool.give(pool.take(50)[0], None)
                pool.trim()
        assert made == 2

    @pytest.mark.parametrize("trained", [1, 3])
    def test_of_those_that_steps_take_the_same_ones_stay(self, trained: int) -> None:
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        pool.provide(100, 5)
        for _ in range(2 * KEPT_STEPS):
            for buffer in [pool.take(100)[0] for _ in range(trained)]:
                pool.give(buffer, None)
            pool.trim()
        assert pool.num_bytes == 100 * trained

    def test_a_buffer_that_an_update_gives_back_while_others_are_let_go_is_kept(self) -> None:
        """The list of free buffers was replaced by one that had been made before the update's thread gave its own."""
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        given = pool.take(100)[0]
        update: list[threading.Thread] = []

        class Free(list[Any]):
            """Those of a size: when all have been looked at, the update gives another one."""

            def __iter__(self) -> Iterator[Any]:
                yield from super().__iter__()
                if not update and self[0].age > KEPT_STEPS:
                    update.append(threading.Thread(target=pool.give, args=(given, None)))
                    update[0].start()
                    update[0].join(0.2)

        pool.give(pool.take(100)[0], None)
        pool._free[100] = Free(pool._free[100])
        for _ in range(KEPT_STEPS + 1):
            pool.trim()
        update[0].join()
        assert pool.take(100)[0] is given

    def test_buffers_are_let_go_without_holding_up_who_gives_some_back(self) -> None:
        """What ends a buffer unregisters its memory, which takes long."""
        pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        held_up: list[bool] = []
        buffer = pool.take(100)[0]
        weakref.finalize(buffer.untyped_storage(), lambda: held_up.append(pool._lock.locked()))
        pool.give(buffer, None)
        del buffer
        for _ in range(KEPT_STEPS + 1):
            pool.trim()
        assert held_up == [False]
