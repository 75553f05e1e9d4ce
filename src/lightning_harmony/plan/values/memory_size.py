"""Amounts of memory as people write them: "16GiB" to bytes, and bytes to "31.9 MiB"."""

import re
from fractions import Fraction

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: int | str) -> int:
    """Read an amount of memory, rounded down to whole bytes.

    Args:
        text: A number of bytes, or a number with a unit in any case: B; kB, MB, GB and TB, which are powers of 1000;
            KiB, MiB, GiB and TiB, which are powers of 1024.

    Raises:
        ValueError: If it is not a positive amount.
    """
    num_bytes = text if isinstance(text, int) and not isinstance(text, bool) else _read(text)
    if num_bytes < 1:
        raise ValueError(
            f"{text!r} is not an amount of memory. Give a positive number of bytes, or a number with a unit such as "
            '"16GiB", "32 MiB" or "11GB", for example HarmonyStrategy(device_memory="16GiB").'
        )
    return num_bytes


def format_bytes(n: int) -> str:
    """Write an amount of memory in its largest binary unit, exactly where that is a whole number.

    Otherwise it is rounded to one decimal, and never cut off to a whole number: "32 MiB" is exact, "32.0 MiB" is not.
    """
    size = abs(n)
    power = 0
    # A size that would round to 1024.0 of a unit is 1.0 of the next.
    while power < 4 and _tenths(size, power) >= 10240:
        power += 1
    whole, rest = divmod(size, 1 << 10 * power)
    tenths = _tenths(size, power)
    number = f"{tenths // 10}.{tenths % 10}" if rest else f"{whole}"
    return f"{'-' if n < 0 else ''}{number} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _read(text: object) -> int:
    """Return the bytes that a text stands for, 0 if it stands for none."""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return 0
    # Fractions, because 0.29 * 100 is not 29 in floating point.
    return int(Fraction(match[1]) * _UNIT_BYTES.get(match[2].lower(), 0))


def _tenths(size: int, power: int) -> int:
    """Return a size in tenths of the unit 1024**power, rounded to the nearest."""
    unit = 1 << 10 * power
    return (20 * size + unit) // (2 * unit)
