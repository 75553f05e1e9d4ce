"""Host bytes of a parameter: weights, AdamW's moments, and no more gradients than the update has not come to."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.stream import HostStream
from lightning_harmony.plan.values.host_need import RING
from lightning_harmony.updating.optimizer_state import StateSize, state_bytes
from support.lightning_fits import trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]
NUM_LAYERS = 24
WIDTH = 128
NUM_STEPS = 3
BATCH_SIZE = 4


class Wide(pl.LightningModule):
    """Many weights and few activations. Looks at reports where nothing waits for it."""

    # Not in a list: what one microbatch adds there, the next one could find.
    seen: ClassVar[Queue[Any]] = Queue()
    reports: Sequence[Any] = ()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.put(self.trainer.strategy.step_report)
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def host_bytes(self) -> list[float]:
        """Of a parameter, in each step."""
        return [report.host_bytes / sum(p.numel() for p in self.parameters()) for report in self.reports]


class ReadsGradients(pl.Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


def fit(strategy: HarmonyStrategy, **options: Any) -> Wide:
    module = Wide()
    trainer = trainer_for(strategy, **options)
    trainer.fit(module, DataLoader(torch.randn(NUM_STEPS * BATCH_SIZE, WIDTH), batch_size=BATCH_SIZE))
    seen = [module.seen.get() for _ in range(module.seen.qsize())]
    module.reports = list(
        {id(each): each for each in [*seen, trainer.strategy.step_report] if each is not None}.values()
    )
    assert len(module.reports) == NUM_STEPS
    assert module.reports[-1].num_packs == NUM_LAYERS
    return module


def strategy(**arguments: Any) -> HarmonyStrategy:
    return HarmonyStrategy(device_memory="700KiB", num_microbatches=2, **arguments)


# Gradients of so many bytes of a parameter are on their way beside those that are kept; the rest is the stash.
RING_BYTES = 4 * RING / NUM_LAYERS + 0.2


@pytest.mark.cpu
def test_just_in_time_needs_the_gradients_of_few_packs() -> None:
    assert max(fit(strategy()).host_bytes()) <= 12 + RING_BYTES


@pytest.mark.nightly
def test_a_slow_update_does_not_make_gradients_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = HostStream.submit

    def late(self: HostStream, work: Callable[[], None], *others: Any, **named: Any) -> Any:
        def slowly() -> None:
            if threading.current_thread().name.startswith("harmony-update"):
                time.sleep(0.005)
            work()

        return submit(self, slowly, *others, **named)

    monkeypatch.setattr(HostStream, "submit", late)
    assert max(fit(strategy()).host_bytes()) <= 12 + RING_BYTES


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"update": "deferred"}, {}),
        ({}, {"gradient_clip_val": 0.1}),
        ({}, {"accumulate_grad_batches": 2}),
        ({}, {"callbacks": [ReadsGradients()]}),
    ],
    ids=["asked", "clip", "accumulate", "hook"],
)
@pytest.mark.cpu
def test_deferred_needs_the_gradients_once(arguments: dict[str, Any], options: dict[str, Any]) -> None:
    module = fit(strategy(**arguments), **options)
    assert {report.update for report in module.reports} == {"deferred"}
    assert max(module.host_bytes()) <= 16 + RING_BYTES


def num_gradients(module: pl.LightningModule) -> int:
    return sum(parameter.grad is not None for parameter in module.parameters())


def test_the_first_step_leaves_no_gradients_behind() -> None:
    # The hook counts through a function: one that names gradients itself has them kept for it.
    class AfterFirst(pl.Callback):
        num_bytes = num_gradients = -1

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                self.num_bytes = trainer.strategy._swapped.engine.pool.num_bytes
                self.num_gradients = num_gradients(module)

    after = AfterFirst()
    with pytest.warns(UserWarning, match="AfterFirst.on_train_batch_end finds no gradients"):
        module = fit(strategy(), callbacks=[after])
    assert module.reports[1].update == "just-in-time"
    assert after.num_gradients == 0
    # What remains is the stash.
    assert 0 <= after.num_bytes < NUM_LAYERS * WIDTH * WIDTH


def test_nothing_of_a_fit_lasts_but_its_model() -> None:
    """The buffers of each fit stayed until the process ended: on a GPU machine the sixth one found its memory full."""
    of_fit: list[weakref.ref[Any]] = []

    class AtEnd(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            engine = trainer.strategy._swapped.engine
            of_fit.extend(weakref.ref(each) for each in (trainer, trainer.optimizers[0], engine, engine.pool))

    module = fit(strategy(), callbacks=[AtEnd()])
    module.trainer = None
    gc.collect()
    assert [each() for each in of_fit] == [None] * 4


class TestStateThatGrowsWhileItIsCounted:
    """An update that outlasts its step makes the state of a parameter that trains late, in its own thread."""

    @staticmethod
    def stepped(optimizer: type[torch.optim.Optimizer], num_parameters: int = 3, **options: Any) -> Any:
        parameters = [nn.Parameter(torch.ones(4)) for _ in range(num_parameters)]
        made = optimizer(parameters, **options)
        sum(parameter.sum() for parameter in parameters).backward()
        made.step()
        return made

    def test_is_counted_all_the_same(self) -> None:
        optimizer = self.stepped(torch.optim.Adam)
        late = nn.Parameter(torch.ones(4))

        class Grows(UserDict[str, Any]):
            """A parameter's state: the update comes between it and the next one."""

            def keys(self) -> Any:
                optimizer.state[late] = {"exp_avg": torch.zeros(4)}
                return super().keys()

        first = optimizer.param_groups[0]["params"][0]
        optimizer.state[first] = Grows(optimizer.state[first])
        assert state_bytes([optimizer]) == 3 * (2 * 16 + 4)
        assert late in optimizer.state

    def test_is_counted_again_when_a_parameter_trains_late(self) -> None:
        optimizer, size = self.stepped(torch.optim.Adam), StateSize()
        assert size.num_bytes([optimizer]) == 3 * (2 * 16 + 4)
        optimizer.state[nn.Parameter(torch.ones(4))] = {"exp_avg": torch.zeros(4)}
        assert size.num_bytes([optimizer]) == state_bytes([optimizer]) == 3 * (2 * 16 + 4) + 16

    def test_is_not_walked_through_after_each_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        optimizer, size = self.stepped(torch.optim.Adam), StateSize()
        before = size.num_bytes([optimizer])
        monkeypatch.setattr(
            "lightning_harmony.updating.optimizer_state.state_bytes", lambda optimizers: pytest.fail("counted again")
        )
        assert size.num_bytes([optimizer]) == before

    def test_is_counted_again_where_it_is_a_history(self) -> None:
        parameter = nn.Parameter(torch.ones(4))
        optimizer, size = torch.optim.LBFGS([parameter], max_iter=2), StateSize()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (parameter**4).sum()
            loss.backward()
            return loss

        counted = []
        for _ in range(3):
            optimizer.step(closure)
            counted.append(size.num_bytes([optimizer]))
            assert counted[-1] == state_bytes([optimizer])
        assert counted[0] < counted[-1]
