"""The host store: parameters move into one arena, and nobody notices."""

import io
import math
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.model.companions import Companions
from lightning_harmony.engine.model.host_store import ALIGNMENT, HostStore, lay_out, lies_in, views_in
from lightning_harmony.engine.structures.parts import are_alike, are_equal, cloned, parts_of
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


def test_tensors_of_any_type_are_found_in_a_buffer_that_begins_within_a_larger_one() -> None:
    tensors = [*a_bit_of_everything(), torch.tensor([True, False]), Lookup.of(torch.randn(8, 8))]
    slots, num_bytes = lay_out(tensors)
    larger = torch.zeros(ALIGNMENT + num_bytes, dtype=torch.uint8)
    views = views_in(larger[ALIGNMENT:], dict(zip(range(len(tensors)), slots, strict=True)))
    for view, tensor in zip(views.values(), tensors, strict=True):
        assert are_alike(view, tensor)
        for part, value in zip(parts_of(view), parts_of(tensor), strict=True):
            part.copy_(value.detach())
    assert all(map(are_equal, views.values(), tensors))
    assert not larger[:ALIGNMENT].any()


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
