"""Fixtures that make mistakes visible."""

import gc
import os
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import hypothesis
import pytest
import torch
from lightning.fabric.utilities import registry
from torch import Tensor

from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from support import cores, same_training
from support.postponing import postponed  # noqa: F401  (a fixture of several modules)
from support.sampling import IS_WHOLE, one_of, sample_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--profile-cache", action="store_true", help="let the fits of a test know what earlier ones measured"
    )
    parser.addoption("--devices", type=int, help="train on so many devices where a test names no number")
    parser.addoption("--accelerator", choices=["cpu", "gpu"], default="cpu", help="on which, where a test names none")


def pytest_configure(config: pytest.Config) -> None:
    # Until all tests are collected: each collection would look at all that the libraries make, and nothing of that ends.
    gc.disable()
    cores.keep_to_one()
    # About the way in which LightningCLI calls it. A filter of warnings by its class would have every test need the package.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    same_training.accelerator = config.getoption("--accelerator")
    if same_training.accelerator == "gpu":
        # Work space of a fixed and, for these small networks, small size: their sums then have one order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of what devices could change run on one and on two: `@pytest.mark.devices(1, 2)`."""
    marker = metafunc.definition.get_closest_marker("devices")
    if marker is not None and metafunc.config.getoption("--devices") is None:
        metafunc.parametrize("num_default_devices", marker.args, indirect=True, ids=lambda number: f"{number}dev")


def pytest_collection_finish() -> None:
    """Full collections look at what tests make, and not each time at the half million objects of the libraries."""
    _spare_what_lasts()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Nor at what libraries and pytest have made since, and keep, but for the one that finds it."""
    before = _num_full_collections()
    result = yield
    if _num_full_collections() > before:
        _spare_what_lasts()
    return result


def _spare_what_lasts() -> None:
    gc.collect()
    gc.freeze()


def _num_full_collections() -> int:
    number: int = gc.get_stats()[-1]["collections"]
    return number


@pytest.fixture(autouse=True, scope="session")
def installed_once() -> Iterator[None]:
    """Each Trainer reads what every package offers that is installed, which takes as long as a step of a small network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True, scope="session")
def seeds_where_there_are_generators() -> Iterator[None]:
    """Each `torch.manual_seed` keeps a seed for devices that are absent, and the whole stack as text with it.

    That took a third of a training by plain Lightning, which seeds each microbatch.
    """
    with pytest.MonkeyPatch.context() as patch:
        for backend in (torch.cuda, torch.xpu, torch.mtia):
            if not backend.is_available():
                patch.setattr(backend, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def num_default_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """On how many devices harmony trains where a test names no number."""
    number: int = getattr(request, "param", None) or request.config.getoption("--devices") or 1
    monkeypatch.setattr(same_training, "default_devices", number)
    return number


# What a test takes tells of the machine and what else runs on it. Examples are the same in every run, so that what fails is
# what was changed; `pytest --hypothesis-profile=others` looks at others.
hypothesis.settings.register_profile("others", deadline=None)
hypothesis.settings.register_profile(
    "any-machine", deadline=None, derandomize=True, max_examples=100 if IS_WHOLE else 30
)
hypothesis.settings.load_profile("any-machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests are chosen: whole matrices have all that the machine can run, `make test` what ten minutes on two cores take.

    Tests and cases that are named on the command line run whatever they are.
    """
    of_trainings = Path(__file__).parent

    def is_left_out(item: pytest.Item) -> bool:
        if item.get_closest_marker("soak") and "soak" not in config.option.markexpr:
            return True
        # On GPUs those run that have to do with an accelerator. Tests of parts, in the folders, name their devices.
        is_of_parts = item.path.parent != of_trainings
        return same_training.accelerator == "gpu" and bool(is_of_parts or item.get_closest_marker("cpu"))

    left_out = {item for item in items if is_left_out(item)}
    if not IS_WHOLE and not any("::" in argument for argument in config.args):
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("nightly"):
                left_out.add(item)
            elif item.get_closest_marker("whole"):
                pass
            elif item not in left_out and (item.path.parent == of_trainings or item.get_closest_marker("sampled")):
                tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for cases in tests.values():
            left_out |= set(cases) - set(sample_of(cases))
        for item in items:
            item.stash[_UPDATES] = (one_of(get_args(same_training.Update), item.nodeid),)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


_UPDATES = pytest.StashKey[tuple[same_training.Update, ...]]()


@pytest.fixture(autouse=True)
def default_updates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """When harmony updates where a test doesn't say: in one of the two ways, as its name says; else in both."""
    monkeypatch.setattr(
        same_training, "default_updates", request.node.stash.get(_UPDATES, get_args(same_training.Update))
    )


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evicted from a virtual device becomes NaN, so that no stale read can pass; not what somebody keeps."""

    def free(self: VirtualDevice, buffer: Tensor, uses: Sequence[Event], *, is_kept: bool = False) -> None:
        for use in uses:
            use.synchronize()
        if not is_kept:
            buffer.untyped_storage().fill_(0xFF)

    monkeypatch.setattr(VirtualDevice, "free", free)


@pytest.fixture(autouse=True)
def exact_on_gpus() -> Iterator[None]:
    """On GPUs, too, plain Lightning and harmony have the same bits: kernels sum in one order."""
    on_gpus = same_training.accelerator == "gpu"
    torch.use_deterministic_algorithms(on_gpus, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def swapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' models are small: they are swapped although they fit, but where a test is about models that fit."""
    if request.node.get_closest_marker("in_memory") is None:
        monkeypatch.setattr("lightning_harmony.strategy.fits", lambda lasting, device: False)


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Tests are small: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    assert torch.get_default_dtype() is torch.float32


@pytest.fixture(autouse=True)
def copied_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' tensors are small: they are copied by the threads that copy large ones."""
    monkeypatch.setattr("lightning_harmony.engine.devices.device.BRIEFLY_COPIED_BYTES", -1)


@pytest.fixture(autouse=True)
def small_stash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' tensors are small: swap out all but scalars."""
    monkeypatch.setattr("lightning_harmony.engine.memory.stash.SMALLEST_BYTES", 64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No test depends on what another one has measured, or on what is in the user's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not request.config.getoption("--profile-cache"):
        monkeypatch.setattr("lightning_harmony.engine.measure.profile_cache.default_folder", lambda: None)


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run by the plan by rules, however slow the machine is that tests run on."""
    monkeypatch.setattr("lightning_harmony.plan.search.search.SHORT_SECONDS", float("inf"))


@pytest.fixture(autouse=True)
def spared_by_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are frozen here, and harmony need not ask in each fit how many are: that counts all of them, one by one."""
    monkeypatch.setattr("lightning_harmony.fit.garbage.NUM_FIRST_STEPS", -1)
