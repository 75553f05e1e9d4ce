"""The stash: what goes out comes back bit for bit, whatever its strides; and nothing that changed on the way."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_harmony.engine.devices.stream import Event, Stream
from lightning_harmony.engine.devices.virtual_device import DeviceOutOfMemoryError, VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory import stash as stash_module
from lightning_harmony.engine.memory.stash import Alias, LaneStash, Stash, Stashed
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.errors import UnsupportedModelError
from support.composed import Packed

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]


@pytest.fixture(scope="module")
def device() -> Iterator[VirtualDevice]:
    device = VirtualDevice(None)
    yield device
    device.close()


@pytest.fixture
def stash(device: VirtualDevice) -> Iterator[Stash]:
    stash = make_stash(device)
    yield stash
    stash.clear()


@pytest.fixture
def slow_swap_out(device: VirtualDevice) -> Iterator[threading.Event]:
    """Nothing is swapped out until this event is set."""
    go = threading.Event()
    device.swap_out.submit(partial(_wait, go))
    yield go
    go.set()


class Recording:
    """A stream that keeps the events of what it was given."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.events: list[Event] = []

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        self.events.append(self._stream.submit(work, after))
        return self.events[-1]

    submit_brief = submit


def make_stash(device: VirtualDevice) -> Stash:
    return Stash(device, HostPool(device.host_buffer), Traffic())


def put(stash: Stash, tensor: Tensor) -> Stashed:
    stashed = stash.put(tensor)
    assert stashed is not None
    return stashed


def bits(tensor: Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return dense.view(-1).view(torch.uint8).numpy().tobytes()


def random_bits(size: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaN and denormals among them; booleans have only two values."""
    torch.manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(size) < 0.5
    return torch.randint(0, 256, (*size[:-1], size[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Tensors under any chain of transposing, slicing, expanding and unfolding."""
    size = draw(st.lists(st.integers(2, 6), min_size=2, max_size=4))
    tensor = random_bits(size, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999)))
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, tensor.dim() - 1))
        match draw(st.sampled_from(["transpose", "step", "select", "expand", "unfold"])):
            case "transpose":
                tensor = tensor.transpose(dim, draw(st.integers(0, tensor.dim() - 1)))
            case "step":
                tensor = tensor.movedim(dim, 0)[draw(st.integers(0, 1)) :: draw(st.integers(1, 2))].movedim(0, dim)
            case "select" if tensor.dim() > 1:
                tensor = tensor.select(dim, 0)
            case "expand":
                tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 3, *tensor.shape[dim:])
            case "unfold" if tensor.size(dim) > 1:
                tensor = tensor.unfold(dim, 2, 1)
    return tensor


class TestRoundTrip:
    @given(tensor=views())
    @settings(deadline=None, max_examples=150)
    def test_gives_the_same_bits_and_strides_back(self, device: VirtualDevice, tensor: Tensor) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stash_module, "SMALLEST_BYTES", 1)
            stash = make_stash(device)
            if tensor.numel() == 0:
                assert stash.put(tensor) is None
                return
            loaded = put(stash, tensor).load()
        stash.clear()
        assert bits(loaded) == bits(tensor)
        assert (loaded.shape, loaded.stride(), loaded.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
            torch.randn(16, 8).t(),
            torch.randn(8, 32)[:, :16],
            torch.randn(16).expand(8, 16),
            torch.randn(8, 1, 16).expand(8, 4, 16).transpose(0, 2),
            torch.randn(64).unfold(0, 8, 2),
            torch.randn(16, 8, dtype=torch.complex64).conj(),
        ],
        ids=["channels_last", "transposed", "gaps", "expanded", "expanded_transposed", "overlapping", "conjugate"],
    )
    def test_of_views_that_models_make(self, stash: Stash, tensor: Tensor) -> None:
        loaded = put(stash, tensor).load()
        assert torch.equal(loaded, tensor)
        assert loaded.stride() == tensor.stride()

    def test_may_be_made_more_than_once(self, stash: Stash) -> None:
        tensor = torch.randn(32)
        stashed = put(stash, tensor)
        first, second = stashed.load(), stashed.load()
        first.zero_()
        assert torch.equal(second, tensor)
        assert torch.equal(stashed.load(), tensor)

    def test_carries_no_graph(self, stash: Stash) -> None:
        loaded = put(stash, torch.randn(32, requires_grad=True) * 2).load()
        assert loaded.is_leaf
        assert not loaded.requires_grad

    def test_takes_only_the_distinct_elements_of_an_expanded_tensor(self, stash: Stash) -> None:
        put(stash, torch.randn(1, 32).expand(100, 32))
        assert stash.pool.num_bytes == 32 * 4

    def test_frees_the_device_in_between(self, device: VirtualDevice, stash: Stash) -> None:
        before = device.allocated_bytes()
        with device.computing():
            tensor = torch.randn(64)
        stashed = put(stash, tensor)
        del tensor
        stash.retire(wait=True)
        assert device.allocated_bytes() == before
        loaded = stashed.load()
        assert device.allocated_bytes() == before + loaded.nbytes


class TestWhatStays:
    def test_a_small_tensor(self, stash: Stash) -> None:
        num_elements = stash_module.SMALLEST_BYTES // 4
        assert stash.put(torch.zeros(num_elements - 1)) is None
        assert stash.put(torch.zeros(num_elements)) is not None

    def test_a_tensor_of_another_device(self, stash: Stash) -> None:
        assert stash.put(torch.zeros(10_000, device="meta")) is None


class TestModificationInPlace:
    def test_before_the_copy_is_refused(self, stash: Stash, slow_swap_out: threading.Event) -> None:
        tensor = torch.zeros(8, 4)
        stashed = put(stash, tensor)
        tensor.add_(1)
        slow_swap_out.set()
        with pytest.raises(UnsupportedModelError, match=r"shape \(8, 4\) .* modified in place .* out of place"):
            stash.retire(wait=True)
        assert stashed is not None

    def test_through_a_view_is_refused(self, stash: Stash, slow_swap_out: threading.Event) -> None:
        tensor = torch.zeros(8, 4)
        stashed = put(stash, tensor.view(32))
        tensor[0, 0] = 1
        slow_swap_out.set()
        with pytest.raises(UnsupportedModelError, match="modified in place"):
            stash.retire(wait=True)
        assert stashed is not None

    def test_after_the_copy_was_retired_is_fine(self, stash: Stash) -> None:
        tensor = torch.zeros(32)
        stashed = put(stash, tensor)
        stash.retire(wait=True)
        tensor.add_(1)
        stash.retire(wait=True)
        assert torch.equal(stashed.load(), torch.zeros(32))

    def test_retiring_without_waiting_does_not_block(self, stash: Stash, slow_swap_out: threading.Event) -> None:
        stashed = put(stash, torch.zeros(32))
        stash.retire()
        assert len(stash.pending) == 1
        assert not slow_swap_out.is_set()
        assert stashed is not None


class TestBuffers:
    def test_are_used_again_after_the_last_reference(self, stash: Stash) -> None:
        stashed = put(stash, torch.zeros(32))
        other = stashed
        del stashed
        put_meanwhile = put(stash, torch.zeros(32))
        assert stash.pool.num_bytes == 2 * 128
        del other, put_meanwhile
        again = [put(stash, torch.zeros(32)) for _ in range(2)]
        assert stash.pool.num_bytes == 2 * 128
        assert len(again) == 2

    def test_come_back_with_the_event_of_their_last_copy(
        self, device: VirtualDevice, stash: Stash, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        outs, ins = Recording(device.swap_out), Recording(device.stash_in)
        monkeypatch.setattr(device, "swap_out", outs)
        monkeypatch.setattr(device, "stash_in", ins)
        stashed = put(stash, torch.ones(32))
        stashed.load()
        stashed.load()
        del stashed
        assert stash.pool.take(128)[1] == [ins.events[1]]
        put(stash, torch.ones(32))
        assert stash.pool.take(128)[1] == [outs.events[1]]

    def test_are_given_back_where_nobody_waits_for_the_copy(self, stash: Stash, slow_swap_out: threading.Event) -> None:
        put(stash, torch.ones(32))
        second = put(stash, torch.zeros(32))
        assert stash.pool.num_bytes == 128
        slow_swap_out.set()
        assert torch.equal(second.load(), torch.zeros(32))

    def test_a_tensor_for_which_there_was_no_room_leaves_nothing_behind(self) -> None:
        device = VirtualDevice(200)
        stash = make_stash(device)
        with device.computing():
            tensor = torch.empty(75, 2, dtype=torch.uint8)
            with pytest.raises(DeviceOutOfMemoryError):
                # Gaps make a dense copy necessary, on the device.
                stash.put(tensor[:, :1])
        device.close()
        gc.collect()
        assert stash.pool.num_bytes == 0

    def test_clear_forgets_what_is_under_way(self, stash: Stash) -> None:
        tensor = torch.zeros(32)
        stashed = put(stash, tensor)
        tensor.add_(1)
        stash.clear()
        stash.retire(wait=True)
        assert stashed is not None


class TestTraffic:
    def test_counts_the_bytes_of_each_copy(self, stash: Stash) -> None:
        stashed = put(stash, torch.zeros(32))
        put(stash, torch.zeros(1, 64, dtype=torch.bfloat16).expand(9, 64))
        stashed.load()
        stashed.load()
        assert stash.traffic.swapped_out == {"weights": 0, "gradients": 0, "optimizer": 0, "stash": 128 + 128}
        assert stash.traffic.swapped_in == {"weights": 0, "gradients": 0, "optimizer": 0, "stash": 2 * 128}


class TestLaneStash:
    def test_swaps_a_tensor_out_once(self, stash: Stash) -> None:
        lane, tensor = LaneStash(stash), torch.zeros(32)
        first = lane.put(tensor)
        assert first is not None
        assert lane.put(tensor) is first
        assert stash.traffic.swapped_out["stash"] == 128

    def test_swaps_it_out_again_after_it_changed(self, stash: Stash) -> None:
        lane, tensor = LaneStash(stash), torch.zeros(32)
        before = lane.put(tensor)
        stash.retire(wait=True)
        tensor.add_(1)
        after = lane.put(tensor)
        assert before is not None
        assert after is not None
        assert torch.equal(before.load(), torch.zeros(32))
        assert torch.equal(after.load(), torch.ones(32))

    def test_swaps_it_out_each_time_where_none_are_shared(self, stash: Stash) -> None:
        lane, tensor = LaneStash(stash), torch.zeros(32)
        before = lane.put(tensor)
        tensor.data.add_(1)
        stash.shares = False
        after = lane.put(tensor)
        assert after is not before
        assert after is not None
        assert torch.equal(after.load(), torch.ones(32))

    def test_swaps_it_out_again_when_nobody_keeps_the_first(self, stash: Stash) -> None:
        lane, tensor = LaneStash(stash), torch.arange(32.0)
        lane.put(tensor)
        again = lane.put(tensor)
        assert again is not None
        assert torch.equal(again.load(), tensor)

    def test_does_not_take_one_tensor_for_another_that_had_its_place(self, stash: Stash) -> None:
        lane = LaneStash(stash)
        kept = []
        for number in range(50):
            tensor = torch.full((32,), float(number))
            kept.append(lane.put(tensor))
            stash.retire(wait=True)
            del tensor
        assert [stashed.load()[0].item() for stashed in kept if stashed is not None] == list(range(50))

    def test_knows_nothing_of_other_lanes(self, stash: Stash) -> None:
        tensor = torch.zeros(32)
        assert LaneStash(stash).put(tensor) is not LaneStash(stash).put(tensor)

    def test_leaves_small_tensors(self, stash: Stash) -> None:
        assert LaneStash(stash).put(torch.zeros(1)) is None


class TestWhatSeveralLayersTake:
    """The positions of tokens, say: to bring them back for each layer would take the host as long as large tensors."""

    @pytest.fixture
    def lane(self) -> Iterator[LaneStash]:
        device = VirtualDevice(256 * 1024)
        device.computes_apart = True
        self.stash = make_stash(device)
        yield LaneStash(self.stash)
        self.stash.clear()
        device.close()

    def taken_twice(self, lane: LaneStash, tensor: Tensor) -> Stashed:
        first, second = lane.put(tensor), lane.put(tensor)
        assert first is not None
        assert first is second
        self.stash.retire(wait=True)
        return first

    def test_comes_from_the_device(self, lane: LaneStash) -> None:
        stashed = self.taken_twice(lane, torch.arange(32.0))
        assert torch.equal(stashed.load(), torch.arange(32.0))
        assert torch.equal(stashed.read(), torch.arange(32.0))
        assert self.stash.traffic.swapped_in["stash"] == 0

    def test_comes_from_the_host_where_one_layer_takes_it(self, lane: LaneStash) -> None:
        stashed = lane.put(torch.arange(32.0))
        assert stashed is not None
        assert torch.equal(stashed.read(), torch.arange(32.0))
        assert self.stash.traffic.swapped_in["stash"] == 128

    def test_is_what_it_was_when_it_was_taken(self, lane: LaneStash) -> None:
        tensor = torch.zeros(32)
        stashed = self.taken_twice(lane, tensor)
        tensor.data.add_(1)
        assert torch.equal(stashed.load(), torch.zeros(32))

    def test_may_be_changed_by_each_that_loads_it(self, lane: LaneStash) -> None:
        stashed = self.taken_twice(lane, torch.zeros(32))
        stashed.load().add_(1)
        assert torch.equal(stashed.load(), torch.zeros(32))
        assert torch.equal(stashed.read(), torch.zeros(32))

    def test_has_the_strides_that_it_had(self, lane: LaneStash) -> None:
        tensor = torch.arange(16.0).view(4, 4).t()
        loaded = self.taken_twice(lane, tensor).load()
        assert torch.equal(loaded, tensor)
        assert loaded.stride() == tensor.stride()

    def test_stays_on_the_host_alone_where_the_device_has_no_room(self, lane: LaneStash) -> None:
        device = self.stash.device
        assert device.capacity_bytes is not None
        filled = device.scratch(device.capacity_bytes - device.allocated_bytes() - 64)
        stashed = self.taken_twice(lane, torch.arange(32.0))
        del filled
        assert torch.equal(stashed.read(), torch.arange(32.0))
        assert self.stash.traffic.swapped_in["stash"] == 128

    def test_takes_no_more_of_the_device_than_plans_leave(self, lane: LaneStash) -> None:
        # A 256th of the device has room for seven of these.
        several = [self.taken_twice(lane, torch.full((36,), float(number))) for number in range(8)]
        assert [each.read()[0].item() for each in several] == list(range(8))
        assert self.stash.traffic.swapped_in["stash"] == 144
        del several[0]
        self.taken_twice(lane, torch.zeros(36)).read()
        assert self.stash.traffic.swapped_in["stash"] == 144


def _wait(go: threading.Event) -> None:
    go.wait(60)


class TestAlias:
    def test_is_the_tensor_without_its_graph(self) -> None:
        tensor = torch.ones(3, requires_grad=True) * 2
        loaded = Alias(tensor).load()
        assert loaded.data_ptr() == tensor.data_ptr()
        assert not loaded.requires_grad

    def test_of_a_tensor_that_was_changed_meanwhile_is_refused(self) -> None:
        tensor = torch.ones(3)
        alias = Alias(tensor)
        tensor.add_(1)
        with pytest.raises(UnsupportedModelError, match=r"shape \(3,\).*modified in place"):
            alias.load()

    def test_of_inference_mode_counts_no_changes(self) -> None:
        with torch.inference_mode():
            tensor = torch.ones(3)
        assert Alias(tensor).load() is not None


def test_a_composed_tensor_is_kept_where_it_is(device: VirtualDevice, stash: Stash) -> None:
    with device.computing():
        assert stash.put(Packed.of(torch.randn(64, 64))) is None


def test_what_the_host_has_no_room_for_stays_and_each_that_is_loaded_may_be_changed(stash: Stash) -> None:
    first, second = torch.randn(64, 64), torch.randn(64, 64).t()
    stash.pool.limit, stash.pool.reserved_bytes = 3 * first.nbytes, first.nbytes + 1
    stashed = [stash.put(first), stash.put(second)]
    assert stash.kept_bytes == second.nbytes
    expected = [first.clone(), second.clone()]
    # Whoever has them may change them once they are stashed.
    stash.drain()
    first.zero_()
    second.zero_()
    for each, value in zip(stashed, expected, strict=True):
        assert each is not None
        each.load().add_(1)
        loaded = each.load()
        assert torch.equal(loaded, value)
        assert loaded.stride() == value.stride()
    del each, stashed
    gc.collect()
    assert stash.kept_bytes == 0
