"""Layers that take, return, change and keep TensorDicts train as plain Lightning trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyPrecision, HarmonyStrategy
from lightning_harmony.errors import UnsupportedModelError
from support.nets import WIDTH
from support.same_training import Net, assert_same_training, trainer_for

tensordict = pytest.importorskip("tensordict")
from tensordict import TensorDict  # noqa: E402
from tensordict.nn import TensorDictModule, TensorDictSequential  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*does not have many workers")

ROWS = 16


class Layer(nn.Module):
    """Saves more than its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def computed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden), hidden.square().mean(-1)


class Returns(Layer):
    """A new TensorDict, with one in it."""

    def forward(self, state: Any) -> Any:
        x, energy = self.computed(state["x"])
        inner = TensorDict({"energy": energy + state["inner", "energy"]}, batch_size=state.batch_size)
        return TensorDict({"x": x, "inner": inner}, batch_size=state.batch_size)


class Writes(Layer):
    """Into the one that it is given."""

    def forward(self, state: Any) -> Any:
        x, energy = self.computed(state["x"])
        state["x"] = x
        state["inner", "energy"] = state["inner", "energy"] + energy
        return state


class Updates(Layer):
    """Into the one that it is given, and returns none."""

    def forward(self, state: Any) -> None:
        x, energy = self.computed(state["x"])
        state.update({"x": x, "inner": {"energy": state["inner", "energy"] + energy}})


class Keeps(Layer):
    """One in an attribute, which code after all layers reads."""

    def forward(self, state: Any) -> Any:
        x, energy = self.computed(state["x"])
        self.kept = TensorDict({"energy": energy}, batch_size=state.batch_size)
        return state.clone(recurse=False).set("x", x)


class Indexes(Layer):
    """Takes rows of one, stacks them and computes with the whole of it."""

    def forward(self, state: Any) -> Any:
        first, rest = state[:, :1], state[:, 1:]
        whole = torch.cat([rest, first], dim=1).apply(torch.tanh)
        x, energy = self.computed(whole["x"])
        return whole.replace({"x": x + state["x"], "inner": {"energy": energy + whole["inner", "energy"]}})


class States(nn.Module):
    """Layers that hand a TensorDict on."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def begin(self, batch: Tensor) -> Any:
        x = batch[:, None] * torch.linspace(0.1, 1.0, ROWS, device=batch.device)[:, None]
        energy = torch.zeros(x.shape[:2], device=x.device)
        return TensorDict({"x": x, "inner": {"energy": energy}}, batch_size=x.shape[:2])

    def forward(self, batch: Tensor) -> Tensor:
        state = self.begin(batch)
        for layer in self.layers:
            returned = layer(state)
            state = state if returned is None else returned
        kept = [layer.kept["energy"].mean() for layer in self.layers if hasattr(layer, "kept")]
        loss: Tensor = self.head(state["x"]).pow(2).mean() + 0.1 * state["inner", "energy"].mean()
        return loss + 0.1 * sum(kept)


class Lazy(States):
    """Several TensorDicts, stacked lazily."""

    class Maps(Layer):
        def forward(self, state: Any) -> Any:
            return tensordict.LazyStackedTensorDict(
                *(each.clone(recurse=False).set("x", self.computed(each["x"])[0]) for each in state.unbind(0)),
                stack_dim=0,
            )

    def __init__(self) -> None:
        super().__init__(Lazy.Maps)

    def begin(self, batch: Tensor) -> Any:
        return tensordict.LazyStackedTensorDict(*super().begin(batch).unbind(0), stack_dim=0)


@tensordict.tensorclass
class State:
    x: Tensor
    name: str


class Classes(States):
    """An instance of a class that is made of a TensorDict, with what is no tensor."""

    class Takes(Layer):
        def forward(self, state: Any) -> Any:
            x, energy = self.computed(state.x)
            return State(x=x * (1 + energy[..., None]), name=state.name + "+", batch_size=state.batch_size)

    def __init__(self) -> None:
        super().__init__(Classes.Takes)

    def forward(self, batch: Tensor) -> Tensor:
        state = State(x=batch[:, None].expand(-1, ROWS, -1), name="begin", batch_size=[len(batch), ROWS])
        for layer in self.layers:
            state = layer(state)
        assert state.name == "begin++++"
        return self.head(state.x).pow(2).mean()  # type: ignore[no-any-return]


class Modules(States):
    """Modules of tensordict's own: each writes its keys into the one that goes through all of them."""

    class Computes(Layer):
        def forward(self, x: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
            x, more = self.computed(x)
            return x, energy + more

    def __init__(self) -> None:
        super().__init__(Modules.module)

    @staticmethod
    def module() -> nn.Module:
        keys = ["x", ("inner", "energy")]
        return TensorDictSequential(TensorDictModule(Modules.Computes(), in_keys=keys, out_keys=keys))


STATES: dict[str, Callable[[], States]] = {
    "returned": lambda: States(Returns),
    "written to": lambda: States(Writes),
    "updated": lambda: States(Updates),
    "kept": lambda: States(Keeps),
    "indexed": lambda: States(Indexes),
    "stacked lazily": Lazy,
    "a tensorclass": Classes,
    "modules of tensordict": Modules,
}


def samples() -> Tensor:
    return torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("memory", [None, "240KiB"])
@pytest.mark.parametrize("name", STATES)
def test_layers_hand_tensordicts_on(name: str, memory: str | None) -> None:
    assert_same_training(Net(STATES[name]()), samples(), device_memory=memory, layers=[Layer])


@pytest.mark.parametrize("name", STATES)
def test_layers_on_two_devices_hand_tensordicts_on(name: str) -> None:
    assert_same_training(Net(STATES[name]()), samples(), devices=2, layers=[Layer])


@pytest.mark.parametrize("name", ["written to", "updated"])
def test_writes_into_a_copy_of_which_tensors_were_cast_are_refused(name: str) -> None:
    trainer = trainer_for(HarmonyStrategy(layers=[Layer]), 1, [], plugins=HarmonyPrecision("bf16-compute"))
    with pytest.raises(UnsupportedModelError, match=r"'net.layers.0' writes into a TensorDict .* return a new one"):
        trainer.fit(Net(STATES[name]()), DataLoader(samples(), batch_size=8))


def test_modules_of_tensordict_may_be_the_layers() -> None:
    assert_same_training(
        Net(Modules()), samples(), device_memory="240KiB", layers=[TensorDictModule], updates=["just in time"]
    )
