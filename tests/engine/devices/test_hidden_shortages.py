"""Hidden shortages: what other errors tell of device memory that is short."""

from __future__ import annotations

import pytest
import torch

from lightning_harmony.engine.devices.hidden_shortages import finding_shortages

SCRIPT = "The following operation failed in the TorchScript interpreter.\nRuntimeError: CUDA "


@pytest.mark.parametrize(
    "words",
    [
        f"{SCRIPT}out of memory. Tried to",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_a_shortage_of_a_library_or_in_torchscript_is_one(words: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=words[:20]), finding_shortages():
        raise RuntimeError(words)


@pytest.mark.parametrize("words", [f"{SCRIPT}no shortage", "CUBLAS_STATUS_EXECUTION_FAILED", "out of memory"])
def test_other_errors_stay_what_they_are(words: str) -> None:
    with pytest.raises(RuntimeError) as error, finding_shortages():
        raise RuntimeError(words)
    assert not isinstance(error.value, torch.OutOfMemoryError)
