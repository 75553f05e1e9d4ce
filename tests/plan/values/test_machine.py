"""Descriptions of machines."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_harmony.plan.values.machine import H200, read_machine


def test_a_description_round_trips_through_json(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(H200.to_json())
    assert read_machine(str(file)) == H200
    assert read_machine("H200") == H200


def test_a_type_that_is_not_listed_is_as_slow_as_the_slowest() -> None:
    assert H200.flops_per_second_of("complex64") == min(H200.flops_per_second.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 3}, "unknown entries speed"),
        ({"swap_in_bytes_per_second": 0}, "swap_in_bytes_per_second must be a positive number"),
        ({"flops_per_second": {}}, "flops_per_second must be an object"),
        ({"flops_per_second": {"float32": "fast"}}, "float32 must be a positive number"),
        ({"host_bytes": -1}, "host_bytes must be a number"),
    ],
)
def test_what_describes_no_machine_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**asdict(H200), **change}))
    with pytest.raises(ValueError, match=message):
        read_machine(str(file))


@pytest.mark.parametrize("text", ["", "[]", '{"name": "a"}'])
def test_a_corrupt_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="does not describe a machine"):
        read_machine(str(file))
