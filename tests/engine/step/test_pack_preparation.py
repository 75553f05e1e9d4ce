"""Lanes that come to a pack find room for all that they allocate there."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.memory import stash
from lightning_harmony.engine.memory.agenda import Place
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.plan.values.plan import Plan
from support import nets
from support.same_training import Net, train_harmony

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

# Of sizes that are stashed: what is smaller stays on the device, and counts nowhere.
TOKENS = torch.randint(0, nets.VOCABULARY, (16, 257), generator=torch.Generator().manual_seed(0))
# A lane's own numbers: its loss, and the gradient of that.
NUMBERS = 64


@dataclass
class Reserved:
    """What was to be free from a moment on, and what was allocated since.

    Attributes:
        where: phase and pack.
        allowed_bytes: what may be allocated.
        peak: tells the most that was.
    """

    where: tuple[str, int]
    allowed_bytes: int
    peak: Callable[[], int]


class Watch:
    """Holds what each visit by a plan allocates against the room that was made for it.

    Attributes:
        short: the most bytes that room was made too few of, by phase and pack.
    """

    def __init__(self) -> None:
        self.short: dict[tuple[str, int], int] = {}
        self._reserved: Reserved | None = None
        self._is_known = False

    def close(self) -> None:
        """What was allocated has been, or more room is made now."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            short = reserved.peak() - reserved.allowed_bytes
            self.short[reserved.where] = max(short, self.short.get(reserved.where, short))

    def open(self, residents: Residents, place: Place, num_bytes: int) -> None:
        """There is room for so much, if it is known what is needed."""
        if self._is_known:
            device = residents.device
            where = place.phase.name, place.pack.index
            self._reserved = Reserved(where, device.allocated_bytes() + num_bytes, device.watch_peak())

    @contextmanager
    def on(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Watch, as long as the context lasts."""
        enter, ensure_room = Residents.enter, Residents.ensure_room

        def entering(residents: Residents, place: Place, work_bytes: int, *, alone: bool) -> None:
            self.close()
            self._is_known = not alone
            enter(residents, place, work_bytes, alone=alone)
            self.open(residents, place, work_bytes)

        def ensuring_room(residents: Residents, num_bytes: int, place: Place) -> None:
            self.close()
            ensure_room(residents, num_bytes, place)
            self.open(residents, place, num_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(Residents, "enter", entering)
            patch.setattr(Residents, "ensure_room", ensuring_room)
            yield


def language(num_blocks: int = 5) -> Net:
    torch.manual_seed(0)
    net = nets.Language(num_blocks=num_blocks)
    # So that the backward of the loss takes more than that of any layer.
    net.head = nn.Linear(nets.WIDTH, 16 * nets.VOCABULARY, bias=False)
    return Net(net)


def train(module: Net, plan: Plan | None, precision: str, devices: int = 1) -> Plan:
    """Train without a capacity, so that nothing but lanes allocates once all has come; returns the plan."""
    strategy = HarmonyStrategy(num_microbatches=2, plan=plan, profile_cache=False)
    options = {"precision": precision, "devices": devices}
    train_harmony(copy.deepcopy(module), TOKENS, strategy, 4, with_gradients=False, **options)
    assert strategy.plan is not None
    return strategy.plan


@cache
def planned(precision: str) -> Plan:
    """The plan of the model's own."""
    return train(language(), None, precision)


def repacked(plan: Plan, sizes: list[int], **changes: Any) -> Plan:
    """A plan with packs of so many layers, whose last one is fused."""
    layers = [name for pack in plan.packs for name in pack]
    assert sum(sizes) == len(layers)
    packs = tuple(tuple(layers[sum(sizes[:n]) : sum(sizes[: n + 1])]) for n in range(len(sizes)))
    places = {"visits": tuple(range(len(packs))), "first_fused": len(packs) - 1, "joined": frozenset()}
    return replace(plan, packs=packs, device_updated=frozenset(), predicted=None, **(places | changes))


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("sizes", "kept"),
    [([1] * 7, ()), ([1] * 7, (1, 2)), ([1, 3, 3], ()), ([1, 3, 3], (0, 1)), ([7], ())],
    ids=["layers", "layers that keep graphs", "packs", "packs that keep graphs", "all in one"],
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.sampled
def test_there_is_room_for_what_a_visit_allocates(
    sizes: list[int], kept: tuple[int, ...], fused: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On an H200, two microbatches of a model of 5 B parameters once took 17 MiB more than their capacity: the backward of the
    # loss found the head's graph, for which nobody had counted. Several layers that keep graphs were short of one, too.
    changes: dict[str, Any] = {"kept": frozenset(kept)} | ({} if fused else {"first_fused": len(sizes)})
    plan = repacked(planned(precision), sizes, **changes)
    watch = Watch()
    with watch.on(monkeypatch):
        train(language(), plan, precision)
    assert len(watch.short) == 2 * len(sizes)
    assert {where: short for where, short in watch.short.items() if short > NUMBERS} == {}


@pytest.mark.cpu
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.sampled
def test_there_is_room_for_the_backward_of_a_loss_on_the_last_of_several_devices(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It was measured on the first device, where it allocates nothing, wherever the last pack was.
    module, num_packs = language(num_blocks=4), 6
    changes: dict[str, Any] = {"kept": frozenset()} | ({} if fused else {"first_fused": num_packs})
    plan = repacked(train(module, None, "32-true", devices=2), [1] * num_packs, **changes)
    assert plan.device_of(plan.visits[-1], 0) == 1
    watch = Watch()
    with watch.on(monkeypatch):
        train(module, plan, "32-true", devices=2)
    assert len(watch.short) == 2 * num_packs
    # Labels come to the loss from the first device.
    labels_bytes = TOKENS[:2, 1:].nbytes
    assert {where: short for where, short in watch.short.items() if short > NUMBERS + labels_bytes} == {}


@pytest.mark.cpu
def test_lanes_that_are_measured_have_all_memory_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    # What lanes before one had stashed was still on its way out, in the backward of the loss, too: a first step on a GPU took
    # more than the capacity where copies were late, or what it took was seen as less than it was.
    leaving: list[int] = []
    copy_of, begin_turn = stash.copy_to, Observer.begin_turn

    def late_copy(destination: Tensor, source: Tensor) -> None:
        time.sleep(0.005)
        copy_of(destination, source)

    def watched(observer: Observer, *arguments: Any) -> None:
        if observer.is_measuring:
            leaving.extend(len(residents.stash.pending) for residents in observer._placement.residents)
        begin_turn(observer, *arguments)

    monkeypatch.setattr(stash, "copy_to", late_copy)
    monkeypatch.setattr(Observer, "begin_turn", watched)
    train(language(), None, "32-true")
    # Of seven layers, forth and back, and the loss.
    assert len(leaving) >= 2 * (2 * 7 + 1)
    assert not any(leaving)
