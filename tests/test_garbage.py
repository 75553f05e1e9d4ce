"""Full collections in a long fit: they look only at what came with its steps, and at everything afterwards."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.fit.garbage import NUM_FIRST_STEPS
from support import nets
from support.same_training import Net, trainer_for

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore:.*LeafSpec.* is deprecated:FutureWarning"
)

# From Python 3.12 on, a full collection itself spares the objects that never end, some hundred. Before, nobody else does.
MOST_OF_PYTHON = 1_000 if sys.version_info >= (3, 12) else 0


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


class Frozen(pl.Callback):
    """How many objects are spared, as each step begins."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.garbage = weakref.ref(Cycle())

    def on_before_zero_grad(self, *args: Any) -> None:
        self.counts.append(gc.get_freeze_count())


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lightning_harmony.fit.garbage.NUM_FIRST_STEPS", NUM_FIRST_STEPS)
    gc.unfreeze()
    yield
    gc.enable()
    # As for all other tests.
    gc.collect()
    gc.freeze()


def fit(steps: int, **options: Any) -> Frozen:
    frozen = Frozen()
    trainer = trainer_for(
        HarmonyStrategy(num_microbatches=2), steps, [frozen, *options.pop("callbacks", [])], **options
    )
    trainer.fit(Net(nets.Language(num_blocks=1)), DataLoader(nets.tokens(4 * steps), batch_size=4))
    return frozen


def test_what_lasts_is_looked_at_no_more_until_the_fit_is_over() -> None:
    frozen = fit(NUM_FIRST_STEPS + 2)
    spared = frozen.counts[NUM_FIRST_STEPS - 1 :]
    assert max(frozen.counts[: NUM_FIRST_STEPS - 1]) <= MOST_OF_PYTHON
    assert spared[0] > 10_000
    # But for what has ended since.
    assert all(0.9 * spared[0] < count <= spared[0] for count in spared)
    assert gc.get_freeze_count() <= MOST_OF_PYTHON
    # What was garbage by then is gone, though all that was there was spared.
    assert frozen.garbage() is None


def test_what_python_itself_spares_is_no_plan_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full collection of 3.12's own, it was taken for one, and the fit's collections looked at everything."""
    count = gc.get_freeze_count
    monkeypatch.setattr("lightning_harmony.fit.garbage.gc.get_freeze_count", lambda: count() + 375)
    assert fit(NUM_FIRST_STEPS + 1).counts[-1] > 10_000


def test_short_fits_leave_the_collector_alone() -> None:
    assert max(fit(NUM_FIRST_STEPS - 1).counts) <= MOST_OF_PYTHON


def test_who_turned_the_collector_off_has_plans_of_their_own() -> None:
    gc.disable()
    assert max(fit(NUM_FIRST_STEPS + 1).counts) <= MOST_OF_PYTHON


def test_what_the_user_froze_stays_frozen() -> None:
    kept = [object(), []]
    gc.freeze()
    count = gc.get_freeze_count()
    assert len(kept) == 2
    fit(NUM_FIRST_STEPS + 1)
    # Objects that end are frozen no more.
    assert 0.5 * count < gc.get_freeze_count() <= count


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == NUM_FIRST_STEPS:
            raise ValueError("of the user's")


def test_a_fit_that_fails_spares_nothing_any_more() -> None:
    with pytest.raises(ValueError, match="of the user's"):
        fit(NUM_FIRST_STEPS + 2, callbacks=[Fails()])
    assert gc.get_freeze_count() <= MOST_OF_PYTHON
