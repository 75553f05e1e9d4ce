"""What PyTorch keeps for the process, and user code sets for a while: each lane finds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch


class _Setting(NamedTuple):
    """One that is read and set by functions of torch; each is read several times a turn, so by those of its own core."""

    read: Callable[[], Any]
    set: Callable[[Any], Any]


def _settings() -> Iterator[_Setting]:
    # As Lightning's 64-true sets it. To set it takes longer than handing over does, even to what it is.
    yield _Setting(torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting(
        lambda: (_core._get_deterministic_algorithms(), _core._get_deterministic_algorithms_warn_only()),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    )
    for name, setter in (
        # `torch.nn.attention.sdpa_kernel`
        ("flash_sdp_enabled", "sdp_use_flash"),
        ("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
        ("math_sdp_enabled", "sdp_use_math"),
        ("cudnn_sdp_enabled", "sdp_use_cudnn"),
        ("sdp_priority_order", "sdp_priority_order"),
        # `torch.backends.cudnn.flags`, `torch.backends.mkldnn.flags`
        ("cudnn_enabled", "cudnn_enabled"),
        ("cudnn_benchmark", "cudnn_benchmark"),
        ("cudnn_deterministic", "cudnn_deterministic"),
        ("mkldnn_enabled", "mkldnn_enabled"),
        ("mkldnn_deterministic", "mkldnn_deterministic"),
        # `torch.backends.cuda.matmul`
        ("cublas_allow_fp16_accumulation", "cublas_allow_fp16_accumulation"),
    ):
        read, set_to = getattr(_core, f"_get_{name}", None), getattr(_core, f"_set_{setter}", None)
        # Those that this version has.
        if read is not None and set_to is not None:
            yield _Setting(read, set_to)
    matmul = torch.backends.cuda.matmul
    for name in ("fp16", "bf16"):
        attribute = f"allow_{name}_reduced_precision_reduction"
        yield _Setting(getattr(_core, f"_get_cublas_{attribute}"), partial(setattr, matmul, attribute))
    yield from _precisions()


def _precisions() -> Iterator[_Setting]:
    """With which precision FP32 is computed: `torch.set_float32_matmul_precision`, and what each library may do.

    Newer versions of torch know a precision for each library and operation, which takes that of the library, or of all,
    where it has none. So these are set before it; and all after the older settings, which set them, too.
    """
    yield _Setting(_older(_core._get_float32_matmul_precision), _core._set_float32_matmul_precision)
    yield _Setting(_older(_core._get_cudnn_allow_tf32), _core._set_cudnn_allow_tf32)
    of_each = getattr(_core, "_get_fp32_precision_getter", None)
    if of_each is None:
        return
    for library, operations in (("generic", ("all",)), ("cuda", _OPERATIONS), ("mkldnn", _OPERATIONS)):
        for operation in operations:
            key = library, operation
            yield _Setting(partial(of_each, *key), partial(_core._set_fp32_precision_setter, *key))


def _older(read: Callable[[], Any]) -> Callable[[], Any]:
    """What an older setting is; None where newer ones are used, of which it cannot tell."""

    def read_older() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return read_older


_core: Any = torch._C
_OPERATIONS = ("all", "matmul", "conv", "rnn")
_SETTINGS = tuple(_settings())
_READ = tuple(setting.read for setting in _SETTINGS)


class ProcessState:
    """Settings of the process: the default dtype, and what chooses kernels and their precision."""

    def __init__(self) -> None:
        self._values = [read() for read in _READ]

    @classmethod
    def capture(cls) -> ProcessState:
        """The state now."""
        return cls()

    def restore(self) -> None:
        """Make it so again."""
        if self._values == [read() for read in _READ]:
            return
        for setting, value in zip(_SETTINGS, self._values, strict=True):
            # Read anew: those before may have changed it.
            if value is not None and setting.read() != value:
                setting.set(value)
