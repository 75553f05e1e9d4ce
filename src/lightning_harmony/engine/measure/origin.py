"""The origin of what is measured: fingerprints of a model and its code, of the machine, and of what computes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any

import torch
from torch import nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.plan.values.record import Origin


def origin_of(module: nn.Module, layers: Sequence[Layer], devices: Sequence[Device], settings: Iterable[str]) -> Origin:
    """What is measured of a model that trains on some devices.

    Args:
        module: the root.
        layers: those that are scheduled.
        devices: where they run.
        settings: what else decides what a layer takes, such as the precision.
    """
    names = [[layer.name, _numbers_of(layer.whole)] for layer in layers]
    return Origin(
        model=_digest([kind_of(module), names, list(settings)]), machine=_machine(devices), versions=_versions()
    )


def kind_of(module: nn.Module) -> str:
    """The same for modules that have the same code, and parameters and buffers of the same shapes and types."""
    tensors = [
        [name, list(part.shape), str(part.dtype), tensor.requires_grad]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        for part in parts_of(tensor)
    ]
    classes: list[Any] = [type(child) for child in module.modules()]
    return _digest([tensors, [_code_of(each) for each in classes]])


def _numbers_of(module: nn.Module) -> list[str]:
    """Attributes of it and of all below, such as the strides of convolutions."""
    return [
        f"{name}={value!r}"
        for child in module.modules()
        for name, value in sorted(vars(child).items())
        if not name.startswith("_") and name != "training" and _is_number(value)
    ]


def _is_number(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(item) for item in value)
    return isinstance(value, int | float | str)


def _machine(devices: Sequence[Device]) -> str:
    names = sorted(
        {
            torch.cuda.get_device_name(device.torch_device) if device.torch_device.type == "cuda" else "host memory"
            for device in devices
        }
    )
    return f"{len(devices)} x {', '.join(names)}; {os.cpu_count()} cores, {torch.get_num_threads()} threads; {platform.node()}"


def own_version() -> str:
    """The version of this package, which may run from its sources."""
    try:
        return version("lightning-harmony")
    except PackageNotFoundError:
        return "of no installation"


def _versions() -> str:
    python = platform.python_version()
    return f"lightning-harmony {own_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, python {python}"


@cache
def _code_of(kind: Any) -> str:
    """What the functions of a class do, its bases' included, as far as they are Python."""
    classes = [base for base in kind.__mro__ if base not in (object, nn.Module)]
    functions = [
        (name, value) for base in classes for name, value in sorted(vars(base).items()) if hasattr(value, "__code__")
    ]
    return _digest([kind.__qualname__, [[name, list(_instructions(function))] for name, function in functions]])


def _instructions(function: Callable[..., Any]) -> Iterator[str]:
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        yield code.co_code.hex()
        yield repr(code.co_names)
        yield repr([constant for constant in code.co_consts if not isinstance(constant, CodeType | frozenset)])
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
