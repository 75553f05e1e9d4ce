"""Train the GPT as others offload it, and print one line of JSON.

Each as its own documentation has it, on one GPU: bfloat16 compute, AdamW on FP32 masters on the host, each block recomputed.
None is tuned. DeepSpeed and RoundPipe have to be installed, and build a kernel when they start.

python benchmarks/offload/peers.py fsdp2 --layers 12
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from clock import Clock
from model import GPT, Shape, Tokens, build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

# Trains on the microbatches of one step; returns their losses.
Step = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Loss(nn.Module):
    """From tokens to the loss of the next ones.

    Args:
        model: the GPT.
        reentrant: which kind of checkpoint recomputes a block. ZeRO-3 takes weights away that the other one wants to compare.
    """

    def __init__(self, model: GPT, *, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = model.embed, model.blocks, model.head
        self._reentrant = reentrant

    def forward(self, batch: Tensor) -> Tensor:
        """The mean over all tokens."""
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._reentrant)
        return loss_of(self.head(x), batch[:, 1:])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in FP32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def fsdp2(shape: Shape, options: argparse.Namespace) -> Step:
    """PyTorch's fully sharded data parallelism with one process, its shards on the host. Gradients add up on the GPU."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    model: Any = Loss(build(shape, recompute=False, fused=None), reentrant=False)
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(microbatches: Sequence[Tensor]) -> Sequence[Tensor]:
        losses = []
        for number, batch in enumerate(microbatches, start=1):
            model.set_requires_gradient_sync(number == len(microbatches))
            loss = model(batch.cuda())
            (loss / len(microbatches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def deepspeed(shape: Shape, options: argparse.Namespace) -> Step:
    """DeepSpeed's ZeRO-3 with parameters and optimizer offloaded."""
    import deepspeed

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    os.environ.update(alone)
    model = Loss(build(shape, recompute=False, fused=None), reentrant=True)
    on_host = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": options.microbatch_size,
        "gradient_accumulation_steps": options.num_microbatches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": on_host, "offload_param": on_host},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(microbatches: Sequence[Tensor]) -> Sequence[Tensor]:
        losses = []
        for batch in microbatches:
            loss = engine(batch.cuda())
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return losses

    return step


def roundpipe(shape: Shape, options: argparse.Namespace) -> Step:
    """RoundPipe, by default with weights that are one step old."""
    from roundpipe import RoundPipe, RoundPipeRunConfig
    from roundpipe.optim import Adam

    model = build(shape, recompute=False, fused=None).to(torch.bfloat16)
    config = RoundPipeRunConfig(num_microbatch=options.num_microbatches)
    layers = nn.Sequential(model.embed, *model.blocks, model.head)
    pipe = RoundPipe(layers, optim_dtype=torch.float32, model_run_config=config)
    optimizer = Adam(pipe.optim_parameters(), lr=1e-4, weight_decay=0.01, decoupled_weight_decay=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets) / options.num_microbatches

    def step(microbatches: Sequence[Tensor]) -> Sequence[Tensor]:
        batch = torch.cat(list(microbatches))
        loss = pipe.forward_backward((batch[:, :-1],), label=batch[:, 1:], loss_fn=mean_loss)
        pipe.step(update, is_async=not options.synchronous)
        return [loss.detach()]

    return step


PEERS = {peer.__name__: peer for peer in (fsdp2, deepspeed, roundpipe)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--synchronous", action="store_true", help="RoundPipe without weights that are one step old")
    options = parser.parse_args(arguments)
    shape = replace(Shape(), layers=options.layers)
    step = PEERS[options.peer](shape, options)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start, clock, losses = time.perf_counter(), Clock(options.num_microbatches), []
    samples = Tokens(options.steps * options.num_microbatches * options.microbatch_size, shape)
    microbatches: list[Tensor] = []
    for batch in DataLoader(samples, batch_size=options.microbatch_size, collate_fn=clock):
        microbatches.append(batch)
        if len(microbatches) == options.num_microbatches:
            losses.append(step(microbatches))
            microbatches.clear()
    clock.note()
    seconds = clock.seconds()
    row = {
        "strategy": f"{options.peer}, synchronous" if options.synchronous else options.peer,
        "precision": "bf16-compute",
        "tokens": options.num_microbatches * options.microbatch_size * shape.length,
        "shape": asdict(shape),
        "step": round(statistics.median(seconds[3:]), 3),
        "steps": [round(second, 3) for second in seconds],
        "first step": round(clock.times[1] - start, 1),
        "device GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "host GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "losses": [round(float(torch.stack(list(each)).mean()), 5) for each in losses],
        "gpu": torch.cuda.get_device_name(),
    }
    print(json.dumps(row), flush=True)
    # Threads of a peer may wait for more.
    os._exit(0)


if __name__ == "__main__":
    main()
