"""What code keeps outside of tensors is each microbatch's own, or microbatches do not take turns: results are as plain."""

from __future__ import annotations

import argparse
import contextlib
import decimal
import gc
import io
import logging
import os
import queue
import random
import signal
import sqlite3
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric, SumMetric

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.step.microbatch_runner import MicrobatchRunner
from lightning_harmony.microbatches.lane_attributes import LaneAttributes
from support import nets
from support.same_training import Net, Update, assert_same_training, placed, room, trainer_for
from support.sampling import combined
from support.taking_turns import ONE_AFTER_THE_OTHER, samples, takes_turns

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # What these steps do to their loss is not what splitting is about.
    pytest.mark.filterwarnings("ignore:the loss of .* samples is"),
    pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches"),
]


class Blocks(nn.Module):
    """Three layers, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nets.Block() for _ in range(3)])
        self.helper = SimpleNamespace(factor=1.0, calls=0, seen=[])
        self.by_name: dict[str, Any] = {"factor": 1.0}
        self.factor = 1.0
        self.factors: list[float] = []
        self.by_layer: dict[str, list[float]] = {"layer 0": [], "layer 1": []}
        self.count = 0
        self.evaluations = 0.0
        self.random = random.Random(5)
        self.generator = np.random.default_rng(5)
        self.draws = torch.Generator().manual_seed(5)
        self.of_the_process: Any = (torch.default_generator, vars(random)["_inst"])
        self.array = np.ones(2)
        self.kept = torch.ones(())
        self.lock = threading.Lock()

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: Any) -> Tensor:
        return self.run(*batch)


def mean_of(y: Tensor) -> float:
    return float(y.mean())


def number_on_the_module(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.factor = mean_of(y)
    return net.blocks(x) * net.factor


def number_put_back(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.factor = mean_of(y)
    x = net.blocks(x) * net.factor
    net.factor = 1.0
    return x


FACTOR = 1.0
FACTORS = {"factor": 1.0}


def global_number(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    global FACTOR  # noqa: PLW0603
    FACTOR = mean_of(y)
    return net.blocks(x) * FACTOR


def number_in_a_global_dict(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    FACTORS["factor"] = mean_of(y)
    return net.blocks(x) * FACTORS["factor"]


def number_of_an_object_put_back(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.helper.factor = mean_of(y)
    x = net.blocks(x) * net.helper.factor
    net.helper.factor = 1.0
    return x


def number_in_a_dict(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.by_name["factor"] = mean_of(y)
    return net.blocks(x) * net.by_name["factor"]


def function_in_a_dict(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    factor = mean_of(y)
    net.by_name["scale"] = lambda tensor: tensor * factor
    scaled: Tensor = net.by_name["scale"](net.blocks(x))
    return scaled


def number_on_an_object(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.helper.factor = mean_of(y)
    return net.blocks(x) * net.helper.factor


def tensor_on_an_object(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.helper.mask = y.mean()
    return net.blocks(x) * net.helper.mask


def count_on_an_object(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.helper.calls += 1
    return net.blocks(x) * (1.0 + net.helper.calls % 3)


def count_on_the_module(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.count += 1
    return net.blocks(x) * (1.0 + net.count % 3)


def count_of_evaluations(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    """A float that is a whole number, as that of the evaluations of a neural differential equation."""
    for block in net.blocks:
        net.evaluations += 1
        x = block(x) * (1.0 + net.evaluations % 3)
    return x


def last_of_a_list(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.factors.append(mean_of(y))
    return net.blocks(x) * net.factors[-1] * len(net.factors)


def adds_for_each_layer(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    for number, block in enumerate(net.blocks):
        x = block(x)
        net.factors.append(mean_of(x.detach()))
        net.by_layer[f"layer {number % 2}"].append(mean_of(x.detach()))
    return x


def mean_of_all_that_was_added(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    x = adds_for_each_layer(net, x, y)
    return x * (1 + sum(net.factors) / len(net.factors))


def mean_of_one_list(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    x = adds_for_each_layer(net, x, y)
    added = net.by_layer["layer 0"]
    return x * (1 + sum(added) / len(added))


def what_was_added_by_an_alias(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    factors = net.factors
    for block in net.blocks:
        x = block(x)
        factors.append(mean_of(x.detach()) + len(factors))
    return x * (1 + factors[-1])


def mean_of_later_steps(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.count += 1
    x = adds_for_each_layer(net, x, y)
    return x * (1 + sum(net.factors) / len(net.factors)) if net.count > 8 else x


def number_for_a_part(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    x = net.blocks[0](x)
    before, net.factor = net.factor, mean_of(y)
    x = net.blocks[1](x) * net.factor
    net.factor = before
    return net.blocks[2](x) * net.factor


def array_in_place(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.array[0] = mean_of(y)
    return net.blocks(x) * float(net.array[0])


def tensor_in_place(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.kept.fill_(y.mean())
    return net.blocks(x) * net.kept.clone()


def tensor_in_place_behind(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    x = net.blocks(x * net.kept.clone())
    net.kept.mul_(0.5).add_(x.detach().mean())
    return x


def array_in_place_behind(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    x = net.blocks(x * float(net.array[0]))
    net.array[:] = mean_of(y)
    return x


def random_before_and_behind(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    first = net.random.random()
    return net.blocks(x) * (first + net.random.random())


def numpy_generator_between(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x) * float(net.generator.random())
    return x


def torch_generator_between(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x) * torch.rand((), generator=net.draws)
    return x


def generators_of_the_process_between(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    """Held as those are that `check_random_state` of scikit-learn returns. Each microbatch has its own streams of them."""
    generator, others = net.of_the_process
    for block in net.blocks:
        x = block(x) * torch.rand((), generator=generator) * others.random()
    return x


def random_before_all_layers(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    return net.blocks(x) * net.random.random()


def default_dtype_for_good(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    x = net.blocks(x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if before is torch.float32 else torch.float32)
    return x * torch.tensor(1.0 / 3, dtype=before).to(x.dtype)


def environment(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    os.environ["FACTOR_OF_A_TEST"] = str(mean_of(y))
    return net.blocks(x) * float(os.environ["FACTOR_OF_A_TEST"])


def environment_put_back(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    x = environment(net, x, y)
    del os.environ["FACTOR_OF_A_TEST"]
    return x


def lock_around_layers(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    with net.lock:
        return net.blocks(x)


GLOBAL_LOCK = threading.RLock()


def global_lock_around_layers(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    with GLOBAL_LOCK:
        return net.blocks(x)


SEMAPHORES = [threading.Semaphore(1)]


def semaphore_around_layers(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    semaphore = SEMAPHORES[0]
    with semaphore:
        return net.blocks(x)


def condition_around_layers(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    condition = net.__dict__.setdefault("condition", threading.Condition())
    with condition:
        return net.blocks(x)


def decimals(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    decimal.getcontext().prec = 3 + int(20 * abs(mean_of(y)))
    return net.blocks(x) * float(1 / decimal.Decimal(3))


def level_of_a_logger(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    logger = logging.getLogger("of a test")
    logger.setLevel(int(100 * abs(mean_of(y))))
    return net.blocks(x) * logger.level


def collector(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    if mean_of(y) > 0:
        gc.disable()
    x = net.blocks(x) * (1.0 if gc.isenabled() else 2.0)
    gc.enable()
    return x


QUEUE: queue.LifoQueue[float] = queue.LifoQueue()
OPTIONS = argparse.Namespace(factor=1.0)


def queue_of_a_file(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    QUEUE.put(mean_of(y))
    return net.blocks(x) * QUEUE.get()


def options_of_a_file(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    OPTIONS.factor = mean_of(y)
    return net.blocks(x) * OPTIONS.factor


def function_of_a_library(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    factor = 1.0 + mean_of(y)
    with mock.patch.object(F, "gelu", lambda each: each * factor):
        return net.blocks(x)


def hooks_that_stay(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.blocks[1].register_forward_hook(lambda module, args, output: output * 1.25)
    return net.blocks(x)


def hooks_that_stay_in_the_end(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.num_calls = getattr(net, "num_calls", 0) + 1
    handle = net.blocks[1].register_forward_hook(lambda module, args, output: output * 1.25)
    x = net.blocks(x)
    if net.num_calls < 10:
        handle.remove()
    return x


HAZARDS = [
    hooks_that_stay, hooks_that_stay_in_the_end,
    decimals, level_of_a_logger, queue_of_a_file, options_of_a_file, function_of_a_library,
    global_number, number_in_a_global_dict, number_on_the_module, number_put_back, number_of_an_object_put_back,
    number_in_a_dict, function_in_a_dict, number_on_an_object, tensor_on_an_object,
    count_on_an_object, number_for_a_part, array_in_place, tensor_in_place, array_in_place_behind, tensor_in_place_behind,
    random_before_and_behind,
    numpy_generator_between, torch_generator_between, environment, lock_around_layers, global_lock_around_layers,
    semaphore_around_layers, condition_around_layers, mean_of_all_that_was_added, mean_of_one_list,
    what_was_added_by_an_alias,
]  # fmt: skip


def quiet(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = net.blocks(x)
        print(mean_of(y))
    return x * float(out.getvalue())


def exact_float32(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    x = net.blocks(x)
    torch.set_float32_matmul_precision(before)
    return x * (1.0 if torch.get_float32_matmul_precision() == "highest" else 2.0)


def deterministic(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    x = net.blocks(x)
    torch.use_deterministic_algorithms(False)
    return x * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)


def attention_kernels(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return net.blocks(x)


def tensor_on_the_module(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    net.mask = y.mean()
    return net.blocks(x) * net.mask


def number_behind_the_layers(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    x = net.blocks(x)
    net.factor = mean_of(y)
    net.by_name[str(len(net.by_name))] = net.factor
    net.helper.seen.append(net.factor)
    return x * net.factor


def hook_that_registers_itself(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    if not hasattr(net, "handle"):
        net.handle = net.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    return net.blocks(x)


def dtype_of_the_process(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    torch.set_num_threads(1)
    return net.blocks(x)


def hook_of_all_modules(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * factor if isinstance(module, nn.LayerNorm) else None

    factor = 1.0 + mean_of(y)
    handle = nn.modules.module.register_module_forward_hook(hook)  # type: ignore[no-untyped-call]
    x = net.blocks(x)
    handle.remove()
    return x


class OfFunctions(TorchFunctionMode):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is F.gelu else result


class OfOperators(TorchDispatchMode):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.ops.aten.gelu.default else result


def mode_of_functions(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    with OfFunctions(1.0 + mean_of(y)):
        return net.blocks(x)


def mode_of_operators(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    with OfOperators(1.0 + mean_of(y)):
        return net.blocks(x)


HARMLESS = [
    generators_of_the_process_between, hook_of_all_modules, collector, mode_of_functions, mode_of_operators,
    quiet, exact_float32, deterministic, attention_kernels, tensor_on_the_module, number_behind_the_layers,
    hook_that_registers_itself, dtype_of_the_process, count_on_the_module, last_of_a_list, random_before_all_layers,
    adds_for_each_layer, count_of_evaluations,
]  # fmt: skip


class Does(Blocks):
    def __init__(self, does: Callable[[Blocks, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.does(self, x, y), y)

    def __deepcopy__(self, memo: dict[int, Any]) -> Does:
        torch.manual_seed(0)
        return Does(self.does)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    with decimal.localcontext():
        yield
    torch.set_default_dtype(dtype)
    OPTIONS.factor = 1.0
    logging.getLogger("of a test").setLevel(logging.NOTSET)
    os.environ.pop("FACTOR_OF_A_TEST", None)


@pytest.mark.parametrize("does", [*HAZARDS, *HARMLESS], ids=lambda does: does.__name__)
def test_what_a_step_keeps_while_layers_run_is_as_in_plain_lightning(does: Any) -> None:
    stdout, filters = sys.stdout, list(warnings.filters)
    # Both updates are compared on two devices, below, for one of each sort.
    assert_same_training(Net(Does(does)), samples(), batch_size=8, updates=["just in time"])
    assert sys.stdout is stdout
    assert list(warnings.filters) == filters


@pytest.mark.parametrize(
    "does", [number_on_the_module, count_on_the_module, quiet, last_of_a_list, numpy_generator_between]
)
def test_what_a_step_keeps_is_as_in_plain_lightning_on_two_devices_and_in_little_memory(does: Any) -> None:
    assert_same_training(Net(Does(does)), samples(), batch_size=8, devices=2, device_memory="44KiB")


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (number_on_the_module, "the number 'factor' of module 'net' is changed before layer 'net.blocks.0'"),
        (number_in_a_dict, "'factor' in 'net.by_name' is changed"),
        (number_on_an_object, "'factor' in 'net.helper' is changed"),
        (number_for_a_part, "the number 'factor' of module 'net' is changed before layer 'net.blocks.1'"),
        (numpy_generator_between, "a generator of random numbers, held by 'net', is drawn from again"),
        (environment, "os.environ is set"),
        (level_of_a_logger, "the level of a logger is set before layer 'net.blocks.0'"),
        (options_of_a_file, "'factor' in 'test_interleaving.OPTIONS' is changed"),
        (function_of_a_library, "'gelu' in 'torch.nn.functional' is changed"),
        (global_lock_around_layers, r"a lock is held (GLOBAL_LOCK, in global_lock_around_layers"),
        (default_dtype_for_good, "the default dtype is set for good before the end of a microbatch"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_speaks_against_taking_turns_is_named_once(does: Any, said: str, caplog: Any) -> None:
    takes, messages = takes_turns(Does(does), caplog)
    assert not takes
    assert len(messages) == 1
    assert said in messages[0]
    assert "swapped in 4 times as often" in messages[0]


@pytest.mark.parametrize("does", HARMLESS, ids=lambda does: does.__name__)
def test_what_other_microbatches_cannot_find_does_not_keep_them_from_taking_turns(does: Any, caplog: Any) -> None:
    assert takes_turns(Does(does), caplog) == (True, [])


class Later(Does):
    """Does something from its third step on."""

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        if self.count <= 8:
            return F.mse_loss(self.blocks(x), y)
        return super().run(x, y)

    def __deepcopy__(self, memo: dict[int, Any]) -> Later:
        torch.manual_seed(0)
        return Later(self.does)


class WithStatistics(Later):
    """Has buffers that each step changes."""

    def __init__(self, does: Any) -> None:
        super().__init__(does)
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(nets.WIDTH, nets.WIDTH), nn.BatchNorm1d(nets.WIDTH)),
            nets.Block(),
            nets.Block(),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> WithStatistics:
        torch.manual_seed(0)
        return WithStatistics(self.does)


class WithStatisticsOfNoLayer(Later):
    """Has buffers that the code between layers changes, in a module without parameters."""

    def __init__(self, does: Any) -> None:
        super().__init__(does)
        self.norm = nn.BatchNorm1d(nets.WIDTH, affine=False)

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return super().run(self.norm(x), y)

    def __deepcopy__(self, memo: dict[int, Any]) -> WithStatisticsOfNoLayer:
        torch.manual_seed(0)
        return WithStatisticsOfNoLayer(self.does)


class WithLateStatistics(WithStatisticsOfNoLayer):
    """Normalizes from its third step on."""

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return super().run(x, y) if self.count >= 8 else Later.run(self, x, y)

    def __deepcopy__(self, memo: dict[int, Any]) -> WithLateStatistics:
        torch.manual_seed(0)
        return WithLateStatistics(self.does)


class Draws(Later):
    """Draws before its first layer in each step."""

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return super().run(x * self.random.random(), y)

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        torch.manual_seed(0)
        return Draws(self.does)


class DrawsBehind(Later):
    """Draws behind its last layer in each step."""

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return super().run(x, y) * self.random.random()

    def __deepcopy__(self, memo: dict[int, Any]) -> DrawsBehind:
        torch.manual_seed(0)
        return DrawsBehind(self.does)


class WithMetrics(Later):
    """Has metrics that each microbatch updates, with a tensor and a list as their states."""

    def __init__(self, does: Any) -> None:
        super().__init__(does)
        self.total, self.all = SumMetric(), CatMetric()

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().run(x, y)
        self.total.update(y.sum())
        self.all.update(y.mean())
        return loss


def random_before_the_layers(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    return net.blocks(x * net.random.random())


LATE = [
    random_before_the_layers,
    hooks_that_stay,
    number_on_the_module,
    number_in_a_dict,
    number_on_an_object,
    number_behind_the_layers,
    hook_that_registers_itself,
    numpy_generator_between,
    torch_generator_between,
    random_before_and_behind,
    random_before_all_layers,
    environment,
    environment_put_back,
    decimals,
    level_of_a_logger,
    options_of_a_file,
    queue_of_a_file,
    function_of_a_library,
    default_dtype_for_good,
    number_put_back,
    number_of_an_object_put_back,
    global_number,
    number_in_a_global_dict,
    array_in_place,
    tensor_in_place,
    array_in_place_behind,
    tensor_in_place_behind,
]


@pytest.mark.parametrize(
    ("does", "kind"),
    combined(
        LATE, [(Later,), (WithStatistics,), (WithStatisticsOfNoLayer,), (WithLateStatistics,), (Draws,), (DrawsBehind,)]
    ),
    ids=lambda value: value.__name__,
)
def test_a_step_in_which_that_shows_late_is_run_again(does: Any, kind: Any) -> None:
    updates = get_args(Update) if kind is Later else ["just in time"]
    assert_same_training(Net(kind(does)), samples(40), batch_size=8, updates=updates)


def test_a_step_that_runs_twice_and_ends_no_turns_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert_same_training(Net(Later(hook_that_registers_itself)), samples(40), batch_size=8)
    assert ONE_AFTER_THE_OTHER not in caplog.text
    assert "a step has run twice: microbatches took turns in it, while" in caplog.text
    assert caplog.text.count("a step has run twice") == caplog.text.count("_forward_hooks")


class Normed(Blocks):
    """What hooks compute in each call of a layer is out of reach while a step runs."""

    def __init__(self, normalize: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[normalize(nn.Linear(nets.WIDTH, nets.WIDTH)) for _ in range(3)])

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("normalize", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_no_step_runs_twice_for_weights_that_hooks_compute(normalize: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert takes_turns(Normed(normalize), caplog) == (True, [])
    assert "has run twice" not in caplog.text


def test_no_two_steps_run_twice_for_the_same_cause(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step that ran again did not show the cause, each step that followed ran twice, and that was told of once."""
    monkeypatch.setattr(LaneAttributes, "late", lambda self: ["something"])
    with caplog.at_level("INFO"):
        assert_same_training(Net(Does(quiet)), samples(40), batch_size=8, updates=["just in time"])
    assert caplog.text.count("a step has run twice: microbatches took turns in it, while something is changed") == 1
    assert caplog.text.count(f"{ONE_AFTER_THE_OTHER}: something is changed, where") == 1


def trained_on_both_sides(make: Any, num_steps: int, data: Any) -> Iterator[Any]:
    """A network, as plain Lightning leaves it that has microbatches as its batches, and as harmony does."""
    for strategy, size, number in (
        ("auto", 2, 4),
        (HarmonyStrategy(device_memory=room("44KiB"), num_microbatches=4, profile_cache=False), 8, 1),
    ):
        torch.manual_seed(0)
        module = Net(make())
        trainer = trainer_for(strategy, num_steps, [], accumulate_grad_batches=number)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=size))
        yield module.net


def test_metrics_count_each_microbatch_of_a_step_that_is_run_again_once(caplog: pytest.LogCaptureFixture) -> None:
    left: list[list[float]] = []
    with caplog.at_level("INFO"):
        for net in trained_on_both_sides(partial(WithMetrics, number_on_the_module), 4, samples(32)):
            total, every = net.total, net.all
            left.append([float(total.compute()), *map(float, every.compute()), total.update_count, every.update_count])
    assert ONE_AFTER_THE_OTHER in caplog.text
    assert len(left[0]) == 19
    assert left[0] == left[1]


def test_what_each_layer_adds_is_in_the_order_of_microbatches() -> None:
    """In lists, and in lists of a dict, which had microbatches run one after the other."""
    left = [
        [*net.factors, *net.by_layer["layer 0"], *net.by_layer["layer 1"]]
        for net in trained_on_both_sides(partial(Does, adds_for_each_layer), 3, samples())
    ]
    assert len(left[0]) == 72
    assert left[0] == left[1]


def test_what_was_added_and_is_first_read_in_a_later_step_has_that_run_again(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with caplog.at_level("INFO"):
        assert_same_training(Net(Does(mean_of_later_steps)), samples(32), device_memory=room("44KiB"))
    assert "list 'net.factors' passes something on from one microbatch to the next" in caplog.text


@pytest.mark.parametrize(
    "does", [lock_around_layers, semaphore_around_layers, condition_around_layers], ids=lambda does: does.__name__
)
def test_a_step_in_which_one_microbatch_first_waits_for_a_lock_of_another_is_run_again(
    does: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Semaphores and conditions kept it waiting for ever."""
    monkeypatch.setattr("lightning_harmony.engine.lanes.lane._PATIENCE", 3)
    monkeypatch.setattr("lightning_harmony.engine.lanes.lane._GLANCE_SECONDS", 0.05)
    assert_same_training(Net(Later(does)), samples(40), batch_size=8, updates=["just in time"])


def alarm(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    return net.blocks(x)


CONNECTION: list[sqlite3.Connection] = []


def query(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    (number,) = CONNECTION[0].execute("select 2").fetchone()
    return net.blocks(x) * number


LOCAL = threading.local()


def thread_local(net: Blocks, x: Tensor, y: Tensor) -> Tensor:
    return net.blocks(x) * LOCAL.factor


@pytest.mark.parametrize("does", [alarm, query, thread_local], ids=lambda does: does.__name__)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_code_that_needs_the_callers_thread_finds_it(does: Any, num_microbatches: int) -> None:
    CONNECTION[:] = [sqlite3.connect(":memory:")]
    LOCAL.factor = 0.5
    options = {"num_microbatches": num_microbatches, "updates": ["just in time"]}
    assert_same_training(Net(Does(does)), samples(), batch_size=8, **options)  # type: ignore[arg-type]


def test_what_the_caller_keeps_for_its_thread_no_microbatch_has_changed_when_it_ends(caplog: Any) -> None:
    """Its thread had let go of it when it was looked at: each such step ran twice where a backward is part of the forward."""
    LOCAL.factor = 0.5
    before, decimal.getcontext().prec = decimal.getcontext().prec, 20
    try:
        with caplog.at_level("INFO"):
            assert_same_training(Net(Does(thread_local)), samples(), batch_size=8, num_microbatches=2)
    finally:
        decimal.getcontext().prec = before
    assert "has run twice" not in caplog.text


class Fails(Blocks):
    def run(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        if self.count == 7:
            raise KeyError("of the user")
        return F.mse_loss(self.blocks(x), y)


def test_an_error_of_a_step_is_the_users_own(caplog: Any) -> None:
    with pytest.raises(KeyError, match="of the user"):
        takes_turns(Fails(), caplog)


def test_the_number_of_threads_is_each_steps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    class Counts(Blocks):
        def run(self, x: Tensor, y: Tensor) -> Tensor:
            found.append(torch.get_num_threads())
            return F.mse_loss(self.blocks(x), y)

    class Sets(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            torch.set_num_threads(batch_idx + 1)

    before = torch.get_num_threads()
    strategy = HarmonyStrategy(num_microbatches=2, loss_reduction="mean", profile_cache=False)
    try:
        trainer = trainer_for(strategy, 3, [Sets()])
        trainer.fit(Net(Counts()), torch.utils.data.DataLoader(samples(), batch_size=8))
    finally:
        torch.set_num_threads(before)
    assert found == [1, 1, 2, 2, 3, 3]


def test_everything_runs_in_the_callers_thread_where_one_microbatch_runs_after_the_other() -> None:
    threads: set[threading.Thread] = set()

    class Noted(Blocks):
        def run(self, x: Tensor, y: Tensor) -> Tensor:
            threads.add(threading.current_thread())
            x.requires_grad_().register_hook(lambda gradient: threads.add(threading.current_thread()))
            return F.mse_loss(self.blocks(x), y)

    trainer = pl.Trainer(
        strategy=HarmonyStrategy(num_microbatches=4, loss_reduction="mean", profile_cache=False),
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, **placed({}),
    )  # fmt: skip
    trainer.fit(Net(Noted()), torch.utils.data.DataLoader(samples(8), batch_size=8))
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("devices", [2, 3])
def test_what_is_left_behind_the_last_layer_is_that_of_the_last_microbatch(devices: int) -> None:
    """Devices come to an end in any order where no gradient is predicted, as while batches accumulate."""
    left: list[list[float]] = []
    for options in ({"strategy": "auto"}, {"devices": devices}):
        module = Net(Does(number_behind_the_layers))
        given = HarmonyStrategy(device_memory="44KiB", num_microbatches=4, parallel="data", profile_cache=False)
        size = 2 if "strategy" in options else 8
        trainer = pl.Trainer(
            strategy=options.get("strategy", given), max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **placed({"devices": options.get("devices", 1)}),
            accumulate_grad_batches=24 // size,
        )  # fmt: skip
        torch.manual_seed(0)
        trainer.fit(module, torch.utils.data.DataLoader(samples(), batch_size=size))
        left.append([module.net.factor, *module.net.helper.seen, *module.net.by_name.values()])
    assert left[0] == left[1]


class Normalized(nn.Module):
    """A layer with statistics, its own or another's too."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(nets.WIDTH, nets.WIDTH)
        self.norm = norm or nn.BatchNorm1d(nets.WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.norm(self.linear(x)))
        return out


class Codebook(nn.Module):
    """A layer that moves a buffer towards what it sees, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(nets.WIDTH, nets.WIDTH)
        self.register_buffer("mean", torch.zeros(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class TwoViews(nn.Module):
    """An encoder that sees two views of each sample, as contrastive learning has it."""

    def __init__(self, layer: Callable[[], nn.Module] = Normalized) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[layer() for _ in range(3)])

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.encoder(x), self.encoder(y).detach())


class OfOneModule(nn.Module):
    """Layers that share the module of their statistics."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(nets.WIDTH, affine=False)
        self.layers = nn.Sequential(Normalized(norm), Normalized(), Normalized(norm))

    def forward(self, batch: Any) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[1])


class SecondViewLater(TwoViews):
    """Sees one view in its first two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, batch: Any) -> Tensor:
        self.count += 1
        return super().forward(batch) if self.count > 8 else F.mse_loss(self.encoder(batch[0]), batch[1])


@pytest.mark.parametrize(
    "make",
    [TwoViews, lambda: TwoViews(Codebook), OfOneModule, SecondViewLater],
    ids=["views", "codebook", "module", "late"],
)
def test_a_buffer_that_a_later_call_finds_changed_is_each_microbatchs_own(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Of microbatches that took turns, the statistics of all first views came before those of all second ones."""
    torch.manual_seed(0)
    with caplog.at_level("INFO"):
        # Gradients of a layer that is called twice are summed call by call, which rounds otherwise.
        assert_same_training(
            Net(make()),
            samples(40),
            device_memory=room("32KiB"),
            batch_size=8,
            tolerance=1e-5,
            updates=get_args(Update),
        )
    lines = [each for each in caplog.messages if ONE_AFTER_THE_OTHER in each]
    assert len(lines) == 2
    assert all("is changed in one call, and found so in a later one" in line for line in lines)


class CountsInBackward(nn.Module):
    """A checkpoint around layers counts what it runs, in the backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nets.Block() for _ in range(3))
        self.calls = 0

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def forward(self, batch: Any) -> Tensor:
        return F.mse_loss(checkpoint(self.run, batch[0], use_reentrant=False), batch[1])


def test_what_a_backward_counts_on_is_seen_in_the_first_step(caplog: Any) -> None:
    """It used to show where a later step ran each backward with its forward. Else some of the counts were lost."""
    net = CountsInBackward()
    turns, said = takes_turns(net, caplog)
    assert not turns
    assert "the number 'calls' of module 'net' is changed" in said[0]
    assert "has run twice" not in caplog.text
    # Of three steps of four microbatches, each counts in its forward and in its backward.
    assert net.calls == 24


class LeavesNothing(Blocks):
    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class LeavesANumber(Blocks):
    """The next microbatch finds it, and none take turns."""

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            self.factor = 0.5 * self.factor + mean_of(x.detach())
            x = block(x) + self.factor
        return x.square().mean()


@pytest.mark.parametrize(("kind", "number"), [(LeavesNothing, 4), (LeavesANumber, 0)])
def test_threads_of_microbatches_take_memory_of_libraries_only_where_these_take_turns(
    kind: type[Blocks], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 96 MiB of an H200, whatever it does."""
    prepared = []
    monkeypatch.setattr(MicrobatchRunner, "prepare_lanes", lambda runner, number: prepared.append(number))
    strategy = HarmonyStrategy(device_memory=room("44KiB"), num_microbatches=4, profile_cache=False)
    trainer = trainer_for(strategy, 3, [])
    trainer.fit(Net(kind()), torch.utils.data.DataLoader(samples(), batch_size=8))
    assert prepared == [number, 0, 0]
