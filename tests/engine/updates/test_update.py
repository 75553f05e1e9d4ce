"""The update: pack by pack it is the same step, and every gradient ends where plain training puts it."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_harmony.engine.devices.stream import Event, Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import lay_out
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SummedGradients
from lightning_harmony.engine.updates.optimizer_twin import Share
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.engine.updates.update import StepUpdate, Updater
from lightning_harmony.engine.updates.update_stage import Stage
from lightning_harmony.plan.values.host_need import RING

Groups = list[dict[str, object]]

OPTIMIZERS: dict[str, Callable[[Groups], Optimizer]] = {
    "SGD": lambda groups: SGD(groups, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: AdamW(groups, amsgrad=True),
    "Adafactor": Adafactor,
}


@pytest.fixture
def pool() -> HostPool:
    return HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))


@pytest.fixture
def updater(pool: HostPool) -> Iterator[Updater]:
    updater = Updater(pool, [StreamedUpdate(VirtualDevice(None))])
    yield updater
    updater.close()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Gate(Happened):
    """An event that happens when the test opens it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.is_waited_for = threading.Event()

    def open(self) -> None:
        self._open.set()

    def synchronize(self) -> None:
        self.is_waited_for.set()
        self._open.wait(60)

    def done(self) -> bool:
        return self._open.is_set()


class Broken(Happened):
    """The event of a copy that failed."""

    def synchronize(self) -> None:
        raise OSError("copy failed")


def layer_of(index: int, *parameters: nn.Parameter) -> SwappedLayer:
    return SwappedLayer(index, f"layer {index}", None, parameters)


def on_host(
    pool: HostPool,
    layer: SwappedLayer,
    gradients: dict[nn.Parameter, Tensor],
    *,
    use: int = 0,
    event: Event | None = None,
    includes_earlier: Sequence[nn.Parameter] = (),
) -> SummedGradients:
    """Gradients of a layer as they arrive on the host."""
    slots, num_bytes = lay_out(list(gradients.values()))
    buffer, _ = pool.take(num_bytes)
    sums = {}
    for (parameter, gradient), slot in zip(gradients.items(), slots, strict=True):
        sums[layer, parameter] = slot.view(buffer).copy_(gradient)
    return SummedGradients(use, buffer, event or Happened(), sums, set(includes_earlier))


def some_parameters(number: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(5, 3 + index)) for index in range(number)]


def two_groups(parameters: Sequence[nn.Parameter]) -> Groups:
    """Every other parameter in a group of its own settings."""
    return [
        {"params": list(parameters[::2]), "lr": 0.1},
        {"params": list(parameters[1::2]), "lr": 0.01, "weight_decay": 0.1},
    ]


def same_state(one: Optimizer, other: Optimizer) -> bool:
    first, second = one.state_dict(), other.state_dict()
    if first["param_groups"] != second["param_groups"] or first["state"].keys() != second["state"].keys():
        return False
    return all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(second["state"][number][key]))
        for number, state in first["state"].items()
        for key, value in state.items()
    )


class TestJustInTime:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_pack_by_pack_is_one_step_bit_for_bit(self, pool: HostPool, updater: Updater, name: str) -> None:
        plain = some_parameters()
        ours = copy.deepcopy(plain)
        expected, optimizer = (OPTIMIZERS[name](two_groups(each)) for each in (plain, ours))
        packs = [ours[:1], ours[1:3], ours[3:]]
        layers = [layer_of(index, *pack) for index, pack in enumerate(packs)]
        for _ in range(3):
            gradients = [torch.randn_like(parameter) for parameter in ours]
            for parameter, gradient in zip(plain, gradients, strict=True):
                parameter.grad = gradient.clone()
            expected.step()
            updater.begin(packs, StepUpdate(optimizer))
            found = dict(zip(ours, gradients, strict=True))
            for pack, layer in reversed(list(zip(packs, layers, strict=True))):
                updater.deliver(pack, [on_host(pool, layer, {p: found[p] for p in pack})])
            updater.finish()
        assert all(torch.equal(p, q) for p, q in zip(plain, ours, strict=True))
        assert same_state(expected, optimizer)

    def test_leaves_the_optimizer_and_the_gradients_as_a_step_does(self, pool: HostPool, updater: Updater) -> None:
        parameters = some_parameters()
        optimizer = SGD(two_groups(parameters))
        groups = optimizer.param_groups
        members = [list(group["params"]) for group in groups]
        updater.begin([parameters], StepUpdate(optimizer))
        updater.deliver(parameters, [on_host(pool, layer_of(0), {p: torch.ones_like(p) for p in parameters})])
        updater.finish()
        assert optimizer.param_groups is groups
        assert all(
            p is q for now, then in zip(groups, members, strict=True) for p, q in zip(now["params"], then, strict=True)
        )
        assert all(parameter.grad is None for parameter in parameters)

    @pytest.mark.parametrize("may_outlast", [False, True])
    def test_who_looks_at_the_optimizer_meanwhile_sees_all_parameters(
        self, pool: HostPool, updater: Updater, may_outlast: bool
    ) -> None:
        """A callback that reads a learning rate in the backward, which the update runs under."""
        parameters = some_parameters()
        optimizer = AdamW(two_groups(parameters))
        before = [parameter.detach().clone() for parameter in parameters]
        seen: list[Groups] = []
        updater.begin(
            [[parameter] for parameter in parameters],
            StepUpdate(
                optimizer,
                clip=lambda _: seen.append([dict(group) for group in optimizer.param_groups]),
                may_outlast=may_outlast,
            ),
        )
        for index, parameter in enumerate(parameters):
            updater.deliver([parameter], [on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)})])
        updater.finish()
        updater.postponed.finish()
        assert len(seen) == len(parameters)
        assert all([group["params"] for group in groups] == [parameters[::2], parameters[1::2]] for groups in seen)
        assert all([group["lr"] for group in groups] == [0.1, 0.01] for groups in seen)
        assert not any(torch.equal(*each) for each in zip(parameters, before, strict=True))

    def test_an_optimizer_of_another_kind_steps_itself_for_who_insists(self, pool: HostPool, updater: Updater) -> None:
        class Counting(SGD):
            num_steps = 0

            def step(self, closure: Any = None) -> Any:
                self.num_steps += 1
                return super().step(closure)

        parameters = some_parameters(2)
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer = Counting(parameters, lr=1.0)
        updater.begin([[parameter] for parameter in parameters], StepUpdate(optimizer))
        for index, parameter in enumerate(parameters):
            updater.deliver([parameter], [on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)})])
        updater.finish()
        assert optimizer.num_steps == 2
        assert all(torch.equal(p, q - 1) for p, q in zip(parameters, before, strict=True))

    def test_a_parameter_without_gradient_is_not_stepped(self, pool: HostPool, updater: Updater) -> None:
        used, unused = some_parameters(2)
        before = unused.detach().clone()
        optimizer = AdamW([used, unused], weight_decay=0.5)
        updater.begin([[used, unused]], StepUpdate(optimizer))
        updater.deliver([used, unused], [on_host(pool, layer_of(0), {used: torch.ones_like(used)})])
        updater.finish()
        assert torch.equal(unused, before)
        assert unused not in optimizer.state
        assert used in optimizer.state

    def test_a_parameter_of_no_group_is_left_alone(self, pool: HostPool, updater: Updater) -> None:
        ours, foreign = some_parameters(2)
        before = foreign.detach().clone()
        updater.begin([[ours], [foreign]], StepUpdate(SGD([ours], lr=0.1)))
        for index, parameter in enumerate((foreign, ours)):
            updater.deliver([parameter], [on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)})])
        updater.finish()
        assert torch.equal(foreign, before)

    def test_waits_for_the_gradients(self, pool: HostPool, updater: Updater) -> None:
        (parameter,) = some_parameters(1)
        before = parameter.detach().clone()
        gate = Gate()
        updater.begin([[parameter]], StepUpdate(SGD([parameter], lr=1.0)))
        source = on_host(pool, layer_of(0), {parameter: torch.zeros_like(parameter)}, event=gate)
        updater.deliver([parameter], [source])
        for view in source.sums.values():
            view.fill_(1)
        gate.open()
        updater.finish()
        assert torch.equal(parameter, before - 1)

    def test_gives_the_buffers_back_at_once(self, pool: HostPool, updater: Updater) -> None:
        parameters = some_parameters(2)
        updater.begin([parameters], StepUpdate(SGD(parameters, lr=1.0)))
        source = on_host(pool, layer_of(0), {p: torch.ones_like(p) for p in parameters})
        updater.deliver(parameters, [source])
        updater.finish()
        assert pool.take(source.buffer.numel())[0] is source.buffer


class TestHoldingBack:
    def test_nothing_changes_before_the_end(self, pool: HostPool, updater: Updater) -> None:
        parameters = some_parameters(2)
        before = [parameter.detach().clone() for parameter in parameters]
        updater.begin([[p] for p in parameters], StepUpdate(SGD(parameters, lr=1.0)), hold_back=True)
        for index, parameter in enumerate(parameters):
            updater.deliver([parameter], [on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)})])
        updater.drain()
        assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
        updater.finish()
        assert all(torch.equal(p, q - 1) for p, q in zip(parameters, before, strict=True))
        assert all(parameter.grad is None for parameter in parameters)
        # Each buffer went when it was used.
        assert pool.num_bytes == 0

    def test_a_step_that_never_ends_changes_nothing(self, pool: HostPool, updater: Updater) -> None:
        (parameter,) = some_parameters(1)
        before = parameter.detach().clone()
        updater.begin([[parameter]], StepUpdate(SGD([parameter], lr=1.0)), hold_back=True)
        updater.deliver([parameter], [on_host(pool, layer_of(0), {parameter: torch.ones_like(parameter)})])
        updater.begin([[parameter]], StepUpdate())
        updater.finish()
        assert torch.equal(parameter, before)
        assert pool.num_bytes == 0


def test_of_what_has_arrived_that_is_updated_first_which_a_forward_needs_first(pool: HostPool) -> None:
    done: list[nn.Parameter] = []
    updater = Updater(
        pool, [StreamedUpdate(VirtualDevice(None))], on_update=lambda parameters, start, end: done.extend(parameters)
    )
    parameters, gate = some_parameters(4), Gate()
    updater.begin([[p] for p in parameters], StepUpdate(SGD(parameters, lr=1.0)))
    for index, parameter in reversed(list(enumerate(parameters))):
        source = on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)}, event=gate)
        updater.deliver([parameter], [source])
        # None has arrived when the first is chosen: it is the one that was delivered first.
        assert gate.is_waited_for.wait(60)
    gate.open()
    updater.finish()
    updater.close()
    assert list(map(id, done)) == [id(parameters[index]) for index in (3, 0, 1, 2)]


class TestSeveralDevices:
    """Each updates what it has summed; updates ran one after the other, and all buses but one were idle."""

    def test_updates_of_two_devices_run_beside_each_other(
        self, pool: HostPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both, where = threading.Barrier(2), dict[nn.Parameter, VirtualDevice]()
        update = StreamedUpdate.update

        def beside(self: StreamedUpdate, share: Share, *args: Any, **options: Any) -> None:
            # Neither ends before the other has begun.
            both.wait(60)
            where.update(dict.fromkeys(share.parameters, self.device))
            update(self, share, *args, **options)

        monkeypatch.setattr(StreamedUpdate, "update", beside)
        devices = [VirtualDevice(None), VirtualDevice(None)]
        updater = Updater(pool, [StreamedUpdate(device) for device in devices])
        parameters = some_parameters(4)
        before = [parameter.detach().clone() for parameter in parameters]
        updater.begin([[p] for p in parameters], StepUpdate(SGD(parameters, lr=1.0)))
        for index, parameter in reversed(list(enumerate(parameters))):
            source = on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)})
            updater.deliver([parameter], [source])
        updater.finish()
        updater.close()
        assert all(torch.equal(new, old - 1) for new, old in zip(parameters, before, strict=True))
        # Of those on the host, each takes its turn.
        assert [where[parameter] for parameter in parameters] == [*devices, *devices]
        assert 0.0 <= updater.overlap.take_hidden() <= 1.0

    @pytest.mark.parametrize("number", [0, 1])
    def test_gradients_are_updated_where_they_are(self, pool: HostPool, number: int) -> None:
        done = []
        devices = [VirtualDevice(None), VirtualDevice(None)]

        class Told(StreamedUpdate):
            def update(self, share: Share, *args: Any, **options: Any) -> None:
                done.append(self.device)
                super().update(share, *args, **options)

        updater = Updater(pool, [Told(device) for device in devices])
        (parameter,) = some_parameters(1)
        before = parameter.detach().clone()
        updater.begin([[parameter]], StepUpdate(SGD([parameter], lr=1.0)))
        (slot,), num_bytes = lay_out([parameter])
        gradient = slot.view(devices[number].sums(num_bytes)).fill_(1.0)
        source = on_host(pool, layer_of(0), {parameter: torch.ones_like(parameter)})
        source.sums = dict.fromkeys(source.sums, gradient)
        updater.deliver([parameter], [source])
        updater.finish()
        updater.close()
        assert done == [devices[number]]
        assert torch.equal(parameter, before - 1)

    def test_an_optimizer_that_steps_as_a_whole_is_stepped_by_one(self, pool: HostPool) -> None:
        threads = set()

        class Own(SGD):
            def step(self, *args: Any) -> Any:
                threads.add(threading.get_ident())
                return super().step(*args)

        updater = Updater(pool, [StreamedUpdate(VirtualDevice(None)) for _ in range(2)])
        parameters = some_parameters(4)
        updater.begin([[p] for p in parameters], StepUpdate(Own(parameters, lr=1.0)))
        for index, parameter in enumerate(parameters):
            updater.deliver([parameter], [on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)})])
        updater.finish()
        updater.close()
        assert len(threads) == 1


def test_a_large_update_lets_a_more_urgent_one_go_first(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pack that the next forward begins with comes last, behind one that may take long."""
    done: list[nn.Parameter] = []
    updater = Updater(
        pool, [StreamedUpdate(VirtualDevice(4096))], on_update=lambda parameters, start, end: done.extend(parameters)
    )
    small, large = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(100, 100))
    expected = [parameter.detach().clone() for parameter in (small, large)]
    launch, begun, delivered = Stage.launch, threading.Event(), threading.Event()

    def watched(*args: Any, **options: Any) -> None:
        launch(*args, **options)
        begun.set()
        assert delivered.wait(60)

    monkeypatch.setattr(Stage, "launch", watched)
    optimizer = SGD([small, large], lr=1.0)
    updater.begin([[small], [large]], StepUpdate(optimizer))
    updater.deliver([large], [on_host(pool, layer_of(1), {large: torch.ones_like(large)})])
    assert begun.wait(60)
    updater.deliver([small], [on_host(pool, layer_of(0), {small: torch.ones_like(small)})])
    delivered.set()
    updater.finish()
    updater.close()
    assert list(map(id, done)) == list(map(id, [large, small, large]))
    assert all(torch.equal(new, old - 1) for new, old in zip((small, large), expected, strict=True))


@pytest.mark.parametrize("room", [None, 3], ids=["few packs", "little room"])
def test_few_packs_wait_for_their_update(pool: HostPool, updater: Updater, room: int | None) -> None:
    """Those of more packs, or of more than the host has room for, are held up until others are updated."""
    parameters = some_parameters(RING + 1 if room is None else room + 1)
    num_bytes = lay_out(parameters[:1])[1]
    pool.limit = None if room is None else room * num_bytes
    gate = Gate()
    updater.begin([[p] for p in parameters], StepUpdate(SGD(parameters, lr=1.0)))
    waited = threading.Event()

    def deliver() -> None:
        for index, parameter in enumerate(parameters):
            updater.await_room(num_bytes)
            source = on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)}, event=gate)
            updater.deliver([parameter], [source])
        waited.set()

    delivering = threading.Thread(target=deliver)
    delivering.start()
    assert not waited.wait(0.05)
    gate.open()
    delivering.join(60)
    assert waited.is_set()
    updater.finish()


class TestSharedParameter:
    CONTRIBUTIONS = ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0))

    def total(self, pool: HostPool, updater: Updater, order: Sequence[int], gradients: Sequence[Tensor]) -> Tensor:
        """The gradient of a parameter of three layers, the first called three times; packs come in an order."""
        shared = nn.Parameter(torch.zeros_like(gradients[0]))
        updater.begin([[shared]] * 3, StepUpdate())
        for index in order:
            layer = layer_of(index, shared)
            updater.deliver(
                [shared],
                [
                    on_host(pool, layer, {shared: gradient}, use=use)
                    for (owner, use), gradient in zip(self.CONTRIBUTIONS, gradients, strict=True)
                    if owner == index
                ],
            )
        updater.finish()
        assert shared.grad is not None
        return shared.grad.clone()

    def test_is_summed_in_one_order_whichever_pack_comes_first(self, pool: HostPool, updater: Updater) -> None:
        # Of magnitudes so far apart that every order has another sum.
        gradients = [torch.randn(100) * 10.0**power for power in (0, 4, 7, 3, 5)]
        first, second, third, *others = gradients
        # As autograd meets them: the last use of a layer has its gradient first.
        expected = third + second + first
        for gradient in others:
            expected = expected + gradient
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)):
            assert torch.equal(self.total(pool, updater, order, gradients), expected)
        assert not torch.equal(sum(reversed(gradients), torch.zeros(100)), expected)

    def test_is_stepped_once_when_its_last_owner_has_delivered(self, pool: HostPool, updater: Updater) -> None:
        shared = nn.Parameter(torch.zeros(3))
        optimizer = SGD([shared], lr=1.0)
        updater.begin([[shared], [shared]], StepUpdate(optimizer))
        updater.deliver([shared], [on_host(pool, layer_of(1, shared), {shared: torch.ones(3)})])
        updater.drain()
        assert shared.tolist() == [0, 0, 0]
        updater.deliver([shared], [on_host(pool, layer_of(0, shared), {shared: torch.ones(3)})])
        updater.finish()
        assert shared.tolist() == [-2, -2, -2]

    def test_is_stepped_when_its_last_owner_has_no_gradient_for_it(self, pool: HostPool, updater: Updater) -> None:
        shared = nn.Parameter(torch.zeros(3))
        updater.begin([[shared], [shared]], StepUpdate(SGD([shared], lr=1.0)))
        updater.deliver([shared], [on_host(pool, layer_of(1, shared), {shared: torch.ones(3)})])
        updater.deliver([shared], [])
        updater.finish()
        assert shared.tolist() == [-1, -1, -1]

    def test_does_not_hold_up_the_rest_of_its_pack(self, pool: HostPool, updater: Updater) -> None:
        shared, own = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        updater.begin([[shared, own], [shared]], StepUpdate(SGD([shared, own], lr=1.0)))
        source = on_host(pool, layer_of(0), {shared: torch.ones(3), own: torch.ones(3)})
        updater.deliver([shared, own], [source])
        updater.drain()
        assert own.tolist() == [-1, -1, -1]
        assert pool.take(source.buffer.numel())[0] is not source.buffer
        updater.deliver([shared], [])
        updater.finish()
        assert pool.take(source.buffer.numel())[0] is source.buffer


class TestCollecting:
    def collect(self, pool: HostPool, updater: Updater, gradients: dict[nn.Parameter, Tensor]) -> SummedGradients:
        updater.begin([list(gradients)], StepUpdate())
        source = on_host(pool, layer_of(0), gradients)
        updater.deliver(list(gradients), [source])
        updater.finish()
        return source

    def test_gradients_become_the_parameters(self, pool: HostPool, updater: Updater) -> None:
        parameters = some_parameters(2)
        gradients = {parameter: torch.randn_like(parameter) for parameter in parameters}
        before = [parameter.detach().clone() for parameter in parameters]
        self.collect(pool, updater, gradients)
        assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in gradients.items())
        assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))

    def test_gradients_are_added_to_those_of_earlier_batches(self, pool: HostPool, updater: Updater) -> None:
        (parameter,) = some_parameters(1)
        parameter.grad = earlier = torch.ones_like(parameter)
        self.collect(pool, updater, {parameter: torch.ones_like(parameter)})
        assert parameter.grad is earlier
        assert torch.equal(earlier, torch.full_like(earlier, 2))

    def test_sums_replace_the_gradients_that_they_include(self, pool: HostPool, updater: Updater) -> None:
        (parameter,) = some_parameters(1)
        parameter.grad = torch.ones_like(parameter)
        updater.begin([[parameter]], StepUpdate())
        total = torch.full_like(parameter, 5)
        updater.deliver([parameter], [on_host(pool, layer_of(0), {parameter: total}, includes_earlier=[parameter])])
        updater.finish()
        assert torch.equal(parameter.grad, total)


class TestErrors:
    def failing(self, parameters: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch) -> Optimizer:
        optimizer = SGD(parameters, lr=1.0)

        def step() -> None:
            raise ZeroDivisionError("in the optimizer")

        monkeypatch.setattr(optimizer, "step", step)
        return optimizer

    def test_of_the_optimizer_are_raised_by_finish(
        self, pool: HostPool, updater: Updater, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parameters = some_parameters(2)
        optimizer = self.failing(parameters, monkeypatch)
        updater.begin([[parameter] for parameter in parameters], StepUpdate(optimizer))
        for index, parameter in enumerate(parameters):
            updater.deliver([parameter], [on_host(pool, layer_of(index), {parameter: torch.ones_like(parameter)})])
        with pytest.raises(ZeroDivisionError, match="in the optimizer"):
            updater.finish()
        assert [len(group["params"]) for group in optimizer.param_groups] == [2]

    def test_of_a_copy_are_raised_by_finish(self, pool: HostPool, updater: Updater) -> None:
        (parameter,) = some_parameters(1)
        updater.begin([[parameter]], StepUpdate())
        gradients = {parameter: torch.ones_like(parameter)}
        updater.deliver([parameter], [on_host(pool, layer_of(0), gradients, event=Broken())])
        with pytest.raises(OSError, match="copy failed"):
            updater.finish()
        assert parameter.grad is None

    def test_are_raised_once(self, pool: HostPool, updater: Updater, monkeypatch: pytest.MonkeyPatch) -> None:
        (parameter,) = some_parameters(1)
        updater.begin([[parameter]], StepUpdate(self.failing([parameter], monkeypatch)))
        updater.deliver([parameter], [on_host(pool, layer_of(0), {parameter: torch.ones_like(parameter)})])
        with pytest.raises(ZeroDivisionError):
            updater.finish()
        updater.begin([[parameter]], StepUpdate())
        updater.finish()

    def test_a_step_that_was_given_up_does_not_run_into_the_next(self, pool: HostPool, updater: Updater) -> None:
        (parameter,) = some_parameters(1)
        optimizer = SGD([parameter], lr=1.0)
        before = parameter.detach().clone()
        gate = Gate()
        updater.begin([[parameter]], StepUpdate(optimizer))
        gradients = {parameter: torch.ones_like(parameter)}
        updater.deliver([parameter], [on_host(pool, layer_of(0), gradients, event=gate)])
        opening = threading.Thread(target=gate.open)
        opening.start()
        updater.begin([[parameter]], StepUpdate())
        opening.join()
        assert torch.equal(parameter, before - 1)
        assert parameter.grad is None
        updater.finish()

    def test_close_joins_the_thread(self, pool: HostPool) -> None:
        before = threading.active_count()
        updater = Updater(pool, [StreamedUpdate(VirtualDevice(None))])
        updater.begin([], StepUpdate())
        assert threading.active_count() == before + 1
        updater.close()
        assert threading.active_count() == before
