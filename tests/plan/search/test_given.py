"""Plans that users give."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search.given import read_plan, refuse_unfit
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.simulate.validity import refuse_invalid
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan, Predicted
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from support.plans import STEP, names

LAYERS = [Cost(f"layer {index}", 10, 10) for index in range(3)]
PLAN = Plan(names(3), (0, 1, 2), 2, num_microbatches=2, fingerprint="same")


def refusal(plan: Plan, *, capacity: int | None = None, fingerprint: str = "same") -> str:
    with pytest.raises(PlanError) as refused:
        refuse_unfit(plan, LAYERS, ["layer 0.weight"], fingerprint, [capacity], "pipeline")
    return str(refused.value)


class TestRead:
    def test_a_file_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(PLAN.to_json())
        assert read_plan(file) == read_plan(str(file)) == read_plan(PLAN) == PLAN

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", PLAN.to_json()[:-20].encode()])
    def test_what_is_no_plan_is_refused_with_the_name_of_the_file(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "plan.json"
        file.write_bytes(content)
        with pytest.raises(PlanError, match=r"plan='.*plan.json': "):
            read_plan(file)

    def test_a_file_that_is_not_there_is_named(self) -> None:
        with pytest.raises(PlanError, match=r"plan='nowhere.json': .*No such file"):
            read_plan("nowhere.json")

    def test_a_plan_that_contradicts_itself_is_refused(self, tmp_path: Path) -> None:
        wrong = replace(PLAN, visits=(0, 1, 7))
        file = tmp_path / "plan.json"
        file.write_text(wrong.to_json())
        for given in (wrong, file):
            with pytest.raises(PlanError, match="it visits pack 7"):
                read_plan(given)


NONSENSE: tuple[Any, ...] = (
    float("nan"), float("inf"), -1, -0.5, 10**30, 1e300, "text", "", None, True, [], [[]], {}, {"a": 1}, [float("nan")],
)  # fmt: skip


def changed(data: Any, value: Any, path: str = "plan") -> Iterator[str]:
    """The path of each thing that lies in JSON, while a value is in its place."""
    for key, item in list(data.items() if isinstance(data, dict) else enumerate(data)):
        here = f"{path}.{key}" if isinstance(data, dict) else f"{path}[{key}]"
        data[key] = value
        yield here
        data[key] = item
        if isinstance(item, dict | list):
            yield from changed(item, value, here)


class TestNonsense:
    @pytest.mark.parametrize("value", NONSENSE, ids=repr)
    def test_a_plan_with_nonsense_anywhere_is_refused_or_can_be_predicted(self, value: Any) -> None:
        """Some ended in an IndexError of the prediction, which named nothing."""
        data, errors = json.loads(predicted(STEP).to_json()), {}
        for path in changed(data, value):
            try:
                plan = Plan.from_json(json.dumps(data))
                refuse_invalid(plan)
                predict(plan)
            except PlanError as error:
                errors[path] = str(error)
            else:
                assert str(plan) != ""
        # Of a value of the wrong kind it is told where it is; of others, what they contradict.
        contradicts = (
            "plan cannot be run",
            "the plan has version",
            "this is not a",
            "the plan does not say",
            "more than",
        )
        unnamed = {
            path: error for path, error in errors.items() if not error.startswith((path, "this " + contradicts[0]))
        }
        assert not [error for error in unnamed.values() if not any(words in error for words in contradicts)]
        assert len(errors) > 20

    @pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "null", "[]", '"plan"', "NaN"])
    def test_a_file_with_something_else_is_refused_with_its_name(self, text: str, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(text)
        with pytest.raises(PlanError, match=r"plan='.*plan.json': this is not a plan"):
            read_plan(file)

    def test_the_field_is_named(self, tmp_path: Path) -> None:
        data = json.loads(predicted(STEP).to_json())
        data["profile"]["layers"][1]["backward_seconds"] = float("nan")
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(data))
        with pytest.raises(PlanError, match=r"plan\.profile\.layers\[1\]\.backward_seconds: Expected `float` >= 0"):
            read_plan(file)

    def test_the_field_of_a_plan_that_is_no_file_is_named(self) -> None:
        profile = Profile((Cost("layer 0", -5, 10),))
        with pytest.raises(PlanError, match=r"plan\.profile\.layers\[0\]\.weight_bytes: Expected `int` >= 0"):
            read_plan(replace(PLAN, profile=profile))

    def test_a_speed_of_nothing_is_refused(self) -> None:
        profile = Profile((Cost("layer 0", 5, 10),), DeviceLimits(None, 0.0))
        with pytest.raises(PlanError, match=r"swap_in_bytes_per_second: Expected `float` > 0"):
            read_plan(replace(PLAN, profile=profile))

    @pytest.mark.parametrize("change", [{"num_microbatches": 10**12}, {"num_devices": 10**12}])
    def test_numbers_that_would_never_be_predicted_are_refused(self, change: Any) -> None:
        with pytest.raises(PlanError, match="from 1 to 65536 are possible"):
            read_plan(replace(PLAN, **change))


def predicted(plan: Plan) -> Plan:
    found = predict(plan)
    return replace(plan, predicted=Predicted(found.seconds, tuple(device.peak_bytes for device in found.devices)))


class TestRefuseUnfit:
    def test_what_fits_passes(self) -> None:
        refuse_unfit(PLAN, LAYERS, [], "same", [None], "pipeline")
        refuse_unfit(replace(PLAN, fingerprint=""), LAYERS, [], "same", [20], "pipeline")

    def test_a_parameter_that_glue_used_may_be_packed(self) -> None:
        refuse_unfit(
            replace(PLAN, packs=(*PLAN.packs, ("layer 0.weight",))),
            LAYERS,
            ["layer 0.weight"],
            "same",
            [None],
            "pipeline",
        )

    def test_a_layer_that_the_model_has_not_is_named(self) -> None:
        other = replace(PLAN, packs=(("layer 0",), ("layer 1", "other"), ("layer 2",)))
        assert "the plan has 'other', which the model has not" in refusal(other)

    def test_a_layer_that_the_plan_has_not_is_refused(self) -> None:
        text = refusal(Plan((("layer 0",),), (0,), 0))
        assert "the model has 'layer 1', which the plan has not (and 1 more differences)" in text
        assert "HarmonyStrategy(layers=..., device_memory=...)" in text

    def test_the_same_names_with_other_shapes_are_another_model(self) -> None:
        assert "not the shapes of their parameters" in refusal(PLAN, fingerprint="other")

    def test_a_pack_larger_than_the_capacity_is_named(self) -> None:
        large = Plan((("layer 0", "layer 1"), ("layer 2",)), (0, 1), 1)
        text = refusal(large, capacity=30)
        assert (
            "pack 0 (layer 0 … layer 1) takes 40 B for weights and gradients, 10 B more than the capacity of 30 B"
            in text
        )
        assert "HarmonyStrategy(device_memory=...)" in text

    def test_what_work_and_graphs_take_counts_where_it_was_measured(self) -> None:
        layers = tuple(replace(cost, graph_bytes=30) for cost in LAYERS)
        plan = replace(PLAN, kept=frozenset({1}), profile=Profile(layers, DeviceLimits(200)))
        plan = replace(plan, predicted=Predicted(1.0, predict(plan).peak_bytes))
        refuse_unfit(plan, LAYERS, [], "same", [200], "pipeline")
        refuse_unfit(plan, LAYERS, [], "same", [None], "pipeline")
        text = refusal(plan, capacity=60)
        assert "the plan does not fit the capacity of 60 B; where it was made it took" in text
        assert ">" in text.splitlines()[-1]
