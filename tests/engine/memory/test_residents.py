"""Which packs are on the device, who comes next, and who makes way."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_harmony.engine.devices.stream import Happened, HostStream
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.agenda import Place
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.stash import Stash
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.engine.updates.queue import Overlap
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import Errand, Phase, Task
from support.plans import parse_task
from support.queues import queues_of

NUM_PACKS = 5
PACK_BYTES = 4096


class Call:
    """A call that keeps its graph."""

    def __init__(self) -> None:
        self.has_graph = True

    def forget(self) -> None:
        self.has_graph = False


class Leaving(Happened):
    """A copy that ends when it is waited for."""

    was_waited_for = False

    def synchronize(self) -> None:
        self.was_waited_for = True

    def done(self) -> bool:
        return False


class Model:
    """Packs of one layer each, on a device with room for some of them."""

    def __init__(self, num_resident: int) -> None:
        self.device = VirtualDevice(num_resident * PACK_BYTES)
        modules = [nn.Linear(PACK_BYTES // 4, 1, bias=False) for _ in range(NUM_PACKS)]
        layers = [SwappedLayer(i, str(i), module, list(module.parameters())) for i, module in enumerate(modules)]
        store = HostStore([p for layer in layers for p in layer.parameters], self.device)
        pool = HostPool(self.device.host_buffer)
        overlap = Overlap()
        (self.queue,) = queues_of([self.device], overlap)
        self.update = PostponedUpdate([self.queue], overlap)
        swapper = Swapper(self.device, store, pool, Traffic(), self.update)
        self.residents = Residents(
            self.device,
            swapper,
            Sums(self.device, pool, Traffic(), lambda parameter: False, lambda layer, parameter: True),
            Stash(self.device, pool, Traffic()),
        )
        self.residents.packs = [SwappedPack(index, [layer], store) for index, layer in enumerate(layers)]
        order = tuple(range(NUM_PACKS))
        self.residents.agenda.use(Plan(tuple((str(index),) for index in order), order, NUM_PACKS - 1), {})

    def forward(self, pack: int) -> Place:
        return Place(self.residents.packs[pack], Phase.FORWARD, pack)

    def backward(self, pack: int) -> Place:
        return Place(self.residents.packs[pack], Phase.BACKWARD, NUM_PACKS - 1 - pack)

    def keep_graph(self, pack: int, call: Call) -> None:
        residency = self.residents.packs[pack].residency
        assert residency is not None
        residency.graphs.add(call)

    def resident(self) -> set[int]:
        return {pack.index for pack in self.residents.packs if pack.residency is not None}


@pytest.fixture
def model() -> Iterator[Model]:
    torch.manual_seed(0)
    model = Model(num_resident=3)
    yield model
    model.queue.close()
    model.device.close()


def test_the_next_packs_are_fetched_ahead(model: Model) -> None:
    place = model.forward(0)
    model.residents.bring(place, 0)
    assert model.residents.prefetch(place, 0)
    assert model.resident() == {0, 1, 2}


@pytest.mark.parametrize("is_told", [False, True], ids=["looking ahead", "as the plan tells"])
def test_what_is_updated_comes_while_the_pack_before_it_is_not(model: Model, is_told: bool) -> None:
    """Told what comes, the host waited for the first pack of a step, and the second came after it though it was updated."""
    if is_told:
        moves = {(Phase.FORWARD, 0): tuple(Task(pack, Errand.SWAP_IN) for pack in (0, 1, 2))}
        model.residents.agenda.use(model.residents.agenda.plan, moves)
    layers = [model.residents.packs[index].parameters for index in (1, 0)]
    optimizer = torch.optim.SGD([p for parameters in layers for p in parameters], lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    found: list[set[int]] = []

    class Watched(StreamedUpdate):
        def update(self, *args: Any, **options: Any) -> None:
            # The second share, that of the first pack, lasts until the second pack has come.
            deadline = time.monotonic() + 20
            while found and 1 not in model.resident() and time.monotonic() < deadline:
                time.sleep(0.001)
            found.append(model.resident())
            super().update(*args, **options)

    model.queue.streamed = Watched(model.device)
    model.update.start(optimizer, layers, None)
    model.residents.enter(model.forward(0), 0, alone=False)
    assert 1 in found[1]
    assert 0 not in found[1]
    assert model.resident() >= {0, 1}
    model.update.finish()


def test_what_is_not_updated_keeps_its_room(model: Model) -> None:
    """What comes behind it and is updated must not take it."""
    first, *others = (model.residents.packs[index].parameters for index in (1, 2, 3))
    optimizer = torch.optim.SGD([p for parameters in (*others, first) for p in parameters], lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    may_end = threading.Event()
    place = model.forward(0)
    model.residents.bring(place, 0)
    model.update.start(optimizer, [first], lambda parameters: assert_set(may_end))
    try:
        assert not model.residents.prefetch(place, 0)
        assert model.resident() == {0}
    finally:
        may_end.set()
    model.update.finish()
    assert model.residents.prefetch(place, 0)
    assert model.resident() == {0, 1, 2}


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def test_what_is_needed_last_makes_way(model: Model) -> None:
    for index in range(4):
        model.residents.bring(model.forward(index), 0)
    # Pack 0 is the last that the backward comes to.
    assert model.resident() == {1, 2, 3}


def test_what_is_needed_sooner_than_the_next_pack_does_not_make_way_for_it(model: Model) -> None:
    for index in (2, 3, 4):
        model.residents.bring(model.forward(index), 0)
    place = model.backward(4)
    assert model.residents.prefetch(place, 0)
    assert model.resident() == {2, 3, 4}
    assert not model.residents.prefetch(model.backward(3), 3 * PACK_BYTES)


def test_room_for_work_is_left_free(model: Model) -> None:
    place = model.forward(0)
    model.residents.bring(place, 0)
    assert not model.residents.prefetch(place, PACK_BYTES)
    assert model.resident() == {0, 1}


def test_pinned_packs_stay_until_nothing_else_can_go(model: Model) -> None:
    for index in (0, 3, 4):
        model.residents.bring(model.forward(index), 0)
    model.residents.pinned = frozenset({0})
    model.residents.bring(model.forward(1), 0)
    assert model.resident() >= {0, 1}
    model.residents.pinned = frozenset({0, 3, 4})
    model.residents.bring(model.forward(2), 2 * PACK_BYTES)
    assert model.resident() == {2}


def test_an_evicted_pack_takes_the_graphs_of_its_calls_along(model: Model) -> None:
    calls = [Call(), Call()]
    for index, call in enumerate(calls):
        model.residents.bring(model.forward(index), 0)
        model.keep_graph(index, call)
    model.residents.evict_all_but(model.residents.packs[1])
    assert [call.has_graph for call in calls] == [False, True]
    assert model.resident() == {1}


def test_the_graphs_of_the_running_pack_go_before_memory_runs_out(model: Model) -> None:
    call, place = Call(), model.forward(0)
    model.residents.bring(place, 0)
    model.keep_graph(0, call)
    assert model.residents.make_room(place)
    assert not call.has_graph
    assert model.resident() == {0}
    assert not model.residents.make_room(place)


def test_a_pack_that_does_not_fit_at_all_is_named(model: Model) -> None:
    kept = model.device.sums(2 * PACK_BYTES + 1)
    with pytest.raises(CapacityError, match="pack 2"):
        model.residents.bring(model.forward(2), 0)
    del kept


def test_to_wait_for_what_leaves_comes_before_another_swap(model: Model) -> None:
    """Which packs were evicted depended on how fast copies were: a step swapped more than was predicted, or less."""
    for index in (0, 1):
        model.residents.bring(model.forward(index), 0)
    leaves = Leaving()
    model.device.leaving.keep(leaves, model.device.sums(PACK_BYTES))
    model.residents.bring(model.forward(2), 0)
    assert leaves.was_waited_for
    assert model.resident() == {0, 1, 2}


class TestMoves:
    """A plan that knows what its layers cost tells what comes and what goes."""

    def follow(self, model: Model, *moves: str, lookahead: int = 2) -> Place:
        place = model.forward(1)
        agenda = model.residents.agenda
        told = {(place.phase, place.position): [parse_task(move) for move in moves]}
        agenda.use(replace(agenda.plan, lookahead=lookahead), told)
        return place

    def test_what_it_tells_comes_and_goes(self, model: Model) -> None:
        model.residents.bring(model.forward(0), 0)
        place = self.follow(model, "0EVICT", "1SWAP_IN", "4SWAP_IN")
        model.residents.enter(place, 0, alone=False)
        assert model.resident() == {1, 4}

    def test_a_move_is_told_once_a_step(self, model: Model) -> None:
        model.residents.bring(model.forward(0), 0)
        place = self.follow(model, "0EVICT", "1SWAP_IN")
        for _ in range(2):
            model.residents.enter(place, 0, alone=False)
            model.residents.enter(model.forward(0), 0, alone=False)
            assert model.resident() == {0, 1}
        model.residents.reset()
        model.residents.bring(model.forward(0), 0)
        model.residents.enter(place, 0, alone=False)
        assert model.resident() == {1}

    def test_what_comes_ahead_waits_for_room_and_takes_nobody_elses(self, model: Model) -> None:
        """Packs that were fetched ahead took each other's room, and came again and again."""
        model.residents.bring(model.forward(0), 0)
        place = self.follow(model, "1SWAP_IN", "2SWAP_IN", "3SWAP_IN")
        for _ in range(2):
            model.residents.enter(place, 0, alone=False)
            assert model.resident() == {0, 1, 2}
        model.residents.evict(model.residents.packs[0])
        model.residents.enter(place, PACK_BYTES, alone=False)
        assert model.resident() == {1, 2}
        model.residents.enter(place, 0, alone=False)
        assert model.resident() == {1, 2, 3}
        model.residents.evict(model.residents.packs[2])
        model.residents.enter(place, 0, alone=False)
        assert model.resident() == {1, 3}

    def test_what_did_not_come_before_it_was_to_go_does_not_come(self, model: Model) -> None:
        place = self.follow(model, "1SWAP_IN", "4SWAP_IN", "4EVICT")
        model.residents.enter(place, 0, alone=False)
        assert model.resident() == {1}

    def test_nothing_comes_before_its_use_where_the_plan_says_so(self, model: Model) -> None:
        place = self.follow(model, "1SWAP_IN", "2SWAP_IN", lookahead=0)
        model.residents.enter(place, 0, alone=False)
        assert model.resident() == {1}


class TestLessReuse:
    def plan(self, model: Model, **changes: Any) -> None:
        changes = {"first_fused": NUM_PACKS, "lookahead": 0, **changes}
        agenda = model.residents.agenda
        agenda.use(replace(agenda.plan, **changes), {})

    def test_nothing_is_fetched_ahead(self, model: Model) -> None:
        self.plan(model, lookahead=0)
        for pack in range(2):
            model.residents.enter(model.forward(pack), 0, alone=False)
        assert model.resident() == {0, 1}

    def test_what_is_not_fetched_ahead_comes_when_the_device_has_computed(
        self, model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where computing is only launched, a copy that waits for nothing would run beside it."""
        computed = Happened()
        waited_for = []

        class Spy(HostStream):
            def submit(self, work: Any, after: Any = (), *others: Any, **named: Any) -> Any:
                waited_for.append(list(after))
                return super().submit(work, after, *others, **named)

            submit_brief = submit

        monkeypatch.setattr(model.device, "record", lambda: computed)
        model.device.swap_in.close()
        model.device.swap_in = Spy("swap-in")
        model.residents.enter(model.forward(0), 0, alone=False)
        assert [computed] not in waited_for
        self.plan(model, lookahead=0)
        model.residents.enter(model.forward(4), 0, alone=False)
        # It, and then the copy.
        assert waited_for[-2:] == [[computed], []]

    def test_a_visit_leaves_neither_weights_nor_sums(self, model: Model) -> None:
        self.plan(model, reuse="visit")
        first = model.backward(4)
        for _ in range(2):
            model.residents.enter(first, 0, alone=False)
            layer = first.pack.layers[0]
            gradients = [(layer.parameters[0], torch.ones_like(layer.parameters[0]))]
            model.residents.sums.accumulate(first.pack, layer, 0, gradients, add_to_earlier=False)
        residency = first.pack.residency
        model.residents.enter(model.backward(3), 0, alone=False)
        assert residency is not None
        assert model.resident() == {3}
        assert not first.pack.accumulators
        (parked,) = first.pack.parked.values()
        parked.event.synchronize()
        assert all(float(total.sum()) == 2 * PACK_BYTES // 4 for total in parked.sums.values())

    def test_sums_that_were_parked_come_back_and_go_on(self, model: Model) -> None:
        self.plan(model, reuse="none")
        place = model.backward(4)
        layer = place.pack.layers[0]
        for number in range(3):
            model.residents.enter(place, 0, alone=False)
            # Each lane finds the device without what the one before brought.
            assert not place.pack.accumulators
            assert len(place.pack.parked) == min(number, 1)
            gradients = [(layer.parameters[0], torch.ones_like(layer.parameters[0]))]
            model.residents.sums.accumulate(place.pack, layer, 0, gradients, add_to_earlier=False)
        (gradients,) = model.residents.sums.swap_out(place.pack)
        gradients.event.synchronize()
        assert all(bool((total == 3).all()) for total in gradients.sums.values())


def test_sums_of_the_running_pack_make_way_for_its_forward_and_for_the_backward_of_the_loss(model: Model) -> None:
    """They stayed when the second microbatch came to its loss, whose backward had more room in the first step."""
    pack = model.residents.packs[4]
    layer = pack.layers[0]
    gradients = [(layer.parameters[0], torch.ones_like(layer.parameters[0]))]
    model.residents.sums.accumulate(pack, layer, 0, gradients, add_to_earlier=False)
    model.residents.bring(model.forward(4), 0)
    # Its own backward adds to them at once.
    assert not model.residents.make_room(model.backward(4))
    assert pack.accumulators
    assert model.residents.make_room(model.forward(4))
    assert pack.parked
    assert not pack.accumulators


def test_sums_stay_until_nothing_is_added_to_them_any_more(model: Model) -> None:
    """As when a step fails while gradients come from other devices."""
    release = threading.Event()
    added: list[bool] = []

    def add() -> None:
        added.append(release.wait(10))

    model.device.gather.submit(add)
    threading.Timer(0.05, release.set).start()
    model.residents.reset()
    assert added == [True]


@pytest.mark.parametrize(("limit", "resident"), [(3, {0, 1, 2}), (2, {1, 2})])
def test_what_lasts_leaves_what_passes_its_memory(
    model: Model, limit: int, resident: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody needs any more makes way before anything waits for an update, or is not fetched ahead."""
    monkeypatch.setattr(
        model.device, "has_lasting_room", lambda size: len(model.resident()) * PACK_BYTES + size <= limit * PACK_BYTES
    )
    for pack in (3, 2):
        model.residents.enter(model.backward(pack), 0, alone=False)
    assert model.resident() == resident


def test_weights_wait_for_an_update_before_they_take_the_memory_of_what_passes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[str] = ["the third pack's", "the second pack's"]

    def retire(*, wait: bool = False) -> bool:
        return wait and bool(updates) and bool(updates.pop())

    monkeypatch.setattr(model.device.leaving, "retire", retire)
    monkeypatch.setattr(model.device, "has_lasting_room", lambda size: len(updates) < 2)
    place = model.backward(1)
    model.residents.enter(place, 0, alone=False)
    assert updates == ["the third pack's"]
    assert place.pack.residency is not None
    # Nothing makes way any more: it has that memory, too.
    monkeypatch.setattr(model.device, "has_lasting_room", lambda size: False)
    model.residents.enter(model.backward(0), 0, alone=False)
    assert model.residents.packs[0].residency is not None
    assert updates == []
