"""`lightning-harmony bench`, on virtual devices."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_harmony.cli import main
from lightning_harmony.plan.values.machine import H200

pytest.importorskip("matplotlib")

from lightning_harmony import bench

pytestmark = [pytest.mark.cpu, pytest.mark.in_memory]


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(H200, name="a machine", host_bytes=2**34, device_bytes=None, library_bytes=0)
    monkeypatch.setattr(bench, "measure_machine", lambda: machine)


TINY = [
    "--accelerator=cpu", "--hidden=32", "--layers=1", "--length=8", "--batch-size=2", "--num-microbatches=2", "--steps=1",
]  # fmt: skip


@pytest.mark.nightly
def test_the_table_the_picture_and_the_rows_go_from_the_least_that_trains_to_all_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, file = tmp_path / "bench.png", tmp_path / "rows.json"
    assert main(["bench", *TINY, "--budgets", "2", "--picture", str(picture), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"wrote {picture}\nwrote {file}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = json.loads(file.read_text())
    assert "torch" in kept["machine"][2]
    assert all(line in out for line in kept["machine"])
    plain, least, most = kept["rows"]
    assert plain["device_memory_bytes"] is None
    assert plain["speed"] == 1.0
    assert least["num_packs"] > 1
    assert least["peak_bytes"] <= least["device_memory_bytes"] < most["device_memory_bytes"]
    assert least["predicted_seconds"] > 0
    assert most["num_packs"] == 0
    assert least["speed"] == pytest.approx(plain["seconds"] / least["seconds"])


@pytest.mark.nightly
def test_a_model_of_the_users_is_trained_in_the_place_of_the_transformer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    sizes = ["num_hidden_layers=2", "hidden_size=16", "num_attention_heads=2", "intermediate_size=16", "vocab_size=40"]
    more = ["--batch-size=4", "--sequence-length=8", "--budgets=1", "--steps=1", "--accelerator=cpu"]
    picture = tmp_path / "bench.png"
    assert main(["bench", "transformers.BertConfig", *sizes, *more, "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("BertForMaskedLM, ")
    assert "32 tokens a step, 2 microbatches" in out
    assert picture.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["transformers.BertConfig", "--hidden=32"],
            "--hidden is of the transformer that is trained where no model is named",
        ),
        (["--sequence-length=8"], "--batch and --sequence-length are of a model: name one, or give --length"),
        (["collections.Counter"], "a model was expected, not Counter"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_of_a_model_and_what_of_the_transformer_is_told_apart(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--accelerator=cpu", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--budgets", "-1"], "--budgets must be at least 1, not -1"),
        (["--hidden", "0"], "--hidden must be at least 1, not 0"),
        (["--hidden", "100"], "--hidden 100"),
        (["--batch-size", "3"], "--num-microbatches 2 must divide --batch-size 3"),
        (["--precision", "8bit"], "precision='8bit' cannot be estimated"),
        (["--picture", "bench.xyz"], "a picture is a file such as bench.png"),
        (["--picture", "no/such/bench.png"], "there is no folder no/such"),
        (["--json", "no/such/rows.json"], "there is no folder no/such"),
        (["--hidden", "64000"], "use a smaller --hidden"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_named_in_one_line_before_anything_is_trained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *TINY, *arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.strip().splitlines()
    assert re.search(re.escape(message), line)
