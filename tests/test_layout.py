"""Where helpers of tests are, and how large modules are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_harmony

TESTS = Path(__file__).parent

PACKAGE = Path(lightning_harmony.__file__).parent
MOST_LINES, MOST_LINES_OF_CLASS = 450, 300
# Larger ones, and why.
LARGE_CLASSES = {
    "StrategyMixin": "a fifth of it describes the arguments of the strategy, and the rest is what Lightning calls",
    "Executor": "it makes nothing itself, but the adapter asks it for all that a step can do",
    "Runtime": "each question of layers and of glue has its answer here",
    "Updater": "gradients come from many sides, and one object knows which updates follow",
}

pytestmark = pytest.mark.cpu


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere, by the first part of their names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


def test_no_test_module_is_imported_by_another_file() -> None:
    test_modules = {path.stem for path in TESTS.rglob("test_*.py")}
    importers = {str(path.relative_to(TESTS)): imported(path) & test_modules for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in importers.items() if names} == {}


def test_no_module_has_more_lines_than_one_reads_at_once() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: number for path, number in lines.items() if number > MOST_LINES} == {}


def test_no_class_is_larger_than_one_reads_at_once_but_for_those_with_a_reason() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    large = {each.name for each in classes if (each.end_lineno or 0) - each.lineno >= MOST_LINES_OF_CLASS}
    assert large == set(LARGE_CLASSES)
