"""One run of a public model, unmodified, through Lightning on a card and a host that are really small.

    python benchmarks/realworld/run.py --model llama8b --gpu-free 24 --host-free 110
    python benchmarks/realworld/run.py --model llama8b --strategy plain --checkpointing --precision bf16-true --layers 8
    python benchmarks/realworld/run.py --model bert --strategy ddp --devices 2 --batch 64 --length 512

Another process holds all memory of the GPUs but `--gpu-free` GiB, and all of the host's but `--host-free` GiB: a soft limit of
an allocator shows nothing about a small card. Weights are random and nothing is downloaded. Prints one line of JSON, or one
that begins with FAILED.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import traceback
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from gpu_time import GpuTime
from host_time import HostTime
from models import MODELS, Subject, quantize
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

GIB = 2**30
# The turns of an earlier one are timed, and the plan is made anew after it.
FIRST_STEADY_STEP = 6
HOLD_GPUS = """
import sys, torch
held = []
for gpu in range(torch.cuda.device_count()):
    size = int(torch.cuda.mem_get_info(gpu)[0] - float(sys.argv[1]) * 2**30)
    held.append(torch.empty(max(0, size), dtype=torch.uint8, device=f"cuda:{gpu}"))
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""
HOLD_HOST = """
import ctypes, mmap, sys
from concurrent.futures import ThreadPoolExecutor
free = next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemAvailable"))
size = int(free - float(sys.argv[1]) * 2**30)
if size > 0:
    held = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    lock, part = ctypes.CDLL(None, use_errno=True).mlock, -(-size // 2**14) * 2**10
    starts = range(0, size, part)
    with ThreadPoolExecutor(len(starts)) as threads:
        done = threads.map(lambda at: lock(ctypes.c_void_p(address + at), ctypes.c_size_t(min(part, size - at))), starts)
        assert not any(done), "mlock"
print("held", flush=True)
sys.stdin.read()
"""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama8b", choices=[*MODELS])
    parser.add_argument("--strategy", default="harmony", choices=["harmony", "plain", "ddp"])
    parser.add_argument("--gpu-free", type=float, help="GiB of each GPU that are left to the run")
    parser.add_argument("--host-free", type=float, help="GiB of host memory that are left to the run")
    parser.add_argument("--device-memory", help="of HarmonyStrategy; what is free if it is not given")
    parser.add_argument("--offload-dir", help="of HarmonyStrategy")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample, or the side of an image")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, help="8 if the model is not known to fit; for a plain run, 1")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a reference in memory")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 on a frozen bfloat16 base")
    parser.add_argument(
        "--quantized",
        choices=["nf4", "int8"],
        help="with --lora: a base of modules of bitsandbytes, which is to be installed",
    )
    parser.add_argument("--predict", action="store_true", help="what the model gives for batches; nothing is trained")
    parser.add_argument("--clip", type=float, help="gradient_clip_val")
    parser.add_argument("--update-on", default="device", choices=["device", "host"], help="of HarmonyStrategy")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="of HarmonyStrategy")
    parser.add_argument("--host-time", action="store_true", help="where the host's time goes, from the sixth step on")
    parser.add_argument(
        "--gpu-time", help="a file.json.gz for all operations of the last step but two; tells waits by cause"
    )
    parser.add_argument("--trace", help="a folder for a recording of the last step")
    parser.add_argument("--checkpointing", action="store_true", help="the model's own gradient checkpointing")
    return parser.parse_args()


def holding(script: str, gib: float | None) -> subprocess.Popen[bytes] | None:
    """A process that holds memory until its standard input is closed."""
    if gib is None:
        return None
    process = subprocess.Popen([sys.executable, "-c", script, str(gib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"held", "the memory that the run is not to have cannot be taken"
    return process


class Samples(Dataset[Any]):
    """Samples that are made before the fit, so that no step waits for them; a few batches of them, again and again."""

    def __init__(self, subject: Subject, number: int, length: int, batch: int) -> None:
        self._number = number
        generator = torch.Generator().manual_seed(0)
        self._made = [subject.sample(length, generator) for _ in range(min(number, 4 * batch))]

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Any:
        return self._made[index % len(self._made)]


class Module(pl.LightningModule):
    def __init__(self, subject: Subject, options: argparse.Namespace) -> None:
        super().__init__()
        narrow = options.lora or "true" in options.precision
        self.net = subject.build(options.layers, torch.bfloat16 if narrow else torch.float32)
        self._subject, self._fused = subject, options.fused or None
        if options.checkpointing:
            nets: list[Any] = [*self.net.values()] if isinstance(self.net, nn.ModuleDict) else [self.net]
            for each in nets:
                each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.quantized:
            quantize(self.net, options.quantized)
        if options.lora:
            import peft

            names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            self.net = peft.get_peft_model(self.net, peft.LoraConfig(r=16, lora_alpha=32, target_modules=names))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self._subject.loss(self.net, batch)
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The most likely next word of each text."""
        found: Tensor = self.net(input_ids=batch, logits_to_keep=1).logits.argmax(-1)
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return (
            torch.optim.SGD(trained, lr=0.01, momentum=0.9)
            if self._subject.sgd
            else torch.optim.AdamW(trained, lr=1e-5, fused=self._fused)
        )


class Measure(pl.Callback):
    """Times steps, and looks at the driver's figure of free memory after each."""

    def __init__(
        self, free_before: list[int], host_time: HostTime | None = None, gpu_time: GpuTime | None = None
    ) -> None:
        self.host_time, self.gpu_time = host_time, gpu_time
        self.times: list[float] = []
        self.losses: list[Tensor] = []
        self.taken = [0] * len(free_before)
        self._free_before = free_before
        self._start = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.host_time is not None and batch_idx == FIRST_STEADY_STEP:
            self.host_time.clear()
        if self.gpu_time is not None and batch_idx == trainer.num_training_batches - 3:
            self.gpu_time.start()
        recorder = getattr(trainer.strategy, "recorder", None)
        if recorder is not None and batch_idx >= trainer.num_training_batches - 2:
            recorder.measures_busy = True

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.gpu_time is not None and batch_idx == trainer.num_training_batches - 3:
            self.gpu_time.stop()
        self.losses.append(outputs["loss"].detach())
        self._note(batch_idx)

    def _note(self, batch_idx: int) -> None:
        self.times.append(time.perf_counter())
        for gpu, before in enumerate(self._free_before):
            self.taken[gpu] = max(self.taken[gpu], before - torch.cuda.mem_get_info(gpu)[0])
        # Where the system kills the run, this is all that is left of it.
        step = self.times[-1] - (self.times[-2] if len(self.times) > 1 else self._start)
        print(
            f"batch {batch_idx}: {step:.2f} s, {_resident_bytes() / GIB:.1f} GiB of the host",
            file=sys.stderr,
            flush=True,
        )

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._start = time.perf_counter()

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self._start = time.perf_counter()

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Tensor, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.losses.append(outputs.float().mean())
        self._note(batch_idx)


def main() -> None:
    options = parsed()
    is_harmony = options.strategy == "harmony"
    holders = [holding(HOLD_GPUS, options.gpu_free), holding(HOLD_HOST, options.host_free)]
    gpus = range(options.devices) if torch.cuda.is_available() else range(0)

    def finish(line: str, status: int) -> None:
        print(line, flush=True)
        for holder in holders:
            if holder is not None:
                holder.kill()
        os._exit(status)

    try:
        free_before = _free_bytes()[: len(gpus)] if gpus else []
        subject = MODELS[options.model]
        host_time = HostTime() if options.host_time else None
        gpu_time = GpuTime(options.gpu_time) if options.gpu_time else None
        module, measure = Module(subject, options), Measure(free_before, host_time, gpu_time)
        split = 1 if is_harmony else options.microbatches or 1
        # Each process of DDP loads its share of a batch.
        num_processes = options.devices if options.strategy == "ddp" else 1
        trainer = pl.Trainer(
            strategy=_harmony(options) if is_harmony else {"plain": "auto"}.get(options.strategy, options.strategy),
            accelerator="gpu" if gpus else "cpu",
            devices=options.devices,
            precision=options.precision,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[measure, *_recording(options)],
            accumulate_grad_batches=split,
            gradient_clip_val=options.clip,
        )
        samples = Samples(subject, options.batch * options.steps, options.length, options.batch)
        start = time.perf_counter()
        loader = DataLoader(samples, options.batch // split // num_processes)
        if options.predict:
            trainer.predict(module, loader, return_predictions=False)
        else:
            trainer.fit(module, loader)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        finish(json.dumps(_row(options, trainer, measure, start, split)), 0)
    except BaseException as error:
        finish(f"{traceback.format_exc()[-3000:]}\nFAILED {type(error).__name__}: {str(error)[:1500]}", 1)


def _resident_bytes() -> int:
    """What this process has of the host's memory."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _free_bytes() -> list[int]:
    """What is free on each GPU before this process has a context there, which counts as taken."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    return [
        int(mebibytes) * 2**20 for mebibytes in subprocess.run(query, capture_output=True, check=True).stdout.split()
    ]


def _harmony(options: argparse.Namespace) -> Any:
    from lightning_harmony import HarmonyStrategy

    return HarmonyStrategy(
        device_memory=options.device_memory,
        num_microbatches=options.microbatches,
        update_on=options.update_on,
        offload_dir=options.offload_dir,
        cuda_graphs=options.cuda_graphs,
        profile_cache=False,
    )


def _recording(options: argparse.Namespace) -> list[pl.Callback]:
    """What records the last step, if that is asked for."""
    if options.trace is None:
        return []
    from lightning_harmony import HarmonyMonitor

    return [HarmonyMonitor(trace_step=options.steps - 1, dirpath=options.trace)]


def _row(options: argparse.Namespace, trainer: Any, measure: Measure, start: float, split: int) -> dict[str, Any]:
    times = measure.times[split - 1 :: split]
    steps = [round(b - a, 4) for a, b in pairwise(times)]
    # To tell how long the GPU computes makes the last two longer.
    step = statistics.median(steps[3:-2] or steps[3:] or steps)
    gpus = range(len(measure.taken))
    row = {
        **vars(options),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "parameters": sum(p.numel() for p in trainer.lightning_module.parameters()),
        "step": step,
        "steps": steps,
        "samples_per_second": round(options.batch / step, 2),
        "first_step": round(times[0] - start, 2),
        "allocated_gib": [round(torch.cuda.max_memory_allocated(gpu) / GIB, 2) for gpu in gpus],
        "reserved_gib": [round(torch.cuda.max_memory_reserved(gpu) / GIB, 2) for gpu in gpus],
        "allocator_retries": [torch.cuda.memory_stats(gpu).get("num_alloc_retries") for gpu in gpus],
        "taken_gib": [round(taken / GIB, 2) for taken in measure.taken],
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "losses": [round(float(loss), 4) for loss in measure.losses[:4]],
    }
    if measure.host_time is not None and len(steps) > FIRST_STEADY_STEP:
        row["host_time"] = measure.host_time.row(len(steps) + 1 - FIRST_STEADY_STEP)
    if measure.gpu_time is not None:
        row["gpu_time"] = measure.gpu_time.row()
    report = getattr(trainer.strategy, "step_report", None)
    if report is not None:
        row |= {
            "num_microbatches": report.num_microbatches,
            "packs": report.num_packs,
            "update": report.update,
            "update_hidden": round(report.update_hidden, 2),
            "disk_read_gib": round(report.disk_read_bytes / GIB, 2),
            "disk_written_gib": round(report.disk_written_bytes / GIB, 2),
            "busy": [round(share, 3) for share in report.busy],
            "predicted": report.predicted_seconds,
            "in_gib": {kind: round(amount / GIB, 2) for kind, amount in report.swapped_in_bytes.items()},
            "out_gib": {kind: round(amount / GIB, 2) for kind, amount in report.swapped_out_bytes.items()},
        }
    return row


if __name__ == "__main__":
    main()
