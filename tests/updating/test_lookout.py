"""What looks at parameters between steps, and what only names them."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_harmony.updating.lookout import Lookout, is_out_of_sight

LOOKS: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "a sum": lambda layer, _: layer.weight.sum(),
    "data": lambda layer, _: layer.weight.data,
    "a call of the layer": lambda layer, _: layer(torch.ones(3)),
    "its state": lambda layer, _: layer.state_dict(),
    "a copy": lambda layer, _: copy.deepcopy(layer),
    "a pickle": lambda layer, _: pickle.dumps(layer),
    "a file": lambda layer, _: torch.save(layer.weight, io.BytesIO()),
    "an array": lambda layer, _: numpy.asarray(layer.weight.detach()).sum(),
    "a number": lambda layer, _: layer.weight[0, 0].item(),
    "words": lambda layer, _: repr(layer.weight),
    "its address": lambda layer, _: layer.weight.data_ptr(),
    "its gradient": lambda layer, _: layer.weight.grad,
    "its version": lambda layer, _: layer.weight._version,
    "lists of it": lambda layer, _: torch._foreach_norm(list(layer.parameters())),
    "another tensor in its memory": lambda _, view: view.sum(),
    "writing": lambda _, view: view.zero_(),
    "an argument by name": lambda layer, _: torch.add(input=torch.ones(()), other=layer.bias),
    "a vector": lambda layer, _: nn.utils.parameters_to_vector(layer.parameters()),
    "averaging": lambda layer, _: torch.optim.swa_utils.AveragedModel(layer),
}
NAMES: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "numbers": lambda layer, _: sum(parameter.numel() for parameter in layer.parameters()),
    "its device": lambda layer, _: next(layer.parameters()).device,
    "its shape": lambda layer, _: [parameter.shape for parameter in layer.parameters()],
    "names": lambda layer, _: dict(layer.named_parameters()),
    "another tensor": lambda *_: torch.ones(3).add(1).numpy().sum(),
    "another layer": lambda *_: nn.Linear(3, 3)(torch.ones(3)).sum().backward(),
}


def lookout() -> tuple[Lookout, list[None]]:
    ended: list[None] = []
    return Lookout(lambda: ended.append(None), lambda name: name.startswith("_pytest")), ended


@pytest.mark.parametrize("looks", LOOKS)
def test_who_looks_ends_the_update(looks: str) -> None:
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    view = layer.weight.detach()[1:]
    watch.keep(layer.parameters())
    try:
        LOOKS[looks](layer, view)
    finally:
        watch.leave()
    assert ended


@pytest.mark.parametrize("names", NAMES)
def test_who_names_a_parameter_does_not(names: str) -> None:
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    watch.keep(layer.parameters())
    try:
        NAMES[names](layer, layer.weight)
    finally:
        watch.leave()
    assert not ended


def test_gradients_count_as_parameters_do() -> None:
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    layer.bias.grad = gradient = torch.ones(3)
    watch.keep(layer.parameters())
    gradient.sum()
    watch.leave()
    assert ended


def test_outside_of_it_nothing_counts() -> None:
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    watch.keep(layer.parameters())
    watch.leave()
    watch.leave()
    layer.weight.sum()
    assert not ended


def test_who_looks_behind_two_steps_is_taken_to_do_so_behind_the_next_one() -> None:
    layer, (watch, _) = nn.Linear(3, 3), lookout()
    found = []
    for looks in (True, False, True, True, False, True):
        found.append(watch.why_at_once())
        watch.keep(layer.parameters())
        if looks:
            layer.weight.sum()
        watch.leave()
    name = "test_who_looks_behind_two_steps_is_taken_to_do_so_behind_the_next_one (test_lookout.py:"
    assert [reason and reason.startswith(name) for reason in found] == [None, None, None, None, True, None]


def test_an_array_counts_for_as_long_as_somebody_has_it() -> None:
    layer, (watch, _) = nn.Linear(3, 3), lookout()
    watch.keep(layer.parameters())
    array = layer.weight.detach().numpy()[1:]
    watch.leave()
    assert watch.why_at_once() == "an array has the memory of parameters"
    del array
    assert watch.why_at_once() is None


class Other(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_that_the_users_code_leaves_stay() -> None:
    watch, _ = lookout()
    first, second = Other(), Other()
    with first:
        watch.keep([torch.ones(3)])
        second.__enter__()
        watch.leave()
        assert torch.overrides._get_current_function_mode_stack() == [first, second]
        second.__exit__(None, None, None)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_code_that_is_compiled_as_a_whole_runs() -> None:
    """The compiler could not follow a lookout, and `fullgraph=True` refuses what it cannot follow."""
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    whole = torch.compile(lambda value: (value * 2).relu().sum(), backend="eager", fullgraph=True)
    watch.keep(layer.parameters())
    try:
        assert float(whole(torch.ones(3))) == 6
        assert not ended
    finally:
        watch.leave()
    assert float(whole(torch.ones(3))) == 6


@torch.compile(backend="eager")
def compiled(value: Tensor) -> Tensor:
    return value + 1


@pytest.mark.parametrize(
    "value", [threading, threading.Thread, ThreadPoolExecutor, ThreadPoolExecutor(1), torch.multiprocessing, compiled]
)
def test_code_that_runs_elsewhere_is_out_of_sight(value: Any) -> None:
    assert is_out_of_sight(value)


@pytest.mark.parametrize("value", [torch, numpy, nn.Linear(2, 2), test_outside_of_it_nothing_counts, 1, None, Tensor])
def test_other_code_is_not(value: Any) -> None:
    assert not is_out_of_sight(value)
