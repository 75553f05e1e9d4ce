"""Saved tensors of a call: a recompute brings them, and leaves nothing else behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_harmony.engine.layers.saved_tensors import SavedTensor, Saves
from lightning_harmony.errors import UnsupportedModelError


class Call:
    """A call of some code whose saved tensors a recompute brings back."""

    def __init__(self, code: Callable[[Tensor], Any]) -> None:
        self.saves, self.code = Saves(), code
        with saved_tensors_hooks(self._save, SavedTensor.load):
            self.result = code(torch.ones(8, requires_grad=True))

    def _save(self, tensor: Tensor) -> SavedTensor:
        saved = SavedTensor(tensor, "a call", self._open, keep=False)
        self.saves.add(saved)
        return saved

    def _open(self, saved: SavedTensor) -> None:
        if saved.content is None:
            self.fill()

    def fill(self) -> None:
        with torch.enable_grad():
            assert self.saves.fill(lambda: self.code(torch.ones(8, requires_grad=True)))


def intermediate(x: Tensor, kept: list[Any], seen: list[weakref.ref[Any]]) -> Tensor:
    """Keep a result, whose graph has saved another one."""
    factor = x.detach() * 3
    seen.append(weakref.ref(factor.untyped_storage()))
    kept.append(x * factor)
    return (kept[-1].exp() * x).sum()


def test_what_is_kept_of_a_recompute_keeps_nothing_that_its_graph_saved() -> None:
    kept: list[Any] = []
    seen: list[weakref.ref[Any]] = []
    call = Call(lambda x: intermediate(x, kept, seen))
    call.fill()
    call.saves.clear()
    assert len(kept) == 2
    assert [each() for each in seen] == [None, None]


def test_a_recompute_brings_what_a_backward_asks_for() -> None:
    call = Call(lambda x: intermediate(x, [], []))
    call.result.backward()
    assert call.saves.alive() == []


class Keeper:
    """An object that keeps the last result."""

    last: Tensor


@pytest.mark.parametrize("is_kept_by_an_error", [False, True])
def test_an_object_or_an_error_that_keeps_a_recompute_keeps_nothing_that_its_graph_saved(
    is_kept_by_an_error: bool,
) -> None:
    keeper, errors, seen = Keeper(), list[BaseException](), list[weakref.ref[Any]]()

    def code(x: Tensor) -> Tensor:
        factor = x.detach() * 3
        seen.append(weakref.ref(factor.untyped_storage()))
        result = x * factor
        del factor
        if not is_kept_by_an_error:
            keeper.last = result
        try:
            return (result.exp() * x).sum()
        except BaseException as error:
            errors.append(error)
            raise

    call = Call(code)
    call.fill()
    call.saves.clear()
    assert len(errors) == 1
    assert seen[-1]() is None


def test_a_backward_through_what_a_recompute_left_behind_is_refused() -> None:
    kept: list[Any] = []
    call = Call(lambda x: intermediate(x, kept, []))
    call.fill()
    with pytest.raises(UnsupportedModelError, match="ran again for another backward"):
        kept[-1].sum().backward()
