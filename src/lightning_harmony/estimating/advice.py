"""What to change where a training does not fit, what costs least first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from lightning_harmony.engine.model.decompose import find_layers
from lightning_harmony.estimating.result import Estimate, Row
from lightning_harmony.plan.outlook.outlook import Need
from lightning_harmony.plan.values.card_memory import limit_for
from lightning_harmony.plan.values.memory_size import format_bytes


def with_advice(result: Estimate, module: nn.Module) -> Estimate:
    """The estimate with what to change: settings first, then what trains otherwise, then more memory.

    Args:
        result: without advice.
        module: the model on the meta device.
    """
    settings = [
        *_other_microbatches(result),
        *_higher_limit(result),
        *_finer_layers(result, module),
        *_weights_in_files(result),
        *_on_disk(result),
    ]
    otherwise = [*_smaller_state(result), *_smaller_layer(result)]
    memory = [*_larger_card(result), *_more_host_memory(result)]
    # Host and device may ask for the same.
    return replace(result, advice=tuple(dict.fromkeys([*settings, *otherwise, *memory])))


# ---- settings ----------------------------------------------------------------------------------------------------------


def _other_microbatches(result: Estimate) -> Iterator[str]:
    fitting = [row for row in result.rows if result.fits_device(row) and result.fits_host(row)]
    if not result.fits and fitting:
        best = min(fitting, key=lambda row: row.outlook.seconds)
        yield (
            f"HarmonyStrategy(num_microbatches={best.outlook.num_microbatches}): microbatches of "
            f"{best.microbatch_size} need {format_bytes(best.outlook.need.num_bytes)}"
        )


def _higher_limit(result: Estimate) -> Iterator[str]:
    if result.fits_device(result.chosen):
        return
    for row in [result.chosen] if any(map(result.fits_device, result.rows)) else [_least(result), result.chosen]:
        need = row.outlook.need
        if _has(result, need):
            limit = _rounded_up(_taken(result, need))
            yield f'HarmonyStrategy(device_memory="{limit}") or more, for microbatches of {row.microbatch_size}'


def _finer_layers(result: Estimate, module: nn.Module) -> Iterator[str]:
    need = _least_too_large(result)
    if need is None or not (need.name and need.state_bytes > need.work_bytes):
        return
    try:
        kinds = _kinds_within(module.get_submodule(need.name))
    except AttributeError:
        return
    if kinds and need.name not in (
        layer.name for layer in find_layers(module, max_layer_bytes=result.capacity_bytes, layers=kinds)
    ):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        yield f"HarmonyStrategy(layers={{{names}}}) schedules the parts of {need.name} one by one"


def _kinds_within(layer: nn.Module) -> set[type[nn.Module]]:
    """The classes of the outermost modules within a layer that can be layers themselves."""
    root = nn.Module()
    root.add_module("layer", layer)
    found = find_layers(root, max_layer_bytes=0)
    return {type(part.module) for part in found if part.module is not layer}


def _weights_in_files(result: Estimate) -> Iterator[str]:
    host = result.outlook.host
    missing = host.least_bytes - (result.machine.host_bytes or 0)
    frozen = host.weight_bytes * (result.num_parameters - result.num_trained) // max(result.num_parameters, 1)
    if not result.fits_host(result.chosen) and missing <= frozen:
        yield (
            f"frozen weights in their files: {format_bytes(missing)} or more of them stay there, and each step reads them, if "
            'they are loaded as they are, with from_pretrained(..., dtype="auto") or torch.load(..., mmap=True)'
        )


def _on_disk(result: Estimate) -> Iterator[str]:
    host, has = result.outlook.host, result.machine.host_bytes or 0
    missing = host.least_bytes - has
    trained = host.weight_bytes * result.num_trained // max(result.num_parameters, 1)
    # Before the first update, there are all gradients.
    without_state = max(host.weight_bytes + trained + host.least_stash_bytes, host.least_bytes - host.optimizer_bytes)
    excess = max(without_state - has, 0)
    weights, gradients = min(excess, trained), max(excess - trained, 0)
    if not result.fits_host(result.chosen) and gradients <= trained:
        state = min(missing, host.optimizer_bytes)
        kinds = (state, "optimizer state"), (weights, "weights"), (gradients, "gradients")
        live = " and ".join(f"{format_bytes(num_bytes)} or more of {kind}" for num_bytes, kind in kinds if num_bytes)
        again = "; layers read the weights twice more" if weights else ""
        yield (
            f'HarmonyStrategy(offload_dir="/a/fast/disk"): {live} live there, and each step reads and writes them{again}'
        )


# ---- what trains otherwise ---------------------------------------------------------------------------------------------


def _smaller_state(result: Estimate) -> Iterator[str]:
    host = result.outlook.host
    on_host, need = not result.fits_host(result.chosen), _least_too_large(result)
    if on_host and host.optimizer_bytes >= host.gradient_bytes > 0:
        state = format_bytes(host.optimizer_bytes)
        yield f"an optimizer with less state, such as Adafactor or SGD: {result.optimizer} keeps {state}"
    if on_host and result.num_trained == result.num_parameters:
        yield "fewer trained parameters: those that are frozen take their weights alone"
    of_weights = need is not None and need.state_bytes > need.work_bytes
    if (on_host or of_weights) and result.precision in ("32-true", "bf16-mixed", "16-mixed"):
        half = format_bytes((host.weight_bytes + host.gradient_bytes + host.optimizer_bytes) // 2)
        where = f"{half} on the host" if on_host else "half of what weights and gradients take on the device"
        yield f"Trainer(precision='bf16-true'), which saves {where} and trains less exactly"


def _smaller_layer(result: Estimate) -> Iterator[str]:
    need = _least_too_large(result)
    if need is None:
        return
    if need.state_bytes > need.work_bytes and need.name:
        yield f"a narrower {need.name}, whose weights and gradients alone take {format_bytes(need.state_bytes)}"
    else:
        yield "shorter sequences or smaller samples: the work space of one sample is what does not fit"


# ---- more memory -------------------------------------------------------------------------------------------------------


def _larger_card(result: Estimate) -> Iterator[str]:
    need = _least_too_large(result)
    if need is not None and not _has(result, need):
        yield (
            f"a device with {_rounded_up(_taken(result, need))} or more, for microbatches of "
            f"{_least(result).microbatch_size}"
        )


def _more_host_memory(result: Estimate) -> Iterator[str]:
    if not result.fits_host(result.chosen):
        yield f"{format_bytes(result.outlook.host.least_bytes - (result.machine.host_bytes or 0))} more host memory"


# ---- amounts -----------------------------------------------------------------------------------------------------------


def _least(result: Estimate) -> Row:
    """The size of microbatches that needs least of the device: inputs of many small ones take more than a few large ones."""
    return min(result.rows, key=lambda row: row.outlook.need.num_bytes)


def _least_too_large(result: Estimate) -> Need | None:
    """The least that any size of microbatches needs, where none fits on the device."""
    return None if any(map(result.fits_device, result.rows)) else _least(result).outlook.need


def _has(result: Estimate, need: Need) -> bool:
    """Whether the device has what is needed, were it not for the limit that was given."""
    return result.machine.device_bytes is None or need.num_bytes <= result.machine.device_bytes


def _taken(result: Estimate, need: Need) -> int:
    """What the process takes of the device if so much is allocated."""
    return need.num_bytes if result.machine.device_bytes is None else limit_for(need.num_bytes)


def _rounded_up(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 10 * 2**30 else (2**20, "MiB")
    return f"{-(-num_bytes // unit)}{name}"
