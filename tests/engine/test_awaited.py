"""Parameters that are being updated: who reads one waits, who asks for its shape does not, and nobody else sees a change."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.awaited import await_updates, settle
from lightning_harmony.engine.stream import Happened


class Update(Happened):
    """Sets a parameter to ones when somebody waits for it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._data = parameter.detach()
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1
        self._data.fill_(1.0)


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4))


@pytest.fixture
def update(parameter: nn.Parameter) -> Iterator[Update]:
    update = Update(parameter)
    await_updates({parameter: update})
    yield update
    settle([parameter])


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "operation": lambda p: p * 1,
    "function": torch.clone,
    "keyword": lambda p: torch.mul(input=p, other=1),
    "several": lambda p: torch._foreach_mul([torch.ones(4), p], 1.0)[1],
    "into": lambda p: torch.zeros(4).copy_(p),
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "number": lambda p: torch.full((4,), p[0].item()),
    "list": lambda p: torch.tensor(p.tolist()),
    "copy": copy.deepcopy,
    "state": lambda p: saved({"p": p})["p"],
    "printed": lambda p: torch.ones(4) if "1., 1., 1., 1." in repr(p) else torch.zeros(4),
    "linear": lambda p: nn.functional.linear(torch.ones(1), p[:, None]),
}


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("way", READS)
def test_who_reads_one_waits_for_its_update_once(parameter: nn.Parameter, update: Update, way: str) -> None:
    for _ in range(2):
        found = READS[way](parameter)
        assert torch.equal(found, torch.ones(4))
        assert update.num_waits == 1
        assert type(parameter) is nn.Parameter
        assert type(found) in (Tensor, nn.Parameter)


@pytest.mark.parametrize(
    "look",
    [
        lambda p: p.shape,
        lambda p: p.device,
        lambda p: p.dtype,
        lambda p: p.requires_grad,
        lambda p: p.numel(),
        len,
        lambda p: {p: 1}[p],
        lambda p: p.grad,
        lambda p: setattr(p, "grad", None),
        lambda p: p.requires_grad_(True),
        lambda p: isinstance(p, nn.Parameter),
        lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(),
    ],
)
def test_who_asks_for_no_values_does_not_wait(
    parameter: nn.Parameter, update: Update, look: Callable[[nn.Parameter], Any]
) -> None:
    look(parameter)
    assert update.num_waits == 0


def test_a_dictionary_finds_it_throughout(parameter: nn.Parameter) -> None:
    before = {parameter: "known"}
    await_updates({parameter: Update(parameter)})
    meanwhile = {parameter: "known"}
    assert before[parameter] == "known"
    settle([parameter])
    assert meanwhile[parameter] == "known"


def test_gradients_come_to_it(parameter: nn.Parameter, update: Update) -> None:
    (parameter * torch.arange(4.0)).sum().backward()
    assert torch.equal(parameter.grad, torch.arange(4.0))


def test_parameters_of_other_classes_are_left_alone() -> None:
    class Own(nn.Parameter):
        pass

    own = Own(torch.zeros(4))
    await_updates({own: Update(own)})
    assert type(own) is Own


def test_a_thread_that_has_waited_leaves_the_next_update_alone(parameter: nn.Parameter) -> None:
    class Slow(Update):
        def __init__(self, parameter: nn.Parameter) -> None:
            super().__init__(parameter)
            self.is_waited_for, self.is_over = threading.Event(), threading.Event()

        def synchronize(self) -> None:
            self.is_waited_for.set()
            self.is_over.wait(60)
            super().synchronize()

    first, second = Slow(parameter), Update(parameter)
    await_updates({parameter: first})
    reader = threading.Thread(target=parameter.sum)
    reader.start()
    assert first.is_waited_for.wait(60)
    settle([parameter])
    await_updates({parameter: second})
    first.is_over.set()
    # Once more, for it is being updated again.
    reader.join()
    assert second.num_waits == 1
