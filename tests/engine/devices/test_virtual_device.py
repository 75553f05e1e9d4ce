"""A virtual device: real storages, counted against a real capacity."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Event, Happened, HostStream
from lightning_harmony.engine.devices.virtual_device import DeviceOutOfMemoryError, VirtualDevice
from lightning_harmony.plan.values.task import Errand
from support.composed import Packed


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    device = VirtualDevice(None)
    yield device
    device.close()


@pytest.fixture
def small() -> Iterator[VirtualDevice]:
    device = VirtualDevice(1000)
    yield device
    device.close()


class Later:
    """An event that happens when the test says so, or when it is waited for."""

    def __init__(self) -> None:
        self.has_happened = False

    def done(self) -> bool:
        return self.has_happened

    def wait(self) -> None:
        self.has_happened = True

    synchronize = wait


class TestCounting:
    @pytest.mark.parametrize("make", ["empty", "sums"])
    def test_a_buffer_counts_until_it_is_gone(self, device: VirtualDevice, make: str) -> None:
        buffer = getattr(device, make)(300)
        assert (buffer.numel(), buffer.dtype) == (300, torch.uint8)
        assert device.allocated_bytes() == 300
        del buffer
        assert device.allocated_bytes() == 0

    def test_a_buffer_made_in_inference_mode_can_be_written_outside(self, device: VirtualDevice) -> None:
        with torch.inference_mode():
            buffer = device.empty(8)
        assert not buffer.is_inference()

    def test_views_are_free(self, device: VirtualDevice) -> None:
        with device.computing():
            x = torch.empty(100, dtype=torch.uint8)
            views = [x[:50], x.view(10, 10).t(), x.detach(), x.expand(7, 100)]
        assert device.allocated_bytes() == 100
        assert len(views) == 4

    def test_a_view_keeps_its_whole_storage(self, device: VirtualDevice) -> None:
        view = device.empty(100)[:1]
        assert device.allocated_bytes() == 100
        del view
        assert device.allocated_bytes() == 0

    def test_a_storage_counts_once_however_often_it_is_counted(self, device: VirtualDevice) -> None:
        buffer = device.empty(100)
        device.count(buffer)
        device.count(buffer[10:])
        assert device.allocated_bytes() == 100
        del buffer
        assert device.allocated_bytes() == 0

    def test_a_storage_that_an_operation_enlarges_counts_at_its_new_size(self, device: VirtualDevice) -> None:
        with device.computing():
            x = torch.empty(10, dtype=torch.uint8)
            x.resize_(100)
        assert device.allocated_bytes() == 100
        del x
        assert device.allocated_bytes() == 0

    def test_a_storage_that_dies_in_another_thread_is_freed(self, device: VirtualDevice) -> None:
        holder = [device.empty(100)]
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
        assert device.allocated_bytes() == 0

    def test_storages_that_come_and_go_in_many_threads_leave_nothing(self, device: VirtualDevice) -> None:
        def churn() -> None:
            for size in range(1, 200):
                device.empty(size)

        threads = [threading.Thread(target=churn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert device.allocated_bytes() == 0

    def test_a_sparse_tensor_counts_its_parts(self, device: VirtualDevice) -> None:
        embedding = nn.Embedding(1000, 4, sparse=True)
        with device.computing():
            embedding(torch.tensor([1, 2])).sum().backward()
        gradient = embedding.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        assert 2 * 4 * 4 + 2 * 8 <= device.allocated_bytes() < 1000
        embedding.weight.grad = gradient = None
        assert device.allocated_bytes() == 0

    def test_tensors_without_data_are_free(self, device: VirtualDevice) -> None:
        with device.computing():
            x = torch.empty(1000, device="meta")
        assert x.is_meta
        assert device.allocated_bytes() == 0


class TestComputing:
    def test_results_count_inside_and_not_outside(self, device: VirtualDevice) -> None:
        outside = torch.ones(100, dtype=torch.uint8)
        with device.computing():
            inside = outside + 1
        after = outside + 2
        assert device.allocated_bytes() == inside.nbytes
        assert after.nbytes == 100

    def test_every_result_of_an_operation_counts(self, device: VirtualDevice) -> None:
        with device.computing():
            parts = torch.max(torch.ones(4, 25), dim=0)
        assert device.allocated_bytes() == sum(part.nbytes for part in parts)

    def test_gradients_count(self, device: VirtualDevice) -> None:
        weight = torch.ones(100, requires_grad=True)
        with device.computing(), torch.autograd.set_multithreading_enabled(False):
            weight.square().sum().backward()
        assert weight.grad is not None
        assert device.allocated_bytes() == weight.grad.nbytes

    def test_host_work_in_the_middle_does_not_count(self, device: VirtualDevice) -> None:
        with device.computing():
            with device.on_host():
                host = torch.ones(100)
            inside = torch.ones(10)
        assert device.allocated_bytes() == inside.nbytes
        assert host.nbytes == 400

    def test_an_error_ends_it(self, device: VirtualDevice) -> None:
        with pytest.raises(ZeroDivisionError), device.computing():
            raise ZeroDivisionError
        outside = torch.ones(100)
        assert outside.nbytes == 400
        assert device.allocated_bytes() == 0


class TestCapacity:
    def test_filling_it_to_the_last_byte_is_fine(self, small: VirtualDevice) -> None:
        buffers = [small.empty(400), small.empty(600)]
        assert small.allocated_bytes() == 1000
        assert len(buffers) == 2

    def test_one_byte_more_raises_with_the_bytes_short(self, small: VirtualDevice) -> None:
        buffer = small.empty(400)
        with pytest.raises(DeviceOutOfMemoryError, match="1 bytes short") as raised:
            small.empty(601)
        assert raised.value.short_bytes == 1
        assert isinstance(raised.value, torch.OutOfMemoryError)
        assert buffer.numel() == 400

    def test_a_result_over_the_capacity_raises(self, small: VirtualDevice) -> None:
        with small.computing(), pytest.raises(DeviceOutOfMemoryError) as raised:
            torch.ones(300)
        assert raised.value.short_bytes == 200

    def test_after_it_was_exceeded_there_is_as_much_room_as_before(self, small: VirtualDevice) -> None:
        with pytest.raises(DeviceOutOfMemoryError):
            small.empty(1001)
        assert small.allocated_bytes() == 0
        assert small.empty(1000).numel() == 1000

    def test_what_did_not_fit_is_not_part_of_the_peak(self, small: VirtualDevice) -> None:
        with pytest.raises(DeviceOutOfMemoryError):
            small.empty(1001)
        assert small.peak_bytes() <= 1000

    def test_room_is_what_is_left(self, small: VirtualDevice) -> None:
        buffer = small.empty(400)
        assert small.room_for(600)
        assert not small.room_for(601)
        del buffer
        assert small.room_for(1000)

    def test_without_a_capacity_there_is_always_room(self, device: VirtualDevice) -> None:
        assert device.room_for(2**60)


class TestPeak:
    def test_is_the_most_that_lived_together(self, device: VirtualDevice) -> None:
        first = device.empty(100)
        second = device.empty(200)
        del first, second
        third = device.empty(250)
        assert third.numel() == 250
        assert device.peak_bytes() == 300

    def test_a_watch_begins_with_what_is_allocated(self, device: VirtualDevice) -> None:
        device.empty(500)
        kept = device.empty(100)
        peak = device.watch_peak()
        assert peak() == 100
        device.empty(50)
        device.empty(70)
        assert kept.numel() == 100
        assert peak() == 170
        assert device.peak_bytes() == 500


class TestKeeping:
    def test_a_kept_buffer_lives_until_its_copy_is_done(self, device: VirtualDevice) -> None:
        event = Later()
        device.leaving.keep(event, device.sums(100))
        assert not device.leaving.retire()
        assert device.allocated_bytes() == 100
        event.has_happened = True
        assert device.leaving.retire()
        assert device.allocated_bytes() == 0
        assert not device.leaving.retire()

    def test_waiting_frees_the_oldest_only(self, device: VirtualDevice) -> None:
        events = [Later(), Later()]
        for event in events:
            device.leaving.keep(event, device.sums(100))
        assert device.leaving.retire(wait=True)
        assert [event.done() for event in events] == [True, False]
        assert device.allocated_bytes() == 100

    def test_waiting_frees_what_is_done_behind_the_oldest_too(self, device: VirtualDevice) -> None:
        events: list[Event] = [Later(), Happened(), Later()]
        for event in events:
            device.leaving.keep(event, device.sums(100))
        assert device.leaving.retire(wait=True)
        assert device.allocated_bytes() == 100

    def test_there_is_nothing_to_wait_for_on_an_empty_device(self, device: VirtualDevice) -> None:
        assert not device.leaving.retire(wait=True)


class TestStreams:
    def test_both_directions_run_at_once(self, device: VirtualDevice) -> None:
        met = threading.Barrier(2)
        events = [stream.submit(lambda: _meet(met)) for stream in (device.swap_in, device.swap_out)]
        for event in events:
            event.synchronize()

    def test_close_finishes_the_copies(self) -> None:
        device = VirtualDevice(None)
        copied: list[Tensor] = []
        device.swap_in.submit(lambda: copied.append(torch.ones(1)))
        device.swap_out.submit(lambda: copied.append(torch.ones(1)))
        device.close()
        assert len(copied) == 2

    def test_what_the_caller_computed_has_happened(self, device: VirtualDevice) -> None:
        assert device.record().done()


class TestCopies:
    @pytest.mark.parametrize(("num_bytes", "is_brief"), [(0, True), (1000, True), (1001, False)])
    def test_small_ones_are_made_by_who_asks(
        self, device: VirtualDevice, num_bytes: int, is_brief: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lightning_harmony.engine.devices.device.BRIEFLY_COPIED_BYTES", 1000)
        copied_by: list[threading.Thread] = []
        copy = lambda: copied_by.append(threading.current_thread())  # noqa: E731
        device.start_copy(Errand.SWAP_IN, "weights", num_bytes, copy).synchronize()
        assert (copied_by == [threading.current_thread()]) == is_brief

    @pytest.mark.parametrize(
        ("kind", "stream"),
        [
            (Errand.SWAP_IN, "swap-in"),
            (Errand.UNPARK, "swap-in"),
            (Errand.SWAP_OUT, "swap-out"),
            (Errand.PARK, "swap-out"),
            (Errand.STASH_OUT, "swap-out"),
            (Errand.STASH_IN, "stash-in"),
        ],
    )
    def test_each_kind_has_its_stream(self, device: VirtualDevice, kind: Errand, stream: str) -> None:
        names: list[str] = []
        device.start_copy(kind, "", 1, lambda: names.append(threading.current_thread().name)).synchronize()
        assert names[0].startswith(f"harmony-{stream}")


class TestHost:
    def test_a_host_buffer_is_not_on_the_device(self, device: VirtualDevice) -> None:
        buffer = device.host_buffer(100)
        assert (buffer.numel(), buffer.dtype, buffer.device.type) == (100, torch.uint8, "cpu")
        assert device.allocated_bytes() == 0

    def test_registering_changes_nothing_here(self, device: VirtualDevice) -> None:
        buffer = device.host_buffer(8).fill_(3)
        device.register_host(buffer)()
        assert buffer.tolist() == [3] * 8


def _meet(barrier: threading.Barrier) -> None:
    barrier.wait(60)


def test_gradients_that_an_update_uses_up_are_waited_for_as_what_leaves_and_do_not_count_as_lasting() -> None:
    device, updates = VirtualDevice(1000), HostStream("update")
    lasting, gate = device.sums(100), threading.Event()
    held = [device.sums(600)]

    def use_up() -> None:
        gate.wait(10)
        held.clear()

    event = updates.submit(use_up)
    device.leaving.note_update(event, 600)
    assert not device.room_for(400)
    assert device.occupied_bytes() == device.allocated_bytes() - 600
    assert not device.leaving.retire()
    threading.Timer(0.05, gate.set).start()
    assert device.leaving.retire(wait=True)
    assert event.done()
    assert device.room_for(400)
    assert device.occupied_bytes() == device.allocated_bytes()
    assert not device.leaving.retire(wait=True)
    del lasting
    updates.close()
    device.close()


def test_what_a_composed_tensors_own_code_allocates_counts(device: VirtualDevice) -> None:
    weight = Packed.of(torch.randn(64, 64))
    with device.computing():
        peak = device.watch_peak()
        result = torch.ones(1, 64) @ weight
    assert peak() >= 64 * 64 * 4
    assert device.owns(result)
    with device.computing():
        copied = weight.clone()
    assert device.owns(copied)
