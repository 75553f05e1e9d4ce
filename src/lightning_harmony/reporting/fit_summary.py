"""The summary of a fit: how the model was divided, and where it lives. It stands beside Lightning's own model summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_harmony.engine.measure.report import in_words
from lightning_harmony.engine.nodes.division import Need
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.plan.drawing.page import format_seconds
from lightning_harmony.plan.simulate.replay import prediction_of
from lightning_harmony.plan.values.host_need import waiting_bytes
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.prediction import Prediction
from lightning_harmony.plan.values.printed import amount, fact_lines, table_lines
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.updating import optimizer_state
from lightning_harmony.updating.update_policy import UpdatePolicy


@dataclass
class FitSummary:
    """Says at the start of a fit what is known by then, and when its plan is made, the rest; each once.

    It is silent where Lightning's model summary is: with `Trainer(enable_model_summary=False)`.
    """

    tree: LightningTree
    trainer: Any
    engine: Executor
    policy: UpdatePolicy
    _has_shown_plan: bool = False
    _has_named_reader: bool = False
    _has_named_gradient: bool = False

    def show_start(self, *, runs_alone: bool) -> None:
        """A fit begins.

        Args:
            runs_alone: whether the training_step runs as it is, so that there will be no plan.
        """
        if self.tree.shows_summary(self.trainer):
            self.tree.show(describe_start(self.engine, runs_alone=runs_alone))

    def show_plan(self, *, takes_turns: bool) -> None:
        """A backward has ended: show the plan, if there is one by now, and no first update in it is still to be timed.

        Args:
            takes_turns: whether microbatches may take turns, as the plan has it.
        """
        plan = self.engine.plan
        if self._has_shown_plan or plan.num_microbatches is None or plan.profile is None:
            return
        update, reason = self.policy.choose()
        if update == "just-in-time" and plan.profile.machine.update_bytes_per_second is None:
            return
        seen = self.policy.why_never_later()
        self._has_shown_plan, self._has_named_reader = True, seen is not None
        if self.tree.shows_summary(self.trainer):
            self.tree.show(
                describe_plan(self.engine, self.trainer.optimizers, update, reason, seen, takes_turns) + "\n"
            )

    def show_late_reader(self) -> None:
        """A step begins: say who misses gradients, and what ends the overlap of updates if the plan named nothing."""
        policy = self.policy
        misses = policy.lookout.misses_gradient
        is_used_up, division = policy.choose()[0] == "just-in-time", policy.division
        is_elsewhere = division is not None and division.need is Need.OWN_AND_NORMS
        if misses is not None and not self._has_named_gradient and (is_used_up or is_elsewhere):
            self._has_named_gradient = True
            where = "used up by the update of its pack, within the backward" if is_used_up else "on one machine alone"
            self.tree.warn(
                f"{misses} finds no gradients: each is {where}. "
                'HarmonyStrategy(update="deferred") keeps them until they are zeroed'
            )
        if not self._has_shown_plan or self._has_named_reader:
            return
        seen = policy.why_never_later()
        if seen is not None:
            self._has_named_reader = True
            self.tree.info(f"Harmony: no overlap from now on, each update ends before the next batch: {seen}")


def describe_start(engine: Executor, *, runs_alone: bool) -> str:
    """What is known before the first step."""
    devices = engine.devices
    limits = [device.capacity_bytes for device in devices]
    limit = "no limit" if limits[0] is None else format_bytes(limits[0])
    if len(set(limits)) > 1:
        limit = ", ".join("no limit" if one is None else format_bytes(one) for one in limits)
    each = " each" if len(devices) > 1 and len(set(limits)) == 1 else ""
    count = _count(len(devices), f"{devices[0].torch_device.type} device")
    layers = _count(sum(len(pack) for pack in engine.plan.packs), "layer")
    what_next = "The plan follows after a step or two"
    if runs_alone:
        what_next = "Each call of a layer brings its weights, for the training_step does the rest itself"
    on_disk = engine.updater.streamed.disk.weight_bytes
    weights = f"{format_bytes(engine.store.num_bytes)} of weights in host memory"
    if on_disk:
        weights += f" and {format_bytes(on_disk)} on disk"
    return f"Harmony: {layers}, {weights}, {count} ({limit}{each}). {what_next}."


def describe_plan(
    engine: Executor, optimizers: Sequence[Any], update: str, reason: str, seen: str | None, takes_turns: bool
) -> str:
    """What the plan says, and where things live: a table, and a few lines below it.

    Args:
        engine: the executor.
        optimizers: of the fit.
        update: when parameters are updated.
        reason: why then.
        seen: what may look at parameters between two batches, so that no update goes on there; None if nothing does.
        takes_turns: whether microbatches may take turns. What others do is not predicted.
    """
    plan = engine.plan
    prediction = prediction_of(plan) if takes_turns else None
    title = (
        f"Harmony: {_count(sum(len(pack) for pack in plan.packs), 'layer')} in {_count(len(plan.packs), 'pack')}, "
        f"{_count(plan.num_microbatches or 1, 'microbatch', 'es')}, {_count(plan.num_devices, 'device')}"
        f"{f' ({plan.parallel})' if plan.num_devices > 1 else ''}"
    )
    table = _table(engine, optimizers, prediction, is_deferred=update == "deferred")
    facts = [(update, in_words(update, reason))]
    if update == "just-in-time":
        facts.append(("p.grad is None", 'After a step; HarmonyStrategy(update="deferred") keeps gradients'))
    if not takes_turns:
        facts.insert(0, ("one by one", "Microbatches run one after the other, which no plan predicts"))
    if seen is not None:
        facts.append(("no overlap", f"Each update ends before the next batch: {seen}"))
    if prediction is not None:
        capacities = [device.capacity_bytes for device in engine.devices]
        peaks = zip(prediction.peak_bytes, capacities, strict=True)
        facts = [
            *((_of(peak, limit), f"Predicted peak on device {number}") for number, (peak, limit) in enumerate(peaks)),
            (format_seconds(prediction.seconds), "Predicted time of a step"),
            *facts,
        ]
    if plan.kept:
        facts.append((_packs(plan.kept), "Graphs are kept from forward to backward"))
    if plan.fused:
        facts.append((_packs(plan.fused), "A microbatch goes through to its loss and back at once"))
    if (disk := engine.updater.streamed.disk).is_in_use:
        facts.append((format_bytes(disk.used_bytes + disk.weight_bytes), _on_disk(disk, prediction)))
    return "\n".join([title, *table, *fact_lines(facts)])


def _on_disk(disk: DiskHome, prediction: Prediction | None) -> str:
    """What living on disk means for that."""
    what, again = "Optimizer state", ""
    if disk.weight_bytes:
        what, again = f"{what} and weights", f"; layers read {format_bytes(disk.weight_bytes)} of it twice more"
    text = f"{what} in {disk.folder}: so much is read and written in each step{again}"
    if prediction is None or not prediction.seconds:
        return text
    a_day = int((disk.used_bytes + disk.weight_bytes) * 24 * 60 * 60 / prediction.seconds)
    return f"{text}, {format_bytes(a_day)} written a day, which is to be compared with what the disk is rated for (TBW)"


def _table(
    engine: Executor, optimizers: Sequence[Any], prediction: Prediction | None, *, is_deferred: bool
) -> list[str]:
    """What lives on the host, and what of it goes to the devices and comes from there in a step."""
    plan = engine.plan
    assert plan.profile is not None
    gradients = [cost.gradient_bytes for cost in plan.profile.pack_costs(plan.packs)]
    state = optimizer_state.expected_state_bytes(optimizers)
    on_disk = engine.updater.streamed.disk.used_bytes
    most = waiting_bytes(gradients, is_deferred=is_deferred)
    if engine.pool.limit is not None:
        most = min(most, engine.pool.limit)
    on_host = {
        "weights": format_bytes(engine.store.num_bytes),
        "gradients": format_bytes(most) if most == sum(gradients) else f"up to {format_bytes(most)}",
        "optimizer state": "unknown" if state is None else amount(state - on_disk),
    }
    # Weights and gradients that go with it are not predicted either.
    moved = {"optimizer state": ["with updates" if engine.updater.streamed.is_on_device else "-"] * 2}
    if prediction is not None:
        for kind in ("weights", "gradients", "stash"):
            ways = [(device.swapped_in_bytes, device.swapped_out_bytes) for device in prediction.devices]
            moved[kind] = [amount(sum(each.get(kind, 0) for each in way)) for way in zip(*ways, strict=True)]
        on_host["stash"] = moved["stash"][1]
    rows = [["", "On the host", "In, a step", "Out, a step"]]
    rows += [[kind, text, *moved.get(kind, ["unknown"] * 2)] for kind, text in on_host.items()]
    return table_lines(rows)


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending if number != 1 else ''}"


def _of(num_bytes: int, limit: int | None) -> str:
    return format_bytes(num_bytes) + ("" if limit is None else f" of {format_bytes(limit)}")


def _packs(numbers: frozenset[int]) -> str:
    """Their numbers, those that follow each other as a range: "packs 0, 4-7"."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"packs {text}" if len(numbers) > 1 else f"pack {text}"
