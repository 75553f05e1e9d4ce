"""The examples train within the memory that they name, and with the weights that plain Lightning gives."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.plan.values.memory_size import parse_bytes
from support.same_training import assert_same_training, trainer_for

EXAMPLES = Path(__file__).parent.parent / "examples"
# Each model is that of the example: its batches are smaller, and microbatches are as many as take turns.
SCRIPTS = {
    "finetune_llm": ["--max-steps=3", "--batch-size=2", "--num-microbatches=2", "--context=16"],
    "finetune_lora": ["--max-steps=3", "--batch-size=2", "--num-microbatches=2", "--context=16"],
    "resnet": ["--max-epochs=1", "--num-images=24", "--batch-size=8", "--num-microbatches=2"],
    "gan": ["--max-steps=3", "--batch-size=8"],
    "diffusion": ["--max-steps=3", "--batch-size=4", "--num-microbatches=2"],
    "graph_network": ["--max-epochs=3"],
}

pytestmark = [
    pytest.mark.cpu,
    # As users run them: what fits is not swapped.
    pytest.mark.in_memory,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*batch statistics.*"),
]


@pytest.fixture(autouse=True)
def among_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Examples import each other, write to the current folder, and choose what Lightning tells."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("name", [*SCRIPTS, "train_gpt", "lightning_cli"])
def test_an_example_tells_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(name).main(["--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_trains_a_model_that_is_larger_than_its_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = import_module(name)
    if name == "diffusion":
        # Its pictures take longer than its training.
        monkeypatch.setattr(example.Diffusion, "draw", partialmethod(example.Diffusion.draw, num_steps=2))
    trainer = example.main(["--accelerator=cpu", *SCRIPTS[name]])
    report, capacity = trainer.strategy.step_report, parse_bytes(example.parse_arguments([]).device_memory)
    weights = sum(parameter.nbytes for parameter in trainer.lightning_module.parameters())
    assert trainer.global_step >= 3
    assert weights > capacity >= max(report.peak_device_bytes)
    assert report.num_packs > 1
    assert report.swapped_in_bytes["weights"] > 0
    images = list(tmp_path.glob("*.png"))
    assert bool(images) == (name in ("gan", "diffusion"))
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in images)


@pytest.mark.parametrize("name", ["finetune_llm", "finetune_lora"])
def test_language_models_of_hugging_face_get_the_weights_that_plain_lightning_gives(name: str) -> None:
    example, text = import_module(name), import_module("text")
    torch.manual_seed(0)
    model = {"finetune_llm": "LanguageModel", "finetune_lora": "Adapted"}[name]
    windows = text.Windows(text.manual_tokens(), 16, 32)
    assert_same_training(getattr(example, model)(example.small_llama(3)), windows, device_memory="7MiB")


@pytest.mark.nightly
def test_a_resnet_gets_the_weights_and_statistics_that_plain_lightning_gives() -> None:
    torch.manual_seed(0)
    model = import_module("resnet").ResNet(width=16, blocks=2)
    assert_same_training(model, import_module("shapes").draw_shapes(32, noise=0.3), device_memory="1MiB", batch_size=16)


def test_a_gan_gets_the_weights_that_plain_lightning_gives() -> None:
    torch.manual_seed(0)
    model = import_module("gan").GAN(latent=16, width=16)
    shapes = import_module("shapes").draw_shapes(24)
    assert_same_training(model, shapes, device_memory="512KiB", num_microbatches=1, updates=["after the backward"])


@pytest.mark.nightly
def test_a_diffusion_model_gets_the_average_of_weights_that_plain_lightning_gives() -> None:
    torch.manual_seed(0)
    model = import_module("diffusion").Diffusion(width=16)
    shapes = import_module("shapes").draw_shapes(16)

    def average() -> Sequence[EMAWeightAveraging]:
        return [EMAWeightAveraging(decay=0.5)]

    assert_same_training(model, shapes, device_memory="3MiB", make_callbacks=average)


def test_a_graph_network_gets_the_weights_that_plain_lightning_gives() -> None:
    example = import_module("graph_network")
    graph: Any = DataLoader(example.OneGraph(example.make_graph(num_nodes=100)), batch_size=None)

    def weights(strategy: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = example.GraphNetwork(width=64, depth=4)
        trainer_for(strategy, 3, []).fit(module, graph)
        return module.state_dict()

    plain, swapped = weights("auto"), weights(HarmonyStrategy(device_memory="512KiB", num_microbatches=1))
    assert all(torch.equal(value, swapped[name]) for name, value in plain.items())


def test_the_command_line_trains_by_its_file_with_the_weights_that_plain_lightning_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning_cli.py"])
    example = import_module("lightning_cli")
    fit = ["fit", f"--config={EXAMPLES / 'lightning_cli.yaml'}", "--trainer.accelerator=cpu"]
    swapped = example.main([*fit, "--data.num_steps=3"])
    # A batch of plain Lightning is a microbatch.
    split = ["--data.num_steps=12", "--data.batch_size=2", "--trainer.accumulate_grad_batches=4"]
    plain = example.main([*fit, *split, "--trainer.strategy=auto"])
    assert swapped.trainer.strategy.step_report.num_packs > 1
    assert swapped.trainer.global_step == plain.trainer.global_step == 3
    weights = swapped.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in plain.model.state_dict().items())


def test_the_demo_compares_itself_with_plain_lightning_and_ends_with_its_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    demo, picture = import_module("train_gpt"), tmp_path / "pictures" / "step.png"
    monkeypatch.setattr(demo, "CONFIG", demo.GPTConfig(hidden=64, num_layers=4, context=64))
    monkeypatch.setattr(demo, "NUM_COMPARED_STEPS", 3)
    assert demo.main(["--max-steps=4", "--device-memory=8MiB", f"--picture={picture}"]) == 0
    out = capsys.readouterr().out
    for words in ("mean loss", "The model continues", "times the time", "times the memory", "bit for bit"):
        assert words in out
    assert out.splitlines()[-1].endswith(str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_text_is_cut_into_tokens_with_nothing_lost() -> None:
    text = import_module("text")
    manual = text.read_manual()
    assert text.manual_vocabulary().decode(text.manual_tokens()) == manual
    assert len(text.manual_tokens()) < len(manual) / 2


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
def test_the_notebook_runs_from_its_first_cell_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    file = EXAMPLES / "harmony.ipynb"
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "outputs belong into no commit"
    # A smaller model and fewer steps, the last of which is drawn all the same.
    for long, short in {
        "num_layers=8": "num_layers=4",
        "num_steps=10": "num_steps=4",
        "trace_step=9": "trace_step=3",
        "step-9.json": "step-3.json",
        "num_tokens=40": "num_tokens=4",
    }.items():
        assert sum(long in cell.source for cell in code) == 1, f"the notebook has no {long}"
        for cell in code:
            cell.source = cell.source.replace(long, short)
    # The kernel is a process of its own.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = json.dumps([cell.outputs for cell in code])
    assert "Time of the step" in shown
    assert "image/png" in shown
