"""What layers are called with on another device comes as a whole: no mode looks at each operation, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.glue.one_device import OneDevice
from support.chains import (
    BATCH,
    CASES,
    MICROBATCHES,
    STEPS,
    Chain,
    Hooked,
    LookedAt,
    UsedBefore,
    UsedBetweenLayers,
    build,
    samples,
)
from support.nets import WIDTH
from support.same_training import Net, Training, assert_same_training, compare, room, root, train_harmony, train_plain

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


def on_two(module: Net) -> Training:
    strategy = HarmonyStrategy(device_memory=room(module.net.memory), num_microbatches=MICROBATCHES)
    return train_harmony(module, samples(), strategy, BATCH, with_gradients=False, devices=2)


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_gradients_are_summed_in_the_order_of_one_device(kind: type[Chain]) -> None:
    plain = train_plain(build(kind), samples(), MICROBATCHES, BATCH)
    assert all(map(torch.isfinite, plain.losses))
    compare(plain, on_two(build(kind)))


@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [(Chain, True), (LookedAt, True), (UsedBefore, True), (Hooked, True), (UsedBetweenLayers, False)],
)
def test_no_operation_of_a_layer_is_looked_at_where_nobody_uses_its_inputs_after_it(
    kind: type[Chain], is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forward on another device went operation by operation, which took as long as the layer itself."""
    module, in_last_step = build(kind), []
    make = OneDevice.__init__

    def noted(self: OneDevice, lane: Any, transfers: Any, at: int | None = None, *args: Any) -> None:
        if at is not None and module.net.num_calls > (STEPS - 1) * MICROBATCHES:
            in_last_step.append(at)
        make(self, lane, transfers, at, *args)

    monkeypatch.setattr(OneDevice, "__init__", noted)
    on_two(module)
    assert (not in_last_step) is is_whole


def test_what_goes_to_another_device_waits_for_its_own_microbatch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies were made in the order of all that computes there: each waited for another microbatch, one GPU for the other."""
    if root().type != "cpu":
        pytest.skip("the copies of virtual devices are looked at")
    waits: list[bool] = []

    def send(device: VirtualDevice, copy: Callable[[], Tensor], source: Tensor, after: object) -> tuple[Tensor, None]:
        if source.dim() == 3:
            waits.append(after is not None)
        return copy(), None

    monkeypatch.setattr(VirtualDevice, "send", send)
    on_two(build(Chain))
    # In the last step, from each of five blocks to the next, and back.
    crossings = 2 * 4 * MICROBATCHES
    assert sum(waits[-crossings:]) >= crossings - MICROBATCHES


class Attends(nn.Module):
    """Calls attentions by themselves: torch's code asks whether their keys are their values."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attentions = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x.transpose(0, 1)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            query = norm(x)
            x = query + attention(query, x, x, attn_mask=mask)[0]
        return x.pow(2).mean()


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_input_that_a_layer_is_given_twice_is_one_on_another_device(num_microbatches: int) -> None:
    """It was two in the forward, and one when the layer ran again: refused, as if it depended on something else."""
    torch.manual_seed(0)
    assert_same_training(
        Net(Attends()),
        torch.randn(24, 5, WIDTH),
        layers=[nn.LayerNorm, nn.MultiheadAttention],
        num_microbatches=num_microbatches,
        devices=2,
    )
