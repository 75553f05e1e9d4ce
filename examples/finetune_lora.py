"""Train adapters (LoRA, by peft) beside the frozen weights of a language model that is larger than its device.

The frozen weights are swapped in, and nothing of them goes back. Without `--model`, the base is a small Llama with random
weights, which needs no download.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from text import VOCABULARY_SIZE, Windows, manual_tokens, read_manual
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_harmony import HarmonyStrategy


class Adapted(pl.LightningModule):
    """A causal language model whose attention gets adapters; they alone are trained."""

    def __init__(self, base: Any, rank: int = 8, learning_rate: float = 1e-2) -> None:
        super().__init__()
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
        self.model = get_peft_model(base, adapters)
        self.learning_rate = learning_rate

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over all tokens of the batch."""
        inputs, targets = batch
        logits = self.model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on what is trained."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def small_llama(num_layers: int = 12) -> LlamaForCausalLM:
    """Return a Llama with random weights, of 3 M parameters if it has 12 layers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="name or folder of a pretrained model, such as Qwen/Qwen3-0.6B")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="pretrained models want less, such as 2e-4")
    parser.add_argument("--device-memory", default="8MiB", help="what the fit may take of the device, such as 16GiB")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-microbatches", type=int, default=4, help="parts of a batch, each run by itself")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sample")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> pl.Trainer:
    """Train adapters for the model that the command line names."""
    options = parse_arguments(arguments)
    pl.seed_everything(1)
    if options.model:
        base: Any = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokens = torch.tensor(tokenizer(read_manual())["input_ids"])
    else:
        base, tokens = small_llama(), manual_tokens()
    data = Windows(tokens, options.max_steps * options.batch_size, options.context)
    trainer = pl.Trainer(
        strategy=HarmonyStrategy(device_memory=options.device_memory, num_microbatches=options.num_microbatches),
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Adapted(base, options.rank, options.learning_rate), DataLoader(data, batch_size=options.batch_size))
    return trainer


if __name__ == "__main__":
    main()
