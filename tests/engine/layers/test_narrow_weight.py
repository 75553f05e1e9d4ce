"""A narrow weight looks as wide as the parameter, and what autocast would not cast it for gets the parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony.engine.layers.narrow_weight import NarrowUse, NarrowWeight, can_show, really, show

X = torch.randn(3, 4)


class Shown:
    """A weight that is shown to a layer's code."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.randn(4, 4))
        self.narrow = nn.Parameter(self.parameter.detach().bfloat16())
        self.gradients: list[Tensor] = []
        self.use = NarrowUse(self.narrow, lambda: self.parameter.detach().clone())
        self.weight = show(self.parameter, self.narrow, self.gradients.append).of(self.use)


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda w: F.linear(X, w),
    "product": lambda w: X @ w,
    "product from the left": lambda w: w @ X.t(),
    "transposed": lambda w: X @ w.t(),
    "a part": lambda w: F.linear(X[:, :2], w[:, :2]),
    "reshaped": lambda w: F.conv1d(X.view(3, 4, 1), w.view(4, 4, 1)),
    "cast by hand": lambda w: w.to(torch.bfloat16),
    "attention": lambda w: F.multi_head_attention_forward(
        X, X, X, 4, 1, torch.ones(12, 4), None, None, None, False, 0.0, w, None, need_weights=False
    )[0],
}  # fmt: skip
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "added": lambda w: X[:, :1] + w.sum(),
    "cast to another type": lambda w: w.to(torch.float64),
    "one of a list": lambda w: torch.cat([w, w]),
    "a norm of a list": lambda w: torch._foreach_norm([w])[0],
    "data": lambda w: w.data.norm(),
    "rows by a tensor": lambda w: w[torch.tensor([1, 0])],
    "an embedding": lambda w: F.embedding(torch.tensor([2]), w),
    "a normalization": lambda w: F.layer_norm(X, (4,), w[0]),
    "a copy": lambda w: copy.deepcopy(w).detach(),
    "einsum": lambda w: torch.einsum("ij,ij->i", w, w),
}


@pytest.mark.parametrize("name", CASTS)
def test_what_autocast_casts_the_weight_for_gets_the_cast(name: str) -> None:
    shown = Shown()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert torch.equal(CASTS[name](shown.weight), CASTS[name](shown.parameter))
    assert shown.use.is_cast
    assert not shown.use.is_read


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_gets_the_parameter(name: str) -> None:
    shown = Shown()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert torch.equal(OTHERS[name](shown.weight), OTHERS[name](shown.parameter))
    assert shown.use.is_read


@pytest.mark.parametrize("name", [name for name in CASTS if name != "cast by hand"])
def test_without_autocast_all_get_the_parameter(name: str) -> None:
    shown = Shown()
    assert torch.equal(CASTS[name](shown.weight), CASTS[name](shown.parameter))
    assert shown.use.is_read
    assert not shown.use.is_cast


def test_what_is_asked_of_it_is_answered_as_by_the_parameter() -> None:
    shown = Shown()
    weight, parameter = shown.weight, shown.parameter
    for asked in (weight, weight.t()):
        expected = parameter if asked is weight else parameter.t()
        assert (asked.dtype, asked.shape, asked.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert asked.is_contiguous() == expected.is_contiguous()
        assert asked.requires_grad
    assert isinstance(weight, nn.Parameter)
    assert weight.is_leaf
    assert not shown.use.is_read


def test_a_second_cast_with_a_gradient_is_made_by_autocast_itself() -> None:
    shown = Shown()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        with torch.no_grad():
            F.linear(F.linear(X, shown.weight), shown.weight)
        assert not shown.use.is_read
        y = F.linear(X, shown.weight)
        assert not shown.use.is_read
        F.linear(y, shown.weight)
        assert shown.use.is_read


def test_to_change_what_was_given_as_the_parameter_is_noticed() -> None:
    shown = Shown()
    assert shown.weight.detach().sum().isfinite()
    assert not shown.use.has_changed()
    with torch.no_grad():
        torch._foreach_mul_([shown.weight.detach()], 2.0)
    assert shown.use.has_changed()


def test_a_gradient_that_comes_past_functions_of_torch_is_told_of() -> None:
    shown = Shown()
    torch.vmap(lambda row: row * 2)(shown.weight).sum().backward()
    assert len(shown.gradients) == 1


def test_a_class_with_functions_of_its_own_is_shown_as_it_is() -> None:
    class Own(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return super().__torch_function__(func, types, args, kwargs)

    parameter = Own(torch.randn(2))
    assert not can_show(parameter, parameter)
    assert can_show(nn.Parameter(torch.randn(2)), parameter)


def test_what_a_layer_leaves_is_the_parameter() -> None:
    shown = Shown()
    assert isinstance(shown.weight, NarrowWeight)
    assert torch.equal(really(shown.weight), shown.parameter)
    assert really(X) is X
