"""Descriptions of machines."""

import json
from dataclasses import asdict, replace
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
        ({"speed": 3}, "machine has 'speed', which is not known"),
        ({"swap_in_bytes_per_second": 0}, "machine.swap_in_bytes_per_second: Expected `float` > 0"),
        ({"swap_in_bytes_per_second": float("inf")}, "machine.swap_in_bytes_per_second: Expected `float` <= 9"),
        ({"flops_per_second": {}}, "flops_per_second is empty"),
        ({"flops_per_second": {"float32": 0}}, r"machine.flops_per_second\[...\]: Expected `float` > 0"),
        ({"flops_per_second": {"float32": "fast"}}, r"machine.flops_per_second\[...\]: Expected `float`, got `str`"),
        ({"host_bytes": -1}, "machine.host_bytes: Expected `int` >= 0"),
        ({"host_bytes": True}, r"machine.host_bytes: Expected `int \| null`, got `bool`"),
    ],
)
def test_what_describes_no_machine_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**asdict(H200), **change}))
    with pytest.raises(ValueError, match=message):
        read_machine(str(file))


def test_what_has_a_default_may_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    known = asdict(H200)
    for name in ("host_bytes", "device_bytes", "library_bytes"):
        del known[name]
    file.write_text(json.dumps(known))
    assert read_machine(str(file)) == replace(H200, host_bytes=None, device_bytes=None, library_bytes=0)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"name": "a"}'])
def test_a_corrupt_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="does not describe a machine"):
        read_machine(str(file))
