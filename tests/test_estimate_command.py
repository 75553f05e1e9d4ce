"""`lightning-harmony estimate`, as users type it: Hugging Face models, cards, wrong input, and what to change."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_harmony.cli import main
from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.plan.values.card_memory import usable_bytes
from lightning_harmony.plan.values.machine import H200, MACHINES, read_machine
from lightning_harmony.plan.values.memory_size import format_bytes

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CONFIGURATIONS: dict[str, Any] = {
    "GPT2LMHeadModel": transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=64),
    "LlamaForCausalLM": transformers.LlamaConfig(**SMALL, vocab_size=50, max_position_embeddings=64),
    "BertForMaskedLM": transformers.BertConfig(**SMALL, vocab_size=50, max_position_embeddings=64),
    "T5ForConditionalGeneration": transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2),
    "ViTForImageClassification": transformers.ViTConfig(**SMALL, image_size=32, patch_size=8),
}


class Wide(pl.LightningModule):
    """A block whose weights outweigh its work space, with its parts in a list."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(64, 64), nn.Bilinear(8, 8, 64)])
            self.out = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.parts[0](x) + self.parts[1](x[:, :8], x[:, :8]))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wide.Block(), Wide.Block()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class NeedsNumbers(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.ones(1).item()


class Broken(Wide):
    def __init__(self, rate: float = 0.1) -> None:
        raise KeyError("rate")


class NoData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        raise KeyError("folder")


class Fails(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyError("labels")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["estimate", *arguments, "--machine", "h200"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


# ---- help ------------------------------------------------------------------------------------------------------------


def test_help_imports_neither_torch_nor_lightning() -> None:
    code = """
import sys
from lightning_harmony.cli import main
for command in ([], ["machine"], ["estimate"], ["plan"], ["trace"], ["bench"]):
    try:
        main([*command, "--help"])
    except SystemExit as stopped:
        assert stopped.code == 0
assert not {"torch", "lightning", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_folder_that_transformers_wrote_is_estimated(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CONFIGURATIONS[name].save_pretrained(tmp_path)
    assert main(["estimate", str(tmp_path), "--machine", "h200", "--batch-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == name


def test_settings_change_a_configuration_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CONFIGURATIONS["GPT2LMHeadModel"].save_pretrained(tmp_path)
    assert main(["estimate", str(tmp_path / "config.json"), "n_layer=3", "--machine", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_layers"] == 3 + 4


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_a_model_of_the_hub_that_cannot_be_read_says_why_and_what_works_offline(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(path: str, *, local_files_only: bool, **options: Any) -> Any:
        assert path == name
        # The Hub's own library would try for half a minute.
        assert local_files_only
        raise OSError("We couldn't connect to the hub.\nCheck your internet connection.")

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("lightning_harmony.estimating.application.getproxies", dict)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    line = refused(capsys, name)
    assert "We couldn't connect to the hub. Check your internet connection." in line
    assert "Offline, give a folder with its config.json" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{empty}"], "holds no configuration of a Hugging Face model"),
        (["{gpt2}", "n_layer=x"], "Validation error for field 'n_layer'"),
        (["{gpt2}", "n_layers=3"], "has no setting 'n_layers': did you mean 'n_layer'?"),
        (["transformers.GPT2Config", "n_layers=3"], "has no setting 'n_layers': did you mean 'n_layer'?"),
        (["transformers.GPT2Config", "n_embd=7"], "must be divisible by num_heads"),
        (["{gpt2}", "--batch", "pixels=float32[2, 3]"], "cannot run a step on a batch of pixels=float32[2, 3]"),
        (["transformers.WhisperConfig"], '--batch "input_features=float32'),
        (["transformers.ViTConfig", "--sequence-length", "8"], "takes images"),
        (["{gpt2}", "--batch-size", "0"], "batch_size must be at least 1, not 0"),
        (["{gpt2}", "--batch-size", "-3"], "batch_size must be at least 1, not -3"),
        (["{gpt2}", "--sequence-length", "0"], "sequence_length must be at least 1, not 0"),
        (["{gpt2}", "--num-microbatches", "0"], "num_microbatches must be at least 1, not 0"),
        (["{gpt2}", "--num-microbatches", "9"], "num_microbatches=9, but a batch has 8 samples: give at most 8"),
        (["{gpt2}", "--host-memory", "much"], "'much' is not an amount of memory"),
        (["test_estimate_command.Wide", "--batch", "float32[4, 3]"], "on a batch of float32[4, 3]: RuntimeError: "),
        (["test_estimate_command.Fails", "--batch", "float32[4, 64]"], "KeyError: 'labels'"),
        (["test_estimate_command.Wide", "--batch", "float32[4, 64]", "--batch-size", "4"], "leave out batch_size"),
        (["test_estimate_command.NeedsNumbers", "--batch", "float32[4, 64]"], "cannot be built without memory"),
        (["test_estimate_command.Broken", "--batch", "float32[4, 64]"], "Broken() cannot be built: KeyError: 'rate'"),
        (
            ["--config", "{broken}", "--batch", "float32[4, 64]"],
            "test_estimate_command.Broken cannot be built: ValueError",
        ),
        (["transformers.GPT2Model", "--batch-size", "4"], "of a Hugging Face configuration, where none is given"),
        (
            ["no_package.Model"],
            "No module named 'no_package'. Give package.module.Name, as seen from the current folder, of a",
        ),
        (["./no/folder"], "'./no/folder' is no import path, and there is no such file or folder"),
        ([""], "name a model, or give --config"),
        (["test_estimate_command.Wide", "--batch", f"float32[{10**20}]"], "is no batch: "),
        (["--config", "{no_class}"], "'3' is no import path"),
        (["--config", "{no_settings}"], "init_args of a strategy, must hold names and values"),
        (["--config", "{no_number}", "--batch", "float32[4, 64]"], "num_microbatches must be at least 1, not [2]"),
        (["--config", "{no_yaml}"], "is no configuration of a LightningCLI application: "),
        (["--config", "{no_data}"], "a batch of test_estimate_command.NoData cannot be built: KeyError: 'folder'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_named_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"gpt2": tmp_path / "gpt2", "empty": tmp_path / "empty"}
    places["empty"].mkdir()
    CONFIGURATIONS["GPT2LMHeadModel"].save_pretrained(places["gpt2"])
    model = "model: {class_path: test_estimate_command.%s}\n"
    for name, text in (
        ("broken", model % "Broken"),
        ("no_data", model % "Wide" + "data: {class_path: test_estimate_command.NoData}\n"),
        ("no_class", "model: {class_path: 3}\n"),
        ("no_settings", model % "Wide" + "trainer: {strategy: {class_path: X, init_args: 3}}\n"),
        ("no_number", model % "Wide" + "trainer: {strategy: {class_path: X, init_args: {num_microbatches: [2]}}}\n"),
        ("no_yaml", "a: b: [\n"),
    ):
        places[name] = tmp_path / f"{name}.yaml"
        places[name].write_text(text)
    assert message in refused(capsys, *(argument.format(**places) for argument in arguments))


# ---- cards and hosts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["RTX 3090", "rtx-4090", "RTX5090", "A100", "h100", "H200", "L40S"])
def test_cards_are_known_by_their_names(name: str) -> None:
    machine = read_machine(name)
    assert machine in MACHINES.values()
    assert machine.device_bytes is not None
    assert machine.flops_per_second["bfloat16"] > machine.flops_per_second["float32"]


def test_rates_of_a_data_sheet_are_said_to_be_unmeasured() -> None:
    config = CONFIGURATIONS["LlamaForCausalLM"]
    by_sheet, fitted = (estimate(config, machine=name) for name in ("rtx4090", "h200"))
    assert "data sheet" in by_sheet.machine.name
    assert any("nobody measured them" in note for note in by_sheet.notes)
    assert not any("nobody measured them" in note for note in fitted.notes)


@pytest.mark.nightly
def test_the_host_of_a_card_is_unknown_until_it_is_said() -> None:
    config = CONFIGURATIONS["LlamaForCausalLM"]
    unknown = estimate(config, machine="l40s")
    assert "host unknown (say it with --host-memory)" in str(unknown)
    assert unknown.fits
    small = estimate(config, machine="l40s", host_memory="100kB")
    assert not small.fits
    assert "host    DOES NOT FIT" in str(small)
    assert estimate(config, machine="l40s", host_memory="1GiB").fits


@pytest.mark.nightly
def test_what_a_host_has_no_room_for_at_once_fits_one_after_the_other() -> None:
    """It was said not to fit, and trained."""
    given = partial(estimate, CONFIGURATIONS["LlamaForCausalLM"], machine="l40s", num_microbatches=8)
    need = given().outlook.host
    assert need.least_bytes < need.in_turns_bytes < need.num_bytes
    turns = "run one after the other"
    for host_bytes, fits, is_said in (
        (need.num_bytes, True, False),
        (need.in_turns_bytes, True, False),
        (need.in_turns_bytes - 1, True, True),
        (need.least_bytes, True, True),
        (need.least_bytes - 1, False, False),
    ):
        result = given(host_memory=host_bytes)
        assert result.fits == fits
        assert any(turns in note for note in result.notes) == is_said


def test_a_limit_of_a_card_includes_what_cannot_be_allocated() -> None:
    config = CONFIGURATIONS["LlamaForCausalLM"]
    result = estimate(config, machine="l40s", device_memory="24GiB")
    assert result.capacity_bytes == usable_bytes(24 * 2**30) < 22 * 2**30
    assert "device 21.6 GiB to allocate under a limit of 24 GiB" in str(result)
    assert estimate(config, machine="l40s", device_memory="80GiB").capacity_bytes == MACHINES["l40s"].device_bytes
    assert estimate(config, machine="l40s", device_memory="2GiB").capacity_bytes == 2 * 2**30


def test_a_model_that_may_fit_is_said_to_need_no_swapping() -> None:
    config = CONFIGURATIONS["LlamaForCausalLM"]
    result = estimate(config, machine="h200")
    assert any("nothing be swapped" in note for note in result.notes)
    state = 16 * result.num_parameters
    assert not any(
        "nothing be swapped" in note for note in estimate(config, machine="h200", device_memory=state // 2).notes
    )


# ---- what to change --------------------------------------------------------------------------------------------------


def test_what_to_change_is_told_in_the_order_of_what_it_costs() -> None:
    machine = replace(H200, device_bytes=200_000, host_bytes=100_000, library_bytes=0)
    result = estimate(
        Wide, torch.empty(64, 64, device="meta"), machine=machine, num_microbatches=1, device_memory=60_000
    )
    ranks = [
        "device_memory=",
        "an optimizer with less state",
        "fewer trained",
        "bf16-true",
        "narrower",
        "more host memory",
    ]
    found = [next(i for i, line in enumerate(result.advice) if rank in line) for rank in ranks]
    assert found == sorted(found), result.advice


class Stack(pl.LightningModule):
    """What stands between its layers keeps activations of each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


def test_the_least_limit_is_advised_where_many_small_microbatches_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the limit that microbatches of a single sample need was named."""
    monkeypatch.setattr("lightning_harmony.engine.memory.stash.SMALLEST_BYTES", 16 * 1024)
    result = estimate(
        Stack,
        torch.empty(64, 64, device="meta"),
        machine=replace(H200, device_bytes=None, library_bytes=0),
        device_memory=9000,
    )
    needs = {row.microbatch_size: row.outlook.need.num_bytes for row in result.rows}
    least = min(needs, key=lambda size: needs[size])
    assert needs[least] < needs[1]
    first, second = [line for line in result.advice if "device_memory=" in line]
    assert first.endswith(f"for microbatches of {least}")
    assert second.endswith("for microbatches of 1")


def test_what_does_not_fit_is_not_said_to_use_less_than_it_needs() -> None:
    text = str(
        estimate(
            Stack,
            torch.empty(8, 64, device="meta"),
            machine=replace(H200, device_bytes=None, library_bytes=0),
            device_memory=9000,
        )
    )
    (line,) = [line for line in text.splitlines() if line.startswith("device  DOES NOT FIT")]
    assert "uses up to" not in line


def test_state_that_a_host_has_no_room_for_may_live_on_disk() -> None:
    given = partial(estimate, CONFIGURATIONS["LlamaForCausalLM"], machine="l40s", num_microbatches=8)
    need = given().outlook.host
    result = given(host_memory=need.least_bytes - 1024)
    assert result.advice[0].startswith('HarmonyStrategy(offload_dir="/a/fast/disk"): 1 KiB or more of optimizer state')
    # The gradients of the first step need room, for which weights make way.
    least = 2 * need.weight_bytes + need.least_stash_bytes
    assert not any("of weights live there" in line for line in given(host_memory=least).advice)
    (line,) = [line for line in given(host_memory=least - 1024).advice if "offload_dir" in line]
    assert "of optimizer state and 1 KiB or more of weights live there" in line
    # Without weights in memory, gradients wait on disk, too.
    least -= 2 * need.weight_bytes
    said = f"and {format_bytes(need.weight_bytes)} or more of gradients live there"
    assert any(said in line for line in given(host_memory=least).advice)
    assert not any("offload_dir" in line for line in given(host_memory=least - 1).advice)


def test_frozen_weights_that_a_host_has_no_room_for_may_stay_in_their_files() -> None:
    def adapted() -> Stack:
        net = Stack().requires_grad_(False)
        list(net.parameters())[-1].requires_grad_()
        return net

    given = partial(estimate, adapted, torch.empty(8, 64, device="meta"), machine="l40s")
    host = given().outlook.host
    result = given(host_memory=host.least_bytes - 1024)
    assert any(
        line.startswith("frozen weights in their files: 1 KiB or more of them stay there") for line in result.advice
    )
    # What else there is has no room.
    frozen = host.weight_bytes * (result.num_parameters - result.num_trained) // result.num_parameters
    least = host.least_bytes - frozen
    assert any("their files" in line for line in given(host_memory=least).advice)
    assert not any("their files" in line for line in given(host_memory=least - 1).advice)


def test_layers_that_are_advised_are_found_in_the_model() -> None:
    batch, machine = torch.empty(4, 64, device="meta"), replace(H200, device_bytes=None, library_bytes=0)
    block = sum(p.numel() * 8 for p in Wide.Block().parameters())
    result = estimate(Wide, batch, machine=machine, device_memory=block + 100)
    (advice,) = [line for line in result.advice if "layers=" in line]
    assert advice.startswith("HarmonyStrategy(layers={Bilinear, Linear})")
    finer = estimate(Wide, batch, machine=machine, device_memory=block + 100, layers={nn.Bilinear, nn.Linear})
    assert finer.fits
    assert finer.num_layers == 6


def test_a_device_that_is_too_small_is_told_what_a_larger_one_needs() -> None:
    machine = replace(H200, device_bytes=50_000, library_bytes=0)
    result = estimate(Wide, torch.empty(4, 64, device="meta"), machine=machine)
    assert not any("device_memory=" in line for line in result.advice)
    assert result.advice[-1].startswith("a device with 1MiB or more")


def test_the_command_takes_the_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", "transformers.LlamaConfig", "hidden_size=32", "num_hidden_layers=1", "vocab_size=50"]
    arguments += ["num_attention_heads=2", "intermediate_size=32", "--machine", "rtx4090", "--host-memory", "64GiB"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["capacity_bytes"] == MACHINES["rtx4090"].device_bytes
