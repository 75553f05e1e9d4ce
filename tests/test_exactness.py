"""Bit for bit what plain Lightning computes with the same microbatches, whatever the plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.plan.values.plan import Plan
from support import nets, same_training
from support.cases import NETS, OPTIMIZERS, SUMMED_IN_ANOTHER_ORDER
from support.same_training import (
    Net,
    Training,
    Update,
    assert_same_training,
    assert_within,
    compare,
    train_harmony,
    train_plain,
    trainer_for,
)
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

CAPACITIES = {"all": None, "some": "88KiB", "tight": "60KiB"}


def build(net: Callable[[], nn.Module], optimizer: str = "sgd") -> Net:
    torch.manual_seed(0)
    return Net(net(), OPTIMIZERS[optimizer])


@cache
def trained_plain(net: str) -> Training:
    return train_plain(build({**NETS, **SUMMED_IN_ANOTHER_ORDER}[net]), nets.tokens(), 4, 8)


def assert_trains_as_plain(net: str, capacity: str, update: Update, tolerance: float = 0.0) -> Plan | None:
    """What `assert_same_training` does, with one plain training for all that is compared with it; the plan in use."""
    module, memory = build({**NETS, **SUMMED_IN_ANOTHER_ORDER}[net]), CAPACITIES[capacity]
    strategy: Any = HarmonyStrategy(device_memory=memory, num_microbatches=4)
    harmony = train_harmony(
        module,
        nets.tokens(),
        strategy,
        8,
        with_gradients=update == "after the backward",
        devices=same_training.default_devices,
    )
    compare(trained_plain(net), harmony, tolerance)
    if memory is not None:
        assert_within(harmony.reports, memory)
    return strategy.plan


# Each network comes in two capacities of three, and half of them with an update in either way. The other two pairs of capacity
# and update are tested with copies that lanes make themselves, below.
@pytest.mark.parametrize(
    ("net", "capacity", "update"),
    [
        *combined(NETS, [("some", "just in time"), ("all", "just in time")]),
        *combined(NETS, [("tight", "after the backward"), ("all", "after the backward")]),
    ],
)
def test_every_network_trains_bit_for_bit_as_plain_lightning(net: str, capacity: str, update: Update) -> None:
    plan = assert_trains_as_plain(net, capacity, update)
    if capacity == "some":
        compare(trained_plain(net), _train(net, HarmonyStrategy(plan=_without_reuse(plan))))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("net", "capacity", "update"), combined(NETS, [("some", "after the backward"), ("tight", "just in time")])
)
def test_every_network_trains_bit_for_bit_where_lanes_make_copies_themselves(
    net: str, capacity: str, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do with small tensors. In other tests threads copy these, too."""
    monkeypatch.setattr("lightning_harmony.engine.devices.device.BRIEFLY_COPIED_BYTES", 64 * 1024)
    assert_trains_as_plain(net, capacity, update)


@pytest.mark.parametrize(
    ("num_microbatches", "optimizer", "update"),
    combined(product([1, 3, 8], OPTIMIZERS), [("after the backward",), ("just in time",)]),
)
def test_every_optimizer_trains_bit_for_bit_in_any_number_of_microbatches(
    num_microbatches: int, optimizer: str, update: Update
) -> None:
    batch_size = num_microbatches * (8 // num_microbatches)
    samples = nets.tokens(3 * batch_size)
    assert_same_training(
        build(lambda: nets.Language(dropout=0.3), optimizer),
        samples,
        device_memory="96KiB",
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        updates=[update],
    )


@pytest.mark.parametrize("update", ["after the backward", "just in time"])
@pytest.mark.cpu
def test_a_third_of_a_loss_is_one_of_64_bits_in_double_precision(update: Update) -> None:
    assert_same_training(
        build(nets.Frozen, "adamw"),
        nets.tokens(18),
        device_memory="176KiB",
        num_microbatches=3,
        batch_size=6,
        updates=[update],
        precision="64-true",
    )


@pytest.mark.parametrize("memory", [pytest.param(None, marks=pytest.mark.in_memory), "88KiB"])
@pytest.mark.parametrize("batches", [3, 4])
@pytest.mark.parametrize("by_code", [False, True])
def test_losses_of_accumulated_batches_are_divided_once(memory: str | None, batches: int, by_code: bool) -> None:
    """By three and by three again rounds to something else than by nine."""

    class Own(Net):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(2 * loss)

    torch.manual_seed(0)
    module = (Own if by_code else Net)(nets.Language())
    samples, size = nets.tokens(72), 72 // 2 // batches
    plain = train_plain(copy.deepcopy(module), samples, 3 * batches, 36)
    strategy = HarmonyStrategy(device_memory=memory, num_microbatches=3)
    trainer = trainer_for(strategy, 2, [], accumulate_grad_batches=batches)
    trainer.fit(module, DataLoader(samples, batch_size=size))
    assert (strategy.plan is None) == (memory is None)
    for name, value in plain.state.items():
        assert torch.equal(value, module.state_dict()[name]), name


class ReadByCode(nets.Language):
    """Code between layers reads, once, the weight of a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(nets.WIDTH, nets.WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x @ self.gate.weight)


@pytest.mark.parametrize("update", get_args(Update))
def test_gradients_of_accumulated_batches_are_summed_in_one_order_where_code_between_layers_reads_a_weight(
    update: Update,
) -> None:
    """Those of earlier batches came last, as if the module were a second source."""
    torch.manual_seed(0)
    module, samples = Net(ReadByCode()), nets.tokens(72)
    plain = train_plain(copy.deepcopy(module), samples, 3, 12, accumulate_grad_batches=3)
    found = train_harmony(
        module,
        samples,
        HarmonyStrategy(num_microbatches=3),
        12,
        with_gradients=update == "after the backward",
        accumulate_grad_batches=3,
    )
    compare(plain, found)


@pytest.mark.parametrize("capacity", [None, "64KiB"])
def test_batch_norm_statistics_follow_the_microbatches(capacity: str | None) -> None:
    assert_same_training(build(nets.Convolutions), nets.images(), device_memory=capacity)


@pytest.mark.parametrize("capacity", [None, "256KiB"])
def test_a_recurrent_layer_runs_with_the_weights_that_it_refers_to(capacity: str | None) -> None:
    layers = {torch.nn.LSTM, torch.nn.Embedding, torch.nn.Linear}
    assert_same_training(build(nets.Recurrent), nets.tokens(), device_memory=capacity, layers=layers)


class Casting(nn.Module):
    """Uses one weight as autocast likes, one as it is, one both ways, and one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.cast, self.wide, self.both, self.twice = (nn.Linear(nets.WIDTH, nets.WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(nets.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.cast(x))
        with torch.autocast(x.device.type, enabled=False):
            x = x + torch.tanh(self.wide(x.float()))
        x = x + torch.tanh(self.both(x)) * self.both.weight.abs().mean()
        return x + self.twice(torch.tanh(self.twice(x)))


class Casts(nets.Language):
    """Calls a layer under autocast at first, and from the second step on without."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.casting = Casting()
        self.changes = changes
        self.num_calls = 0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        with torch.autocast(x.device.type, enabled=not self.changes or self.num_calls <= 4, dtype=torch.bfloat16):
            x = self.casting(x)
        return super().body(x)


@pytest.mark.parametrize(("changes", "capacity"), combined([False, True], [(None,), ("96KiB",)]))
def test_weights_are_narrow_only_where_autocast_alone_reads_them(changes: bool, capacity: str | None) -> None:
    module = build(lambda: Casts(changes=changes))
    assert_same_training(module, nets.tokens(), device_memory=capacity, precision="bf16-mixed")


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("net", SUMMED_IN_ANOTHER_ORDER)
def test_gradients_with_several_sources_differ_by_the_rounding_of_their_sum_only(net: str, capacity: str) -> None:
    """Plain Lightning adds the sources of one microbatch, then microbatches; here each source adds its microbatches."""
    for update in same_training.default_updates:
        assert_trains_as_plain(net, capacity, update, tolerance=2e-6)


@pytest.mark.parametrize("net", SUMMED_IN_ANOTHER_ORDER)
def test_the_result_does_not_depend_on_the_plan_even_where_plain_lightning_sums_in_another_order(net: str) -> None:
    """Capacity, packs and how long they stay change nothing. The other networks have the bits of plain Lightning."""
    strategies = [
        HarmonyStrategy(num_microbatches=4, device_memory="88KiB"),
        HarmonyStrategy(num_microbatches=4),
        HarmonyStrategy(num_microbatches=4, device_memory="60KiB", update="deferred"),
    ]
    runs = [_train(net, strategy) for strategy in strategies]
    runs.append(_train(net, HarmonyStrategy(plan=_without_reuse(strategies[0].plan))))
    for other in runs[1:]:
        compare(runs[0], other)


def _train(net: str, strategy: Any) -> Training:
    module = build({**NETS, **SUMMED_IN_ANOTHER_ORDER}[net])
    return train_harmony(module, nets.tokens(), strategy, 8, with_gradients=False)


def _without_reuse(plan: Plan | None) -> Plan:
    """The same packs, each of which leaves the device after each visit."""
    assert plan is not None
    less = {"first_fused": len(plan.visits), "kept": frozenset(), "lookahead": 0, "profile": None, "predicted": None}
    return replace(plan, reuse="none", **less)


def _hugging_face(name: str) -> nn.Module:
    import transformers as hf

    size = {"vocab_size": nets.VOCABULARY}
    models: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(**size, n_embd=16, n_layer=3, n_head=2, n_positions=16, tie_word_embeddings=False)
        ),
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **size,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                tie_word_embeddings=False,
            )
        ),
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(
                **size,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                max_position_embeddings=16,
                tie_word_embeddings=False,
            )
        ),
    }
    return nets.HuggingFace(models[name]())


@pytest.mark.parametrize(("name", "capacity"), combined(["gpt2", "llama", "bert"], [("100KiB",), (None,)]))
def test_models_of_hugging_face_train_bit_for_bit_as_plain_lightning(name: str, capacity: str | None) -> None:
    module = build(lambda: _hugging_face(name), "adamw")
    assert_same_training(module, nets.tokens(), device_memory=capacity)


class LargeVocabulary(nets.Language):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(nets.WIDTH, 2048, bias=False)


def test_the_gradients_of_many_losses_are_not_on_the_device_at_once() -> None:
    """Also in the first step, where lanes go layer by layer: that of one microbatch's loss takes 96 KiB here."""
    samples = nets.tokens(32)
    assert_same_training(build(LargeVocabulary), samples, device_memory="1MiB", num_microbatches=16, batch_size=32)


class CalledAgain(nn.Module):
    """Goes on with a recurrent layer from where an earlier call has left it, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.RNN(4, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, batch: Tensor) -> Tensor:
        state = None
        for part in batch.chunk(3, 1):
            hidden, state = self.recurrent(part, state)
        return self.out(hidden).square().mean()


def test_a_recurrent_layer_that_is_called_several_times_trains_as_in_plain_lightning_but_for_rounding() -> None:
    """Its weights' gradients are summed call by call, where autograd sums those of all steps of all calls in one go."""
    torch.manual_seed(0)
    assert_same_training(Net(CalledAgain()), torch.randn(32, 12, 4), tolerance=2e-6)
