"""Values as text: tables of a report, and what notebooks show."""

from collections.abc import Sequence
from html import escape

from lightning_harmony.plan.values.memory_size import format_bytes


class Printed:
    """A value that a notebook shows as it is printed."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def amount(num_bytes: int) -> str:
    """Bytes in a cell of a table, which may be none."""
    return format_bytes(num_bytes) if num_bytes else "-"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with rules around its body.

    Args:
        rows: the cells of each row, the head first.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
    return [lines[0], rule, *lines[1:], rule]


def fact_lines(facts: Sequence[tuple[str, str]]) -> list[str]:
    """Values with their meanings beside them, in two columns."""
    width = max((len(value) for value, _ in facts), default=0)
    return [f"{value:<{width}}  {meaning}" for value, meaning in facts]
