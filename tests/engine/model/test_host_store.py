"""The host store: parameters move into one arena, and nobody notices."""

import gc
import io
import math
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.model.companions import Companions
from lightning_harmony.engine.model.host_store import ALIGNMENT, KEPT_STEPS, HostPool, HostStore, lay_out, lies_in
from lightning_harmony.engine.structures.parts import are_alike, are_equal, cloned, parts_of
from lightning_harmony.errors import CapacityError
from support.composed import Lookup, Nested

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    device = VirtualDevice(None)
    yield device
    device.close()


def a_bit_of_everything() -> list[nn.Parameter]:
    """Parameters of many dtypes and strides, empty and scalar ones among them."""
    torch.manual_seed(0)
    plain = [torch.randn(3, 5, dtype=dtype) for dtype in DTYPES]
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return [
        nn.Parameter(data)
        for data in (*plain, channels_last, torch.randn(7, 3).t(), torch.randn(0, 4), torch.tensor(2.5))
    ]


class TestParameters:
    def test_keep_identity_values_and_strides(self, device: VirtualDevice) -> None:
        parameters = a_bit_of_everything()
        before = [(p.detach().clone(), p.stride(), p.dtype, p.shape) for p in parameters]
        store = HostStore(parameters, device)
        for parameter, (values, stride, dtype, shape) in zip(parameters, before, strict=True):
            assert parameter in store
            assert isinstance(parameter, nn.Parameter)
            assert torch.equal(parameter, values)
            assert (parameter.stride(), parameter.dtype, parameter.shape) == (stride, dtype, shape)

    def test_are_views_of_the_arena_at_their_slots(self, device: VirtualDevice) -> None:
        parameters = a_bit_of_everything()
        store = HostStore(parameters, device)
        for parameter in parameters:
            assert torch.equal(store.slot(parameter).view(store.arena), parameter)
        with torch.no_grad():
            parameters[0].fill_(7)
        assert torch.equal(store.slot(parameters[0]).view(store.arena), torch.full((3, 5), 7.0))

    def test_tell_how_much_is_done(self, device: VirtualDevice) -> None:
        parameters, told = a_bit_of_everything(), list[int]()
        HostStore(parameters, device, told.append)
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        assert told == [sum(sizes[: number + 1]) for number in range(len(sizes))]

    def test_move_one_by_one_and_no_second_copy_of_all_comes_to_be(self, device: VirtualDevice) -> None:
        parameters = [nn.Parameter(torch.ones(100)) for _ in range(10)]
        before = [weakref.ref(parameter.untyped_storage()) for parameter in parameters]
        alive: list[int] = []
        HostStore(parameters, device, lambda done: alive.append(sum(storage() is not None for storage in before)))
        # One may be on its way out.
        assert all(left <= 10 - moved for moved, left in enumerate(alive))
        assert not any(storage() is not None for storage in before)

    def test_keep_requires_grad(self, device: VirtualDevice) -> None:
        frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        trained = nn.Parameter(torch.ones(3))
        HostStore([frozen, trained], device)
        assert [frozen.requires_grad, trained.requires_grad] == [False, True]

    def test_of_a_module_are_still_the_ones_it_trains(self, device: VirtualDevice) -> None:
        module = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        before = list(module.parameters())
        store = HostStore(before, device)
        assert all(now is then for now, then in zip(module.parameters(), before, strict=True))
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert torch.equal(store.slot(module.weight).view(store.arena), module.weight)

    def test_own_a_storage_of_their_exact_size(self, device: VirtualDevice) -> None:
        parameters = a_bit_of_everything()
        HostStore(parameters, device)
        for parameter in parameters:
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
            assert parameter.storage_offset() == 0

    def test_saving_one_does_not_save_the_arena(self, device: VirtualDevice) -> None:
        small, large = nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.ones(100_000))
        HostStore([large, small], device)
        file = io.BytesIO()
        torch.save(small, file)
        assert file.tell() < 4000
        file.seek(0)
        assert torch.equal(torch.load(file), small)

    def test_are_aligned_as_a_device_allocates(self, device: VirtualDevice) -> None:
        parameters = a_bit_of_everything()
        store = HostStore(parameters, device)
        base = store.arena.data_ptr()
        for parameter in parameters:
            assert store.slot(parameter).offset % ALIGNMENT == 0
            if parameter.numel():
                assert parameter.data_ptr() == base + store.slot(parameter).offset

    def test_do_not_overlap_and_fill_the_arena_in_order(self, device: VirtualDevice) -> None:
        parameters = a_bit_of_everything()
        store = HostStore(parameters, device)
        end = 0
        for parameter in parameters:
            slot = store.slot(parameter)
            assert end <= slot.offset < end + ALIGNMENT
            end = slot.offset + slot.num_bytes
        assert end <= store.num_bytes == store.arena.numel()

    def test_with_gaps_or_repeats_in_memory_become_contiguous(self, device: VirtualDevice) -> None:
        gaps = nn.Parameter(torch.arange(20.0).view(4, 5)[:, :3])
        repeats = nn.Parameter(torch.arange(3.0).expand(4, 3))
        HostStore([gaps, repeats], device)
        assert gaps.is_contiguous()
        assert repeats.is_contiguous()
        assert torch.equal(gaps, torch.arange(20.0).view(4, 5)[:, :3])
        assert torch.equal(repeats, torch.arange(3.0).expand(4, 3))

    def test_stay_usable_after_close(self, device: VirtualDevice) -> None:
        parameter = nn.Parameter(torch.arange(4.0))
        store = HostStore([parameter], device)
        store.close()
        del store
        assert parameter.tolist() == [0, 1, 2, 3]

    def test_of_others_are_not_in_it(self, device: VirtualDevice) -> None:
        store = HostStore([nn.Parameter(torch.ones(2))], device)
        assert nn.Parameter(torch.ones(2)) not in store

    @pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.empty(0, 3))]])
    def test_may_all_be_empty(self, device: VirtualDevice, parameters: list[nn.Parameter]) -> None:
        store = HostStore(parameters, device)
        assert store.num_bytes == 0
        assert all(store.slot(parameter).view(store.arena).shape == (0, 3) for parameter in parameters)


class TestRegistration:
    def test_the_arena_is_registered_until_close(self, device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        registered: list[int] = []

        def register(buffer: Tensor) -> object:
            registered.append(buffer.data_ptr())
            return registered.clear

        monkeypatch.setattr(device, "register_host", register)
        store = HostStore([nn.Parameter(torch.ones(3))], device)
        assert registered == [store.arena.data_ptr()]
        store.close()
        assert registered == []


class TestLayOut:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_slot_shows_the_tensor_in_a_buffer(self, dtype: torch.dtype) -> None:
        tensors = [torch.randn(3, 4, dtype=dtype), torch.randn(5, 2, dtype=dtype).t()]
        slots, num_bytes = lay_out(tensors)
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.view(buffer).copy_(tensor)
        for slot, tensor in zip(slots, tensors, strict=True):
            assert torch.equal(slot.view(buffer), tensor)
            assert slot.view(buffer).stride() == tensor.stride()
            assert slot.num_bytes == math.prod(tensor.shape) * dtype.itemsize


class TestFollow:
    """Code assigns other data to a parameter's ``data``."""

    @pytest.fixture
    def parameters(self) -> list[nn.Parameter]:
        return [nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(0))]

    def test_what_nobody_else_has_goes_into_the_arena(
        self, device: VirtualDevice, parameters: list[nn.Parameter]
    ) -> None:
        store = HostStore(parameters, device)
        address = parameters[0].data_ptr()
        parameters[0].data = parameters[0].data * 2
        assert store.follow(parameters) == []
        assert parameters[0].data_ptr() == address
        assert torch.equal(parameters[0], torch.arange(6.0).view(2, 3) * 2)
        assert not store.elsewhere

    def test_a_backup_of_what_was_there_stays_as_it_is(
        self, device: VirtualDevice, parameters: list[nn.Parameter]
    ) -> None:
        store = HostStore(parameters, device)
        backup = parameters[0].data
        parameters[0].data = torch.full((2, 3), 7.0)
        store.follow(parameters)
        assert store.elsewhere == {parameters[0]}
        assert torch.equal(backup, torch.arange(6.0).view(2, 3))
        parameters[0].data = backup
        store.follow(parameters)
        assert not store.elsewhere
        parameters[0].data = torch.full((2, 3), 8.0)
        del backup
        store.follow(parameters)
        assert not store.elsewhere
        assert torch.equal(parameters[0], torch.full((2, 3), 8.0))

    def test_who_shares_what_was_assigned_sees_it_trained(
        self, device: VirtualDevice, parameters: list[nn.Parameter]
    ) -> None:
        store = HostStore(parameters, device)
        shared = torch.zeros(4)
        parameters[1].data = shared
        store.follow(parameters)
        with torch.no_grad():
            parameters[1].add_(1)
        assert torch.equal(shared, torch.ones(4))
        assert store.elsewhere == {parameters[1]}

    def test_a_view_of_its_own_memory_is_seen(self, device: VirtualDevice) -> None:
        parameter = nn.Parameter(torch.arange(4.0).view(2, 2))
        store = HostStore([parameter], device)
        parameter.data = parameter.data.t()
        store.follow([parameter])
        assert store.elsewhere == {parameter}
        assert torch.equal(parameter, torch.arange(4.0).view(2, 2).t())

    def test_another_type_or_shape_is_told(self, device: VirtualDevice, parameters: list[nn.Parameter]) -> None:
        store = HostStore(parameters, device)
        parameters[0].data = parameters[0].data.double()
        parameters[1].data = torch.ones(5)
        assert store.follow(parameters) == parameters[:2]


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


def test_a_part_of_several_tensors_lies_in_the_arena_once() -> None:
    weights = [Lookup.of(torch.randn(8, 8)) for _ in range(3)]
    slots, num_bytes = lay_out([torch.empty(4), *weights])
    assert {slot.parts[1].offset for slot in slots[1:]} == {2 * ALIGNMENT}
    # A tensor, a table and three times codes.
    assert num_bytes == ALIGNMENT + 4 * 256 + 3 * ALIGNMENT
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    views = [slot.view(buffer) for slot in slots[1:]]
    for view, weight in zip(views, weights, strict=True):
        assert are_alike(view, weight)
        for part, value in zip(parts_of(view), parts_of(weight), strict=True):
            part.copy_(value)
    assert all(map(are_equal, views, weights))
    assert all(lies_in(view, buffer) for view in views)
    assert not any(lies_in(weight, buffer) for weight in weights)


def test_the_store_has_composed_weights_as_views_of_its_arena(device: VirtualDevice) -> None:
    values = [Nested.of(torch.randn(8, 8)), Lookup.of(torch.randn(8, 8)), Lookup.of(torch.randn(8, 8))]
    weights = [nn.Parameter(value, requires_grad=False) for value in values]
    before = [cloned(weight) for weight in weights]
    store = HostStore(weights, device)
    for weight, value in zip(weights, before, strict=True):
        assert are_equal(weight, value)
        assert are_equal(store.slot(weight).view(store.arena), value)
    parts = [part.data_ptr() for weight in weights for part in parts_of(weight)]
    assert store.follow(weights) == []
    assert [part.data_ptr() for weight in weights for part in parts_of(weight)] == parts
    assert not store.elsewhere
    weights[1].codes = codes = torch.zeros(8, 8, dtype=torch.uint8)  # type: ignore[attr-defined]
    kept = codes.view(-1)
    assert store.follow(weights) == []
    assert store.elsewhere == {weights[1]}
    assert kept.data_ptr() == codes.data_ptr()
    del kept
    assert store.follow(weights) == []
    assert not store.elsewhere
    assert codes.data_ptr() == parts[4]
    weights[1].codes = torch.zeros(8, 7, dtype=torch.uint8)  # type: ignore[attr-defined]
    assert [id(weight) for weight in store.follow(weights)] == [id(weights[1])]


def test_companions_of_a_weight_move_with_it_and_other_data_for_one_of_both_is_a_misfit(device: VirtualDevice) -> None:
    module = nn.Linear(4, 4, bias=False).requires_grad_(False)
    module.state = state = SimpleNamespace(codes=module.weight.data.t(), scale=torch.rand(4))  # type: ignore[assignment]
    companions = Companions([module], [module.weight])
    before = module.weight.clone(), state.scale.clone()
    store = HostStore([module.weight], device, companions=[companions])
    slot = store.slot(module.weight)
    assert (slot.num_bytes, [place.num_bytes for place in slot.beside]) == (64, [16])
    assert torch.equal(slot.view(store.arena), before[0])
    assert torch.equal(slot.beside[0].view(store.arena), before[1])
    assert state.codes.data_ptr() == module.weight.data_ptr() == slot.view(store.arena).data_ptr()
    assert state.scale.data_ptr() == slot.beside[0].view(store.arena).data_ptr()
    # Elements that are copied there come to the device with the next visit; so do those of other memory.
    state.scale.copy_(torch.ones(4))
    assert store.follow([module.weight]) == []
    state.scale.data = torch.full((4,), 2.0)
    assert store.follow([module.weight]) == []
    assert torch.equal(slot.beside[0].view(store.arena), torch.full((4,), 2.0))
    module.weight.data = torch.zeros(4, 4)
    assert [id(parameter) for parameter in store.follow([module.weight])] == [id(module.weight)]
