"""What is refused before training begins, with the cause and the way out.

Arguments are checked in `settings`, checkpoints in `checkpoints`, precisions in `precision`, host memory in `host_budget`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.engine.structures.parts import is_composed, parts_of
from lightning_harmony.engine.structures.strides import spanned_bytes
from lightning_harmony.errors import UnsupportedModelError


def refuse_windows() -> None:
    """Refuse Windows: signals, page-locked memory and the cores of threads are handled as POSIX systems have them.

    Raises:
        RuntimeError: naming what else there is.
    """
    if platform.system() == "Windows":
        raise RuntimeError(
            "strategy='harmony' does not run on Windows: use Linux, or the Windows Subsystem for Linux (WSL 2)"
        )


def refuse_other_accelerators(accelerator: Any) -> None:
    """Refuse all but CPUs and CUDA.

    Raises:
        ValueError: naming the accelerator.
    """
    name = None if accelerator is None else type(accelerator).__name__
    if name not in (None, "CPUAccelerator", "CUDAAccelerator"):
        raise ValueError(
            f"strategy='harmony' cannot serve {name}: use Trainer(accelerator='gpu') with CUDA, or accelerator='cpu'"
        )


def refuse_other_processes(num_nodes: int, environment: Any) -> None:
    """Refuse to be another process than the one of its node.

    Args:
        num_nodes: that the Trainer was given.
        environment: Lightning's, of the cluster; None if there is none.

    Raises:
        ValueError: if a launcher started more than one process on a node, or others than one on each, or none where there are
            several.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > 1:
        raise ValueError(
            f"LOCAL_WORLD_SIZE={local}: strategy='harmony' runs all devices of a machine from one process; start it "
            "with plain `python` (or `torchrun --nproc-per-node=1`)"
        )
    commands = (
        f"`torchrun --nnodes={num_nodes} --nproc-per-node=1`, or `srun --nodes={num_nodes} --ntasks-per-node=1`, which start "
        "one process on each node"
    )
    if environment is None or not environment.creates_processes_externally:
        if num_nodes > 1 and "MASTER_PORT" not in os.environ:
            raise ValueError(
                f"Trainer(strategy='harmony', num_nodes={num_nodes}): nothing tells this process where the others are. Use "
                f"{commands}; or set MASTER_ADDR, MASTER_PORT and NODE_RANK"
            )
        return
    # Tasks of SLURM may be fits of their own.
    if num_nodes == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    number = environment.world_size()
    if number != num_nodes:
        raise ValueError(
            f"{number} processes were started for Trainer(num_nodes={num_nodes}): strategy='harmony' needs one on each node, "
            f"which runs all of its devices. Use {commands}"
        )


def refuse_batch_norm_over_nodes(layer_sync: Any) -> None:
    """Refuse to have layers wait for those of other nodes, in a forward or where it runs again.

    Args:
        layer_sync: Lightning's; None if none is asked for.

    Raises:
        ValueError: if there is one.
    """
    if layer_sync is not None:
        raise ValueError(
            "strategy='harmony' has each node normalize its own samples: use Trainer(sync_batchnorm=False), or layers that "
            "normalize each sample by itself, such as GroupNorm"
        )


def refuse_sparse(module: nn.Module, layers: Iterable[Layer]) -> None:
    """Refuse modules of torch that make sparse gradients. Those that other code makes are refused when they come.

    Args:
        module: the model.
        layers: its layers, whose buffers are refused, too, where they are sparse, nested or quantized.

    Raises:
        UnsupportedModelError: naming the first.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise UnsupportedModelError(
                f"module {name!r} has sparse gradients, which are summed as dense ones here: set sparse=False"
            )
    for layer in layers:
        for name, buffer in layer.module.named_buffers():
            if buffer.layout is not torch.strided or buffer.is_quantized:
                raise UnsupportedModelError(
                    f"layer {layer.name!r} has a sparse, nested or quantized buffer, {name!r}, which is not swapped with it: "
                    "register it on the module that calls the layer, and pass it to the layer as an argument"
                )


def refuse_composed(module: nn.Module) -> None:
    """Refuse trained parameters that hold their values in other tensors, where layers are swapped: gradients are plain.

    Raises:
        UnsupportedModelError: naming the first.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and is_composed(parameter):
            raise UnsupportedModelError(
                f"parameter {name!r} is a {type(parameter).__name__}, whose values are in tensors of its own "
                "(__tensor_flatten__): where layers are swapped, such a parameter is not trained. Freeze it with "
                "requires_grad_(False) and train adapters beside it, or give the device enough memory to hold the model as a "
                "whole with HarmonyStrategy(device_memory=...)"
            )


def refuse_shared_memory(module: nn.Module) -> None:
    """Refuse parameters that lie in the memory of another one, or of a buffer: each is swapped by itself.

    Raises:
        UnsupportedModelError: naming the first two.
    """
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    strided = [(name, each) for name, each in tensors if each.layout is torch.strided and not each.is_nested]
    parts = [(name, part) for name, tensor in strided for part in parts_of(tensor) if part.numel() and not part.is_meta]
    spans = sorted(
        (part.data_ptr(), part.data_ptr() + spanned_bytes(part), name, number)
        for number, (name, part) in enumerate(parts)
    )
    for (_, end, first, number), (start, _, second, following) in pairwise(spans):
        one, other = parts[number][1], parts[following][1]
        trains = one.requires_grad or other.requires_grad
        # Columns of one matrix take turns in memory.
        if start < end and trains and (one.is_contiguous() or other.is_contiguous()):
            raise UnsupportedModelError(
                f"{first!r} and {second!r} lie in the same memory, but are not the same parameter, and would be swapped "
                "apart: share the parameter itself, as in `head.weight = embedding.weight`"
            )


def refuse_several_losses(losses: Sequence[Tensor]) -> None:
    """Refuse losses of more than one element, as autograd does.

    Raises:
        RuntimeError: naming the shape.
    """
    for loss in losses:
        if loss.numel() != 1:
            raise RuntimeError(
                "grad can be implicitly created only for scalar outputs: training_step returned a loss of shape "
                f"{tuple(loss.shape)}; return its mean or its sum"
            )


def refuse_uninitialized(module: nn.Module) -> None:
    """Refuse parameters that have no shape yet: nobody knows what they will take.

    Raises:
        UnsupportedModelError: naming the first.
    """
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise UnsupportedModelError(
                f"parameter {name!r} has no shape yet: run the lazy module once on a sample before the fit, for example in "
                "configure_model"
            )


def refuse_scripted(module: nn.Module) -> None:
    """Refuse compiled modules of TorchScript: nobody can put other weights into them for a while.

    Raises:
        UnsupportedModelError: naming the first with parameters.
    """
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise UnsupportedModelError(
                f"module {name!r} is scripted or traced (torch.jit), and keeps its weights where they cannot be swapped: use "
                "the module that it was made from, with HarmonyStrategy(compile_layers=True) for speed"
            )
