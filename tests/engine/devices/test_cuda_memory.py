"""How much of a GPU a fit may take, on GPUs of which another process holds a part."""

from __future__ import annotations

import pytest
import torch

from lightning_harmony.engine.devices import cuda_memory
from lightning_harmony.engine.devices.cuda_memory import CudaBudget, use_expandable_segments
from lightning_harmony.plan.values.card_memory import CONTEXT_BYTES, usable_bytes

GIB = 1 << 30
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 80 GiB with 24 GiB free, of which this process has 2 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (22 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)


def test_without_a_limit_the_budget_is_what_is_free_less_what_libraries_load() -> None:
    budget = CudaBudget.of(GPU, None)
    assert budget.reserved_bytes == 24 * GIB - GIB // 2
    assert 0.9 * budget.reserved_bytes < budget.capacity_bytes < budget.reserved_bytes


def test_a_limit_of_the_card_includes_the_context() -> None:
    budget = CudaBudget.of(GPU, 16 * GIB)
    assert budget.reserved_bytes == 16 * GIB - CONTEXT_BYTES
    # As `estimate` counts it.
    assert budget.capacity_bytes == usable_bytes(16 * GIB)


def test_a_limit_above_what_is_free_is_what_is_free() -> None:
    assert CudaBudget.of(GPU, 40 * GIB) == CudaBudget.of(GPU, None)


def loaded(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * GIB - num_bytes, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * GIB)


@pytest.mark.parametrize("limit", [None, 16 * GIB])
def test_what_kernels_take_beyond_what_was_left_for_them_is_not_there_for_tensors(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama's take 1.4 GiB: a fit that had filled the rest of a card found no room for a last tensor of 112 MiB."""
    before = CudaBudget.of(GPU, limit)
    loaded(monkeypatch, GIB // 4)
    assert before.behind_kernels(GPU) == before
    loaded(monkeypatch, 3 * GIB // 2)
    found = before.behind_kernels(GPU)
    assert before.reserved_bytes is not None
    assert found.reserved_bytes == before.reserved_bytes - GIB
    assert 0.9 * found.reserved_bytes < found.capacity_bytes < found.reserved_bytes


def test_a_limit_that_no_card_has_is_one_of_what_is_allocated() -> None:
    assert CudaBudget.of(GPU, 64 << 20) == CudaBudget(64 << 20, None)


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    settings: list[str] = []
    for name in cuda_memory._CONFIGURATION:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    return settings


def test_segments_are_expandable_unless_the_user_has_configured_the_allocator(
    configured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = configured
    use_expandable_segments()
    assert settings == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    use_expandable_segments()
    assert settings == ["expandable_segments:True"]
