"""The plan in use: what it was made from, what it predicts, and plans that are given."""

from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from traceback import extract_stack
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import CapacityError, HarmonyStrategy, PlanError, StepReport
from lightning_harmony.engine.devices.stream import HostStream
from lightning_harmony.engine.lanes.lane import this_thread
from lightning_harmony.engine.measure.profile import Speed, UpdateSpeeds
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.plan.search.graphs import fused_alone
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.plan import Plan, visits_of
from lightning_harmony.plan.values.prediction import DevicePrediction
from lightning_harmony.plan.values.record import Record
from lightning_harmony.plan.values.task import Phase, Task
from support import nets
from support.cases import NETS, SUMMED_IN_ANOTHER_ORDER
from support.copies import Late, Prompt
from support.same_training import SEED, Net, Reports, compare, room, train_harmony, trainer_for
from support.sampling import IS_WHOLE, combined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


def build(net: type[torch.nn.Module] = nets.Language) -> Net:
    torch.manual_seed(SEED)
    return Net(net())


def fit(
    strategy: Any, module: Net | None = None, *, samples: Any = None, **options: Any
) -> tuple[Plan, list[StepReport]]:
    """The plan in use at the end, and what each of three steps did."""
    reports = Reports()
    plans: list[Plan] = []
    reports.on_train_epoch_end = lambda trainer, module: plans.append(trainer.strategy.plan)  # type: ignore[method-assign]
    trainer = trainer_for(strategy, 3, [reports], **{"devices": 1, **options})
    trainer.fit(module or build(), DataLoader(nets.tokens() if samples is None else samples, batch_size=8))
    return plans[0], reports.reports


@cache
def planned(capacity: str | None = "96KiB", net: type[torch.nn.Module] = nets.Language, **options: Any) -> Plan:
    return fit(HarmonyStrategy(device_memory=capacity, num_microbatches=4), build(net), **options)[0]


class TestProfile:
    def test_each_layer_is_measured_while_the_first_step_trains(self) -> None:
        plan = planned()
        assert plan.profile is not None
        costs = {cost.name: cost for cost in plan.profile.layers}
        assert list(costs) == ["net.embed", *(f"net.blocks.{i}" for i in range(4)), "net.head"]
        assert all(cost.forward_seconds > 0 for cost in costs.values())
        assert all(cost.backward_seconds > cost.recompute_seconds > 0 for cost in costs.values())
        block = sum(p.numel() * p.element_size() for p in nets.Block().parameters())
        assert costs["net.blocks.0"].copied_bytes >= block
        # Two samples of six tokens, as wide as the model.
        assert costs["net.blocks.2"].stash_bytes == 2 * 6 * nets.WIDTH * 4
        machine = plan.profile.machine
        assert machine.capacity_bytes == 96 * 1024
        assert all(
            speed is not None and speed > 0
            for speed in (
                machine.swap_in_bytes_per_second,
                machine.swap_out_bytes_per_second,
                machine.update_bytes_per_second,
            )
        )

    @pytest.mark.cpu
    @pytest.mark.parametrize("parallel", ["pipeline", "data"])
    def test_copies_between_devices_have_a_speed(self, parallel: Any) -> None:
        for devices in (1, 2):
            strategy = HarmonyStrategy(device_memory="96KiB", num_microbatches=4, parallel=parallel)
            plan, _ = fit(strategy, devices=devices)
            assert plan.profile is not None
            assert (plan.profile.machine.transfer_bytes_per_second is not None) == (devices > 1)

    @pytest.mark.cpu
    def test_an_update_that_is_not_just_in_time_has_no_speed(self) -> None:
        strategy = HarmonyStrategy(device_memory="96KiB", num_microbatches=4, update="deferred")
        plan, _ = fit(strategy)
        assert plan.profile is not None
        assert plan.profile.machine.update_bytes_per_second is None
        assert plan.predicted is not None

    @pytest.mark.cpu
    @pytest.mark.parametrize("beside_copies", [600.0, 950.0, 1100.0])
    def test_updates_are_predicted_as_they_are_beside_the_copies_of_the_plan(
        self, beside_copies: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Layer by layer there are few copies beside them: on GPUs, steps that updates bound were predicted too short."""
        seen: list[float] = []
        note = UpdateSpeeds.note

        def told(self: UpdateSpeeds, of_step: Speed) -> None:
            if of_step.num_bytes:
                seen.append(1000.0 if len(seen) < 2 else beside_copies)
                of_step = Speed(int(seen[-1]), 1.0)
            note(self, of_step)

        monkeypatch.setattr(UpdateSpeeds, "note", told)
        plans: list[Plan] = []

        class Look(Reports):
            def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
                plans.append(trainer.strategy.plan)
                next(module.parameters()).clone()

        strategy = HarmonyStrategy(device_memory="96KiB", num_microbatches=4, profile_cache=False)
        trainer = trainer_for(strategy, 8, [Look()], devices=1)
        trainer.fit(build(), DataLoader(nets.tokens(64), batch_size=8))
        predicted = {
            plan.profile.machine.update_bytes_per_second: plan.predicted.seconds
            for plan in plans
            if plan.profile is not None and plan.predicted is not None
        }
        # None had been seen when the first plan was made.
        assert list(predicted) == [None, 1000.0, beside_copies]
        # What is predicted changes, and not what is done.
        assert (predicted[beside_copies] - predicted[1000.0]) * (beside_copies - 1000.0) <= 0
        assert len({(plan.packs, plan.first_fused, plan.kept) for plan in plans[-4:]}) == 1

    @pytest.mark.parametrize("looks", [False, True])
    def test_whether_updates_may_outlast_their_step_is_part_of_the_profile(self, looks: bool) -> None:
        strategy = HarmonyStrategy(device_memory="96KiB", num_microbatches=4, profile_cache=False)

        class Look(pl.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                next(module.parameters()).clone()

        callbacks: list[pl.Callback] = [Look()] if looks else []
        trainer = trainer_for(strategy, 8, callbacks, devices=1)
        trainer.fit(build(), DataLoader(nets.tokens(64), batch_size=8))
        assert strategy.plan is not None
        assert strategy.plan.profile is not None
        assert strategy.plan.profile.machine.updates_outlast is not looks

    def test_the_strategy_tells_the_profile(self) -> None:
        strategy = HarmonyStrategy(num_microbatches=4)
        assert strategy.profile is None
        found = []

        class Look(Reports):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                found.append(trainer.strategy.profile)

        trainer = trainer_for(strategy, 1, [Look()], devices=1)
        trainer.fit(build(), DataLoader(nets.tokens(), batch_size=8))
        assert len(found[0].layers) == 6


@pytest.mark.cpu
class TestPrediction:
    @pytest.mark.parametrize("capacity", [None, "96KiB"])
    @pytest.mark.parametrize("net", [nets.Language, nets.SkipConnections])
    def test_counts_the_bytes_that_a_step_with_room_swaps(
        self, capacity: str | None, net: type[torch.nn.Module]
    ) -> None:
        plan, reports = fit(HarmonyStrategy(device_memory=capacity, num_microbatches=4), build(net))
        (device,) = predict(plan).devices
        report = reports[-1]
        assert device.swapped_out_bytes.get("gradients", 0) == report.swapped_out_bytes["gradients"]
        assert device.swapped_out_bytes.get("stash", 0) == report.swapped_out_bytes["stash"]
        assert device.swapped_in_bytes.get("stash", 0) == report.swapped_in_bytes["stash"]
        # Layers that come together come with what lies between them.
        assert device.swapped_in_bytes["weights"] == pytest.approx(report.swapped_in_bytes["weights"], rel=0.05)
        assert device.peak_bytes == pytest.approx(max(report.peak_device_bytes), rel=0.15)
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes == (device.peak_bytes,)

    @pytest.mark.parametrize("parallel", ["pipeline", "data"])
    def test_counts_the_bytes_of_several_devices(self, parallel: Any) -> None:
        strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=4, parallel=parallel)
        plan, reports = fit(strategy, devices=2)
        devices, report = predict(plan).devices, reports[-1]
        assert sum(d.swapped_out_bytes["gradients"] for d in devices) == report.swapped_out_bytes["gradients"]
        assert sum(d.swapped_out_bytes["stash"] for d in devices) == report.swapped_out_bytes["stash"]
        assert sum(d.swapped_in_bytes["weights"] for d in devices) == report.swapped_in_bytes["weights"]
        # What glue stashes counts as if it were passed on: here the logits, as much as half of all that is.
        assert sum(d.transferred_bytes for d in devices) == pytest.approx(report.transferred_bytes, rel=0.5)
        for device, peak in zip(devices, report.peak_device_bytes, strict=True):
            assert device.peak_bytes == pytest.approx(peak, rel=0.15)

    @pytest.mark.parametrize("joined", [(), (2, 3), (1, 3, 4)])
    @pytest.mark.parametrize("capacity", [None, "96KiB", "64KiB"])
    def test_lanes_are_granted_in_the_order_that_the_schedule_tells(
        self, capacity: str | None, joined: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from lightning_harmony.engine.step.executor import Executor
        from lightning_harmony.engine.step.pack_preparation import PackPreparation

        entered: list[Task] = []
        enter, forward = PackPreparation.enter, Executor.forward

        def spy(self: Any, progress: Any, place: Any) -> None:
            entered.append(Task(place.pack.index, place.phase, progress.lane.microbatch))
            enter(self, progress, place)

        def begin(self: Any, *args: Any, **options: Any) -> None:
            entered.clear()
            forward(self, *args, **options)

        monkeypatch.setattr(PackPreparation, "enter", spy)
        monkeypatch.setattr(Executor, "forward", begin)
        plan = fit(HarmonyStrategy(device_memory=capacity, num_microbatches=4))[0] if not joined else planned(capacity)
        if joined:
            layers = tuple((name,) for pack in plan.packs for name in pack)
            plan = Plan(layers, tuple(range(6)), 5, joined=frozenset(joined), num_microbatches=4)
            plan = fit(HarmonyStrategy(device_memory=capacity, plan=plan))[0]
            assert plan.joined == set(joined)
        assert plan.profile is not None
        (tasks,) = lower(plan, plan.profile.pack_costs(plan.packs), plan.profile.machine).devices
        assert entered == [task for task in tasks if isinstance(task.kind, Phase)]


class Wide(nets.Language):
    """Activations and weights that outweigh what one counts with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(nets.VOCABULARY, 64)
        self.blocks = torch.nn.ModuleList(nets.Block(64) for _ in range(6))
        self.head = torch.nn.Linear(64, nets.VOCABULARY, bias=False)


class Buffered(Wide):
    """Each block has a buffer, as of a mask, that takes more than its work does."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("mask", torch.ones(256 * 1024))


class Peaks(Reports):
    """The most on the device in each step, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: list[int] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        (self._device,) = trainer.strategy._swapped.engine.devices
        self._watched = self._device.watch_peak()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.peaks.append(self._watched())
        self.plan = trainer.strategy.plan


def swept(
    capacity: str | None, num_microbatches: int | None, net: type[torch.nn.Module], update: Any = "auto", **plan: Any
) -> Peaks | None:
    """What three steps swapped and took; None if they don't fit."""
    strategy = HarmonyStrategy(device_memory=capacity, num_microbatches=num_microbatches, update=update, **plan)
    peaks = Peaks()
    trainer = trainer_for(strategy, 3, [peaks], devices=1)
    try:
        trainer.fit(build(net), DataLoader(nets.tokens(24, 33), batch_size=8))
    except CapacityError:
        return None
    return peaks


@cache
def swept_promptly(capacity: str | None, num_microbatches: int, net: type[torch.nn.Module]) -> Peaks | None:
    """The same, with copies that end at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_harmony.engine.devices.virtual_device.HostStream", Prompt)
        return swept(capacity, num_microbatches, net)


@pytest.mark.cpu
class TestPredicted:
    """From what hardly fits to what fits all: what steps do is what was predicted.

    In tight capacities they swapped half as much again, as what made way depended on what had been copied by then.
    """

    CAPACITIES = ("512KiB", "640KiB", "896KiB", "1280KiB", "1792KiB", None)

    @pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
    @pytest.mark.parametrize("net", [Wide])
    def test_bytes_and_peaks_of_steps_are_those_predicted(
        self, num_microbatches: int, net: type[torch.nn.Module]
    ) -> None:
        found = 0
        for capacity in self.CAPACITIES if IS_WHOLE and num_microbatches < 8 else self.CAPACITIES[1::2]:
            run = swept_promptly(capacity, num_microbatches, net)
            if run is None:
                continue
            found += 1
            (device,) = predict(run.plan).devices
            for report in run.reports[2:]:
                self.compare(device, report)
            # Predicted are copies that end a turn late; here they end at once.
            assert run.plan.profile is not None
            leaving = max(cost.gradient_bytes for cost in run.plan.profile.layers)
            # A loss of four bytes for each microbatch of each step is kept by the module, and not predicted.
            measured = max(run.peaks[2:]) - 3 * 4 * num_microbatches
            assert measured <= device.peak_bytes <= 1.1 * measured + leaving
        assert found >= 3

    @pytest.mark.parametrize("update", ["auto", "deferred"])
    @pytest.mark.parametrize("net", [Wide, nets.SkipConnections])
    def test_bytes_do_not_depend_on_how_fast_copies_are(
        self, net: type[torch.nn.Module], update: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        capacities = self.CAPACITIES[2:4] if net is Wide else ("160KiB", "256KiB")
        for capacity in capacities:
            for stream in (Prompt, Late):
                monkeypatch.setattr("lightning_harmony.engine.devices.virtual_device.HostStream", stream)
                run = swept(capacity, 4, net, update)
                assert run is not None
                (device,) = predict(run.plan, is_deferred=update == "deferred").devices
                for report in run.reports[2:]:
                    self.compare(device, report)

    @pytest.mark.parametrize("capacity", ["640KiB", "896KiB", "1280KiB"])
    def test_to_fetch_ahead_swaps_no_more(self, capacity: str) -> None:
        run = swept(capacity, 4, Wide)
        assert run is not None
        on_demand = swept(capacity, 4, Wide, plan=replace(run.plan, lookahead=0))
        assert on_demand is not None
        assert run.reports[-1].swapped_in_bytes == on_demand.reports[-1].swapped_in_bytes

    @pytest.mark.parametrize(("num_microbatches", "stream"), [(2, Late), (4, Prompt)])
    def test_bytes_and_peaks_are_those_predicted_where_a_turn_of_the_forward_takes_several_packs(
        self, num_microbatches: int, stream: type[HostStream], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lightning_harmony.engine.devices.virtual_device.HostStream", stream)
        found = 0
        for number, capacity in enumerate(self.CAPACITIES):
            run = swept_promptly(capacity, num_microbatches, Wide)
            if run is None or run.plan.predicted is None:
                continue
            # Pairs of packs and all packs in one turn, in turns: which of them in which capacity, copies say.
            apart = 1 + (number + (stream is Late)) % 2
            joined = frozenset(range(1, run.plan.first_fused, apart))
            plan = replace(run.plan, joined=joined)
            try:
                predict(plan)
            except PlanError:
                continue
            found += bool(joined)
            again = swept(capacity, None, Wide, plan=plan)
            assert again is not None
            assert again.plan.joined == joined
            (device,) = predict(again.plan).devices
            for report in again.reports[2:]:
                self.compare(device, report)
            if stream is Prompt:
                assert max(again.peaks[2:]) - 3 * 4 * num_microbatches <= device.peak_bytes
        assert found >= 3

    def test_a_call_copies_no_buffers_but_its_layer_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All buffers of its pack were copied before each call: twelve blocks of a ResNet took three times as long for it."""
        monkeypatch.setattr("lightning_harmony.engine.devices.virtual_device.HostStream", Prompt)
        layers = ("net.embed", *(f"net.blocks.{number}" for number in range(6)), "net.head")
        plan = Plan((layers,), (0,), 0, num_microbatches=4)
        run = swept(None, None, Buffered, plan=plan)
        assert run is not None
        assert run.plan.packs == plan.packs
        (device,) = predict(run.plan).devices
        assert max(run.peaks[2:]) - 3 * 4 * 4 <= device.peak_bytes

    def compare(self, device: DevicePrediction, report: StepReport) -> None:
        for kind in ("weights", "gradients", "stash"):
            assert device.swapped_out_bytes.get(kind, 0) == report.swapped_out_bytes[kind]
            # Layers that come together come with what lies between them.
            predicted, made = device.swapped_in_bytes.get(kind, 0), report.swapped_in_bytes[kind]
            assert predicted == pytest.approx(made, rel=0.02)


class TestGiven:
    @pytest.mark.parametrize(("capacity", "given_as"), [(None, "path"), ("64KiB", "plan"), ("96KiB", "name")])
    def test_a_plan_of_an_earlier_run_is_run_by(self, capacity: str | None, given_as: str, tmp_path: Path) -> None:
        plan = planned(capacity)
        file = tmp_path / "plan.json"
        file.write_text(plan.to_json())
        given: Any = {"plan": plan, "path": file, "name": str(file)}[given_as]
        again, reports = fit(HarmonyStrategy(device_memory=capacity, plan=given))
        assert replace(again, profile=None, predicted=None) == replace(plan, profile=None, predicted=None)
        assert [report.num_microbatches for report in reports] == [4, 4, 4]

    def test_a_plan_for_several_devices_is_run_by(self) -> None:
        plan, _ = fit(HarmonyStrategy(device_memory="64KiB", num_microbatches=4), devices=2)
        again, _ = fit(HarmonyStrategy(device_memory="64KiB", plan=plan), devices=2)
        assert replace(again, profile=None, predicted=None) == replace(plan, profile=None, predicted=None)

    @pytest.mark.cpu
    def test_packs_that_planning_would_not_choose_are_used_and_change_no_bit(self) -> None:
        plan = planned("96KiB")
        names = [name for pack in plan.packs for name in pack]
        assert len(plan.packs) == 6
        packs = (tuple(names[:2]), tuple(names[2:3]), tuple(names[3:5]), tuple(names[5:]))
        other = Plan(packs, (0, 1, 2, 3), 3, frozenset(), num_microbatches=4, fingerprint=plan.fingerprint)
        used, reports = fit(HarmonyStrategy(device_memory="96KiB", plan=other))
        assert replace(used, profile=None, predicted=None) == other
        assert [report.num_packs for report in reports] == [4, 4, 4]
        runs = [
            train_harmony(copy.deepcopy(build()), nets.tokens(), strategy, 8, with_gradients=False, devices=1)
            for strategy in (
                HarmonyStrategy(device_memory="96KiB", plan=other),
                HarmonyStrategy(device_memory="96KiB", num_microbatches=4),
            )
        ]
        compare(*runs)

    def test_parameters_that_glue_uses_are_packed_where_the_plan_packs_them(self) -> None:
        plan = planned(None, nets.OwnParameters)
        assert {"net.position", "net.temperature"} <= {name for pack in plan.packs for name in pack}
        again, _ = fit(HarmonyStrategy(plan=plan), build(nets.OwnParameters))
        assert {frozenset(pack) for pack in again.packs} == {frozenset(pack) for pack in plan.packs}

    def test_a_step_in_another_order_than_planned_goes_by_the_packs_alone(self) -> None:
        plan = planned("96KiB")
        backwards = replace(plan, visits=(0, 4, 3, 2, 1, 5), kept=frozenset(), first_fused=6, predicted=None)
        again, _ = fit(HarmonyStrategy(device_memory="96KiB", plan=backwards))
        assert replace(again, profile=None, predicted=None) == replace(plan, profile=None, predicted=None)

    def test_a_short_batch_is_split_into_fewer_microbatches(self) -> None:
        plan = planned()
        _, reports = fit(HarmonyStrategy(plan=plan), samples=nets.tokens(8 + 8 + 3))
        assert [report.num_microbatches for report in reports] == [4, 4, 3]


class TestForwardPacks:
    @pytest.mark.parametrize(
        ("net", "capacity"),
        combined(
            ["plain", "dropout", "tied-by-code", "skipped", "own-parameters", "used-twice"], [(None,), ("128KiB",)]
        ),
    )
    def test_a_turn_of_the_forward_that_takes_several_packs_changes_no_bit(
        self, net: str, capacity: str | None
    ) -> None:
        self.compare({**NETS, **SUMMED_IN_ANOTHER_ORDER}[net], nets.tokens(24), capacity, "pipeline", 1)

    @pytest.mark.cpu
    @pytest.mark.parametrize("num_devices", [1, 2])
    def test_a_turn_of_the_forward_that_takes_layers_with_buffers_changes_no_bit(self, num_devices: int) -> None:
        self.compare(nets.Convolutions, nets.images(24), None, "data", num_devices)

    def compare(self, net: Any, samples: Any, capacity: Any, parallel: Any, num_devices: int) -> None:
        calls: list[str] = []

        def train(**given: Any) -> tuple[Any, Plan]:
            strategy = HarmonyStrategy(device_memory=room(capacity), parallel=parallel, **given)
            plans: list[Plan] = []

            class Look(pl.Callback):
                def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                    plans.append(trainer.strategy.plan)
                    planner = trainer.strategy._swapped.engine.planner
                    calls[:] = [planner._layers[call].name for call in planner._calls]

            options: dict[str, Any] = {"with_gradients": False, "devices": num_devices, "more_callbacks": [Look()]}
            return train_harmony(build(net), samples, strategy, 8, **options), plans[0]

        expected, plan = train(num_microbatches=4)
        names = [name for pack in plan.packs for name in pack]
        visits = visits_of([names.index(name) for name in calls])
        end = fused_alone(visits)
        other = Plan(tuple((name,) for name in names), visits, end, joined=frozenset(range(1, end)), num_microbatches=4)
        given = replace(other, num_devices=num_devices, parallel=parallel)
        again, used = train(plan=given)
        compare(expected, again)
        assert used.joined == given.joined


class TestReuse:
    """What Harmony is compared with: less stays on a device, more is copied, and not a bit of the training is another."""

    @pytest.mark.cpu
    @pytest.mark.parametrize(
        ("reuse", "num_devices", "parallel"),
        combined(["none", "visit", "just-in-time"], [(2, "pipeline"), (3, "data"), (1, "pipeline")]),
    )
    def test_changes_what_is_copied_and_nothing_else(self, reuse: Any, num_devices: int, parallel: Any) -> None:
        names = ["net.embed", *(f"net.blocks.{i}" for i in range(4)), "net.head"]
        shape = {"num_devices": num_devices, "parallel": parallel, "num_microbatches": 4}
        plan = Plan(tuple((n,) for n in names), tuple(range(6)), 6, reuse=reuse, lookahead=0, **shape)
        runs = []
        for given in ({"plan": plan}, {"num_microbatches": 4}):
            strategy = HarmonyStrategy(device_memory="96KiB", parallel=parallel, **given)
            options = {"with_gradients": False, "devices": num_devices}
            runs.append(train_harmony(build(), nets.tokens(24), strategy, 8, **options))
            if "plan" in given:
                used = strategy.plan
        compare(*runs)
        assert used is not None
        assert replace(used, profile=None, predicted=None, fingerprint="") == plan
        report, devices = runs[0].reports[-1], predict(used).devices
        # Glue stashes, too, which no plan predicts.
        for kind in ("weights", "gradients"):
            for way in ("in", "out"):
                predicted = sum(getattr(device, f"swapped_{way}_bytes").get(kind, 0) for device in devices)
                assert predicted == getattr(report, f"swapped_{way}_bytes")[kind]

    @pytest.mark.cpu
    def test_without_it_each_microbatch_swaps_each_layer_anew(self) -> None:
        plan = planned("96KiB")
        names = [(name,) for pack in plan.packs for name in pack]
        other = Plan(tuple(names), tuple(range(6)), 6, num_microbatches=4, reuse="none", lookahead=0)
        _, reports = fit(HarmonyStrategy(device_memory="96KiB", plan=other))
        assert plan.profile is not None
        weights = sum(cost.copied_bytes for cost in plan.profile.layers)
        gradients = sum(cost.gradient_bytes for cost in plan.profile.layers)
        report = reports[-1]
        assert report.swapped_in_bytes["weights"] == 2 * 4 * weights
        assert report.swapped_out_bytes["gradients"] == 4 * gradients
        assert report.swapped_in_bytes["gradients"] == 3 * gradients

    def test_a_batch_that_was_not_planned_for_is_run_in_the_same_way(self) -> None:
        names = [("net.embed",), *((f"net.blocks.{i}",) for i in range(4)), ("net.head",)]
        plan = Plan(tuple(names), tuple(range(6)), 6, num_microbatches=4, reuse="visit", lookahead=0)
        used, reports = fit(HarmonyStrategy(plan=plan), samples=nets.tokens(8 + 8 + 3))
        assert (used.reuse, used.lookahead, used.kept) == ("visit", 0, frozenset())
        assert [report.num_microbatches for report in reports] == [4, 4, 3]


class TestSearched:
    @pytest.mark.cpu
    def test_a_plan_that_is_found_is_run_by_and_changes_no_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def train() -> Any:
            strategy = HarmonyStrategy(device_memory=room("160KiB"), num_microbatches=4)
            return train_harmony(build(), nets.tokens(), strategy, 8, with_gradients=False, devices=1)

        expected = train()
        searched = []

        def found(plan: Plan, calls: list[int], *, with_its_packs: bool, most_tasks: float) -> Plan:
            searched.append((plan, calls, with_its_packs))
            packs = (("net.embed", "net.blocks.0"), ("net.blocks.1",), ("net.blocks.2", "net.blocks.3"), ("net.head",))
            return replace(plan, packs=packs, visits=(0, 1, 2, 3), first_fused=2, kept=frozenset({1}))

        monkeypatch.setattr("lightning_harmony.plan.search.deciding.search_better", found)
        compare(expected, train())
        plan, calls, with_its_packs = searched[0]
        assert plan.profile is not None
        assert plan.predicted is not None
        assert calls == list(range(6))
        assert not with_its_packs
        plan, reports = fit(HarmonyStrategy(device_memory=room("160KiB"), num_microbatches=4))
        assert [len(pack) for pack in plan.packs] == [2, 1, 2, 1]
        assert (plan.first_fused, plan.kept) == (2, {1})
        assert plan.predicted is not None
        assert predict(plan).peak_bytes == plan.predicted.peak_bytes
        assert reports[-1].num_packs == 4

    def test_a_plan_that_is_given_is_not_searched_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = planned()
        monkeypatch.setattr("lightning_harmony.plan.search.deciding.search_better", None)
        fit(HarmonyStrategy(device_memory="96KiB", plan=plan))


class TestRefusals:
    def refuse(self, strategy: Any, module: Net, message: str, **options: Any) -> None:
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(PlanError, match=message):
            fit(strategy, module, **options)
        # Nothing was touched: the weights are as they were, and calls of layers are the module's own.
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        assert not any("forward" in vars(child) for child in module.modules())

    def test_a_plan_for_another_model_is_refused(self) -> None:
        self.refuse(HarmonyStrategy(plan=planned()), Net(nets.Language(num_blocks=5)), "the model has 'net.blocks.4'")

    @pytest.mark.cpu
    def test_a_capacity_that_the_plan_does_not_meet_is_refused(self) -> None:
        strategy = HarmonyStrategy(device_memory="64KiB", plan=planned(None))
        self.refuse(strategy, build(), r"pack 0 .* takes 75.5 KiB .* more than the capacity of 64 KiB")

    @pytest.mark.cpu
    def test_a_plan_whose_graphs_do_not_fit_is_refused(self) -> None:
        plan = planned("160KiB")
        strategy = HarmonyStrategy(device_memory="48KiB", plan=replace(plan, kept=frozenset({2, 3})))
        self.refuse(strategy, build(), r"the plan does not fit the capacity of 48 KiB")

    @pytest.mark.parametrize(("num_devices", "parallel"), [(1, "pipeline"), (3, "pipeline"), (2, "data")])
    def test_a_plan_for_other_devices_is_refused(self, num_devices: int, parallel: Any) -> None:
        plan = replace(planned(), num_devices=num_devices, parallel=parallel)
        message = rf"is for {num_devices} devices \({parallel}\), not for 2 \(pipeline\)"
        self.refuse(HarmonyStrategy(plan=plan), build(), message, devices=2)

    def test_two_numbers_of_microbatches_are_refused(self) -> None:
        with pytest.raises(PlanError, match="is for 4 microbatches, but num_microbatches=3"):
            HarmonyStrategy(plan=planned(), num_microbatches=3)

    def test_a_file_that_is_no_plan_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text("{")
        with pytest.raises(PlanError, match=r"plan='.*plan.json': this is not a plan"):
            HarmonyStrategy(plan=file)


def test_no_turn_but_the_first_waits_for_a_host_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make one takes longer than small layers do: all turns of a first step used to be timed with it."""
    take, missed = HostPool.take, Counter[int]()

    def noting(pool: HostPool, num_bytes: int, **options: Any) -> Any:
        lane = this_thread.lane
        # Sums that make way for a layer that is measured are no part of its turn.
        parks = any(frame.name == "park" and frame.filename.endswith("sums.py") for frame in extract_stack())
        if lane is not None and not parks and not pool._free[num_bytes]:
            missed[lane.microbatch] += 1
        return take(pool, num_bytes, **options)

    monkeypatch.setattr(HostPool, "take", noting)
    strategy = HarmonyStrategy(num_microbatches=4, device_memory="256KiB")
    trainer_for(strategy, 1, []).fit(build(nets.Language), DataLoader(nets.tokens(8), batch_size=8))
    assert missed.keys() == {0}


class SlowAtFirst(nn.Module):
    """A block whose first forwards take long, as if the host was busy.

    Args:
        block: computes.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls <= 8:
            time.sleep(0.05)
        return self.block(x)


def test_what_turns_take_by_the_plan_is_learned_when_the_first_steps_are_over(tmp_path: Path) -> None:
    """They are slower on a busy host: a step of 1.25 seconds was predicted to take 1.9 for as long as the fit went on."""
    torch.manual_seed(SEED)
    net = nets.Language()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = SlowAtFirst(block)
    strategy = HarmonyStrategy(num_microbatches=4, device_memory=room("256KiB"), profile_cache=tmp_path)
    predicted: list[float] = []

    class Watcher(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            assert strategy.plan is not None
            if strategy.plan.predicted is not None:
                predicted.append(strategy.plan.predicted.seconds)

    data = DataLoader(nets.tokens(64), batch_size=8)
    trainer_for(strategy, 8, [Watcher()]).fit(Net(net), data)
    assert predicted[0] > 0.2
    assert predicted[-1] < predicted[0] / 2
    (file,) = tmp_path.iterdir()
    record = Record.from_json(file.read_text())
    assert max(cost.forward_seconds for cost in record.sizes[0].layers) < 0.05
