"""Settings of the process that a lane changes are its own: others find theirs, and it finds its own again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_harmony.engine.lane import LanePool, current_lane
from lightning_harmony.engine.process_state import ProcessState

backends: Any = torch.backends
newer = pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="needs a newer torch")


@pytest.fixture
def pool() -> Iterator[LanePool]:
    pool = LanePool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = ProcessState.capture()
    yield
    left = ProcessState.capture()
    before.restore()
    assert left._values == before._values


def deterministic(value: Any) -> None:
    torch.use_deterministic_algorithms(value, warn_only=value)


# For each: how it is set, how it is read, and what it is set to.
SETTINGS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], Any]] = {
    "default dtype": (torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "matmul high": (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "high"),
    "matmul medium": (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"),
    "cuBLAS TF32": (
        lambda value: setattr(backends.cuda.matmul, "allow_tf32", value),
        lambda: backends.cuda.matmul.allow_tf32,
        True,
    ),
    "cuDNN TF32": (
        lambda value: setattr(backends.cudnn, "allow_tf32", value),
        lambda: backends.cudnn.allow_tf32,
        False,
    ),
    "cuDNN benchmark": (
        lambda value: setattr(backends.cudnn, "benchmark", value),
        lambda: backends.cudnn.benchmark,
        True,
    ),
    "oneDNN": (backends.mkldnn.set_flags, torch._C._get_mkldnn_enabled, False),
    "reduced sums": (
        lambda value: setattr(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", value),
        lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        False,
    ),
    "deterministic": (deterministic, torch.are_deterministic_algorithms_enabled, True),
    "attention": (backends.cuda.enable_flash_sdp, backends.cuda.flash_sdp_enabled, False),
}
NEWER: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], Any]] = {
    "of all": (
        lambda value: setattr(backends, "fp32_precision", value),
        lambda: backends.fp32_precision,
        "tf32",
    ),
    "of a library": (
        lambda value: setattr(backends.mkldnn, "fp32_precision", value),
        lambda: backends.mkldnn.conv.fp32_precision,
        "bf16",
    ),
    "of an operation": (
        lambda value: setattr(backends.cuda.matmul, "fp32_precision", value),
        lambda: backends.cuda.matmul.fp32_precision,
        "tf32",
    ),
}


def check(pool: LanePool, set_to: Callable[[Any], Any], read: Callable[[], Any], value: Any) -> None:
    before = read()
    assert before != value
    found: list[Any] = []

    def job(*, sets: bool) -> None:
        lane = current_lane()
        assert lane is not None
        if sets:
            set_to(value)
        lane.park(None)
        found.append(read())
        lane.park(None)
        found.append(read())

    lanes = pool.lanes([lambda: job(sets=True), lambda: job(sets=False)])
    turns = iter([*lanes, *lanes, *lanes])
    pool.drive(lambda previous: next(turns, None))
    assert found == [value, before, value, before]
    assert read() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_each_lane_has_its_own(pool: LanePool, name: str) -> None:
    check(pool, *SETTINGS[name])


@newer
@pytest.mark.parametrize("name", NEWER)
def test_each_lane_has_its_own_precision(pool: LanePool, name: str) -> None:
    check(pool, *NEWER[name])
    # Each falls back on the next wider one, as before.
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.skipif(not hasattr(torch._C, "_get_sdp_priority_order"), reason="needs a newer torch")
def test_the_order_in_which_kernels_of_attention_are_tried() -> None:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        within = ProcessState.capture()
    outside = ProcessState.capture()
    within.restore()
    assert ProcessState.capture()._values == within._values
    outside.restore()
    assert ProcessState.capture()._values == outside._values
