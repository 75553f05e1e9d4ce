"""Which files the code of a step leads to: their globals are looked at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import Any

import pytest

from lightning_harmony.held.files import Code

FILES = {
    "of_functions": "def used(): ...\ndef unused(): ...",
    "of_objects": "class Context:\n    scale = 1\ncontext = Context()",
    "behind_functions": "from of_functions import used\ndef uses(): return used()",
    "behind_classes": """
        from of_objects import context
        from of_functions import used
        class Used:
            def method(self): return context.scale
            def never(self): return used()
            @property
            def shown(self): return used()
        """,
    "unused": "def unused(): ...",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Makes the class of a model, from the code of its file, in a project with files beside it."""
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(code: str) -> Any:
        (tmp_path / "of_model.py").write_text(dedent(code))
        return __import__("of_model").Model

    yield make
    for name in (*FILES, "of_model"):
        sys.modules.pop(name, None)


def led_to(kind: Any, functions: tuple[FunctionType, ...] = ()) -> set[str]:
    return set(Code([kind], functions).files) - {"of_model"}


USES: dict[str, tuple[str, str, set[str]]] = {
    "function": ("from of_functions import used", "used()", {"of_functions"}),
    "module": ("import of_functions", "of_functions.used()", {"of_functions"}),
    "other name": ("import of_functions as o", "o.used()", {"of_functions"}),
    "object": ("from of_objects import context", "context.scale", {"of_objects"}),
    "function of a function": (
        "import behind_functions",
        "behind_functions.uses()",
        {"behind_functions", "of_functions"},
    ),
    "method": ("from behind_classes import Used", "Used().method()", {"behind_classes", "of_objects"}),
    "property": ("from behind_classes import Used", "Used().shown", {"behind_classes", "of_functions"}),
    "nested function": ("from of_functions import used", "(lambda: [used() for _ in (1, 2)])()", {"of_functions"}),
    "nothing": ("from unused import unused", "1", set()),
    "installed": ("import pytest, torch", "pytest.approx(torch.zeros(1))", set()),
}


@pytest.mark.parametrize("use", USES)
def test_what_the_code_of_a_step_names_is_followed(use: str, model: Callable[[str], Any]) -> None:
    imports, call, files = USES[use]
    step = "def training_step(self, batch): return self.helper()"
    code = f"{imports}\nclass Model:\n    {step}\n    def helper(self): return {call}"
    assert led_to(model(code)) == files


@pytest.mark.parametrize("hook", ["on_fit_start", "configure_optimizers", "__init__"])
def test_the_code_of_hooks_between_steps_is_not_followed(hook: str, model: Callable[[str], Any]) -> None:
    """A tool of the project's that watches a fit may be larger than its models."""
    code = f"from of_functions import used\nclass Model:\n    def {hook}(self): used()\n    def forward(self): ..."
    assert led_to(model(code)) == set()


def test_functions_that_a_model_keeps_are_followed(model: Callable[[str], Any]) -> None:
    kind = model("from of_functions import used\ndef hook(*_): used()\nclass Model: ...")
    assert led_to(kind, (sys.modules["of_model"].hook,)) == {"of_functions"}
