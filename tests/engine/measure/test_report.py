"""The report of a step prints as a table."""

from __future__ import annotations

from dataclasses import replace

from lightning_harmony.engine.measure.report import StepReport

SWAPPED = StepReport(
    seconds=0.5,
    swapped_in_bytes={"weights": 3 << 20, "gradients": 0, "optimizer": 9 << 20, "stash": 0},
    swapped_out_bytes={"weights": 0, "gradients": 1 << 20, "optimizer": 6 << 20, "stash": 0},
    transferred_bytes=0,
    peak_device_bytes=[4 << 20],
    host_bytes=16 << 20,
    num_microbatches=4,
    num_packs=6,
    update="deferred",
    update_reason="there are 2 optimizers",
    update_hidden=0.25,
    predicted_seconds=0.4,
    num_samples=32,
)


def test_a_report_prints_as_a_table_in_units_that_people_read() -> None:
    """It was the repr of a dataclass, in bytes."""
    assert str(SWAPPED).splitlines() == [
        "A step of 4 microbatches, 6 packs",
        "            | In    | Out",
        "---------------------------",
        "weights     | 3 MiB | -",
        "gradients   | -     | 1 MiB",
        "for updates | 9 MiB | 6 MiB",
        "stash       | -     | -",
        "---------------------------",
        "500 ms    Time of the step; 400 ms were predicted",
        "64        Samples a second",
        "4 MiB     Peak on device 0",
        "16 MiB    In host memory",
        "25%       Of the time of updates, devices had other work",
        "deferred  Weights are updated after the backward: there are 2 optimizers",
    ]


def test_a_report_of_a_model_that_fits_has_no_table_of_copies() -> None:
    report = replace(
        SWAPPED, num_packs=0, update="in-memory", update_reason="it fits", num_microbatches=1, update_hidden=0.0
    )
    assert str(report).splitlines() == [
        "A step of 1 microbatch",
        "500 ms     Time of the step; 400 ms were predicted",
        "4 MiB      Peak on device 0",
        "in-memory  Nothing is swapped: it fits",
    ]


def test_what_is_seldom_there_is_printed_where_it_is() -> None:
    text = str(replace(SWAPPED, transferred_bytes=1024, disk_read_bytes=2048, disk_written_bytes=1024, busy=[0.5]))
    assert "1 KiB     From device to device" in text
    assert "2 KiB     Read from disk; 1 KiB written" in text
    assert "50%       Of the time, device 0 computed" in text
