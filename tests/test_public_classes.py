"""What users construct: ordinary classes, with the arguments that they show, in both trees of Lightning."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import lightning_harmony
from lightning_harmony.monitor import MonitorMixin
from lightning_harmony.precision import PrecisionMixin
from lightning_harmony.setup.lightning_tree import classes_of
from lightning_harmony.setup.registration import TREES
from lightning_harmony.strategy import StrategyMixin

pytestmark = pytest.mark.cpu

MIXINS = {"HarmonyStrategy": StrategyMixin, "HarmonyPrecision": PrecisionMixin, "HarmonyMonitor": MonitorMixin}
# What all classes have.
OF_OBJECTS = {*dir(type("", (), {})), "__annotations__", "__annotate_func__", "__annotations_cache__", "tree"}


def functions_of(value: Any) -> list[Any]:
    """The functions behind an attribute of a class."""
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset) if function is not None]
    return [function] if inspect.isfunction(function := getattr(value, "__func__", value)) else []


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", MIXINS)
def test_what_overrides_lightning_says_so_and_nothing_else_does(tree: str, name: str) -> None:
    kind, mixin = getattr(classes_of(tree), name), MIXINS[name]
    inherited = {attribute for base in kind.__mro__[kind.__mro__.index(mixin) + 1 :] for attribute in vars(base)}
    ours = {attribute: functions_of(value) for attribute, value in vars(mixin).items() if attribute not in OF_OBJECTS}
    overriding = {attribute for attribute, functions in ours.items() if functions and attribute in inherited}
    marked = {
        attribute
        for attribute, functions in ours.items()
        if any(getattr(function, "__override__", False) for function in functions)
    }
    assert marked == overriding
    assert len(overriding) > 0


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        (
            "HarmonyStrategy",
            {"devcie_memory": "4GiB"},
            r"HarmonyStrategy.*'devcie_memory': did you mean 'device_memory'\?",
        ),
        ("HarmonyStrategy", {"microbatches": 4}, r"'microbatches': did you mean 'num_microbatches'\?"),
        ("HarmonyStrategy", {"zzz": 4}, r"'zzz': its arguments are device_memory, num_microbatches, .*, profile_cache"),
        ("HarmonyPrecision", {"precison": "32-true"}, r"HarmonyPrecision.*'precison': did you mean 'precision'\?"),
        ("HarmonyMonitor", {"tracestep": 3}, r"HarmonyMonitor.*'tracestep': did you mean 'trace_step'\?"),
    ],
)
def test_a_wrong_name_of_an_argument_says_which_one_was_meant(
    tree: str, name: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        getattr(classes_of(tree), name)(**arguments)


def test_a_wrong_name_of_an_argument_of_estimate_says_which_one_was_meant() -> None:
    with pytest.raises(TypeError, match=r"estimate\(\) .*'batchsize': did you mean 'batch_size'\?"):
        lightning_harmony.estimate(None, batchsize=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("tree", TREES)
def test_arguments_are_those_that_inspect_shows(tree: str) -> None:
    shown = inspect.signature(classes_of(tree).HarmonyStrategy).parameters
    assert list(shown)[:3] == ["device_memory", "num_microbatches", "microbatch_size"]
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in shown.values())
    strategy = classes_of(tree).HarmonyStrategy(**{name: parameter.default for name, parameter in shown.items()})
    assert type(strategy).__name__ == "HarmonyStrategy"


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", MIXINS)
def test_inspect_shows_what_the_constructor_takes(tree: str, name: str) -> None:
    mixin = MIXINS[name]
    ours = list(inspect.signature(mixin.__init__).parameters.values())[1:]  # type: ignore[misc]
    assert list(inspect.signature(getattr(classes_of(tree), name)).parameters.values()) == ours
