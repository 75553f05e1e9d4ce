"""Compiled layers: the numbers of plain Lightning with the same layers compiled, and nothing is compiled at a swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyPrecision, HarmonyStrategy, estimate
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from support import nets
from support.compilations import Compilations
from support.same_training import Net, compare, train_harmony, train_plain, trainer_for

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that counts what it compiles, and how often that runs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


def build(net: Callable[[], nn.Module], backend: Any = None) -> Net:
    """A model, its blocks compiled if a backend is given."""
    torch.manual_seed(0)
    module = Net(net())
    if backend is not None:
        for block in module.net.blocks:
            block.compile(backend=backend)
    return module


def train(module: Net, strategy: Any, samples: Any = None, **options: Any) -> tuple[Any, Compilations]:
    compilations = Compilations()
    samples = nets.tokens() if samples is None else samples
    trainer_options = {"with_gradients": True, "more_callbacks": [compilations], **options}
    return train_harmony(module, samples, strategy, 8, **trainer_options), compilations


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "dropout": (lambda: nets.Language(dropout=0.3), nets.tokens),
    "rich": (nets.Rich, nets.tokens),
    "batch-norm": (nets.Convolutions, nets.images),
}


@pytest.mark.parametrize("net", NETS)
def test_layers_that_the_user_compiled_train_bit_for_bit_as_in_plain_lightning(net: str) -> None:
    make, samples = NETS[net]
    plain = train_plain(build(make, "aot_eager"), samples(), 4, 8)
    module = build(make, "aot_eager")
    harmony, compilations = train(module, HarmonyStrategy(num_microbatches=4, device_memory="96KiB"), samples())
    compare(plain, harmony)
    assert compilations.frames == [compilations.frames[0]] * 3


@pytest.mark.parametrize("capacity", [None, "96KiB"])
def test_layers_of_one_class_share_code_and_no_swap_compiles_anew(capacity: str | None) -> None:
    backend = Counting()
    _, compilations = train(build(nets.Language, backend), HarmonyStrategy(num_microbatches=4, device_memory=capacity))
    assert compilations.frames == [1, 1, 1]
    assert backend.graphs == 1
    # Four blocks, four microbatches, three steps: each forward, and each recompute in the step that knows no graphs to keep.
    assert backend.runs >= 4 * 4 * (3 + 1)


def test_compile_layers_compiles_what_the_user_did_not() -> None:
    backend, users = Counting(), Counting()
    module = build(nets.Language)
    module.net.blocks[1].compile(backend=users)
    plain = train_plain(build(nets.Language), nets.tokens(), 4, 8)
    strategy = HarmonyStrategy(num_microbatches=4, device_memory="96KiB", compile_layers={"backend": backend})
    harmony, compilations = train(module, strategy)
    compare(plain, harmony)
    # One for the blocks, one for the embedding, one for the head.
    assert (backend.graphs, users.graphs) == (3, 1)
    assert compilations.frames == [4, 4, 4]


def test_compiled_layers_on_several_devices_train_as_plain_lightning_does() -> None:
    plain = train_plain(build(nets.Language, "aot_eager"), nets.tokens(), 4, 8)
    strategy = HarmonyStrategy(num_microbatches=4, device_memory="96KiB")
    harmony, compilations = train(build(nets.Language, "aot_eager"), strategy, devices=2)
    compare(plain, harmony)
    assert compilations.frames == [compilations.frames[0]] * 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-compute"])
def test_compiled_layers_get_narrow_weights_only_where_these_are_asked_for(precision: str) -> None:
    """A compiler rounds gradients at other places if it finds weights cast: on a GPU, those of a bias differed."""
    options = {"plugins": HarmonyPrecision(precision)}
    strategy = HarmonyStrategy(num_microbatches=4, device_memory="160KiB")
    harmony, compilations = train(build(nets.Language, "aot_eager"), strategy, **options)
    blocks = {f"net.blocks.{number}" for number in range(4)}
    assert blocks & compilations.narrow == (blocks if precision == "bf16-compute" else set())
    assert compilations.frames == [compilations.frames[0]] * 3
    expected, _ = train(build(nets.Language), HarmonyStrategy(num_microbatches=4), **options)
    compare(expected, harmony)


def test_validation_runs_compiled_and_afterwards_the_module_is_as_it_was() -> None:
    backend = Counting()
    module = build(nets.Language, backend)
    before = [block._compiled_call_impl for block in module.net.blocks]
    module.validation_step = lambda batch, batch_idx: module.net(batch)  # type: ignore[method-assign]
    loader = DataLoader(nets.tokens(8), batch_size=8)
    trainer_for(HarmonyStrategy(), 1, []).validate(module, loader, verbose=False)
    assert backend.runs == 4
    assert [block._compiled_call_impl for block in module.net.blocks] == before
    assert all("forward" not in vars(block) for block in module.net.blocks)
    assert torch.isfinite(module.net(nets.tokens(8)))


@pytest.mark.nightly
def test_an_estimate_compiles_nothing() -> None:
    backend = Counting()
    compiled, plain = (estimate(build(nets.Language, each), nets.tokens(8)) for each in (backend, None))
    assert compiled.outlook.peak_bytes == plain.outlook.peak_bytes
    assert backend.graphs == 0


def without_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a virtual device nothing but layers is compiled, for it counts by a mode; on a GPU all is."""
    monkeypatch.setattr(VirtualDevice, "computing", lambda self: nullcontext())


def test_a_compiled_container_breaks_its_graph_at_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_meter(monkeypatch)
    plain = train_plain(build(nets.Language), nets.tokens(), 4, 8)
    module = build(nets.Language)
    module.net.compile(backend="eager")
    compare(plain, train(module, HarmonyStrategy(num_microbatches=4))[0])


@pytest.mark.parametrize("capacity", [None, "96KiB"])
def test_between_the_layers_of_a_compiled_container_nothing_of_ours_is_compiled(
    capacity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the copies of what autograd saves there used to be, and the compiler failed at them."""
    without_meter(monkeypatch)
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.extend(node.stack_trace for node in graph.graph.nodes if node.stack_trace is not None)
        return graph

    plain = train_plain(build(nets.Convolutions), nets.images(), 4, 8)
    strategy = HarmonyStrategy(num_microbatches=4, device_memory=capacity)
    compare(plain, train(build(nets.Convolutions, backend), strategy, nets.images())[0])
    assert [trace for trace in compiled if "lightning_harmony" in trace] == []


@pytest.mark.cpu
@pytest.mark.parametrize("capacity", [None, "96KiB"])
def test_what_counts_memory_is_not_compiled(capacity: str | None) -> None:
    """It was, and the compiler failed now and then: other threads count meanwhile, in a dict that it went through."""
    compiled: list[str] = []
    hook = register_bytecode_hook(lambda code, new: compiled.append(f"{code.co_name} in {code.co_filename}"))
    try:
        module = build(nets.Convolutions)
        module.net.compile(backend="eager")
        train(module, HarmonyStrategy(num_microbatches=4, device_memory=capacity), nets.images())
    finally:
        hook.remove()
    assert [code for code in compiled if "lightning_harmony" in code] == []


def test_compiled_glue_that_uses_a_parameter_is_refused_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    without_meter(monkeypatch)
    module = build(nets.OwnParameters)
    module.net.compile(backend="eager")
    with pytest.raises(Exception, match=r"parameter 'net\.position'.* HarmonyStrategy\(compile_layers=True\)"):
        train(module, HarmonyStrategy(num_microbatches=4))


def test_compile_layers_is_a_choice_or_arguments() -> None:
    with pytest.raises(ValueError, match=r"compile_layers='max-autotune'\): True, False, or the arguments"):
        HarmonyStrategy(compile_layers="max-autotune")


class Stacked(nn.Module):
    """Submodules that `torch.compile` has wrapped, for a compiler that runs their operations one by one."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(nets.WIDTH, nets.WIDTH), nn.GELU()) for _ in range(3)]
        self.blocks = nn.Sequential(*[torch.compile(block, backend="eager") for block in blocks])

    def forward(self, batch: Any) -> torch.Tensor:
        return self.blocks(batch[0]).square().mean()


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_a_recompute_saves_is_not_traced_where_the_compiler_leaves_code_to_python() -> None:
    """It does for good what it does once, as where a mode is active, and compiles what that code calls: a hook of ours."""
    samples = torch.utils.data.TensorDataset(torch.randn(24, nets.WIDTH))
    with Passing():
        build(Stacked).net(samples[:2])
    plain = train_plain(build(Stacked), samples, 4, 8)
    harmony, _ = train(build(Stacked), HarmonyStrategy(num_microbatches=4, device_memory="20KiB"), samples)
    compare(plain, harmony)
