"""Parts of random programs: layers, parents that call others, and code between layers, each with several kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, VOCABULARY = 6, 3, 10
LAYERS: dict[str, type[Layer]] = {}
PARENTS: dict[str, type[Parent]] = {}
GLUE: dict[str, Callable[[Context, int, Tensor], Tensor]] = {}
# What uses a parameter at several places: sums have another order then.
INEXACT = {"Repeated", "Borrowed", "SharedWeight", "read_weight", "penalty"}
# So do these where what they consist of are layers of their own.
INEXACT_APART = {"Looping", "PartlyWithout", "Recurrent", "Reparametrised"}
Kind = TypeVar("Kind", bound=type)


@dataclass
class Context:
    """What code between layers reaches beside its input."""

    root: nn.Module
    batch_idx: int
    tokens: Tensor
    saved: list[Tensor]
    losses: list[Tensor]

    def all(self, kind: type[Any]) -> Iterator[Any]:
        return (module for module in self.root.modules() if isinstance(module, kind))


class Layer(nn.Module):
    """A module that takes and returns a tensor of (samples, LENGTH, WIDTH), with what is special of it in `run`."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH, bias=kind % 3 > 0)
        self.build()

    def __init_subclass__(cls) -> None:
        LAYERS[cls.__name__] = cls

    def build(self) -> None:
        """Make what the layer has beside its linear one."""

    def call(self, x: Tensor, context: Context) -> Tensor:
        """How code between layers calls it."""
        return self(x)


class Parent(nn.Module):
    """Calls others, as code between layers."""

    def __init__(self, kind: int, inner: list[Any]) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.ModuleList(inner)

    def __init_subclass__(cls) -> None:
        PARENTS[cls.__name__] = cls

    def through(self, x: Tensor, context: Context) -> Tensor:
        for part in self.inner:
            x = part.call(x, context)  # type: ignore[operator]
        return x

    def call(self, x: Tensor, context: Context) -> Tensor:
        return self(x, context)


class Glue(Parent):
    """Code between layers, as a module."""

    def __init__(self, name: str, kind: int) -> None:
        super().__init__(kind, [])
        self.name = name

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return GLUE[self.name](context, self.kind, x)


del PARENTS["Glue"]


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Record:
    a: Tensor
    b: Tensor | None


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: int) -> Any:
        result, ctx.kind = x.mul_(2) if kind % 2 else x * weight.exp(), kind
        if kind % 2:
            ctx.mark_dirty(x)
        ctx.save_for_backward(weight, result if kind % 3 else x.clone())
        index = result.argmax(-1)
        ctx.mark_non_differentiable(index)
        return result, index

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        weight, saved = ctx.saved_tensors
        return gradient * 2, (gradient * saved).sum((0, 1)) * weight.cos(), None


# ---- layers ------------------------------------------------------------------------------------------------------------


class Dense(Layer):
    def forward(self, x: Tensor) -> Tensor:
        activations = (torch.tanh, partial(F.relu, inplace=True), partial(F.leaky_relu_, negative_slope=0.2), F.gelu)
        return activations[self.kind % 4](self.linear(x))


class Normalised(Layer):
    def build(self) -> None:
        running = {"momentum": None if self.kind % 2 else 0.3, "track_running_stats": True}
        instances = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
        norms = (
            nn.BatchNorm1d(WIDTH, **running),
            instances,
            nn.GroupNorm(2, WIDTH),
            nn.BatchNorm1d(WIDTH, affine=False),
        )
        self.norm = norms[self.kind % 4]

    def forward(self, x: Tensor) -> Tensor:
        if self.kind % 5 == 0:
            x = checkpoint(self.linear, x, use_reentrant=False)
        run = partial(checkpoint, self.norm, use_reentrant=self.kind % 7 > 3) if self.kind % 3 == 0 else self.norm
        return run(x.transpose(1, 2)).transpose(1, 2)


class Dropped(Layer):
    def build(self) -> None:
        kinds = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d)
        self.drop = kinds[self.kind % 4](0.3, inplace=self.kind % 3 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)) + torch.rand_like(x[:, :1])


class Recurrent(Layer):
    def build(self) -> None:
        both, kind = self.kind % 5 == 0, (nn.LSTM, nn.GRU, nn.RNN)[self.kind % 3]
        self.cell = kind(WIDTH, WIDTH // 2 if both else WIDTH, 1 + self.kind % 2, batch_first=True, bidirectional=both)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind % 2 == 0:
            self.state = self.cell(x)[1]
            return self.cell(self.linear(x))[0]
        packed = rnn.pack_padded_sequence(x, [LENGTH - n % 2 for n in range(len(x))], True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.cell(packed)[0], True, total_length=LENGTH)[0] + self.linear(x)


class Reparametrised(Layer):
    def build(self) -> None:
        old, new = torch.nn.utils, parametrizations
        with torch.no_grad():
            kinds = (new.weight_norm, old.spectral_norm, new.spectral_norm, new.orthogonal)
            self.made = kinds[self.kind % 4](nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.made(x) + (self.made.weight.mean() if self.kind % 3 == 0 else 0)


class Complex(Layer):
    def build(self) -> None:
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.filter = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        found = (
            torch.fft.rfft(x.float(), dim=1)
            * torch.view_as_complex(self.filter.float())
            * self.phase.to(torch.complex64)
        )
        made = found.abs() if self.kind % 3 == 0 else found
        return torch.fft.irfft(made, n=LENGTH, dim=1).to(x.dtype) + x


class OtherPrecision(Layer):
    def build(self) -> None:
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind % 3 == 0:
            return (x.double() @ self.linear.weight.double() * self.scale.double()).to(x.dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.kind % 3 == 1):
            return self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


class ByHand(Layer):
    def build(self) -> None:
        self.weight = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        made, index = OwnFunction.apply(self.linear(x).tanh(), self.weight, self.kind)
        return made + index[..., None]


class CheckpointInside(Layer):
    def build(self) -> None:
        self.norm, self.num_runs = nn.BatchNorm1d(LENGTH), 0
        self.other = nn.Linear(WIDTH, WIDTH)

    def part(self, x: Tensor) -> Tensor:
        self.num_runs += self.kind % 2
        return F.dropout(torch.tanh(self.norm(self.linear(x))), 0.2) * (1 + 0.01 * self.num_runs)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(
            checkpoint(self.part, x, use_reentrant=self.kind % 3 == 0, preserve_rng_state=self.kind % 5 > 0)
        )


class Viewing(Layer):
    """Returns views of its input, or changes that."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        views = (
            lambda: x.transpose(0, 1).transpose(0, 1), lambda: x, lambda: x.add_(made), lambda: made[:, :1].expand_as(x),
            lambda: torch.cat(made.chunk(2, -1)[::-1], -1), lambda: made.mul_(x.detach()).relu_(), lambda: x.flip(1).add_(1),
        )  # fmt: skip
        return views[self.kind % 7]()


class Arguments(Layer):
    """Is called with lists, dicts and keywords; returns other things than tensors."""

    def forward(self, xs: list[Tensor], *, more: dict[str, Any], flag: bool = False) -> Any:
        a = self.linear(xs[0]) * (2 if flag else 1) + more["inner"]["x"]
        b = torch.tanh(a) if self.kind % 2 else None
        results: tuple[Any, ...] = ({"a": a, "b": b}, Record(a, b), Pair(a, a * 2), [a, [b, "text"]], (a, None, 3))
        return results[self.kind % 5]

    def call(self, x: Tensor, context: Context) -> Tensor:
        found = self([x, "text"], more={"inner": {"x": x[:1] * 0.5}, "none": None}, flag=context.batch_idx % 2 == 1)
        if isinstance(found, dict | Record):
            fields = found if isinstance(found, dict) else vars(found)
            return fields["a"] if fields["b"] is None else fields["a"] * fields["b"]
        return found[0]


class Hooked(Layer):
    def build(self) -> None:
        self.seen, linear, kind = [], self.linear, self.kind % 9  # type: ignore[var-annotated]
        if kind == 0:
            linear.register_forward_hook(lambda module, args, kwargs, made: made * 1.5, with_kwargs=True)
        elif kind == 1:
            linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.5 + torch.rand(()),))
        elif kind == 2:
            linear.register_full_backward_hook(
                lambda module, into, out: (into[0] * 0.5,) if into[0] is not None else None
            )
        elif kind == 3:
            self.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))
        elif kind == 4:
            linear.weight.register_hook(lambda gradient: gradient * 0.5)
        elif kind == 5:
            self.register_forward_hook(lambda module, args, made: self.seen.append(float(made.detach().sum())))
        elif kind == 6:
            original = linear.forward
            linear.forward = lambda x: original(x) + x  # type: ignore[method-assign]
        elif kind == 7:
            self.register_full_backward_hook(lambda module, into, out: self.seen.append(float(out[0].sum())))
        else:
            self.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Listed(Layer):
    def build(self) -> None:
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(WIDTH) * 0.3) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": nn.Parameter(torch.tensor(0.5))})
        self.rows = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(3)})
        self.fixed = {"w": torch.ones(WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.rows[str(int(x.detach().abs().sum() * 7) % 3)](x)
        return chosen + sum(map(torch.sin, self.scales)) * self.named["a"] + self.named["b"] + self.fixed["w"]


class Embedded(Layer):
    def build(self) -> None:
        options = ({"max_norm": 0.8}, {"scale_grad_by_freq": True}, {"padding_idx": 1}, {})[self.kind % 4]
        self.table = (nn.EmbeddingBag if self.kind % 5 == 0 else nn.Embedding)(VOCABULARY, WIDTH, **options)  # type: ignore

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        found = self.table(tokens)
        return self.linear(x) + (found if found.ndim == 3 else found[:, None])

    def call(self, x: Tensor, context: Context) -> Tensor:
        return self(x, context.tokens)


class Statistics(Layer):
    mean: Tensor
    filled: Tensor | None
    count: Tensor

    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=self.kind % 2 == 0)
        self.register_buffer("filled", None)
        self.register_buffer("count", torch.tensor(0))
        self.num_calls, self.history = 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        made, kind = self.linear(x), self.kind % 6
        new = made.detach().mean((0, 1)).to(self.mean.dtype)
        if kind == 0:
            self.mean.lerp_(new, 0.1)
        elif kind == 1:
            self.mean = 0.9 * self.mean + new
        elif kind == 2:
            self.filled = new if self.filled is None else self.filled + new
            made = made + self.filled
        elif kind == 3:
            self.mean[self.count % WIDTH] = new[0]
            self.count += 1
        elif kind == 4:
            self.num_calls += 1
            made = made * (1 + 0.01 * self.num_calls)
        else:
            self.history.append(self.history[-1] + float(new.sum()))
        return made - self.mean


class PartlyWithout(Layer):
    def build(self) -> None:
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(self.kind % 3 > 0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
            if self.kind % 4 == 0:
                self.teacher.weight.lerp_(self.linear.weight, 0.1)
        return self.linear(x) - target + (self.linear(x.detach()) if self.kind % 5 == 0 else 0)


class Penalised(Layer):
    loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if self.kind % 2 and x.requires_grad else x.detach().requires_grad_()
            made = torch.tanh(self.linear(z))
            (gradient,) = torch.autograd.grad(made.sum(), z, create_graph=True)
        self.loss = gradient.square().mean() if self.kind % 3 else None
        return made + x + (0 if self.kind % 3 else gradient)


class Looping(Layer):
    """Uses its parts as often as data says."""

    def build(self) -> None:
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1 + int(x.detach().abs().sum() * 10) % 3):
            x = torch.tanh((self.linear if self.kind % 2 else self.parts[number])(x))
        chosen = x.detach().argmax(-1) % 3
        for number, part in enumerate(self.parts):
            rows = chosen == number
            if rows.any():
                x = x.index_put((rows,), part(x[rows]).to(x.dtype))
        return x


class Attending(Layer):
    def build(self) -> None:
        self.attend = nn.MultiheadAttention(WIDTH, 2, dropout=0.2 * (self.kind % 2), batch_first=True)
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made, self.weights = self.attend(x, x, x, need_weights=self.kind % 3 == 0)
        return x + made


class Functional(Layer):
    def forward(self, x: Tensor) -> Tensor:
        changed = {name: value * 1.5 for name, value in self.linear.named_parameters()}
        if self.kind % 2:
            return torch.vmap(self.linear)(x)
        return torch.func.functional_call(self.linear, changed, (x,))


class BuiltLater(Layer):
    """Makes what it needs in its first call."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        return self.linear(x) * self.table


class Kept(Layer):
    """Leaves on itself what code between layers reads."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        self.kept = (made, made.detach(), x, made[:, 0])[self.kind % 4]
        return torch.tanh(made)


class MadeInCalls(Layer):
    """Makes in a call what later ones change: on itself, on an object, and in an entry."""

    def build(self) -> None:
        self.calls, self.space, self.by_number = 0, SimpleNamespace(), {}  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made, kind = self.linear(x), self.kind % 3
        if kind == 0:
            kept = self.__dict__.setdefault("made", SimpleNamespace(value=0.0))
        elif kind == 1:
            kept = vars(self.space).setdefault("made", {}).setdefault("inner", SimpleNamespace(value=0.0))
        else:
            kept = self.by_number.setdefault(self.calls // 3, SimpleNamespace(value=0.0))
        kept.value = 0.5 * kept.value + float(made.detach().mean())
        return made - kept.value


class ChangesTheOther(Layer):
    """Changes one of its inputs in place, and computes with another one in the same memory."""

    def forward(self, part: Tensor, whole: Tensor) -> Tensor:
        part.mul_(1.5)
        return self.linear(whole * 1.0).tanh()

    def call(self, x: Tensor, context: Context) -> Tensor:
        whole = x * 1.5
        parts = (whole[:, 1:], whole[..., ::2], whole.transpose(0, 1), whole)
        return self(parts[self.kind % 4], whole) + x


# ---- parents -----------------------------------------------------------------------------------------------------------


class Sequence(Parent):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.through(x, context) + (x if self.kind % 2 else 0)


class Repeated(Parent):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        for _ in range(1 + int(x.detach().abs().sum() * 10) % 2 if self.kind % 2 else 2):
            x = self.through(x, context)
        return x


class Borrowed(Parent):
    """Each of two parents calls all."""

    def __init__(self, kind: int, inner: list[Any]) -> None:
        super().__init__(kind, inner)
        self.others = nn.ModuleList([Sequence(0, inner), Sequence(1, inner)])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.others[0](x, context) + self.others[1](x.tanh(), context)


class SharedWeight(Parent):
    def __init__(self, kind: int, inner: list[Any]) -> None:
        super().__init__(kind, inner)
        first, *others = [part.linear for part in inner if isinstance(part, Layer)] or [None]
        for other in others:
            other.weight = first.weight

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.through(x, context)


class Checkpointed(Parent):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x * 1.1
        run = partial(self.through, context=context)
        if self.kind % 4 == 0:
            return torch.utils.checkpoint.checkpoint_sequential([run, torch.tanh], 1, x, use_reentrant=False)
        return checkpoint(run, x, use_reentrant=self.kind % 3 == 0) + torch.rand(())


class Without(Parent):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        with torch.set_grad_enabled(self.kind % 2 == 1):
            made = self.through(x.detach() if self.kind % 2 else x, context)
        return x + made


class Branches(Parent):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        made = [part.call(x, context) for part in self.inner]  # type: ignore[operator]
        return torch.stack([x, *made[:: -1 if self.kind % 2 else 1]]).mean(0)


class Conditional(Parent):
    """Calls parts in an order, and as many, as batch, step, chance or data say."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        says = (
            context.batch_idx, context.root.trainer.global_step, torch.rand(()) * 9, x.detach().sum() > 0,
        )[self.kind % 4]  # fmt: skip
        for part in list(self.inner)[:: -1 if int(says) % 2 else 1][: 1 + int(says) % 3]:
            x = part.call(x, context)  # type: ignore[operator]
        return x


class Uncast(Parent):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.through(x.to(context.root.head.weight.dtype), context)


class Teacher(Parent):
    """A copy of all, as an average of weights that the step changes, or reads."""

    def __init__(self, kind: int, inner: list[Any]) -> None:
        super().__init__(kind, inner)
        self.teacher = copy.deepcopy(self.inner).requires_grad_(False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        with torch.no_grad():
            if self.kind % 2:
                for mean, new in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
            target = x
            for part in self.teacher:
                target = part.call(target, context)  # type: ignore[operator]
        made = self.through(x, context)
        context.losses.append((made - target).square().mean())
        return made


class Scaled(Parent):
    """Has parameters and a buffer of its own around all."""

    def __init__(self, kind: int, inner: list[Any]) -> None:
        super().__init__(kind, inner)
        self.scale, self.num_calls = nn.Parameter(torch.ones(WIDTH)), 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self.num_calls += 1
        x = self.through(x * self.scale.to(x.dtype), context)
        new = x.detach().mean((0, 1)).to(self.mean.dtype)
        if self.kind % 3 == 0:
            self.mean.mul_(0.9).add_(new)
        elif self.kind % 3 == 1:
            self.mean = 0.5 * self.mean + new
        return x - self.mean.to(x.dtype)


# ---- code between layers -----------------------------------------------------------------------------------------------


def glue(run: Callable[[Context, int, Tensor], Tensor]) -> Callable[[Context, int, Tensor], Tensor]:
    GLUE[run.__name__] = run
    return run


@glue
def operate(context: Context, kind: int, x: Tensor) -> Tensor:
    mask, odd = x.detach() > 0, x.clone()
    odd[:, 1:] *= 0.5
    operations = (
        lambda: F.relu(x), lambda: x.clamp_(-2, 2), lambda: odd, lambda: x.masked_fill(mask, 0.5),
        lambda: F.normalize(x.float(), dim=-1).to(x.dtype), lambda: x * (0.5 if bool(mask.any()) else 2),
        lambda: (x.double() * 2).to(x.dtype), lambda: F.dropout(x, 0.2), lambda: x + torch.randn_like(x),
        lambda: torch.view_as_real(torch.fft.fft(x.float()))[..., 0].to(x.dtype), lambda: x.flip(1).roll(1, -1),
        lambda: x.to_sparse().to_dense(), lambda: checkpoint(torch.tanh, x, use_reentrant=False),
    )  # fmt: skip
    return operations[kind % 13]()


@glue
def save(context: Context, kind: int, x: Tensor) -> Tensor:
    context.saved.append(x)
    return x


@glue
def load(context: Context, kind: int, x: Tensor) -> Tensor:
    return x + context.saved[kind % len(context.saved)] if context.saved else x


@glue
def hook(context: Context, kind: int, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1, 1) if kind % 2 else None)
    return x


@glue
def read_kept(context: Context, kind: int, x: Tensor) -> Tensor:
    for layer in context.all(Kept):
        if layer.kept is not None and len(layer.kept) == len(x):
            context.losses.append(layer.kept.square().mean())
    return x


@glue
def read_weight(context: Context, kind: int, x: Tensor) -> Tensor:
    weights = [layer.linear.weight for layer in context.all(Layer)]
    return x + weights[kind % len(weights)].mean().to(x.dtype) if weights else x


@glue
def penalty(context: Context, kind: int, x: Tensor) -> Tensor:
    context.losses += [0.01 * parameter.abs().square().sum() for parameter in context.root.parameters()]
    return x


@glue
def read_buffer(context: Context, kind: int, x: Tensor) -> Tensor:
    means = [layer.mean for layer in context.all(Statistics)]
    return x + means[kind % len(means)].to(x.dtype) if means else x


@glue
def remember(context: Context, kind: int, x: Tensor) -> Tensor:
    root: Any = context.root
    if kind % 3 == 0:
        root.value = 0.9 * root.value + 0.1 * float(x.detach().mean())
    elif kind % 3 == 1:
        root.history.append(float(x.detach().mean()))
    else:
        root.kept, before = x.detach().mean(), root.kept
        return x if before is None else x + before
    return x * (1 + root.value)
