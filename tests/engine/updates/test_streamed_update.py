"""Updates in pieces on a device: each is the step of the whole, and what is on the host afterwards is what a step leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.host_store import lay_out
from lightning_harmony.engine.updates import update_stage
from lightning_harmony.engine.updates.optimizer_twin import Share, by_norm, by_value
from lightning_harmony.engine.updates.separable_optimizers import SEPARABLE
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate

# So small that most parameters here are cut.
CAPACITY = 4096


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Large and small ones, one of them transposed, one a number, and one that has no gradient."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator).to(dtype) for size in ((40, 60), (3, 5), (30, 100), (7,), ())]
    made[2] = made[2].t()
    return [*(nn.Parameter(tensor) for tensor in made), nn.Parameter(torch.ones(2, dtype=dtype))]


def set_gradients(members: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for parameter in members[:-1]:
        values = torch.randn(parameter.numel(), generator=generator).to(parameter.dtype)
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(values.view_as(parameter))


def share_of(optimizer: Optimizer) -> Share:
    return Share(optimizer, {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]})


def same(one: Optimizer, other: Optimizer) -> bool:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    pairs = zip(*([p for group in each.param_groups for p in group["params"]] for each in (one, other)), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def pieces_of(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """From now on, the parts of each piece that is stepped."""
    found: list[list[Any]] = []
    launch = update_stage.Stage.launch

    def watched(self: Any, share: Any, piece: Any, *args: Any, **options: Any) -> None:
        found.append(list(piece.parts))
        launch(self, share, piece, *args, **options)

    monkeypatch.setattr(update_stage.Stage, "launch", watched)
    return found


MATRICES = {kind for kind in SEPARABLE if kind.__name__ == "Muon"}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    **{kind.__name__: kind for kind in sorted(SEPARABLE - MATRICES, key=lambda kind: kind.__name__)},
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "amsgrad": lambda p: AdamW(p, amsgrad=True),
    "fused": lambda p: AdamW(p, fused=True),
    "foreach": lambda p: Adam(p, foreach=True),
    "tensor lr": lambda p: AdamW(p, lr=torch.tensor(0.1)),
    "groups": lambda p: AdamW([{"params": p[::2], "lr": 0.1}, {"params": p[1::2], "weight_decay": 0.3}]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_have_the_bits_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pieces_of(monkeypatch)
    members, expected = parameters(), parameters()
    optimizer, plain = OPTIMIZERS[name](members), OPTIMIZERS[name](expected)
    streamed = StreamedUpdate(VirtualDevice(CAPACITY))
    for step in range(4):
        for each in (members, expected):
            set_gradients(each, step)
        plain.step()
        streamed.update(share_of(optimizer))
        assert same(plain, optimizer)
    # Adafactor looks at rows and columns.
    was_cut = any(part.elements is not None for piece in found for part in piece)
    assert was_cut == (name != "Adafactor")


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "momentum", "foreach"])
def test_gradients_that_are_on_the_device_stay_there(name: str) -> None:
    members, expected = parameters(), parameters()
    optimizer, plain = OPTIMIZERS[name](members), OPTIMIZERS[name](expected)
    traffic, device = Traffic(), VirtualDevice(None)
    streamed = StreamedUpdate(device, traffic=traffic)
    for step in range(3):
        for each in (members, expected):
            set_gradients(each, step)
        plain.step()
        share, come = share_of(optimizer), 0
        for number, (parameter, gradient) in enumerate(list(share.gradients.items())):
            if number % 3 == 0:
                come += gradient.nbytes
            else:
                share.gradients[parameter] = _on(device, gradient)
        traffic.reset()
        streamed.update(share)
        assert same(plain, optimizer)
        with_gradients = [p for p in members if p.grad is not None]
        states = [value for p in with_gradients for value in optimizer.state[p].values() if isinstance(value, Tensor)]
        changed = sum(value.nbytes for value in (*with_gradients, *states) if value.dim() > 0)
        # Parameters and their state come and go, of gradients those that were on the host; numbers of elements of no size.
        assert traffic.swapped_out["optimizer"] == pytest.approx(changed, abs=64)
        if step > 0:
            assert traffic.swapped_in["optimizer"] == pytest.approx(changed + come, abs=64)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "momentum", "foreach"])
def test_parameters_that_are_on_a_device_do_not_come(name: str) -> None:
    """Weights that a backward had there, as they are on the host, are twice what a narrow copy would take of the bus."""
    members, expected = parameters(), parameters()
    optimizer, plain = OPTIMIZERS[name](members), OPTIMIZERS[name](expected)
    device, traffic = VirtualDevice(None), Traffic()
    streamed = StreamedUpdate(device, traffic=traffic)
    for step in range(3):
        for each in (members, expected):
            set_gradients(each, step)
        plain.step()
        share = share_of(optimizer)
        share.masters.update({parameter: _on(device, parameter.detach()) for parameter in share.gradients})
        kept = {parameter: master.clone() for parameter, master in share.masters.items()}
        traffic.reset()
        streamed.update(share)
        assert same(plain, optimizer)
        # Whoever else looks at the weights there finds what the backward had.
        assert all(torch.equal(share.masters[parameter], master) for parameter, master in kept.items())
        parameter_bytes = sum(parameter.nbytes for parameter in share.gradients)
        if step > 0:
            come = traffic.swapped_out["optimizer"] - parameter_bytes + sum(g.nbytes for g in share.gradients.values())
            assert traffic.swapped_in["optimizer"] == pytest.approx(come, abs=64)


def _on(device: VirtualDevice, gradient: Tensor) -> Tensor:
    (slot,), num_bytes = lay_out([gradient])
    return slot.view(device.sums(num_bytes)).copy_(gradient)


def test_no_piece_is_asked_for_before_there_is_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in the queue of a device's copies holds up all behind it, as the stash that a lane waits for."""
    members = parameters()
    optimizer = AdamW(members)
    set_gradients(members, 0)
    streamed = StreamedUpdate(VirtualDevice(CAPACITY))
    stage = streamed._stage
    coming = stage._streams[0]
    submit, free = coming.submit, []

    def watched(work: Callable[[], None], after: Sequence[Any] = ()) -> Any:
        if getattr(getattr(work, "func", None), "__name__", "") == "copy_all":
            free.append(stage._buffers[0][1].done() and not after)
        return submit(work, after)

    monkeypatch.setattr(coming, "submit", watched)
    streamed.update(share_of(optimizer))
    assert len(free) > 3
    assert all(free)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [AdamW, Adafactor, lambda p: SGD(p, lr=0.1, momentum=0.9)])
def test_pieces_of_other_types_have_the_bits_of_a_step(make: Any, dtype: torch.dtype) -> None:
    members, expected = parameters(dtype), parameters(dtype)
    optimizer, plain = make(members), make(expected)
    streamed = StreamedUpdate(VirtualDevice(CAPACITY))
    for step in range(3):
        for each in (members, expected):
            set_gradients(each, step)
        plain.step()
        streamed.update(share_of(optimizer))
    assert same(plain, optimizer)


@pytest.mark.skipif(not MATRICES, reason="torch has no Muon yet")
def test_muon_updates_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pieces_of(monkeypatch)
    (kind,) = MATRICES
    members, expected = ([p for p in parameters() if p.dim() == 2] for _ in range(2))
    optimizer, plain = kind(members), kind(expected)
    for step in range(3):
        for each in (members, expected):
            set_gradients([*each, each[0]], step)
        plain.step()
        StreamedUpdate(VirtualDevice(CAPACITY)).update(share_of(optimizer))
    assert same(plain, optimizer)
    assert not any(part.elements is not None for piece in found for part in piece)


@pytest.mark.parametrize("how", ["value", "norm"])
def test_gradients_are_clipped_piece_by_piece_and_go_back_where_somebody_may_look(how: str) -> None:
    members, expected = parameters(), parameters()
    optimizer, plain = AdamW(members), AdamW(expected)
    for each in (members, expected):
        set_gradients(each, 0)
    if how == "value":
        clip = by_value(0.5)
        torch.nn.utils.clip_grad_value_(expected, 0.5)
    else:
        found = by_norm(1.0, torch.nn.utils.get_total_norm([p.grad for p in members if p.grad is not None]))
        assert found is not None
        clip = found
        torch.nn.utils.clip_grad_norm_(expected, 1.0)
    plain.step()
    StreamedUpdate(VirtualDevice(CAPACITY)).update(share_of(optimizer), clip, keeps_gradients=True)
    assert same(plain, optimizer)
    for ours, theirs in zip(members, expected, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_state_that_a_first_step_makes_lies_in_memory_that_copies_are_fast_from() -> None:
    """One piece's state lies one behind the other, and numbers stay tensors of their own."""
    buffers: list[Tensor] = []

    class Locking(VirtualDevice):
        def host_buffer(self, num_bytes: int) -> Tensor:
            buffers.append(super().host_buffer(num_bytes))
            return buffers[-1]

    members = parameters()
    optimizer = AdamW(members)
    set_gradients(members, 0)
    StreamedUpdate(Locking(None)).update(share_of(optimizer))
    (buffer,) = buffers
    for parameter in members[:4]:
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[parameter][name]
            assert 0 <= value.data_ptr() - buffer.data_ptr() < buffer.nbytes
            assert value.stride() == parameter.stride()
            # Who saves it does not save the others.
            assert value.untyped_storage().nbytes() == value.nbytes
        assert optimizer.state[parameter]["step"].shape == ()


def test_state_of_a_checkpoint_moves_to_such_memory_once() -> None:
    moved: list[Tensor] = []

    class Locking(VirtualDevice):
        def copies_fast(self, tensor: Tensor) -> bool:
            return any(0 <= tensor.data_ptr() - buffer.data_ptr() < buffer.nbytes for buffer in moved)

        def host_buffer(self, num_bytes: int) -> Tensor:
            buffer = super().host_buffer(num_bytes)
            moved.append(buffer)
            return buffer

    members = parameters()
    optimizer, streamed = AdamW(members), StreamedUpdate(Locking(CAPACITY))
    set_gradients(members, 0)
    optimizer.step()
    numbers = []
    for step in range(2):
        set_gradients(members, step)
        streamed.update(share_of(optimizer))
        numbers.append(len(moved))
    assert numbers[0] == numbers[1] > 0


def test_where_the_system_locks_no_more_memory_updates_are_the_same() -> None:
    class Refusing(VirtualDevice):
        def copies_fast(self, tensor: Tensor) -> bool:
            return False

        def host_buffer(self, num_bytes: int) -> Tensor:
            raise RuntimeError("cudaHostRegister failed with status 2")

    members, expected = parameters(), parameters()
    optimizer, plain = AdamW(members), AdamW(expected)
    for step in range(3):
        for each in (members, expected):
            set_gradients(each, step)
        plain.step()
        StreamedUpdate(Refusing(CAPACITY)).update(share_of(optimizer))
    assert same(plain, optimizer)


def test_an_error_in_a_piece_is_raised_and_leaves_no_half_of_a_new_state() -> None:
    members = parameters()
    optimizer, streamed = AdamW(members), StreamedUpdate(VirtualDevice(CAPACITY))
    set_gradients(members, 0)
    number = iter(range(100))

    def fails(parameters: list[nn.Parameter]) -> None:
        if next(number) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        streamed.update(share_of(optimizer), fails)
    assert not optimizer.state
    streamed.update(share_of(optimizer))
    assert len(optimizer.state) == len(members) - 1


def test_what_is_not_swapped_is_updated_where_it_is() -> None:
    """A tensor of the user's own beside the module's, on whichever device."""
    swapped, own = parameters()[0], parameters()[2]
    expected = [copy.deepcopy(swapped), copy.deepcopy(own)]
    optimizer, plain = AdamW([swapped, own]), AdamW(expected)
    streamed = StreamedUpdate(VirtualDevice(CAPACITY), lambda parameter: parameter is swapped)
    for _ in range(2):
        for parameter in (swapped, own, *expected):
            parameter.grad = torch.ones_like(parameter)
        plain.step()
        streamed.update(share_of(optimizer))
    assert same(plain, optimizer)


def test_a_parameter_of_a_class_of_its_own_has_all_of_its_group_stepped_one_by_one() -> None:
    """So torch has it on GPUs, where it steps several tensors at once otherwise."""

    class Own(nn.Parameter):
        pass

    usual, own = nn.Parameter(torch.ones(2)), Own(torch.ones(2))
    optimizer = AdamW([{"params": [usual, own]}, {"params": [nn.Parameter(torch.ones(1))]}])
    twin = share_of(optimizer)._twin
    assert [group["foreach"] for group in twin.param_groups] == [False, None]


def test_what_the_pieces_take_is_a_small_part_of_the_capacity() -> None:
    taken: list[int] = []

    class Counting(VirtualDevice):
        def staging(self, num_bytes: int, stream: Any) -> Tensor:
            taken.append(num_bytes)
            return super().staging(num_bytes, stream)

    StreamedUpdate(Counting(1 << 20)).open()
    assert taken == [(1 << 20) // 32] * 2


def test_a_parameter_that_is_updated_as_a_whole_and_finds_no_room_is_refused() -> None:
    class Full(VirtualDevice):
        def staging(self, num_bytes: int, stream: Any) -> Tensor:
            if num_bytes > 8192:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().staging(num_bytes, stream)

    members = parameters()[:1]
    optimizer = Adafactor(members)
    members[0].grad = torch.ones_like(members[0])
    before = members[0].detach().clone()
    with pytest.raises(update_stage.CapacityError, match=r"takes 19 KiB.*as a whole.*device_memory"):
        StreamedUpdate(Full(CAPACITY)).update(share_of(optimizer))
    assert torch.equal(members[0], before)
