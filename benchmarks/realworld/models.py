"""The models of the benchmark: public classes, made from their configurations with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        build: makes the model on the host, given a number of layers, or None for its own, and a type of parameters.
        sample: makes one sample of a length, or of a side.
        loss: of the model on a batch.
        sgd: whether it is trained with SGD and momentum; else with AdamW.
    """

    build: Callable[[int | None, torch.dtype], Any]
    sample: Callable[[int, Generator], Any]
    loss: Callable[[Any, Any], Tensor]
    sgd: bool = False


def _language_model(kind: str, config_kind: str, **sizes: Any) -> Subject:
    def config() -> Any:
        import transformers

        return getattr(transformers, config_kind)(**sizes)

    def build(num_layers: int | None, dtype: torch.dtype) -> Any:
        import transformers

        made, small = config(), config()
        if num_layers is not None:
            made.num_hidden_layers = num_layers
        make = getattr(transformers, kind)
        with torch.device("meta"):
            model = make(made).to(dtype)
        model.to_empty(device="cpu")
        fill(model)
        # Buffers such as rotary frequencies come from a small one that is made for real.
        small.num_hidden_layers, small.vocab_size, small.pad_token_id = 1, 64, 0
        real = dict(make(small).named_buffers())
        for name, buffer in model.named_buffers():
            if name in real and real[name].shape == buffer.shape:
                buffer.data.copy_(real[name])
        model.tie_weights()
        return model

    words: list[int] = []

    def sample(length: int, generator: Generator) -> Tensor:
        # To make a configuration takes longer than to make a sample.
        words[:] = words or [config().vocab_size]
        return torch.randint(0, words[0], (length,), generator=generator)

    def loss(model: Any, batch: Tensor) -> Tensor:
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    return Subject(build, sample, loss)


def _classifier(make: Callable[[], nn.Module], *, sgd: bool) -> Subject:
    def sample(side: int, generator: Generator) -> tuple[Tensor, Tensor]:
        image = torch.randn(3, side, side, generator=generator)
        return image, torch.randint(0, 1000, (), generator=generator)

    def loss(model: Any, batch: Any) -> Tensor:
        images, classes = batch
        return nn.functional.cross_entropy(model(images), classes)

    return Subject(lambda num_layers, dtype: make().to(dtype), sample, loss, sgd=sgd)


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, **options)
        return model

    return make


def _mlp() -> nn.Module:
    hidden = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(2048), *hidden, nn.Linear(2048, 1000))


def _made_mlp() -> nn.Module:
    model = _mlp()
    model(torch.zeros(1, 3, 32, 32))
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give parameters small random numbers, quickly; ones to the weights of norms, the only ones that are vectors."""
    noise = torch.randn(1 << 22, generator=Generator().manual_seed(0)) * 0.02
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            piece = flat[start : start + noise.numel()]
            piece.copy_(noise[: piece.numel()])


@torch.no_grad()
def quantize(model: nn.Module, kind: str) -> None:
    """Put modules of bitsandbytes in the places of all linear layers but the head.

    Those of four bits are quantized where a fit computes, and come back; those of eight when they are first moved there.

    Args:
        model: its linear layers have no biases, and lie on the host, where they stay.
        kind: "nf4" or "int8".
    """
    import bitsandbytes as bnb

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for module in list(model.modules()):
        for name, linear in module.named_children():
            if type(linear) is not nn.Linear or name == "lm_head":
                continue
            sizes, weight = (linear.in_features, linear.out_features), linear.weight.detach()
            if kind == "nf4":
                packed = bnb.nn.Linear4bit(
                    *sizes, bias=False, compute_dtype=weight.dtype, quant_type="nf4", device="meta"
                )
                packed.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=packed)
                packed = packed.to(device).to("cpu")
            else:
                packed = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
                packed.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            setattr(module, name, packed)


def _llama(**sizes: Any) -> Subject:
    common = {"use_cache": False, "max_position_embeddings": 8192, "vocab_size": 128256}
    return _language_model("LlamaForCausalLM", "LlamaConfig", **{**common, **sizes})


def _preference(of: Subject) -> Subject:
    """A language model that is trained to prefer one text to another more than a frozen copy of it does, as DPO has it."""

    def build(num_layers: int | None, dtype: torch.dtype) -> nn.Module:
        model = of.build(num_layers, dtype)
        reference = copy.deepcopy(model).requires_grad_(False)
        return nn.ModuleDict({"model": model, "reference": reference})

    def sample(length: int, generator: Generator) -> Tensor:
        return torch.stack([of.sample(length, generator) for _ in range(2)])

    def loss(models: Any, batch: Tensor) -> Tensor:
        rewards = _log_likelihood(models["model"], batch)
        with torch.no_grad():
            expected = _log_likelihood(models["reference"], batch)
        chosen, rejected = (0.1 * (rewards - expected)).unbind(1)
        return -nn.functional.logsigmoid(chosen - rejected).mean()

    return Subject(build, sample, loss)


def _log_likelihood(model: Any, batch: Tensor) -> Tensor:
    """Of texts (samples, 2, tokens), for each the mean over its tokens, in float32: (samples, 2)."""
    texts = batch.flatten(0, 1)
    logits = model(input_ids=texts).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), texts[:, 1:], reduction="none")
    return -losses.float().mean(1).view(batch.shape[:2])


_LLAMA_3B = _llama(
    hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8
)
MODELS = {
    "llama8b": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "llama3b": _LLAMA_3B,
    "llama3b-dpo": _preference(_LLAMA_3B),
    # 10.6 B parameters, of which a token uses 1.2 B.
    "moe10b": _language_model(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        use_cache=False,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=64,
        num_experts_per_tok=8,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
    ),
    # Kernels are short: the host bounds a step.
    "little": _llama(
        hidden_size=768,
        intermediate_size=2112,
        num_hidden_layers=20,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
    ),
    "tiny": _llama(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
    ),
    "qwen32b": _language_model(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        use_cache=False,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    ),
    "bert": _language_model("BertForMaskedLM", "BertConfig"),
    "gpt2": _language_model("GPT2LMHeadModel", "GPT2Config", use_cache=False),
    "resnet50": _classifier(_timm("resnet50"), sgd=True),
    "resnet152": _classifier(_timm("resnet152"), sgd=True),
    "vit-l": _classifier(_timm("vit_large_patch16_224", img_size=512), sgd=False),
    "mlp": _classifier(_made_mlp, sgd=False),
}
