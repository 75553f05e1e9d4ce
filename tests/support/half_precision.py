"""What training in half precision is compared with."""

from __future__ import annotations

import copy
import random
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_harmony.engine.lanes.rng import stream_seed
from lightning_harmony.engine.model.decompose import find_layers
from support.same_training import SEED, Gradients, Net, Training, root


class Scales(pl.Callback):
    """The scale and the first weights after each step."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.scales: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.num_batches == 0:
            self.scales.append(trainer.scaler.get_scale())
            self.weights.append(next(module.parameters()).detach().cpu().clone())


def train_reference(
    module: Net, samples: Any, num_microbatches: int, batch_size: int, layers: Any = None, device: str | None = None
) -> Training:
    """What "bf16-compute" means: a loop over a bfloat16 copy on the device, with float32 masters."""
    device = device or root().type
    gradients, compute = Gradients(), copy.deepcopy(module).to(device)
    optimizer: Any = module.to(device).configure_optimizers()
    for parameter in compute.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for layer in find_layers(compute, max_layer_bytes=None, layers=layers):
        layer.module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
    pairs = list(zip(module.parameters(), compute.parameters(), strict=True))
    size = batch_size // num_microbatches
    torch.manual_seed(SEED)
    for step in range(len(samples) // batch_size):
        for master, copied in pairs:
            copied.data.copy_(master.data)
        sums: dict[nn.Parameter, Tensor] = {}
        for number in range(num_microbatches):
            torch.manual_seed(stream_seed(SEED, step, number))
            random.seed(stream_seed(SEED, step, number))
            start = step * batch_size + number * size
            loss = compute.training_step(samples[start : start + size].to(device), step)
            loss.backward(torch.full_like(loss, 1 / num_microbatches))
            for master, copied in pairs:
                if copied.grad is not None:
                    gradient, copied.grad = copied.grad.to(master.dtype), None
                    sums[master] = sums[master] + gradient if master in sums else gradient
        for master, total in sums.items():
            master.grad = total
        gradients.on_before_optimizer_step(None, module, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        **{name: value.cpu() for name, value in compute.state_dict().items()},
        **{name: master.detach().cpu() for name, master in module.named_parameters(remove_duplicate=False)},
    }
    tensors = [v.cpu() for each in optimizer.state.values() for v in each.values() if isinstance(v, Tensor)]
    return Training([loss.cpu() for loss in compute.losses], state, tensors, gradients.steps)


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    known: dict[Any, Tensor] = {}

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        # A tensor in two places stays one.
        return known.setdefault(value, value.to(torch.bfloat16))

    return torch.utils._pytree.tree_map(cast, (args, kwargs))
