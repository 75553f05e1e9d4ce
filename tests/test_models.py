"""Kinds of models that others bring, each as its authors write it, in less memory than it takes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from support import nets, same_training
from support.nets import VOCABULARY, WIDTH
from support.same_training import SEED, Net, Update, assert_same_training, trainer_for
from support.sampling import combined
from support.taking_turns import ONE_AFTER_THE_OTHER

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

NUM_SAMPLES, LENGTH, NUM_CLASSES = 12, 7, 5


@pytest.fixture(autouse=True)
def taking_turns(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Microbatches of all these models take turns, but where a test says otherwise."""
    caplog.set_level("INFO")
    yield
    said = [each.message for each in caplog.get_records("call") if ONE_AFTER_THE_OTHER in each.message]
    # What libraries take on a GPU may leave these capacities no room for turns.
    if any("the device has no room" in message for message in said) and same_training.accelerator == "gpu":
        return
    assert bool(said) == (request.node.get_closest_marker("one_after_the_other") is not None), said


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def build(net: Callable[[], nn.Module], optimizer: Any = adamw) -> Net:
    torch.manual_seed(0)
    return Net(net(), optimizer)


def assert_same_and_swapped(module: pl.LightningModule, samples: Any, memory: str, **options: Any) -> None:
    """Compare with plain Lightning, and see to it that the weights did not just stay on the device."""
    options = {"num_microbatches": 2, "batch_size": 4, **options}
    reports = assert_same_training(module, samples, device_memory=memory, **options)
    parameter_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    narrow = 2 if options.get("precision") == "bf16-mixed" else 1
    assert reports[-1].num_packs > 1
    # On several devices together they may just fit.
    swaps_again = narrow * reports[-1].swapped_in_bytes["weights"] > parameter_bytes
    assert swaps_again or len(reports[-1].peak_device_bytes) > 1


# ---- data --------------------------------------------------------------------------------------------------------------


def tokens(num_samples: int = NUM_SAMPLES) -> Tensor:
    return nets.tokens(num_samples, LENGTH)


def padded_tokens() -> list[tuple[Tensor, int]]:
    """Sequences of several lengths, filled up with zeros."""
    lengths = [2 + number * 3 % (LENGTH - 1) for number in range(NUM_SAMPLES)]
    rows = tokens().clamp(min=1)
    return [(row * (torch.arange(LENGTH) < length), length) for row, length in zip(rows, lengths, strict=True)]


def images() -> list[tuple[Tensor, int]]:
    return nets.images(NUM_SAMPLES)


def images_with_text() -> list[tuple[Tensor, Tensor]]:
    return [(image, row) for (image, _), row in zip(images(), tokens(), strict=True)]


def waves_with_text() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(200, generator=generator), row.clamp(min=3)) for row in tokens()]


def graphs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """One graph, the same in every step: features of its nodes, its edges, the classes of its nodes."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(20, WIDTH, generator=generator)
    edges = torch.randint(0, 20, (2, 60), generator=generator)
    return [(features, edges, torch.arange(20) % NUM_CLASSES)] * 3


# ---- models from Hugging Face, from config -----------------------------------------------------------------------------

TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **TEXT,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


class SequenceToSequence(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch.flip(1), attention_mask=(batch > 2).long()).loss


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, labels = batch
        return self.model(pixel_values=pixels, labels=labels).loss


class TwoTowers(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, text = batch
        return self.model(pixel_values=pixels, input_ids=text, return_loss=True).loss


def t5() -> nn.Module:
    import transformers as hf

    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return SequenceToSequence(hf.T5ForConditionalGeneration(config))


def bart() -> nn.Module:
    import transformers as hf

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _BART_SIDE.items()}
    config = hf.BartConfig(**TEXT, d_model=WIDTH, max_position_embeddings=32, **sides)
    return SequenceToSequence(hf.BartForConditionalGeneration(config))


_BART_SIDE = {"layers": 2, "ffn_dim": 32, "attention_heads": 2}


def vit() -> nn.Module:
    import transformers as hf

    return Classifier(hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=NUM_CLASSES)))


class Recognizer(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        waves, text = batch
        return self.model(input_values=waves, labels=text[:, :3]).loss


def wav2vec2() -> nn.Module:
    import transformers as hf

    convolutions = {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2}
    config = hf.Wav2Vec2Config(
        **{**VISION, "vocab_size": VOCABULARY},
        **convolutions,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
    )
    return Recognizer(hf.Wav2Vec2ForCTC(config))


def convnext() -> nn.Module:
    import transformers as hf

    config = hf.ConvNextConfig(
        num_labels=NUM_CLASSES, patch_size=2, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, drop_path_rate=0.2
    )
    return Classifier(hf.ConvNextForImageClassification(config))


def mixtral(*, router_loss: bool = False) -> nn.Module:
    import transformers as hf

    config = hf.MixtralConfig(**DECODER, num_local_experts=8, num_experts_per_tok=1, output_router_logits=router_loss)
    return nets.HuggingFace(hf.MixtralForCausalLM(config))


def gemma2() -> nn.Module:
    import transformers as hf

    config = hf.Gemma2Config(**DECODER, sliding_window=3, query_pre_attn_scalar=8, attn_implementation="eager")
    return nets.HuggingFace(hf.Gemma2ForCausalLM(config))


def gemma3() -> nn.Module:
    import transformers as hf

    config = hf.Gemma3TextConfig(**{**DECODER, "tie_word_embeddings": True}, sliding_window=3, query_pre_attn_scalar=8)
    return nets.HuggingFace(hf.Gemma3ForCausalLM(config))


def mamba() -> nn.Module:
    import transformers as hf

    config = hf.MambaConfig(**TEXT, hidden_size=WIDTH, state_size=4, num_hidden_layers=3, tie_word_embeddings=False)
    return nets.HuggingFace(hf.MambaForCausalLM(config))


def rwkv() -> nn.Module:
    """Scales its weights in place when it is first called in evaluation, as the check of the split does: which is refused."""
    import transformers as hf

    config = hf.RwkvConfig(**TEXT, hidden_size=WIDTH, attention_hidden_size=WIDTH, num_hidden_layers=3, use_cache=False)
    return nets.HuggingFace(hf.RwkvForCausalLM(config))


def clip() -> nn.Module:
    import transformers as hf

    text = {**TEXT, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.CLIPConfig(text_config={**text, "max_position_embeddings": 16}, vision_config=VISION, projection_dim=8)
    return TwoTowers(hf.CLIPModel(config))


def checkpointed() -> nn.Module:
    """Hugging Face's own recompute, around layers that recompute anyway."""
    import transformers as hf

    model = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, attention_dropout=0.1))
    model.gradient_checkpointing_enable()
    return nets.HuggingFace(model)


# ---- models as people write them ---------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """ResNet's, as torchvision has it."""

    def __init__(self, wide_in: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide_in, wide, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(wide_in, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 1, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, NUM_CLASSES)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return F.cross_entropy(self.fc(torch.flatten(x, 1)), labels)


class Siamese(nn.Module):
    """One encoder with batch norm for two views of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(BasicBlock(3, 8, 2), BasicBlock(8, 8, 1), nn.Flatten(), nn.Linear(128, WIDTH))
        self.predictor = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = self.encoder(batch[0]), self.encoder(batch[0].flip(-1) + 0.1)
        return -F.cosine_similarity(self.predictor(one), other.detach()).mean()


def double_conv(wide_in: int, wide: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(wide_in, wide, 3, padding=1),
        nn.GroupNorm(2, wide),
        nn.ReLU(inplace=True),
        nn.Conv2d(wide, wide, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """What the way down computes waits for the way up, across packs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([double_conv(3, 8), double_conv(8, 16)])
        self.middle = double_conv(16, 16)
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)])
        self.join = nn.ModuleList([double_conv(32, 8), double_conv(16, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return F.mse_loss(self.head(x), batch[0])


class VariationalAutoencoder(nn.Module):
    """Draws its latent in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 2 * WIDTH))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 192), nn.Tanh())

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        latent = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).rsample()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(latent), x.flatten(1)) + 0.01 * divergence


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = torch.zeros_like(x).index_add(0, target, self.neighbours(x)[source])
        return F.relu(self.own(x) + messages)


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(GraphConvolution() for _ in range(4))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, edges, classes = (part.squeeze(0) for part in batch)
        for convolution in self.convolutions:
            x = F.dropout(convolution(x, edges), 0.1, self.training)
        return F.cross_entropy(self.head(x), classes)


class Packed(nn.Module):
    """Packed sequences through a recurrent network of either kind."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.first = kind(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.second = kind(2 * WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        sequences, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(sequences), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = self.second(self.first(packed)[0])
        padded, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=LENGTH)
        return F.cross_entropy(self.head(padded).flatten(0, 1), sequences.flatten(), ignore_index=0)


class Translator(nn.Module):
    """torch's own encoder-decoder, with a causal mask and masks of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, dim_feedforward=32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.embed_target = self.embed

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        source, _ = batch
        target = source.roll(1, dims=1)
        padding = source == 0
        states = self.transformer(
            self.embed(source),
            self.embed_target(target) * math.sqrt(WIDTH),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(LENGTH, device=source.device) < 0,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.cross_entropy(self.head(states).flatten(0, 1), source.flatten(), ignore_index=0)


class EncoderOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device) < 0
        states = self.encoder(self.embed(x), mask=mask, src_key_padding_mask=x == 0)
        return F.cross_entropy(self.head(states).flatten(0, 1), x.flatten(), ignore_index=0)


class Attentive(nn.Module):
    """Puts the attention's weights into the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        entropy = x.new_zeros(())
        for block in self.blocks:
            attended, weights = block(x, x, x, need_weights=True, average_attn_weights=False)
            x = x + attended
            entropy = entropy - (weights * (weights + 1e-6).log()).sum(-1).mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten()) + 0.01 * entropy


class WeightNormed(nn.Module):
    """Causal convolutions with normed weights, as in WaveNet; the last one orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        normed = nn.utils.parametrizations.weight_norm
        self.blocks = nn.ModuleList(normed(nn.Conv1d(WIDTH, WIDTH, 2, dilation=2**n)) for n in range(3))
        self.rotation = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, VOCABULARY))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch).transpose(1, 2)
        for number, block in enumerate(self.blocks):
            x = x + F.gelu(block(F.pad(x, (2**number, 0))))
        return F.cross_entropy(self.head(self.rotation(x.transpose(1, 2))).flatten(0, 1), batch.flatten())


class SequentialOfSequentials(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def mixer() -> nn.Sequential:
            return nn.Sequential(
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)), nn.GELU(), nn.Linear(32, WIDTH)
            )

        body = nn.Sequential(mixer(), nn.Dropout(0.1), nn.Sequential(mixer(), nn.Tanh(), mixer()))
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), body, nn.Sequential(nn.Linear(WIDTH, VOCABULARY)))

    def forward(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())


class Containers(nn.Module):
    """Modules and parameters in dictionaries and lists; a parameter list also belongs to a layer."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
            self.inner = nn.ModuleDict({"up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = x + torch.tanh(x * scale)
            return x + self.inner["down"](F.gelu(self.inner["up"](x)))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({name: Containers.Mixture() for name in ("a", "b", "c")})
        self.shifts = nn.ParameterDict({name: nn.Parameter(torch.randn(WIDTH)) for name in self.blocks})
        self.gates = nn.ParameterList([torch.randn(()), torch.randn(WIDTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for name, block in self.blocks.items():
            x = block(x + self.shifts[name])
        x = x * self.gates[0] + self.gates[1]
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


class KeywordsOnly(nets.Language):
    """Every argument of every layer by name."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.gate = nets.Block(dropout=0.1), nn.Linear(WIDTH, WIDTH)

        def forward(
            self, *, states: Tensor, mask: Tensor | None = None, options: dict[str, float] | None = None
        ) -> Any:
            states = self.block(states) * torch.sigmoid(self.gate(states))
            return {"states": states if mask is None else states * mask, "options": options}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordsOnly.Gated() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            mask = x.new_ones((*x.shape[:2], 1)) if number % 2 else None
            x = block(states=x, mask=mask, options={"number": number})["states"]
        return x


@dataclass
class Output:
    states: Tensor
    penalty: Tensor
    name: str = ""


class ReturnsDataclass(nets.Language):
    """The graph of the layers goes through an object."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nets.Block()

        def forward(self, x: Tensor) -> Output:
            states = self.block(x)
            return Output(states, states.square().mean(), name="block")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsDataclass.Wrapped() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            output = block(x)
            x = output.states + output.penalty
        return x


class CodeBook(nn.Module):
    """A vector quantizer whose codes follow by moving averages, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(8, WIDTH))
        self.register_buffer("counts", torch.ones(8))
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("not_saved", torch.zeros(WIDTH), persistent=False)
        # No version counts what is done to its data: that was lost.
        self.register_buffer("through_data", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        flat = x.flatten(0, 1)
        nearest = torch.cdist(flat, self.codes).argmin(1)
        code = self.codes[nearest].view_as(x)
        if self.training:
            with torch.no_grad():
                picked = F.one_hot(nearest, 8).to(x.dtype)
                self.counts.mul_(0.9).add_(picked.sum(0), alpha=0.1)
                self.codes = self.codes * 0.9 + 0.1 * (picked.T @ flat) / self.counts.clamp(min=1).unsqueeze(1)
                self.num_calls += 1
                self.not_saved.copy_(flat.mean(0))
                self.through_data.data.lerp_(flat.mean(0), 0.1)
        return x + (code - x).detach() + 0.1 * self.not_saved * (1 + self.through_data)


class ChangesBuffers(nets.Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nets.Block(), CodeBook(), nets.Block(), CodeBook()])
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.tensor(0))

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        self.seen += x.shape[0]
        return x - self.mean


class Checkpointed(nets.Language):
    """Recompute inside of the layers, and around them."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nets.Block(dropout=0.2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Checkpointed.Inside() for _ in range(4))
        self.around = around

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return x


class Compiled(nets.Language):
    """One layer compiled in place, one wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].compile(backend="eager")
        self.blocks[2] = torch.compile(self.blocks[2], backend="eager")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Routed(nn.Module):
    """Experts by their words: some get nothing from a microbatch, and one gets nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 6), nn.ModuleList(Expert() for _ in range(6))
        with torch.no_grad():
            self.router.bias[5] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)
            if len(rows[0]):
                result = result.index_put(rows, expert(x[rows]) * weights[rows].unsqueeze(-1))
        return x + result


class MixtureOfExperts(nets.Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(2))


class LoRA(nn.Module):
    """A frozen linear layer with a trained update of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / base.in_features)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class MergedLoRA(LoRA):
    """Adds the update to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


class Adapted(nets.Language):
    def __init__(self, kind: type[LoRA] = LoRA) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = kind(block.up), kind(block.down)


@dataclass
class Case:
    net: Callable[[], nn.Module]
    samples: Callable[[], Any]
    memory: str
    layers: Any = None
    tolerance: float = 2e-6


CASES = {
    "vit": Case(vit, images, "56KiB"),
    "convnext": Case(convnext, images, "144KiB"),
    "mixtral": Case(mixtral, tokens, "200KiB"),
    "mixture-of-experts": Case(MixtureOfExperts, tokens, "40KiB"),
    "gemma2": Case(gemma2, tokens, "80KiB"),
    "mamba": Case(mamba, tokens, "144KiB"),
    "rwkv": Case(rwkv, tokens, "96KiB"),
    "clip": Case(clip, images_with_text, "80KiB"),
    "wav2vec2": Case(wav2vec2, waves_with_text, "160KiB"),
    "checkpointed-llama": Case(checkpointed, tokens, "80KiB"),
    "resnet": Case(ResNet, images, "108KiB"),
    "unet": Case(UNet, images, "80KiB"),
    "vae": Case(VariationalAutoencoder, images, "108KiB"),
    "packed-lstm": Case(lambda: Packed(nn.LSTM), padded_tokens, "112KiB", {nn.LSTM}),
    "packed-gru": Case(lambda: Packed(nn.GRU), padded_tokens, "96KiB", {nn.GRU}),
    "transformer-encoder": Case(EncoderOnly, padded_tokens, "80KiB"),
    "attention-weights": Case(Attentive, tokens, "36KiB"),
    "parametrizations": Case(WeightNormed, tokens, "48KiB"),
    "sequential-of-sequentials": Case(SequentialOfSequentials, tokens, "20KiB"),
    "containers": Case(Containers, tokens, "44KiB"),
    "keywords-only": Case(KeywordsOnly, tokens, "60KiB"),
    "buffers": Case(ChangesBuffers, tokens, "60KiB"),
    "checkpoint-inside": Case(lambda: Checkpointed(around=False), tokens, "60KiB"),
    "checkpoint-around": Case(lambda: Checkpointed(around=True), tokens, "60KiB"),
    "returns-dataclass": Case(ReturnsDataclass, tokens, "60KiB"),
    "compiled": Case(Compiled, tokens, "60KiB"),
    "lora": Case(Adapted, tokens, "48KiB"),
    "merged-lora": Case(lambda: Adapted(MergedLoRA), tokens, "60KiB"),
}
SUMMED_IN_ANOTHER_ORDER = {
    "t5": Case(t5, tokens, "108KiB"),
    "bart": Case(bart, tokens, "108KiB"),
    "gemma3": Case(gemma3, tokens, "80KiB", tolerance=1e-5),
    "transformer": Case(Translator, padded_tokens, "108KiB"),
}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo asks.
@pytest.mark.parametrize(("name", "update"), combined(CASES, [("just in time",), ("after the backward",)]))
def test_a_model_that_swaps_trains_bit_for_bit_as_plain_lightning(name: str, update: Update) -> None:
    case = CASES[name]
    assert_same_and_swapped(build(case.net), case.samples(), case.memory, layers=case.layers, updates=[update])


@pytest.mark.parametrize("name", SUMMED_IN_ANOTHER_ORDER)
def test_a_model_with_tied_or_shared_sources_differs_by_the_rounding_of_sums_only(name: str) -> None:
    """By SGD: Adam divides a gradient of nearly zero by its own size, and makes its rounding as large as any."""
    case = SUMMED_IN_ANOTHER_ORDER[name]
    module = build(case.net, None)
    assert_same_and_swapped(module, case.samples(), case.memory, layers=case.layers, tolerance=case.tolerance)


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("name", "update"),
    combined(
        ["vit", "gemma2", "mixture-of-experts", "unet", "vae", "buffers", "checkpoint-around", "lora"],
        [("just in time",), ("after the backward",)],
    ),
)
def test_a_model_that_swaps_on_several_devices_trains_bit_for_bit_as_plain_lightning(name: str, update: Update) -> None:
    case = CASES[name]
    assert_same_and_swapped(build(case.net), case.samples(), case.memory, layers=case.layers, updates=[update])


@pytest.mark.parametrize("name", ["vit", "gemma2", "resnet", "lora"])
def test_a_model_in_mixed_precision_trains_bit_for_bit_as_plain_lightning(name: str) -> None:
    case = CASES[name]
    assert_same_and_swapped(build(case.net), case.samples(), case.memory, precision="bf16-mixed")


@pytest.mark.devices(1, 2)
def test_a_graph_that_does_not_split_trains_as_one_microbatch() -> None:
    assert_same_and_swapped(build(GraphNetwork), graphs(), "32KiB", num_microbatches=1, batch_size=1)


@pytest.mark.parametrize("kind", [LoRA, MergedLoRA])
@pytest.mark.devices(1, 2)
def test_adapters_alone_have_optimizer_state_and_the_base_stays(kind: type[LoRA]) -> None:
    module = build(lambda: Adapted(kind))
    before = copy.deepcopy(module.state_dict())
    strategy = HarmonyStrategy(device_memory="60KiB", num_microbatches=2)
    trainer = trainer_for(strategy, 3, [])
    trainer.fit(module, DataLoader(tokens(), batch_size=4))
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name.rsplit(".", 1)[1] for name in trained} == {"a", "b"}
    assert set(trainer.optimizers[0].state) == {p for name, p in module.named_parameters() if name in trained}
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in trained), name


@pytest.mark.one_after_the_other
def test_running_statistics_of_a_layer_called_twice_in_a_step_follow_another_order_and_nothing_else_does() -> None:
    """They average over all calls, and which microbatch makes its second call first depends on the packs."""
    samples, results = images(), []
    for strategy, num_microbatches in (
        (HarmonyStrategy(num_microbatches=2), 2),
        (HarmonyStrategy(num_microbatches=2, device_memory="48KiB"), 2),
        ("auto", 1),
    ):
        module = build(Siamese, None)
        trainer = trainer_for(strategy, 3, [], accumulate_grad_batches=2 // num_microbatches)
        torch.manual_seed(SEED)
        trainer.fit(module, DataLoader(samples, batch_size=2 * num_microbatches))
        results.append(module.state_dict())
    everywhere, swapped, plain = results
    for name, value in plain.items():
        if "running_" in name:
            assert torch.isfinite(swapped[name]).all(), name
        else:
            assert torch.equal(everywhere[name], swapped[name]), name
            torch.testing.assert_close(swapped[name], value, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft_train_bit_for_bit_and_alone_have_optimizer_state() -> None:
    peft = pytest.importorskip("peft")
    import transformers as hf

    def adapted() -> nn.Module:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return nets.HuggingFace(peft.get_peft_model(model, config))

    module = build(adapted)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert_same_and_swapped(module, tokens(), "64KiB")
    strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=2)
    trainer = trainer_for(strategy, 3, [])
    trainer.fit(module, DataLoader(tokens(), batch_size=4))
    assert set(trainer.optimizers[0].state) == {p for p in module.parameters() if p.requires_grad}


class AgainstItsBase(nn.Module):
    """Has the base as the reference, as where preferences are learned."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def scores(self, batch: Tensor) -> Tensor:
        logits = self.model(input_ids=batch).logits[:, :-1].log_softmax(-1)
        found: Tensor = logits.gather(2, batch[:, 1:, None]).sum((1, 2))
        return found

    def forward(self, batch: Tensor) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            reference = self.scores(batch)
        return -nn.functional.logsigmoid(self.scores(batch) - reference).mean()


class Switching(nn.Module):
    """Has another adapter as the reference."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        self.model.set_adapter("other")
        with torch.no_grad():
            reference = self.model(input_ids=batch, labels=batch).loss
        self.model.set_adapter("default")
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return (loss - 0.5 * reference).square()


def with_adapters(kind: str) -> nn.Module:
    """A model with adapters of one of peft's kinds."""
    import peft
    import transformers as hf

    targets = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    if kind == "target_parameters":
        config = hf.MixtralConfig(**DECODER, num_local_experts=4)
        experts = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
        return nets.HuggingFace(peft.get_peft_model(hf.MixtralForCausalLM(config), experts))
    more = {"dora": {"use_dora": True}, "modules_to_save": {"modules_to_save": ["lm_head"]}}.get(kind, {})
    model = peft.get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), peft.LoraConfig(**targets, **more))
    if kind == "several":
        model.add_adapter("other", peft.LoraConfig(**targets, init_lora_weights=False))
        return Switching(model)
    return AgainstItsBase(model) if kind == "disable_adapter" else nets.HuggingFace(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["disable_adapter", "target_parameters", "dora", "modules_to_save", "several"])
def test_adapters_of_each_kind_train_bit_for_bit(kind: str) -> None:
    pytest.importorskip("peft")
    assert_same_and_swapped(build(lambda: with_adapters(kind)), tokens(), "96KiB")


# ---- what reaches out of layers -----------------------------------------------------------------------------------------


class Box:
    """No pytree and no dataclass."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxed(nets.Language):
    """Layers whose graph goes on inside an object; ``saves``: autograd keeps a tensor for it."""

    class Shift(nn.Module):
        def __init__(self, *, saves: bool) -> None:
            super().__init__()
            self.shift, self.saves = nn.Parameter(torch.randn(WIDTH)), saves

        def forward(self, x: Tensor) -> Box:
            return Box(x * self.shift if self.saves else x + self.shift)

    def __init__(self, *, saves: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxed.Shift(saves=saves) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).x
        return x


@pytest.mark.parametrize("saves", [False, True])
def test_a_graph_goes_on_inside_an_object_that_a_layer_returns(saves: bool) -> None:
    assert_same_training(build(lambda: Boxed(saves=saves)), tokens(), num_microbatches=2, batch_size=4)


def test_the_logits_of_routers_reach_the_loss_bit_for_bit_by_the_hooks_that_collect_them() -> None:
    """The hooks collect those of recomputes, too: three layers' weights stayed on the device with their graphs."""
    module = build(lambda: mixtral(router_loss=True))
    assert_same_training(module, tokens(), device_memory="200KiB", num_microbatches=2, batch_size=4)


class ByAttention(nn.Module):
    """A penalty on what the model collects of its layers with hooks: attentions, and hidden states."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        self.net = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, attn_implementation="eager"))

    def forward(self, batch: Tensor) -> Tensor:
        found = self.net(
            input_ids=batch, labels=batch, use_cache=False, output_attentions=True, output_hidden_states=True
        )
        collected = [*found.attentions, *found.hidden_states]
        loss: Tensor = found.loss + sum(each.pow(2).mean() for each in collected)
        return loss


@pytest.mark.parametrize("memory", [None, "160KiB"])
def test_attentions_and_hidden_states_that_hooks_collect_reach_the_loss_bit_for_bit(memory: str | None) -> None:
    assert_same_training(build(ByAttention), tokens(), device_memory=memory, num_microbatches=2, batch_size=4)


def test_routers_may_be_layers_of_their_own() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    module = build(lambda: mixtral(router_loss=True), None)
    assert_same_and_swapped(module, tokens(), "200KiB", layers={MixtralTopKRouter}, tolerance=2e-6)


def untied(model: Any) -> nn.Module:
    """An encoder-decoder whose sides and head have tables of their own."""
    shared = model.get_input_embeddings().weight.detach()
    for side in (model.get_encoder(), model.get_decoder()):
        side.set_input_embeddings(nn.Embedding.from_pretrained(shared.clone(), freeze=False))
    model.lm_head.weight = nn.Parameter(torch.randn_like(shared) * 0.05)
    return SequenceToSequence(model)


def untied_t5() -> nn.Module:
    import transformers as hf

    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0, tie_word_embeddings=False)
    return untied(hf.T5ForConditionalGeneration(config))


def untied_bart() -> nn.Module:
    import transformers as hf

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _BART_SIDE.items()}
    config = hf.BartConfig(**TEXT, d_model=WIDTH, max_position_embeddings=32, **sides, tie_word_embeddings=False)
    return untied(hf.BartForConditionalGeneration(config))


class Listens(nn.Module):
    """Whisper, which reads frames and writes tokens."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _BART_SIDE.items()}
        positions = {"max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 4}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        config = hf.WhisperConfig(
            vocab_size=VOCABULARY, d_model=WIDTH, **sides, **positions, **special, tie_word_embeddings=False
        )
        self.model = hf.WhisperForConditionalGeneration(config)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(input_features=batch["frames"], labels=batch["labels"]).loss
        return loss


def frames() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(7)
    return [
        {"frames": torch.randn(4, 16, generator=made), "labels": torch.randint(3, VOCABULARY, (6,), generator=made)}
        for _ in range(24)
    ]


class UntiedTranslator(Translator):
    """Its decoder has a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_target = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)


ENCODER_DECODERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "t5": (untied_t5, tokens),
    "bart": (untied_bart, tokens),
    "transformer": (UntiedTranslator, padded_tokens),
    "whisper": (Listens, frames),
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@pytest.mark.devices(1, 2)
def test_an_encoders_output_that_all_layers_of_the_decoder_read_has_the_gradient_of_plain_training(name: str) -> None:
    """Each layer had summed the gradients of its own reads first, which rounds in another way."""
    net, samples = ENCODER_DECODERS[name]
    assert_same_and_swapped(build(net), samples(), "120KiB")


class Prefixed(nn.Module):
    """Learned keys and values lie before those of each layer, in a cache that layers are given.

    If the model is frozen, gradients come to nothing that the first layer is called with but to what is in the cache.
    """

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        import transformers as hf

        self.model = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)).requires_grad_(not is_frozen)
        self.prefix = nn.Parameter(torch.randn(3, 2, 1, 4, 8))

    def forward(self, batch: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache()
        for number, (keys, values) in enumerate(self.prefix):
            size = len(batch), -1, -1, -1
            cache.update(keys.expand(size), values.expand(size), number)
        loss: Tensor = self.model(input_ids=batch, past_key_values=cache, labels=batch).loss
        return loss


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("memory", [None, "64KiB"])
@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.devices(1, 2)
def test_learned_keys_and_values_in_a_cache_get_the_gradients_of_plain_training(
    memory: str | None, is_frozen: bool
) -> None:
    options: Any = {"num_microbatches": 2, "batch_size": 4}
    assert_same_training(build(partial(Prefixed, is_frozen=is_frozen)), tokens(), device_memory=memory, **options)


# ---- refused -----------------------------------------------------------------------------------------------------------


class CapsNorms(nets.Language):
    """Its embedding scales long rows down when it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)


@pytest.mark.one_after_the_other
def test_an_embedding_that_caps_the_norms_of_its_rows_trains_bit_for_bit() -> None:
    """That was refused."""
    assert_same_training(build(CapsNorms), tokens(), num_microbatches=2, batch_size=4)


# ---- validation and prediction -----------------------------------------------------------------------------------------


class Evaluated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch), batch_size=4)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)


EVALUATED = [
    "vit",
    "clip",
    "resnet",
    "packed-lstm",
    "transformer-encoder",
    "buffers",
    "returns-dataclass",
    "merged-lora",
]


@pytest.mark.parametrize("name", EVALUATED)
def test_validation_and_prediction_are_those_of_plain_lightning(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    untouched = Evaluated(case.net(), adamw)
    loader = DataLoader(case.samples(), batch_size=4)
    results = []
    for strategy in ("auto", HarmonyStrategy(device_memory=case.memory, layers=case.layers)):
        module = copy.deepcopy(untouched)
        trainer = trainer_for(strategy, 3, [])
        (values,) = trainer.validate(module, loader, verbose=False)
        results.append([torch.tensor(values["val_loss"]), *trainer.predict(module, loader)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Generator(Net):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            use_cache=True,
        )


def llama() -> nn.Module:
    import transformers as hf

    return nets.HuggingFace(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)))


@pytest.mark.parametrize("net", [llama, t5, mamba, gemma2])
def test_text_is_generated_with_a_cache_as_in_plain_lightning(net: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = Generator(net(), adamw)
    loader = DataLoader(tokens(8), batch_size=4)
    results = [
        trainer_for(strategy, 3, []).predict(module, loader)
        for strategy in ("auto", HarmonyStrategy(device_memory="160KiB" if net is mamba else "64KiB"))
    ]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_model_generates_after_training_with_the_weights_that_it_was_given() -> None:
    module = Generator(llama(), adamw)
    trainer = trainer_for(HarmonyStrategy(device_memory="80KiB", num_microbatches=2), 3, [])
    trainer.fit(module, DataLoader(tokens(), batch_size=4))
    loader = DataLoader(tokens(8), batch_size=4)
    results = [run.predict(module, loader) for run in (trainer, trainer_for("auto", 3, []))]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Unrolled(nn.Module):
    """A cell that is called once for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(nets.VOCABULARY, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, nets.VOCABULARY)

    def forward(self, batch: Tensor) -> Tensor:
        x, state, outputs = self.embed(batch), None, []
        for position in range(batch.shape[1]):
            state = self.cell(x[:, position], state)
            outputs.append(state[0])
        return F.cross_entropy(self.head(torch.stack(outputs, 1)).flatten(0, 1), batch.flatten())


@pytest.mark.parametrize(
    ("net", "memory"),
    [
        *(pytest.param("siamese", f"{m}KiB", marks=pytest.mark.one_after_the_other) for m in (56, 80, 100, 112)),
        *(("unrolled", f"{m}KiB") for m in (112, 144, 176)),
    ],
)
def test_more_memory_never_makes_a_layer_that_is_called_often_too_large(net: str, memory: str) -> None:
    """Graphs are kept for each call, and make way when memory runs out: they were counted once, and did not."""
    module, samples = (build(Siamese), images()) if net == "siamese" else (build(Unrolled), tokens())
    layers = None if net == "siamese" else {nn.LSTMCell, nn.Embedding, nn.Linear}
    strategy = HarmonyStrategy(num_microbatches=2, device_memory=memory, layers=layers)
    trainer = trainer_for(strategy, 3, [])
    trainer.fit(module, DataLoader(samples, batch_size=4))
    assert trainer.global_step == 3
