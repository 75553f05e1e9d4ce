"""Random programs, composed of independent features, train as in plain Lightning, or are refused before anything changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import StackDataset

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import CapacityError, PlanError, UnsupportedModelError
from support.program_parts import (
    GLUE,
    INEXACT,
    INEXACT_APART,
    LAYERS,
    LENGTH,
    PARENTS,
    VOCABULARY,
    WIDTH,
    Context,
    Glue,
    Layer,
)
from support.same_training import compare, train_harmony, train_plain

NUM_STEPS, MICROBATCH = 3, 2
ROUNDING = 1e-5

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120, method="thread")]


@dataclass(frozen=True)
class Part:
    """A layer, code between layers, or a parent of others; the kind chooses among what one does."""

    name: str
    kind: int = 0
    inner: tuple[Part, ...] = ()

    def build(self) -> nn.Module:
        if self.name in GLUE:
            return Glue(self.name, self.kind)
        inner = [part.build() for part in self.inner]
        return PARENTS[self.name](self.kind, inner) if self.name in PARENTS else LAYERS[self.name](self.kind)

    def all(self) -> Iterator[Part]:
        yield self
        for part in self.inner:
            yield from part.all()


@dataclass(frozen=True)
class Program:
    """A module and a configuration of its training. All defaults are the simplest ones."""

    parts: tuple[Part, ...]
    seed: int = 0
    num_microbatches: int = 2
    num_accumulated: int = 1
    optimizer: str = "SGD"
    precision: Any = "32-true"
    clip: float | None = None
    memory: float | None = None
    devices: int = 1
    parallel: Any = "pipeline"
    is_just_in_time: bool = False
    loss: str = "mse"
    layers: str | None = None

    @property
    def names(self) -> set[str]:
        return {part.name for each in self.parts for part in each.all()}

    @property
    def is_exact(self) -> bool:
        """Whether all sums have one order."""
        several = INEXACT if self.layers == "each" else INEXACT | INEXACT_APART
        return not self.names & several and (self.devices == 1 or self.parallel == "pipeline")

    @property
    def batch_size(self) -> int:
        return self.num_microbatches * MICROBATCH


# Of each field of a program behind its seed; what is there twice is chosen more often.
CHOICES: tuple[tuple[Any, ...], ...] = (
    (1, 2, 2, 3, 4), (1, 1, 2), ("SGD", "AdamW", "Adagrad", "Adafactor", "RMSprop"),
    ("32-true", "32-true", "64-true", "bf16-mixed", "bf16-true"), (None, None, 0.05), (None, 3.0, 1.0), (1, 1, 2),
    ("pipeline", "pipeline", "data"), (True, False), ("mse", "cross entropy", "penalised", "dict"), (None, None, "each"),
)  # fmt: skip


def random_part(chance: random.Random, depth: int) -> Part:
    kind = chance.randrange(420)
    drawn = chance.random()
    if depth and drawn < 0.35:
        inner = tuple(random_part(chance, depth - 1) for _ in range(chance.randint(1, 3)))
        return Part(chance.choice(list(PARENTS)), kind, inner)
    return Part(chance.choice(list(GLUE) if drawn < 0.5 else list(LAYERS)), kind)


def random_program(seed: int) -> Program:
    chance = random.Random(seed)
    parts = (Part("Dense"), *(random_part(chance, 2) for _ in range(chance.randint(1, 5))), Part("Dense"))
    program = Program(parts, seed, *map(chance.choice, CHOICES))
    return program if program.is_exact else replace(program, precision="64-true")


class Model(pl.LightningModule):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program, self.losses = program, []
        self.parts = nn.ModuleList(part.build() for part in program.parts)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.value, self.history, self.kept = 0.0, [], None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, tokens = batch
        is_plain = not isinstance(self.trainer.strategy, HarmonyStrategy)
        context = Context(self, batch_idx // self.program.num_microbatches if is_plain else batch_idx, tokens, [], [])
        x = x if self.program.precision == "bf16-mixed" else x.to(self.head.weight.dtype)
        for part in self.parts:
            x = part.call(x, context)
        made, how = self.head(x), self.program.loss
        loss = F.cross_entropy(made.flatten(0, 1), tokens.flatten()) if how == "cross entropy" else made.square().mean()
        losses = [getattr(module, "loss", None) for module in self.modules()]
        for each in (*context.losses, *(each for each in losses if isinstance(each, Tensor))):
            loss = loss + 0.01 * each
        if how == "penalised":
            loss = loss + 0.1 * made.exp().mean().log()
        self.losses.append(loss.detach().clone())
        return {"loss": loss, "made": made.detach()} if how == "dict" else loss

    def configure_optimizers(self) -> Any:
        options = {"momentum": 0.9} if self.program.optimizer == "SGD" else {}
        return getattr(torch.optim, self.program.optimizer)(self.parameters(), lr=0.02, **options)


class Steps(pl.Callback):
    """Keeps the parameters behind each step."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen[trainer.global_step] = [parameter.detach().clone() for parameter in module.parameters()]

    on_train_start = on_train_batch_end


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The numbers, and lists of numbers, that modules keep."""

    def are_numbers(value: Any) -> bool:
        return all(isinstance(each, int | float) for each in (value if isinstance(value, list) else [value]))

    found = {f"{name}.{key}": value for name, each in module.named_modules() for key, value in vars(each).items()}
    return {key: value for key, value in found.items() if are_numbers(value)}


def difference(program: Program) -> str | None:
    """Train by plain Lightning and by harmony: what differs; None if nothing does, or if harmony has refused it in time."""
    number, size = program.num_microbatches, program.batch_size
    chance = torch.Generator().manual_seed(program.seed)
    num_samples = NUM_STEPS * program.num_accumulated * size
    samples = StackDataset(
        torch.randn(num_samples, LENGTH, WIDTH, generator=chance),
        torch.randint(VOCABULARY, (num_samples, LENGTH), generator=chance),
    )
    options: dict[str, Any] = {"precision": program.precision, "gradient_clip_val": program.clip}
    options["accumulate_grad_batches"] = program.num_accumulated
    steps, plain, failed = Steps(), Model(program), None
    try:
        expected = train_plain(plain, samples, number, size, more_callbacks=[steps], **options)
    except Exception as error:
        failed = error
    module = Model(program)
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    memory = None if program.memory is None else int(program.memory * num_bytes) + 24 * 1024
    is_divided = program.layers == "each" and any(isinstance(each, Layer) for each in module.modules())
    strategy = HarmonyStrategy(
        device_memory=memory,
        num_microbatches=number,
        parallel=program.parallel if program.devices > 1 else "pipeline",
        layers=[Layer] if is_divided else None,
    )
    options |= {"devices": program.devices, "with_gradients": not program.is_just_in_time}
    try:
        found = train_harmony(module, samples, strategy, size, **options)
    except (UnsupportedModelError, CapacityError, PlanError) as error:
        before = steps.seen.get(module.trainer.global_step, [])
        changed = any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=False))
        is_late = program.is_exact and failed is None and changed
        return f"changed before it was refused: {error}" if is_late else None
    except Exception as error:
        # Without a checkpoint plain training raises the same; within one it computes silently with what was changed.
        is_unseen = "modified by an inplace operation" in str(error) and "Checkpointed" in program.names
        return None if failed is not None or is_unseen else f"{type(error).__name__}: {error}"
    if failed is not None and "Checkpointed" in program.names:
        # Plain training runs again what changes a tensor in place that is saved; harmony does not.
        return None
    if failed is not None:
        return f"plain Lightning alone fails: {type(failed).__name__}: {failed}"
    try:
        compare(expected, found, 0.0 if program.is_exact else ROUNDING)
        if program.is_exact:
            one, other = attributes_of(plain), attributes_of(module)
            assert one == other, {key: (one.get(key), other.get(key)) for key in one if one.get(key) != other.get(key)}
    except AssertionError as error:
        return str(error)
    return None


def simpler(program: Program) -> Iterator[Program]:
    """Programs that lack one feature each."""
    for parts in fewer(program.parts):
        yield replace(program, parts=parts)
    for each in fields(Program):
        if each.name not in ("parts", "seed") and getattr(program, each.name) != each.default:
            yield replace(program, **{each.name: each.default})


def fewer(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    for at, part in enumerate(parts):
        before, behind = parts[:at], parts[at + 1 :]
        yield before + behind
        if part.inner:
            yield before + part.inner + behind
        for inner in fewer(part.inner):
            yield (*before, replace(part, inner=inner), *behind)


def shrunk(program: Program) -> Program:
    """The program without all features that its failure does not need."""
    for other in simpler(program):
        if (other.is_exact or other.precision == "64-true") and difference(other) is not None:
            return shrunk(other)
    return program


@pytest.mark.parametrize("seed", range(3000, 3160))
def test_a_random_program_trains_as_in_plain_lightning(seed: int) -> None:
    program = random_program(seed)
    found = difference(program)
    if found is not None:
        small = shrunk(program)
        pytest.fail(f"seed {seed}: {found}\n{program}\nwith less: {difference(small)}\n{small}")
