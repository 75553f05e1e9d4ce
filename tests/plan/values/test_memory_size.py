import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (1024, 1024),
        ("4096", 4096),
        ("4096 B", 4096),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("32MiB", 32 * 2**20),
        ("16GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("11GB", 11 * 10**9),
        ("1.5 GB", 1_500_000_000),
        (" .5 GiB ", 2**29),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
    ],
)
def test_reads_what_people_write(text, num_bytes):
    assert parse_bytes(text) == num_bytes


def test_decimal_fractions_are_exact():
    assert int(0.29 * 100) == 28  # what floating point would make of it
    assert parse_bytes("1.1 GB") == 1_100_000_000
    assert parse_bytes("0.00000029 GB") == 290


def test_rounds_down_so_that_a_capacity_is_never_exceeded():
    assert parse_bytes("0.9999999 KiB") == 1023


@pytest.mark.parametrize(
    "text",
    [
        *(0, -1, True, 1.5, float("nan"), float("inf"), None),
        *("", "GiB", "0", "0GiB", "0.1 B", "-16GiB", "nan", "inf", "16 apples", "16G", "16GiBs", "1,5GB", "1e9", "1 2"),
        *("16GiB 4MiB", "1.GB", "٣GB"),
    ],
)
def test_refuses_the_rest_by_name_and_with_an_example(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))) as error:
        parse_bytes(text)
    assert 'HarmonyStrategy(device_memory="16GiB")' in str(error.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (33_449_574, "31.9 MiB"),
        (32 * 2**20, "32 MiB"),
        (32 * 2**20 + 1, "32.0 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (16 * 2**30, "16 GiB"),
        (5000 * 2**40, "5000 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_sizes_are_written_exactly_and_shortly(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_what_is_written_reads_back_to_the_printed_precision(num_bytes):
    text = format_bytes(num_bytes)
    read = parse_bytes(text)
    if "." in text:
        # Half of the last decimal, relative to at least 1.0 of the unit, and one byte for rounding down.
        assert abs(read - num_bytes) <= 0.05 * num_bytes + 1
    else:
        assert read == num_bytes
