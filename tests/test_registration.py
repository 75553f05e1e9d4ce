"""Each case is a fresh interpreter, because imports happen once in a process."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu

TREES = ["lightning.pytorch", "pytorch_lightning"]
IS_REGISTERED = "from {tree}.strategies import StrategyRegistry; assert 'harmony' in StrategyRegistry"
SINGLE_DEVICE_STAND_IN = """
import sys, types
def of_single_device(tree):
    from importlib import import_module
    single_device = import_module(tree + ".strategies").SingleDeviceStrategy
    return type("HarmonyStrategy", (single_device,), {"__init__": lambda self: single_device.__init__(self, "cpu")})
for each in ("lightning.pytorch", "pytorch_lightning"):
    name = "lightning_harmony." + each.replace(".", "_")
    stand_in = types.ModuleType(name)
    stand_in.__getattr__ = lambda attribute, each=each: of_single_device(each)
    sys.modules[name] = stand_in
"""


def run(code, autoload=True):
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_registered_in_both_trees_without_an_import_of_ours():
    run("\n".join([f"import {TREES[1]}, {TREES[0]}", *(IS_REGISTERED.format(tree=tree) for tree in TREES)]))


@pytest.mark.parametrize(
    "order", ["lightning_harmony, {0}, {1}", "{0}, lightning_harmony, {1}", "{1}, {0}, lightning_harmony"]
)
def test_registered_in_both_trees_by_our_import_where_autoload_is_off(order):
    imports = f"import {order.format(*TREES)}"
    run("\n".join([imports, *(IS_REGISTERED.format(tree=tree) for tree in TREES)]), autoload=False)


def test_importing_torch_or_this_package_imports_no_lightning():
    code = """
import sys
import {module}
roots = {{name.partition(".")[0] for name in sys.modules}}
assert not roots & {{"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"}}, roots
assert any(type(finder).__module__ == "lightning_harmony.autoload" for finder in sys.meta_path)
"""
    run(code.format(module="torch"))
    run(code.format(module="lightning_harmony"))


def test_installing_twice_adds_one_finder_and_keeps_a_name_that_is_taken():
    run("""
import sys
from lightning_harmony import autoload, registration
autoload.install(); autoload.install()
assert sum(type(finder).__module__ == autoload.__name__ for finder in sys.meta_path) == 1
from lightning.pytorch.strategies import StrategyRegistry
StrategyRegistry.register("harmony", dict, override=True)
autoload.install(); registration.register("lightning.pytorch")
assert StrategyRegistry["harmony"]["strategy"] is dict
""")


@pytest.mark.parametrize("tree", TREES)
def test_the_strategy_is_built_only_when_a_trainer_asks_for_it(tree):
    run(f"""
import {tree} as tree, sys
from {tree}.strategies import StrategyRegistry
assert "lightning_harmony.strategy" not in sys.modules
{SINGLE_DEVICE_STAND_IN}
trainer = tree.Trainer(strategy="harmony", accelerator="cpu", logger=False, enable_checkpointing=False)
assert type(trainer.strategy).__name__ == "HarmonyStrategy"
assert isinstance(trainer.strategy, tree.strategies.SingleDeviceStrategy)
StrategyRegistry.register("harmony_again", StrategyRegistry["harmony"]["strategy"])
assert type(StrategyRegistry.get("harmony_again")).__name__ == "HarmonyStrategy"
""")


@pytest.mark.parametrize("broken", ["register", "register_loaded_trees"])
def test_a_broken_registration_breaks_no_import(broken):
    done = run(f"""
from lightning_harmony import registration
def fail(*args):
    raise RuntimeError("broken on purpose")
registration.{broken} = fail
import torch
import lightning.pytorch
import lightning_harmony.autoload
lightning_harmony.autoload.install()
""")
    assert "broken on purpose" in done.stderr
    assert "harmony" in done.stderr


def test_once_imported_the_module_looks_as_without_us():
    run("""
import importlib, importlib.util, inspect, pickle
from importlib.machinery import SourceFileLoader
import lightning.pytorch.strategies as strategies
assert type(strategies.__spec__.loader) is SourceFileLoader
assert type(strategies.__loader__) is SourceFileLoader
assert "StrategyRegistry" in inspect.getsource(strategies)
assert pickle.loads(pickle.dumps(strategies.SingleDeviceStrategy)) is strategies.SingleDeviceStrategy
before = strategies.StrategyRegistry
assert importlib.reload(strategies) is strategies
assert strategies.StrategyRegistry is not before
assert "harmony" in strategies.StrategyRegistry
assert type(strategies.__spec__.loader) is SourceFileLoader
""")


def test_before_its_execution_the_loader_answers_as_the_real_one():
    run("""
import copy, importlib.util, pickle, sys, torch
import lightning.pytorch
name = "lightning.pytorch.strategies"
del sys.modules[name]
spec = importlib.util.find_spec(name)
assert "StrategyRegistry" in spec.loader.get_source(name)
assert spec.loader.is_package(name)
assert spec.loader.path == spec.origin
for loader in (copy.deepcopy(spec.loader), pickle.loads(pickle.dumps(spec.loader))):
    assert loader.get_source(name) == spec.loader.get_source(name)
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
assert "harmony" in module.StrategyRegistry
""")


@pytest.mark.parametrize("position", [0, 1])
def test_finders_that_ask_each_other_do_not_go_round_in_circles(position):
    run(f"""
import sys
import lightning_harmony.autoload
lightning_harmony.autoload.install()
class AsksAll:
    def find_spec(self, *args):
        finders = [finder for finder in sys.meta_path if finder is not self]
        return next((spec for finder in finders if (spec := finder.find_spec(*args)) is not None), None)
sys.meta_path.insert({position}, AsksAll())
import lightning.pytorch.strategies as strategies
assert "harmony" in strategies.StrategyRegistry
""")


def test_a_missing_lightning_stays_an_import_error():
    run("""
import sys, lightning_harmony
sys.path = [path for path in sys.path if "site-packages" not in path]
try:
    import pytorch_lightning.strategies
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
""")
