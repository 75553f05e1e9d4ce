"""Fresh interpreters, because imports happen once in a process; few, because each takes seconds to import Lightning.

Most of that time goes to torch and to libraries that know neither Lightning nor this package. Where nothing depends on when
these are imported, interpreters are forks of one that has imported them.
"""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.forks import forking

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent
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


IMPORTS = """
import torch, torch._dynamo, torchmetrics
assert "lightning" not in sys.modules and "pytorch_lightning" not in sys.modules
"""


def run(code, autoload=True, path=None):
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@contextmanager
def forks_of_torch(autoload):
    with forking(IMPORTS, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}) as forks:

        def run(code):
            exit_code, said = forks.run(code)
            assert exit_code == 0, said
            return said

        yield run


@pytest.fixture(scope="module")
def run_in_fork():
    """Runs code in a fork of an interpreter that has imported torch, where this package is loaded with it."""
    with forks_of_torch(autoload=True) as run:
        yield run


@pytest.fixture(scope="module")
def run_in_fork_without_autoload():
    """The same, where torch loads nothing of us."""
    with forks_of_torch(autoload=False) as run:
        yield run


def test_registered_in_both_trees_without_an_import_of_ours_and_built_only_when_a_trainer_asks_for_it(run_in_fork):
    built = """
import {tree} as tree
from {tree}.strategies import StrategyRegistry
trainer = tree.Trainer(strategy="harmony", accelerator="cpu", logger=False, enable_checkpointing=False)
assert type(trainer.strategy).__name__ == "HarmonyStrategy"
assert isinstance(trainer.strategy, tree.strategies.SingleDeviceStrategy)
StrategyRegistry.register("harmony_again", StrategyRegistry["harmony"]["strategy"])
assert type(StrategyRegistry.get("harmony_again")).__name__ == "HarmonyStrategy"
"""
    run_in_fork(
        "\n".join(
            [
                f"import {TREES[1]}, {TREES[0]}, sys",
                *(IS_REGISTERED.format(tree=tree) for tree in TREES),
                'assert "lightning_harmony.strategy" not in sys.modules',
                SINGLE_DEVICE_STAND_IN,
                *(built.format(tree=tree) for tree in TREES),
            ]
        )
    )


@pytest.mark.nightly
def test_registered_in_the_tree_before_our_import_and_in_the_one_after_it_where_autoload_is_off(
    run_in_fork_without_autoload,
):
    for first, second in (TREES, TREES[::-1]):
        imports = f"import {first}, lightning_harmony, {second}"
        run_in_fork_without_autoload("\n".join([imports, *(IS_REGISTERED.format(tree=tree) for tree in TREES)]))


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


def test_installing_twice_adds_one_finder_and_keeps_a_name_that_is_taken(run_in_fork):
    run_in_fork("""
import sys
from lightning_harmony import autoload
from lightning_harmony.setup import registration
autoload.install(); autoload.install()
assert sum(type(finder).__module__ == autoload.__name__ for finder in sys.meta_path) == 1
from lightning.pytorch.strategies import StrategyRegistry
StrategyRegistry.register("harmony", dict, override=True)
autoload.install(); registration.register("lightning.pytorch")
assert StrategyRegistry["harmony"]["strategy"] is dict
""")


def test_a_broken_registration_breaks_no_import(run_in_fork):
    said = run_in_fork("""
from lightning_harmony.setup import registration
def broken(message):
    def fail(*args):
        raise RuntimeError(message)
    return fail
registration.register = broken("broken for one tree")
registration.register_loaded_trees = broken("broken for those that are loaded")
import torch
import lightning.pytorch
import lightning_harmony.autoload
lightning_harmony.autoload.install()
""")
    assert "RuntimeError: broken for one tree" in said
    assert "RuntimeError: broken for those that are loaded" in said
    assert "harmony" in said


def install_broken(tmp_path, broken):
    """An installation whose entry point is this project's, and whose package is broken: the first on the path counts."""
    group = (ROOT / "pyproject.toml").read_text().partition('"torch.backends"]\n')[2]
    module, function = re.match(r'\w+ = "(\w+):(\w+)"', group).groups()
    metadata = tmp_path / "lightning_harmony-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-harmony\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\nharmony = {module}:{function}\n")
    (tmp_path / "lightning_harmony").mkdir()
    (tmp_path / "lightning_harmony/__init__.py").write_text(broken)
    shutil.copy(ROOT / f"src/{module}.py", tmp_path)


def assert_says_what_is_not_available(said):
    assert 'Trainer(strategy="harmony") is not available' in said
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said


def test_a_package_that_cannot_be_imported_breaks_no_import_of_torch(tmp_path):
    install_broken(tmp_path, "import nowhere")
    assert_says_what_is_not_available(run("import torch; torch.ones(1)", path=tmp_path))


@pytest.mark.parametrize("broken", ["raise RuntimeError('half of it is missing')", "def ("])
def test_a_package_that_is_broken_in_another_way_breaks_no_loading_of_backends(
    broken, tmp_path, run_in_fork_without_autoload
):
    """What `import torch` ends with, in a process that has imported all before it."""
    install_broken(tmp_path, broken)
    load = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch; torch._import_device_backends()"
    assert_says_what_is_not_available(run_in_fork_without_autoload(load))


def test_nothing_is_said_of_a_broken_package_where_autoload_is_off(tmp_path):
    install_broken(tmp_path, "import nowhere")
    assert run("import torch; torch.ones(1)", autoload=False, path=tmp_path) == ""


def test_once_imported_the_module_looks_as_without_us_and_before_the_loader_answers_as_the_real_one(run_in_fork):
    run_in_fork("""
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

import copy, sys
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


def test_finders_that_ask_each_other_do_not_go_round_in_circles(run_in_fork):
    run_in_fork("""
import sys
import lightning_harmony.autoload
lightning_harmony.autoload.install()
class AsksAll:
    def find_spec(self, *args):
        finders = [finder for finder in sys.meta_path if finder is not self]
        return next((spec for finder in finders if (spec := finder.find_spec(*args)) is not None), None)
before, behind = AsksAll(), AsksAll()
sys.meta_path.insert(0, before)
import lightning.pytorch.strategies as strategies
assert "harmony" in strategies.StrategyRegistry
sys.meta_path.remove(before)
ours = next(at for at, finder in enumerate(sys.meta_path) if type(finder).__module__ == "lightning_harmony.autoload")
sys.meta_path.insert(ours + 1, behind)
import pytorch_lightning.strategies as strategies
assert "harmony" in strategies.StrategyRegistry
""")


def test_a_missing_lightning_stays_an_import_error(run_in_fork):
    run_in_fork("""
import sys, lightning_harmony
sys.path = [path for path in sys.path if "site-packages" not in path]
try:
    import pytorch_lightning.strategies
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
""")
