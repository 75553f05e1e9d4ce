"""Values as text."""

from lightning_harmony.plan.values.printed import Printed, fact_lines, table_lines


class Value(Printed):
    def __str__(self) -> str:
        return "a < b"


def test_a_notebook_shows_what_is_printed() -> None:
    assert Value()._repr_html_() == "<pre>a &lt; b</pre>"


def test_tables_and_facts_have_columns() -> None:
    assert table_lines([("", "In"), ("weights", "4 MiB")]) == [
        "        | In",
        "---------------",
        "weights | 4 MiB",
        "---------------",
    ]
    assert fact_lines([("1 s", "time"), ("12 MiB", "peak")]) == ["1 s     time", "12 MiB  peak"]
    assert fact_lines([]) == []
