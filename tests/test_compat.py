"""Private names of Lightning are used in one module, and versions that may have renamed them are told."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_harmony
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import classes_of
from lightning_harmony.setup.registration import TREES

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent
PACKAGE = Path(lightning_harmony.__file__).parent
# The engine and plans know nothing of Lightning, which import-linter checks.
ADAPTER = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in ("engine", "plan")]
# Of torch, of transformers and of the standard library.
OF_OTHERS = {
    *("_C", "_BatchNorm", "_apply", "_backward_hooks", "_buffers", "_compiled_call_impl", "_modules", "_parameters"),
    *("_growth_tracker", "_lazy_init_scale_growth_tracker", "_scale", "_step_supports_amp_scaling"),
    *("_cdata", "_current_graph_task_id", "_current_level", "_data", "_opt_called", "_version", "_wrapped_by_lr_sched"),
    *("_device_types", "_get_backend", "_get_sequence_number_for_group", "_world"),
    *("_from_config", "_getframe", "_lock", "_optimizer_step_pre_hooks", "_replace", "_value"),
}


def private_names(tree: ast.AST, *, own: frozenset[str] = frozenset()) -> Iterator[str]:
    """The private attributes that code names of other objects, and those of its own that Lightning's classes give it.

    Args:
        tree: of the code.
        own: what the classes of this package define.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not (is_of_self and node.attr in own):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))  # type: ignore[misc]


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a module defines: functions, classes, and attributes that its classes set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def names_in_compat() -> set[str]:
    tree = ast.parse(Path(compat.__file__).read_text())
    return {*filter(is_private, private_names(tree)), *compat.PLUGIN_HOOKS}


def test_private_names_of_lightning_are_in_one_module() -> None:
    trees = {file: ast.parse(file.read_text()) for file in ADAPTER}
    own = frozenset(name for tree in trees.values() for name in own_names(tree))
    found = {}
    for file, tree in trees.items():
        if file != Path(compat.__file__):
            named = set(filter(is_private, private_names(tree, own=own)))
            found[file.name] = named & names_in_compat() | named - OF_OTHERS - set(own_names(tree))
    assert {file: names for file, names in found.items() if names} == {}
    assert len(names_in_compat()) > 10


@pytest.mark.parametrize("tree", [*TREES, "torchmetrics"])
def test_the_installed_version_has_these_names(tree: str) -> None:
    spec = find_spec(tree)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    texts = [file.read_text() for file in Path(spec.submodule_search_locations[0]).rglob("*.py")]
    known = set(re.findall(r"\b_[a-z]\w*", "\n".join(texts)))
    of_metrics = {"_forward_cache", "_defaults"}
    assert (of_metrics if tree == "torchmetrics" else names_in_compat() - of_metrics) - known == set()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("2.6.4", True), ("2.6.99", True), ("2.6.3", False), ("2.7.0", False), ("2.7.0rc1", False), ("3.0", False)],
)
def test_a_version_that_was_not_tested_is_told_when_the_strategy_is_made(
    tree: str, version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module(tree), "__version__", version)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        classes_of(tree).HarmonyStrategy()
    expected = [] if is_tested else [f"harmony was not tested with {tree} {version}, .* 'lightning>=2.6.4,<2.7'"]
    assert len(said) == len(expected)
    assert all(re.match(words, str(warning.message)) for words, warning in zip(expected, said, strict=True))


def test_the_tested_versions_are_those_that_are_installed() -> None:
    assert f'"lightning>={compat.OLDEST},<{compat.BELOW}"' in (ROOT / "pyproject.toml").read_text()
    assert f"lightning=={compat.OLDEST} pytorch-lightning=={compat.OLDEST}" in (ROOT / "Makefile").read_text()
