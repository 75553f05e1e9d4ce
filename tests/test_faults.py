"""Whatever fails in any thread surfaces from fit; all threads join, the module is whole, and the next fit works."""

from __future__ import annotations

import copy
import functools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.stream import HostStream
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.engine.step.gradient_sums import GradientSums
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.errors import CapacityError
from support import nets
from support.same_training import Net, trainer_for
from support.sampling import combined

pytestmark = [
    # By a thread: what hangs after Ctrl-C may hear no signal any more.
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]
NUM_MICROBATCHES = 3
BATCH_SIZE = 6
NUM_STEPS = 2
PHASES = ["before the first layer", "layer forward", "between layers", "loss", "layer backward"]
# The step and microbatch of the running code: the batch tells them, and context variables bring them to the layers.
where: ContextVar[tuple[int, int]] = ContextVar("where")


class Boom(Exception):
    """What goes wrong."""


class Fault:
    """Does something at one place, once."""

    def __init__(self, phase: str = "", step: int = -1, microbatch: int = -1, action: Any = None) -> None:
        self.place = (phase, step, microbatch)
        self.action = action or self.explode
        self.happened = False

    def explode(self) -> None:
        raise Boom(self.place)

    def reach(self, phase: str) -> None:
        if not self.happened and (phase, *where.get((-1, -1))) == self.place:
            self.happened = True
            self.action()


class ReachInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fault.reach("layer backward")
        return gradient, None


class FaultyBlock(nets.Block):
    fault = Fault()

    def forward(self, x: Tensor) -> Tensor:
        self.fault.reach("layer forward")
        return ReachInBackward.apply(super().forward(x), self.fault)


class Faulty(Net):
    """Language whose middle block, glue and validation reach the places where a fault may be."""

    def __init__(self, fault: Fault, optimizer: Any = None) -> None:
        torch.manual_seed(3)
        super().__init__(nets.Language(), optimizer)
        self.net.blocks[1] = FaultyBlock()
        self.set_fault(fault)

    def set_fault(self, fault: Fault) -> None:
        self.fault = fault
        self.net.blocks[1].fault = fault

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        where.set((batch_idx, int(batch[0, 0])))
        self.fault.reach("before the first layer")
        x = self.net.embed(batch[:, 1:-1])
        for block in self.net.blocks:
            x = block(x)
            self.fault.reach("between layers")
        loss = F.cross_entropy(self.net.head(x).flatten(0, 1), batch[:, 2:].flatten())
        self.fault.reach("loss")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        where.set((-2, batch_idx))
        self.net(batch[:, 1:])


def samples() -> Tensor:
    """The first token of each sample says which microbatch it is in."""
    tokens = nets.tokens(NUM_STEPS * BATCH_SIZE)
    tokens[:, 0] = torch.arange(len(tokens)) % BATCH_SIZE // (BATCH_SIZE // NUM_MICROBATCHES)
    return tokens


def fit(module: pl.LightningModule, *, validate: bool = False, **options: Any) -> pl.Trainer:
    strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=NUM_MICROBATCHES, **options)
    trainer = trainer_for(strategy, NUM_STEPS, [], num_sanity_val_steps=0)
    loader = DataLoader(samples(), batch_size=BATCH_SIZE)
    trainer.fit(module, loader, DataLoader(samples(), batch_size=BATCH_SIZE) if validate else None)
    return trainer


def assert_recovered(module: Faulty, *, validate: bool = False) -> None:
    """No thread is left, the module is an ordinary one, and trains."""
    assert module.fault.happened or module.fault.place[0] == ""
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())
    assert not [child for child in module.modules() if "forward" in vars(child)]
    module.set_fault(Fault())
    module.train()
    loss = module.net(samples()[:, 1:])
    loss.backward()
    module.zero_grad()
    assert torch.is_grad_enabled()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    assert fit(module, validate=validate).global_step == NUM_STEPS
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def functions_in(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@functools.cache
def undisturbed() -> list[Tensor]:
    """The parameters after a fit in which nothing fails."""
    module = Faulty(Fault())
    fit(module)
    return [parameter.detach().clone() for parameter in module.parameters()]


# --- Lanes. The first step is measured and defers its update; later ones are planned, fused and update just in time.


@pytest.mark.parametrize(("phase", "step", "microbatch"), combined(product(PHASES, [0, 1]), [(1,), (0,), (2,)]))
def test_an_exception_in_a_lane_surfaces_with_its_traceback_and_the_next_fit_works(
    phase: str, step: int, microbatch: int
) -> None:
    module = Faulty(Fault(phase, step, microbatch))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(Boom) as raised:
        fit(module)
    assert "explode" in functions_in(raised.value)
    if step == 0:
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert_recovered(module)
    if step == 0:
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), undisturbed(), strict=True))


def test_an_exception_in_a_lane_that_the_user_catches_around_a_layer_is_the_users() -> None:
    class Careful(Faulty):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            try:
                return super().training_step(batch, batch_idx)
            except Boom:
                return super().training_step(batch, batch_idx)

    module = Careful(Fault("layer forward", 1, 1))
    assert fit(module).global_step == NUM_STEPS
    assert_recovered(module)


@pytest.mark.parametrize(
    ("microbatch", "phase"), combined(range(NUM_MICROBATCHES), [("layer forward",), ("layer backward",)])
)
def test_an_exception_surfaces_from_a_fit_that_validates(microbatch: int, phase: str) -> None:
    module = Faulty(Fault(phase, 1, microbatch))
    with pytest.raises(Boom) as raised:
        fit(module, validate=True)
    assert "explode" in functions_in(raised.value)
    assert_recovered(module, validate=True)


def test_an_exception_in_a_layer_of_the_validation_surfaces() -> None:
    module = Faulty(Fault("layer forward", -2, 1))
    with pytest.raises(Boom) as raised:
        fit(module, validate=True)
    assert "explode" in functions_in(raised.value)
    assert_recovered(module, validate=True)


# --- Backwards that the user's own code runs, outside of lanes.


class LateFaultyBlock(FaultyBlock):
    """Its fault is where its backward ends, with all that the layer has saved in use."""

    def forward(self, x: Tensor) -> Tensor:
        return nets.Block.forward(self, ReachInBackward.apply(x, self.fault))


class FaultyByHand(Faulty):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.automatic_optimization = False
        self.net.blocks[1] = LateFaultyBlock()
        self.set_fault(fault)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.cpu
def test_an_exception_in_a_backward_by_hand_surfaces_and_the_module_is_whole(step: int) -> None:
    module = FaultyByHand(Fault("layer backward", step, 0))
    with pytest.raises(Boom) as raised:
        fit(module)
    assert "explode" in functions_in(raised.value)
    assert_recovered(module)


@pytest.mark.cpu
def test_a_backward_by_hand_that_does_not_fit_names_its_layer_and_the_module_is_whole() -> None:
    def run_out_of_memory() -> None:
        raise torch.OutOfMemoryError("no room")

    module = FaultyByHand(Fault("layer backward", 0, 0, run_out_of_memory))
    with pytest.raises(CapacityError, match=r"'net.blocks.1'.*in manual optimization.*smaller batches.*no room"):
        fit(module)
    assert_recovered(module)


# What asks a device for memory when no layer's own code runs, and the step from which on it finds none.
SHORT: dict[str, tuple[type, str, int, str]] = {
    "sums that come back": (Sums, "unpark", 0, r"pack \d \(.*\) with microbatch 0 exceeds"),
    "the pack of a turn": (Residents, "enter", 1, r"pack \d \(.*\) with microbatch 0 exceeds"),
    "gradients that leave, measured": (GradientSums, "deliver_final", 0, "exceeds the capacity of 64 KiB"),
    "gradients that leave": (GradientSums, "deliver_final", 1, "exceeds the capacity of 64 KiB"),
    "all other gradients": (
        GradientSums,
        "deliver_rest",
        0,
        "what a step does between the turns of its layers exceeds",
    ),
    "an update": (
        StreamedUpdate,
        "update",
        1,
        r"the update of \d+ parameters, .* exceeds the capacity of 64 KiB: .*'host'",
    ),
}


@pytest.mark.parametrize("what", SHORT)
def test_whatever_finds_no_room_on_a_device_is_named_with_a_way_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What made a lane's turn ready was no turn yet: where that found no room, the allocator's own error surfaced."""
    owner, name, step, message = SHORT[what]
    original, seen = getattr(owner, name), [0]

    def run_out_of_memory(*args: Any, **kwargs: Any) -> Any:
        if seen[0] > step:
            seen[0] = -NUM_STEPS
            raise torch.OutOfMemoryError("no room")
        return original(*args, **kwargs)

    class Counting(Faulty):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen[0] += 1

    monkeypatch.setattr(owner, name, run_out_of_memory)
    module = Counting(Fault())
    with pytest.raises(CapacityError, match=rf"{message}.*HarmonyStrategy\(device_memory=.*no room"):
        fit(module, profile_cache=False)
    assert_recovered(module)


# --- Helper threads.


class FaultySGD(torch.optim.SGD):
    """Fails in its second step that has a parameter to update."""

    fault = Fault("update", 0, 0)
    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.num_steps += 1
        if self.num_steps == 2:
            where.set((0, 0))
            self.fault.reach("update")
        return loss


@pytest.mark.filterwarnings("ignore:FaultySGD steps as a whole, and on the host")
@pytest.mark.parametrize("update", ["just-in-time", "deferred"])
def test_an_exception_in_the_optimizers_step_surfaces(update: str) -> None:
    fault = Fault("update", 0, 0)

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = FaultySGD(parameters, lr=0.1)
        optimizer.fault = fault
        return optimizer

    module = Faulty(Fault(), make)
    with pytest.raises(Boom) as raised:
        fit(module, update=update)
    assert {"explode", "step"} <= set(functions_in(raised.value))
    assert fault.happened
    assert_recovered(module)


@pytest.fixture
def faulty_stream(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], list[str]]:
    """Let a piece of work of a stream fail, by its number; returns the names of the threads in which it did."""

    def inject(stream: str, number: int) -> list[str]:
        submit = HostStream.submit
        seen: list[str] = []
        failed: list[str] = []

        def faulty_submit(self: HostStream, work: Callable[[], None], *others: Any, **named: Any) -> Any:
            def faulty_work() -> None:
                thread = threading.current_thread().name
                if thread.startswith(f"harmony-{stream}"):
                    seen.append(thread)
                    if len(seen) == number:
                        failed.append(thread)
                        raise Boom(stream)
                work()

            return submit(self, faulty_work, *others, **named)

        monkeypatch.setattr(HostStream, "submit", faulty_submit)
        return failed

    return inject


@pytest.mark.cpu
@pytest.mark.parametrize("number", [1, 4, 8])
@pytest.mark.parametrize("stream", ["swap-in", "swap-out", "update"])
def test_an_exception_in_a_helper_thread_surfaces(
    stream: str, number: int, faulty_stream: Callable[[str, int], list[str]]
) -> None:
    module = Faulty(Fault())
    failed = faulty_stream(stream, number)
    with pytest.raises(Boom) as raised:
        fit(module)
    assert failed != []
    assert "faulty_work" in functions_in(raised.value)
    assert_recovered(module)


# --- Ctrl-C. Lightning shuts down, and exits.


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Lightning ignores further signals once it shuts down."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    raise KeyboardInterrupt


def send_signal() -> None:
    """Press Ctrl-C, and go on for a while, as a layer would."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.02)


def raise_signal() -> None:
    """As if the system had chosen the lane's thread to hear of Ctrl-C: the main thread learns of it when it wakes."""
    signal.raise_signal(signal.SIGINT)


def assert_interrupted(module: Faulty, *, validate: bool = False) -> None:
    with pytest.raises(SystemExit) as raised:
        fit(module, validate=validate)
    assert raised.value.code == 1
    assert isinstance(raised.value.__context__, KeyboardInterrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert module.trainer.state.status == "interrupted"
    assert_recovered(module, validate=validate)


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize(
    ("action", "phase", "step"),
    combined(
        [
            *((interrupt, phase) for phase in ("layer forward", "layer backward")),
            *((raise_signal, phase) for phase in ("layer backward", "layer forward")),
            *((send_signal, phase) for phase in PHASES),
        ],
        [(0,), (1,)],
    ),
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_ctrl_c_in_a_lane_ends_the_fit_as_lightning_does(action: Callable[[], None], phase: str, step: int) -> None:
    assert_interrupted(Faulty(Fault(phase, step, 1, action)))


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("action", [interrupt, send_signal], ids=lambda action: action.__name__)
def test_ctrl_c_in_the_validation_ends_the_fit_as_lightning_does(action: Callable[[], None]) -> None:
    assert_interrupted(Faulty(Fault("layer forward", -2, 0, action)), validate=True)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_in_a_hook_between_steps_ends_the_fit_as_lightning_does() -> None:
    class Impatient(Faulty):
        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            where.set((0, 0))
            self.fault.reach("hook")

    assert_interrupted(Impatient(Fault("hook", 0, 0, send_signal)))
