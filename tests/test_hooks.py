"""Whoever looks at weights and gradients finds those of plain Lightning, however the hook came to be."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from support.lightning_fits import QUIET_MARKS, Model, assert_same, harmony, loader, trainer_for, values

pytestmark = QUIET_MARKS
SEE_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
Look = Callable[[], None]


def wrapped(hook: Callable[..., Any], look: Look) -> Callable[..., Any]:
    @wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        look()
        return hook(*args, **kwargs)

    return wrapper


def looking(look: Look, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    look()
    return hook(*args, **kwargs)


def spied(hook: Callable[..., Any], look: Look) -> Mock:
    spy = Mock(wraps=hook)
    spy.side_effect = lambda *args, **kwargs: (look(), hook(*args, **kwargs))[1]
    return spy


WRAPPERS: dict[str, Callable[[Callable[..., Any], Look], Callable[..., Any]]] = {
    "wraps": wrapped,
    "partial": lambda hook, look: partial(looking, look, hook),
    "mock": spied,
}


def sights(strategy: Any, owner: pl.LightningModule | pl.Callback, hook: str, wrapper: str) -> list[dict[str, Tensor]]:
    """The weights and gradients that a hook finds that is wrapped on its instance."""
    module = owner if isinstance(owner, pl.LightningModule) else Model()
    seen: list[dict[str, Tensor]] = []

    def look() -> None:
        # An update just in time leaves none behind.
        named = module.named_parameters() if hook in SEE_GRADIENTS else ()
        seen.append(values(module) | {f"grad of {n}": p.grad.clone() for n, p in named if p.grad is not None})

    # Not through `nn.Module`, which would keep it from a copy of the module.
    object.__setattr__(owner, hook, WRAPPERS[wrapper](getattr(owner, hook), look))
    callbacks = [owner] if isinstance(owner, pl.Callback) else []
    trainer = trainer_for(strategy, callbacks=callbacks, enable_checkpointing=isinstance(owner, ModelCheckpoint))
    trainer.fit(module, loader())
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("make", "hook"),
    [
        *((Model, hook) for hook in (*SEE_GRADIENTS, "on_train_batch_end")),
        *((pl.Callback, hook) for hook in (*SEE_GRADIENTS, "on_train_batch_end")),
        (partial(ModelCheckpoint, save_top_k=0), "on_train_batch_end"),
    ],
)
def test_a_wrapper_on_the_instance_sees_what_it_would(make: Callable[..., Any], hook: str, wrapper: str) -> None:
    # Lightning's helper takes a wrapper for the hook that it wraps, and says that nothing is overridden: such a one found no
    # gradients, and weights from before the update.
    expected, found = (
        sights(strategy, make(), hook, wrapper)
        for strategy in ("auto", harmony(num_microbatches=1, device_memory="1MiB"))
    )
    assert len(expected) == len(found) > 1
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value.cpu(), other[name].cpu()) for name, value in one.items())


# --- Who sees gradients, or changes them, without Lightning's usual hooks.


def trained(module: pl.LightningModule, strategy: Any, **options: Any) -> Any:
    trainer = trainer_for(strategy, **options)
    trainer.fit(module, loader())
    return trainer


def whole() -> Any:
    return harmony(num_microbatches=1, device_memory="1MiB")


class ClipsByItself(Model):
    """Clips in the method that Lightning calls for it, whether it was told to clip or not."""

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.02)


# A GPU adds up the norm in another order than the host, where harmony updates.
@pytest.mark.cpu
def test_a_module_may_clip_in_the_method_that_does() -> None:
    # It found no gradients, as each pack's had gone with its update.
    plain, swapped = (trained(ClipsByItself(), strategy) for strategy in ("auto", whole()))
    assert_same(plain, swapped)
    assert swapped.strategy.step_report.update_reason.startswith("ClipsByItself.clip_gradients is overridden")


# And the norm.
@pytest.mark.cpu
@pytest.mark.parametrize("function", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_function_of_torch_that_clips_may_be_replaced(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As code that looks at norms does, or clips in another way: it was passed by, and torch's own computation took its place.
    def clips(parameters: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(args)
        for parameter in parameters:
            parameter.grad *= 0.3

    calls: list[Any] = []
    monkeypatch.setattr(torch.nn.utils, function, clips)
    algorithm = "norm" if function == "clip_grad_norm_" else "value"
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    plain, swapped = (trained(Model(), strategy, **options) for strategy in ("auto", whole()))
    assert_same(plain, swapped)
    assert len(calls) == 2 * plain.global_step > 0


class Centralizes(Precision):
    """Changes gradients behind the backward."""

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad -= parameter.grad.mean()
        return super().post_backward(tensor, module)


# And the mean.
@pytest.mark.cpu
def test_a_precision_plugin_may_change_gradients() -> None:
    plain, swapped = (trained(Model(), strategy, plugins=[Centralizes()]) for strategy in ("auto", whole()))
    assert_same(plain, swapped)
    assert swapped.strategy.step_report.update_reason.startswith("Centralizes.post_backward is overridden")


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("scheduled", [False, True], ids=["", "scheduled"])
@pytest.mark.parametrize("clip", [None, 0.02])
def test_an_optimizer_may_have_a_step_of_its_own(clip: float | None, scheduled: bool) -> None:
    # It was called for each pack, and found the gradients of no other.
    totals: dict[str, list[Tensor]] = {"plain": [], "swapped": []}

    def make(kind: str) -> Callable[[Any], Any]:
        def optimizer(parameters: Any) -> Any:
            found = torch.optim.AdamW(list(parameters), lr=0.01)
            step = found.step

            @wraps(step)
            def normed(*args: Any, **kwargs: Any) -> Any:
                result = step(*args, **kwargs)
                gradients = [p.grad for group in found.param_groups for p in group["params"] if p.grad is not None]
                totals[kind].append(torch.nn.utils.get_total_norm(gradients))
                return result

            scheduler = torch.optim.lr_scheduler.StepLR(found, 1) if scheduled else None
            found.step = normed  # type: ignore[method-assign]
            return found if scheduler is None else ([found], [scheduler])

        return optimizer

    plain = trained(Model(make("plain")), "auto", gradient_clip_val=clip)
    swapped = trained(Model(make("swapped")), whole(), gradient_clip_val=clip)
    assert_same(plain, swapped)
    assert len(totals["plain"]) == len(totals["swapped"]) > 0
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(*totals.values(), strict=True))


class ReadsAfterwards(pl.Callback):
    """Keeps the gradients that a hook finds that runs when the step is over."""

    def __init__(self, hook: str) -> None:
        self.seen: list[dict[str, Tensor]] = []
        setattr(self, hook, self._read)

    def _read(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_train_epoch_end", "on_train_batch_start", "on_before_zero_grad"]
)
def test_hooks_behind_the_step_may_read_its_gradients(hook: str) -> None:
    readers = [ReadsAfterwards(hook) for _ in range(2)]
    plain, swapped = (
        trained(Model(), strategy, callbacks=[reader], max_epochs=2)
        for strategy, reader in zip(("auto", whole()), readers, strict=True)
    )
    assert_same(plain, swapped)
    assert swapped.strategy.step_report.update_reason.startswith(f"ReadsAfterwards.{hook} reads gradients")
    assert any(readers[0].seen)
    for one, other in zip(readers[0].seen, readers[1].seen, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(gradient.cpu(), other[name].cpu()) for name, gradient in one.items())


class ReadsDecorated(pl.Callback):
    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.norm = sum(parameter.grad.cpu().norm() for parameter in module.parameters())


def test_a_hook_that_reads_gradients_may_be_decorated() -> None:
    callbacks = ReadsDecorated(), ReadsDecorated()
    trained(Model(), "auto", callbacks=[callbacks[0]])
    trained(Model(), whole(), callbacks=[callbacks[1]])
    assert torch.equal(callbacks[0].norm, callbacks[1].norm)


def test_hooks_that_read_no_gradients_leave_the_update_just_in_time() -> None:
    class Counts(pl.Callback):
        count = 0

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            self.count += sum(parameter.requires_grad for parameter in module.parameters())

    swapped = trained(Model(), whole(), callbacks=[Counts()])
    assert swapped.strategy.step_report.update == "just-in-time"


# --- What hooks draw.


class Draws(pl.Callback):
    """Draws numbers in each hook around a step."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, float, float]] = []
        for hook in ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"):
            setattr(self, hook, partial(self._draw, hook))

    def _draw(self, hook: str, *args: Any) -> None:
        self.drawn.append((hook, torch.rand(()).item(), random.random()))


def test_hooks_draw_from_the_process_and_not_from_a_microbatch() -> None:
    # Between the losses and the backward, they drew what the last microbatch would have drawn next.
    drawn = []
    for strategy in ("auto", whole(), harmony(num_microbatches=4), harmony(num_microbatches=2)):
        pl.seed_everything(0, verbose=False)
        callback = Draws()
        trained(Model(), strategy, callbacks=[callback])
        drawn.append(callback.drawn)
    assert len(drawn[0]) > 4
    assert all(other == drawn[0] for other in drawn)


# --- Callbacks whose hooks are not on their class.


class Proxy:
    """Passes on what it is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Clips(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Proxy(pl.callbacks.LambdaCallback(on_train_batch_end=lambda *_: None)),
        lambda: Proxy(Clips()),
        lambda: Mock(spec=pl.Callback, **{"state_dict.return_value": {}}),
        lambda: Mock(wraps=Clips(), **{"state_dict.return_value": {}}),
        lambda: pl.callbacks.LambdaCallback(on_train_batch_end=Mock()),
    ],
    ids=["proxy", "proxy that clips", "mock", "mock that clips", "lambda"],
)
def test_a_callback_whose_hooks_are_not_on_its_class_is_heard_as_in_plain_lightning(make: Callable[[], Any]) -> None:
    assert_same(*(trained(Model(), strategy, callbacks=[make()]) for strategy in ("auto", whole())))


def test_a_hook_whose_code_cannot_be_seen_may_read_gradients() -> None:
    class Reads:
        def __call__(self, trainer: Any, module: Any, *args: Any) -> None:
            seen.append([parameter.grad.cpu().clone() for parameter in module.parameters()])

    sights = []
    for strategy in ("auto", whole()):
        seen: list[list[Tensor]] = []
        callback = pl.callbacks.LambdaCallback(on_train_batch_end=Reads())
        swapped = trained(Model(), strategy, callbacks=[callback])
        sights.append(seen)
    assert "is no Python function" in swapped.strategy.step_report.update_reason
    for one, other in zip(*sights, strict=True):
        assert all(map(torch.equal, one, other))
