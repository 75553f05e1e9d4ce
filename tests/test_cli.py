"""The command line."""

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from lightning_harmony.cli import main
from lightning_harmony.plan.drawing.page import summary, to_html
from lightning_harmony.plan.drawing.recording import Recording
from lightning_harmony.plan.drawing.trace import to_trace
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.machine import read_machine
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from support.plans import STEP, STEP_LAYERS, parse_schedule, parse_task

pytestmark = pytest.mark.cpu

# A step that was slower than it was predicted to be.
MEASURED = predict(STEP, DeviceLimits(None, 1024.0, 1024.0))
RECORDING = Recording(STEP, MEASURED, "just-in-time: nothing reads all gradients")


def test_machine_shows_versions_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines[0]
    assert lines[1].startswith("host: ")
    assert lines[1].endswith(" free")
    assert len(lines) == 2 + max(torch.cuda.device_count(), 1)


def test_a_command_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "machine" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_measured_machine_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "--measure"]) == 0
    file = tmp_path / "machine.json"
    file.write_text(capsys.readouterr().out)
    machine = read_machine(str(file))
    assert machine.flops_per_second["float32"] > 0
    assert (machine.device_bytes is None) == (not torch.cuda.is_available())


class TestPlan:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = tmp_path / "plan.json"
        file.write_text(STEP.to_json())
        return file

    def test_shows_a_plan_and_what_it_predicts(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", str(file)]) == 0
        out = capsys.readouterr().out
        assert out == "\n".join([str(STEP), *summary(STEP, predict(STEP))]) + "\n"

    def test_prints_the_tasks_when_asked(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["plan", str(file), "--grid"])
        grid = capsys.readouterr().out.partition("device 0 |")[2]
        assert parse_schedule(f"device 0 |{grid}").devices[0][:3] == tuple(
            map(parse_task, ["0SWAP_IN", "1SWAP_IN", "0F0"])
        )

    def test_writes_what_is_asked_for_and_says_so(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page, trace = tmp_path / "plan.html", tmp_path / "trace.json"
        main(["plan", str(file), "--html", str(page), "--trace", str(trace)])
        assert capsys.readouterr().out.endswith(f"\nwrote {page}\nwrote {trace}\n")
        assert page.read_text() == to_html(STEP, {"predicted": predict(STEP)}, "Plan of a step")
        assert trace.read_text() == to_trace(STEP, {"predicted": predict(STEP)})

    def test_draws_a_picture(self, file: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        main(["plan", str(file), "--png", str(tmp_path / "plan.png")])
        assert (tmp_path / "plan.png").exists()

    def test_a_plan_without_costs_is_shown_but_not_predicted(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(replace(STEP, profile=None).to_json())
        assert main(["plan", str(file)]) == 0
        with pytest.raises(SystemExit):
            main(["plan", str(file), "--grid"])

    @pytest.mark.parametrize(("content", "problem"), [("{", "this is not a plan"), (None, "No such file")])
    def test_what_is_no_plan_is_refused(
        self, content: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if content is not None:
            (tmp_path / "plan.json").write_text(content)
        with pytest.raises(SystemExit) as stopped:
            main(["plan", str(tmp_path / "plan.json")])
        assert stopped.value.code == 2
        assert problem in capsys.readouterr().err


class TestTrace:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = tmp_path / "step-5.json"
        file.write_text(RECORDING.to_json())
        return file

    def test_tells_what_was_measured_and_what_was_predicted(
        self, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["trace", str(file)]) == 0
        measured, device, predicted, _, update = capsys.readouterr().out.splitlines()
        assert measured == f"measured: {summary(STEP, MEASURED)[0]}"
        assert device == summary(STEP, MEASURED)[1]
        assert predicted == f"predicted: {summary(STEP, predict(STEP))[0]}"
        assert update == "update: just-in-time: nothing reads all gradients"

    def test_writes_what_is_asked_for(self, file: Path, tmp_path: Path) -> None:
        page, trace, steps = (
            tmp_path / "a.html",
            tmp_path / "a.json",
            {"measured": MEASURED, "predicted": predict(STEP)},
        )
        main(["trace", str(file), "--html", str(page), "--trace", str(trace)])
        assert page.read_text() == to_html(STEP, steps, "A recorded step")
        assert trace.read_text() == to_trace(STEP, steps)

    def test_draws_a_picture(self, file: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        main(["trace", str(file), "--png", str(tmp_path / "step.png")])
        assert (tmp_path / "step.png").exists()

    @pytest.mark.parametrize(
        ("profile", "why"),
        [
            (None, "the plan was made before the step had been measured"),
            (Profile(STEP_LAYERS, DeviceLimits(2048, 2048.0, 2048.0)), "the plan is so tight"),
        ],
        ids=["not measured", "too tight"],
    )
    def test_a_step_that_had_no_prediction_is_shown_alone_and_says_why(
        self, profile: Profile | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, page = tmp_path / "step-0.json", tmp_path / "a.html"
        file.write_text(replace(RECORDING, plan=replace(STEP, profile=profile)).to_json())
        assert main(["trace", str(file), "--html", str(page)]) == 0
        assert f"predicted: nothing, for {why}" in capsys.readouterr().out
        assert page.read_text().count("<svg") == 1

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ("{", "this is not a recorded step"),
            (STEP.to_json(), "HarmonyMonitor(trace_step=...)"),
            (None, "No such file"),
        ],
    )
    def test_what_is_no_recording_is_refused(
        self, content: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if content is not None:
            (tmp_path / "step.json").write_text(content)
        with pytest.raises(SystemExit) as stopped:
            main(["trace", str(tmp_path / "step.json")])
        assert stopped.value.code == 2
        assert problem in capsys.readouterr().err


class TestWrongInput:
    """Each ended in a traceback."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["estimate", "../../x"], "'../../x' is no import path"),
            (["estimate", "..x"], "'..x' is no import path"),
            (["estimate", "math.pi"], r"math\.pi\(\) cannot be built: TypeError: 'float' object is not callable"),
            (["estimate", "collections.OrderedDict", "a=1", "b"], "'b' is no argument of the model"),
            (["estimate", "torch.nn.Linear", "width=3"], r"torch\.nn\.Linear\(width=3\) cannot be built: TypeError"),
            (["estimate", "torch.nn.ReLU", "--batch", "int64[99999999999999999999]"], "is no batch"),
            (["estimate", "torch.nn.ReLU", "--machine", "{deep}"], "does not describe a machine"),
            (["estimate", "torch.nn.ReLU", "--machine", "{folder}"], "neither a machine that is known"),
            (["estimate", "--config", "{deep}", "torch.nn.ReLU"], "is no configuration"),
            (["estimate", "--config", "{numbers}", "torch.nn.ReLU"], "must hold names and values"),
            (["plan", "{deep}"], "this is not a plan, for it is not JSON"),
            (["plan", "{folder}"], "Is a directory"),
            (["plan", "{nan}"], r"profile\.machine\.swap_in_bytes_per_second is nan"),
            (["plan", "{plan}", "--html", "{folder}"], "Is a directory"),
            (["plan", "{plan}", "--png", "{folder}"], r"a picture is a file such as .*\.png, \.svg or \.pdf"),
            (
                ["plan", "{plan}", "--png", "step.xyz"],
                r"step\.xyz: a picture is a file such as step\.png, \.svg or \.pdf",
            ),
            (["plan", "{plan}", "--png", "{folder}/none/step.png"], "there is no folder"),
            (["trace", "{deep}"], "this is not a recorded step, for it is not JSON"),
            (["trace", "{plan}"], "this is not a recorded step"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_is_named_in_one_line(
        self, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert STEP.profile is not None
        nan = replace(STEP, profile=replace(STEP.profile, machine=DeviceLimits(None, float("nan"))))
        texts = {
            "deep": "[" * 100_000,
            "numbers": "model: {}\ntrainer: 5\n",
            "plan": STEP.to_json(),
            "nan": nan.to_json(),
        }
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        places = {name: str(tmp_path / name) for name in texts} | {"folder": str(tmp_path)}
        with pytest.raises(SystemExit) as stopped:
            main([argument.format(**places) for argument in arguments])
        assert stopped.value.code == 2
        assert re.search(message, capsys.readouterr().err)
