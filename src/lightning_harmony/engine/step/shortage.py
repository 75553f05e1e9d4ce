"""Shortage: what is said where a model and a device's capacity do not go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.step.step import Grant
from lightning_harmony.engine.structures.parts import num_bytes_of
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.search.packing import smallest
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.task import Phase


def refuse_too_large(layers: Sequence[SwappedLayer], devices: Sequence[Device]) -> None:
    """Refuse layers that could never run.

    Raises:
        CapacityError: if a layer's weights, buffers and gradients exceed the capacity.
    """
    capacity = smallest(device.capacity_bytes for device in devices)
    for layer in layers if capacity is not None else []:
        weights = sum(
            p.numel() * layer.narrow[p].itemsize if p in layer.narrow else num_bytes_of(p) for p in layer.parameters
        )
        gradients = sum(p.numel() * p.element_size() for p in layer.parameters if p.requires_grad)
        buffers = layer.buffer_bytes
        short = weights + gradients + buffers - (capacity or 0)
        if short > 0:
            of_buffers = f", {format_bytes(buffers)} for its buffers" if buffers else ""
            raise CapacityError(
                f"layer {layer.name!r} needs {format_bytes(weights)} for its weights{of_buffers} and "
                f"{format_bytes(gradients)} for its gradients, {format_bytes(short)} more than the device's "
                f"{format_bytes(capacity or 0)}: raise HarmonyStrategy(device_memory=...), or name smaller modules with "
                "HarmonyStrategy(layers=...)"
            )


def exceeded(
    what: str,
    device: Device,
    error: BaseException,
    words: str,
    smaller: str = "microbatches with HarmonyStrategy(num_microbatches=...)",
) -> CapacityError:
    """What to raise where a device ran out of memory.

    Args:
        what: ran there.
        device: which one.
        error: raised by its allocator.
        words: what else there is to say, as on the record that predicted something else.
        smaller: what may be made smaller.
    """
    capacity = device.capacity_bytes
    limit = "the device" if capacity is None else f"the capacity of {format_bytes(capacity)}"
    short = getattr(error, "short_bytes", None)
    missing = "" if short is None else f" by {format_bytes(short)}"
    return CapacityError(
        f"{what} exceeds {limit}{missing}: weights, gradients and work space together do not fit. Use smaller "
        f"{smaller}, more memory with HarmonyStrategy(device_memory=...), or smaller layers with "
        f"HarmonyStrategy(layers=...). ({error}){words}"
    )


def exceeded_in_turn(granted: Grant, devices: Sequence[Device], error: BaseException, words: str) -> CapacityError:
    """What to raise where a device ran out of memory in a lane's turn.

    Args:
        granted: the turn.
        devices: all of them.
        error: raised by the allocator.
        words: what else there is to say, as on the record that predicted something else.
    """
    pack = granted.pack
    outside = "the code before the first layer" if granted.phase is Phase.FORWARD else "the backward of the loss"
    where = f"pack {pack.index} ({pack.name})" if pack is not None else outside
    on_device = f" on device {granted.device}" if len(devices) > 1 else ""
    what = f"{where} with microbatch {granted.progress.lane.microbatch}{on_device}"
    return exceeded(what, devices[granted.device], error, words)


@contextmanager
def naming_shortages(devices: Sequence[Device]) -> Iterator[None]:
    """A context of a step's work that is no lane's turn, such as the copies of gradients: a shortage is told with a way out.

    Args:
        devices: all of them.

    Raises:
        CapacityError: if one of them runs out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise exceeded("what a step does between the turns of its layers", devices[0], error, "") from error
