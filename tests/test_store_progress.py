"""The bar of a host store: shown where the store is large and bars are."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks.progress import tqdm_progress

from lightning_harmony.setup import progress
from support.lightning_fits import QUIET_MARKS, Model, harmony, loader, trainer_for

pytestmark = QUIET_MARKS


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bars of host stores that were made."""
    made: list[Any] = []
    init = tqdm_progress.Tqdm.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if kwargs.get("desc") == "Building the host store":
            made.append(self)

    monkeypatch.setattr(tqdm_progress.Tqdm, "__init__", noted)
    return made


def validate(**options: Any) -> None:
    trainer_for(harmony(), limit_val_batches=1, **options).validate(Model(), loader(), verbose=False)


def test_a_large_store_has_a_bar_that_comes_to_its_end(bars: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LARGE_BYTES", 1024)
    validate(enable_progress_bar=True)
    (bar,) = bars
    assert bar.total == sum(parameter.numel() * 4 for parameter in Model().parameters())
    assert bar.n == bar.total


@pytest.mark.parametrize(
    "options",
    [
        {"enable_progress_bar": False},
        {"enable_progress_bar": True, "callbacks": [pl.callbacks.TQDMProgressBar(refresh_rate=0)]},
    ],
    ids=["no bars", "bars off"],
)
def test_no_bar_is_shown_where_lightnings_bars_are_off(
    bars: list[Any], monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    monkeypatch.setattr(progress, "LARGE_BYTES", 1024)
    validate(**options)
    assert bars == []


def test_a_small_store_has_no_bar(bars: list[Any]) -> None:
    validate(enable_progress_bar=True)
    assert bars == []
