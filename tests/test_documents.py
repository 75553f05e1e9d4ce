"""What README and docs show: each block of Python runs, and each command line is understood. What they quote is there."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_harmony
from lightning_harmony import HarmonyStrategy
from lightning_harmony.cli import main
from lightning_harmony.plan.values.machine import MACHINES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("[A-Z]*.md")), *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS_IN_README = 700
PACKAGE = ROOT / "src" / "lightning_harmony"

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.in_memory,
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:HarmonyMonitor.*records nothing"),
    pytest.mark.filterwarnings("ignore:.*bf16-mixed is not supported by the model summary"),
]


def blocks(language: str) -> list[Any]:
    found = []
    for document in DOCUMENTS:
        for number, (kind, text) in enumerate(re.findall(r"```(\w*)\n(.*?)```", document.read_text(), re.DOTALL)):
            if kind == language:
                found.append(pytest.param(text, id=f"{document.name}-{number}"))
    return found


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=8)


@pytest.mark.whole
@pytest.mark.parametrize("text", blocks("python"))
def test_each_block_of_python_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = pl.Trainer(
        strategy=HarmonyStrategy(device_memory="256KiB"),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    # Swapped: what is in memory has no plan to show.
    monkeypatch.setattr("lightning_harmony.strategy.fits", lambda lasting, device: False)
    trainer.fit(Model(), Data())
    names = {
        "batch": [torch.empty(8, 4, device="meta"), torch.empty(8, 1, device="meta")],
        "HarmonyStrategy": HarmonyStrategy,
        "Path": Path,
        "data": Data(),
        "logger": CSVLogger(tmp_path),
        "model": Model(),
        "pl": pl,
        "Trainer": pl.Trainer,
        "trainer": trainer,
    }
    shown = text.replace('accelerator="gpu"', 'accelerator="cpu", max_epochs=1, enable_progress_bar=False')
    # Of several, this one would wait for the others.
    shown = shown.replace("num_nodes=2", "num_nodes=1")
    exec(compile(shown, "a block", "exec"), names)


def test_mypy_looks_at_the_example_of_the_readme() -> None:
    text = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    example = [each for each in ast.parse(text).body if not isinstance(each, ast.Import)]
    # What a user writes is checked there.
    typed = ast.parse((ROOT / "tests" / "typed_user.py").read_text()).body
    function = next(each for each in typed if isinstance(each, ast.FunctionDef) and each.name == "first_example")
    assert [ast.dump(each) for each in function.body[1:]] == [ast.dump(each) for each in example]


def test_commands_that_the_documents_show_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for block in blocks("") for line in block.values[0].splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("lightning-harmony ")]
    assert {command[1] for command in commands} == {"--help", "bench", "estimate", "machine", "plan", "trace"}
    understood: list[Any] = []
    for name in ("bench", "estimate", "machine", "plan", "trace"):
        monkeypatch.setattr(f"lightning_harmony.cli._{name}", lambda options: understood.append(options) or 0)
    whole = [arguments for _, *arguments in commands if "--help" not in arguments]
    assert [main(arguments) for arguments in whole] == [0] * len(whole)
    # Cards are told by names, and files by theirs.
    machines = {options.machine for options in understood if getattr(options, "machine", None) is not None}
    assert {name for name in machines if not Path(name).suffix} <= MACHINES.keys()


def test_blocks_are_commands_or_python_or_what_is_printed() -> None:
    for document in DOCUMENTS:
        for kind in re.findall(r"```(\w*)\n.*?```", document.read_text(), re.DOTALL):
            assert kind in ("", "python", "text"), document.name


def said_by_the_code() -> str:
    """The texts of the package, what is filled in left out."""
    texts = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_that_are_explained_are_said_so() -> None:
    said = said_by_the_code()
    messages = re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 40
    parts = [part.strip(" :") for message in messages for part in message.split("…")]
    assert [part for part in parts if part not in said] == []


def test_the_picture_shows_the_figures_of_the_benchmarks(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "benchmarks" / "memory_picture.py"))["draw"](tmp_path / "drawn.svg")
    drawn, kept = ((tmp_path / "drawn.svg").read_text(), (ROOT / "docs" / "speed-against-memory.svg").read_text())
    # Where a text lies depends on the version of matplotlib.
    for part in ("<dc:description>.*?</dc:description>", "<text[^>]*>([^<]*)</text>"):
        assert re.findall(part, drawn)
        assert re.findall(part, drawn) == re.findall(part, kept)


def test_each_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == sorted(file.name for file in (ROOT / "docs").glob("*.md"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS_IN_README


def test_links_between_documents_lead_somewhere() -> None:
    # Entries of the changelog name pages as they were called then.
    for document in (each for each in DOCUMENTS if each.name != "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_one_version_is_told_everywhere() -> None:
    version = lightning_harmony.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()


def test_fragments_of_the_changelog_say_of_which_kind_they_are() -> None:
    names = [file.name for file in (ROOT / "changelog.d").iterdir() if file.name != "README.md"]
    assert [
        name for name in names if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|deprecated|removed|fixed)\.md", name)
    ] == []


def test_workflows_run_the_versions_that_the_package_names() -> None:
    project, workflow = (ROOT / "pyproject.toml").read_text(), (ROOT / ".github/workflows/tests.yml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f"python: [{', '.join(map('{!r}'.format, pythons))}]".replace("'", '"') in workflow
    for library in ("torch", "lightning"):
        oldest = re.search(rf'"{library}>=([\d.]+)', project)
        assert oldest is not None
        assert f"{library}=={oldest[1]}" in workflow


def test_the_changelog_has_the_version_of_the_package() -> None:
    assert f"## [{lightning_harmony.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
