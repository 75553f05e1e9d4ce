"""Whoever looks at weights and gradients finds those of plain Lightning, however the hook came to be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_lightning import Model, harmony, loader, trainer_for, values
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
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
