"""What looks at parameters between steps, and what only names them."""

from __future__ import annotations

import copy
import io
import os
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

# Made before anybody looks out, by the addresses of what they share memory with.
IN_MEMORY: dict[int, Tensor] = {}
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
    "a gradient transform": lambda layer, _: torch.func.grad(lambda weight: weight.sum())(layer.weight),
    "a map over it": lambda layer, _: torch.vmap(lambda row: row.sum())(layer.weight),
    "a tensor of an array in its memory": lambda _, view: IN_MEMORY[view.data_ptr()].sum(),
    "averaging": lambda layer, _: torch.optim.swa_utils.AveragedModel(layer),
}
NAMES: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "numbers": lambda layer, _: sum(parameter.numel() for parameter in layer.parameters()),
    "its device": lambda layer, _: next(layer.parameters()).device,
    "its shape": lambda layer, _: [parameter.shape for parameter in layer.parameters()],
    "names": lambda layer, _: dict(layer.named_parameters()),
    "another tensor": lambda *_: torch.ones(3).add(1).numpy().sum(),
    "another gradient transform": lambda *_: torch.func.jacrev(torch.func.grad(torch.sum))(torch.ones(3)),
    "another map": lambda *_: torch.vmap(torch.sum)(torch.ones(3, 3)),
    "compiled code": lambda *_: torch.compile(lambda value: value + 1, backend="eager", fullgraph=True)(torch.ones(3)),
    "another layer": lambda *_: nn.Linear(3, 3)(torch.ones(3)).sum().backward(),
}


def lookout() -> tuple[Lookout, list[None]]:
    ended: list[None] = []
    return Lookout(lambda: ended.append(None), lambda name: name.startswith("caller.")), ended


def called(hook: Callable[[], Any], by: str = "caller.loops.fit") -> None:
    exec("hook()", {"__name__": by, "hook": hook})


@pytest.mark.parametrize("looks", LOOKS)
def test_who_looks_ends_the_update(looks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    view = layer.weight.detach()[1:]
    monkeypatch.setitem(IN_MEMORY, view.data_ptr(), torch.from_numpy(view.numpy()))
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
            called(layer.weight.sum)
        watch.leave()
    assert found == [None, None, None, None, "code between batches looks at parameters", None]


def test_of_hooks_that_call_each_other_by_way_of_the_trainer_the_loops_is_named() -> None:
    layer, (watch, _) = nn.Linear(3, 3), lookout()

    def looks() -> None:
        layer.weight.sum()

    def saves() -> None:
        called(looks, "caller.trainer.saving")

    for hook, by in ((saves, "caller.loops.fit"), (saves, "caller.trainer.fit"), (looks, "caller.trainer.fit")):
        for _ in range(2):
            watch.keep(layer.parameters())
            called(hook, by)
            watch.leave()
        assert (watch.why_at_once() or "").startswith(f"{hook.__name__} (test_lookout.py:")


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


@pytest.mark.parametrize("make", [Other, lambda: torch.device("cpu")], ids=["mode", "device"])
def test_a_mode_may_be_left_while_it_is_kept(make: Callable[[], Any]) -> None:
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    mode = make()
    mode.__enter__()
    watch.keep(layer.parameters())
    mode.__exit__(None, None, None)
    layer.weight.sum()
    watch.leave()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert ended


def test_a_default_device_may_be_set_and_unset_while_it_is_kept() -> None:
    watch, _ = lookout()
    torch.set_default_device("cpu")
    try:
        watch.keep([torch.ones(3)])
        torch.set_default_device("meta")
        assert torch.ones(3).is_meta
    finally:
        torch.set_default_device(None)
    watch.leave()
    assert torch.overrides._get_current_function_mode_stack() == []


class Looking(TorchFunctionMode):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.weight.sum()
        return func(*args, **(kwargs or {}))


def test_a_mode_that_looks_ends_the_update() -> None:
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    with Looking(layer.weight):
        watch.keep(layer.parameters())
        torch.ones(3)
        watch.leave()
    assert ended


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_who_forks_a_process_ends_the_update() -> None:
    layer, (watch, ended) = nn.Linear(3, 3), lookout()
    watch.keep(layer.parameters())
    process = os.fork()
    if process == 0:
        os._exit(0)
    watch.leave()
    os.waitpid(process, 0)
    assert ended
    others, ended = lookout()
    others.keep(layer.parameters())
    others.leave()
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    assert not ended


def imports_elsewhere() -> Any:
    from concurrent.futures import ThreadPoolExecutor as Pool

    return Pool(1)


@torch.compile(backend="eager")
def compiled(value: Tensor) -> Tensor:
    return value + 1


@pytest.mark.parametrize(
    "value",
    [
        threading,
        threading.Thread,
        ThreadPoolExecutor,
        ThreadPoolExecutor(1),
        torch.multiprocessing,
        compiled,
        imports_elsewhere,
        torch.compile(nn.Linear(2, 2)),
    ],
)
def test_code_that_runs_elsewhere_is_out_of_sight(value: Any) -> None:
    assert is_out_of_sight(value)


@pytest.mark.parametrize("value", [torch, numpy, nn.Linear(2, 2), test_outside_of_it_nothing_counts, 1, None, Tensor])
def test_other_code_is_not(value: Any) -> None:
    assert not is_out_of_sight(value)
