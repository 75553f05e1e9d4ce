"""Which architectures of the transformers library take turns, and whether they train to the bits of plain Lightning.

Each is built small, with random weights and without dropout, and trained for three steps of four microbatches: by plain
Lightning with accumulation, and with its layers swapped. A line of JSON for each, and a summary. What the library cannot
build from the sizes that are given to all, or cannot run on tokens or on images alone, is skipped.

python benchmarks/zoo.py
python benchmarks/zoo.py --kinds image --only ResNetForImageClassification
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.models.auto import modeling_auto

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import CapacityError

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
NUM_MICROBATCHES, BATCH_SIZE, NUM_STEPS = 4, 8, 3
VOCABULARY, LENGTH, IMAGE_SIZE = 64, 12, 32
# What is larger in spite of the sizes below would take long.
MOST_BYTES = 100 << 20
# By the names that configurations have for them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embedding_size", "attention_hidden_size"], 32),
    **dict.fromkeys(["intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"], 48),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers"], 3),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "state_size"], 4),
    **dict.fromkeys(["head_dim", "d_kv", "patch_size"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 64),
    "hidden_dim": 48,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "image_size": IMAGE_SIZE,
    "num_channels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    # Of weights that are shared, gradients are summed in another order.
    "tie_word_embeddings": False,
}


class Trained(pl.LightningModule):
    """A model that brings its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Hazards(pl.Callback):
    """Keeps what was said of microbatches that run one after the other."""

    def __init__(self) -> None:
        self.hazard: str | None = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        hazard = trainer.strategy._swapped.training._interleaving.hazard
        self.hazard = None if hazard is None else str(hazard)


def samples(kind: str) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    number = NUM_STEPS * BATCH_SIZE
    if kind == "image":
        images = torch.randn(number, 3, IMAGE_SIZE, IMAGE_SIZE, generator=drawn)
        return [{"pixel_values": image, "labels": torch.tensor(place % 2)} for place, image in enumerate(images)]
    tokens = torch.randint(3, VOCABULARY, (number, LENGTH), generator=drawn)
    return [{"input_ids": each, "labels": each} for each in tokens]


def built(name: str) -> nn.Module:
    kind = getattr(transformers, name)
    known = kind.config_class()
    sizes = {
        size: value for size, value in SIZES.items() if isinstance(getattr(known, size, ""), (type(value), type(None)))
    }
    sizes |= {
        size: _without_share(value)
        for size, value in vars(known).items()
        if any(word in size for word in ("drop", "jitter"))
    }
    config = kind.config_class(**sizes)
    with torch.device("meta"):
        num_bytes = sum(parameter.nbytes for parameter in kind(config).parameters())
    if num_bytes > MOST_BYTES:
        raise ValueError(f"{num_bytes >> 20} MiB of weights")
    torch.manual_seed(0)
    return kind(config)  # type: ignore[no-any-return]


def _without_share(value: Any) -> Any:
    """Nothing in the place of a share, or of one for each stage of a model."""
    if isinstance(value, list | tuple):
        return type(value)(map(_without_share, value))
    return 0.0 if isinstance(value, float) else value


def train(module: Trained, kind: str, strategy: Any, num_parts: int, callbacks: list[pl.Callback]) -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=num_parts,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, DataLoader(samples(kind), batch_size=BATCH_SIZE // num_parts))  # type: ignore[arg-type]


def swapped(model: nn.Module, kind: str) -> tuple[Trained, str | None]:
    """The model after its training, and why its microbatches ran one after the other."""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(sum(p.nbytes for p in each.parameters()) for each in model.modules() if not list(each.children()))
    for memory in (whole // 2 + 3 * largest, 2 * whole + 3 * largest + MOST_BYTES):
        module, hazards = Trained(copy.deepcopy(model)), Hazards()
        strategy = HarmonyStrategy(
            device_memory=memory + (3 << 20), num_microbatches=NUM_MICROBATCHES, profile_cache=False
        )
        try:
            # What is so small would fit.
            with patch("lightning_harmony.strategy.fits", lambda *_: False):
                train(module, kind, strategy, 1, [hazards])
        except CapacityError as error:
            short = error
            continue
        return module, hazards.hazard
    raise short


def row(kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind, "name": name}
    try:
        model = built(name)
        plain = Trained(copy.deepcopy(model))
        train(plain, kind, "auto", NUM_MICROBATCHES, [])
    except Exception as error:
        return {**found, "skipped": f"{type(error).__name__}: {str(error)[:200]}"}
    try:
        other, hazard = swapped(model, kind)
    except Exception as error:
        return {**found, "failed": f"{type(error).__name__}: {str(error)[:400]}"}
    before, after = plain.state_dict().values(), other.state_dict().values()
    is_equal = all(map(torch.equal, [*before, *plain.losses], [*after, *other.losses]))
    worst = max(
        (float((a.double() - b.double()).abs().max()) for a, b in zip(before, after, strict=True) if a.numel()),
        default=0.0,
    )
    return {**found, "hazard": hazard, "equal": is_equal, "largest_difference": worst}


def rows(kinds: list[str], only: list[str]) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        names = {name if isinstance(name, str) else name[0] for name in KINDS[kind].values()}
        for name in sorted(names):
            if not only or name in only:
                yield row(kind, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--only", nargs="+", default=[], help="names of classes")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    counts = Counter[str]()
    for each in rows(options.kinds, options.only):
        print(json.dumps(each), flush=True)
        ran = "hazard" in each
        counts["trained"] += ran
        counts["take turns"] += ran and each["hazard"] is None
        counts["equal bits"] += ran and each["equal"]
        counts["failed"] += "failed" in each
        counts["skipped"] += "skipped" in each
    print(dict(counts))


if __name__ == "__main__":
    main()
