"""Layers found in module trees."""

from typing import ClassVar

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy

from lightning_harmony.engine.model.decompose import find_layers


class Block(nn.Module):
    """A block with an inner Sequential that repeats classes too."""

    def __init__(self, width=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Mlp(nn.Module):
    """No repeated siblings inside."""

    def __init__(self, width=4):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Decoder(nn.Module):
    """Embedding, blocks and head, as most language models."""

    def __init__(self, num_blocks=3):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.positions = nn.Parameter(torch.zeros(8, 4))
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.head = nn.Linear(4, 10, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class BasicBlock(nn.Module):
    def __init__(self, width, downsample=None):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x):
        return x


class ResNet(nn.Module):
    """The module tree of torchvision's."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.ReLU()
        self.layer1 = nn.Sequential(BasicBlock(4), BasicBlock(4))
        self.layer2 = nn.Sequential(BasicBlock(4, nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))), BasicBlock(4))
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return x


class Learned(Metric):
    """A metric with a network of its own, as FID has."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(2, 2)

    def update(self):
        pass

    def compute(self):
        return 0


def root_of(**modules):
    """Make a model with these submodules."""
    root = nn.Module()
    for name, module in modules.items():
        root.add_module(name, module)
    return root


def names(root, max_layer_bytes=None, layers=None):
    return [layer.name for layer in find_layers(root, max_layer_bytes=max_layer_bytes, layers=layers)]


def unowned(root):
    """Parameters that are in no layer: glue uses them."""
    owned = {parameter for layer in find_layers(root, max_layer_bytes=None) for parameter in layer.module.parameters()}
    return [name for name, parameter in root.named_parameters() if parameter not in owned]


def classes(root):
    return {layer.name: type(layer.module).__name__ for layer in find_layers(root, max_layer_bytes=None)}


class TestPlainModels:
    def test_blocks_are_layers_and_so_is_each_module_beside_them(self):
        assert names(Decoder()) == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]

    def test_a_wrapper_around_the_model_changes_only_the_names(self):
        assert names(root_of(model=Decoder(2))) == ["model.embed", "model.blocks.0", "model.blocks.1", "model.head"]

    def test_layers_are_the_modules_of_those_names(self):
        root = Decoder()
        for layer in find_layers(root, max_layer_bytes=None):
            assert root.get_submodule(layer.name) is layer.module

    @pytest.mark.parametrize("kind", ["a model beside its copy", "an ensemble", "stages"])
    def test_blocks_that_are_large_stacks_of_blocks_give_theirs(self, kind):
        """A model beside its frozen copy was two layers, wherever a device had the room for the weights of one."""
        if kind == "a model beside its copy":
            root = nn.ModuleDict({"model": Decoder(4), "reference": Decoder(4)})
            expected = [f"{name}.blocks.{number}" for name in ("model", "reference") for number in range(4)]
        elif kind == "an ensemble":
            root = nn.ModuleList(Decoder(5) for _ in range(6))
            expected = [f"{member}.blocks.{number}" for member in range(6) for number in range(5)]
        else:
            stages = [nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(depth))}) for depth in (2, 6)]
            root = root_of(stages=nn.ModuleList(stages))
            expected = [
                f"stages.{stage}.blocks.{number}" for stage, depth in ((0, 2), (1, 6)) for number in range(depth)
            ]
        assert [name for name in names(root) if "blocks" in name] == expected

    def test_blocks_of_many_stay_layers_whatever_they_are_made_of(self):
        """As mixtures of experts, each of which is a module."""

        class Mixture(nn.Module):
            def __init__(self):
                super().__init__()
                self.experts = nn.ModuleList(Mlp() for _ in range(8))

            def forward(self, x):
                return sum(expert(x) for expert in self.experts)

        assert names(nn.ModuleList(Mixture() for _ in range(16))) == [str(number) for number in range(16)]
        assert names(nn.ModuleList(Mixture() for _ in range(4)))[:2] == ["0.experts.0", "0.experts.1"]

    def test_a_sequential_gives_its_parts_that_have_parameters(self):
        assert names(root_of(net=nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["net.0", "net.2"]

    def test_the_root_itself_may_be_a_sequential(self):
        assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]

    @pytest.mark.parametrize("root", [nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Dropout()), nn.Module()])
    def test_a_root_without_submodules_that_have_parameters_has_no_layers(self, root):
        assert names(root) == []

    def test_a_module_without_repeated_blocks_is_one_layer(self):
        modules = {"mlp": Mlp(), "attention": nn.MultiheadAttention(4, 2), "lstm": nn.LSTM(4, 4, num_layers=2)}
        assert names(root_of(**modules)) == ["mlp", "attention", "lstm"]

    def test_single_blocks_in_a_list_are_layers_too(self):
        assert names(root_of(blocks=nn.ModuleList([Mlp(), nn.Linear(4, 4)]))) == ["blocks.0", "blocks.1"]

    def test_the_values_of_a_module_dict_are_layers(self):
        assert names(root_of(heads=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3)}))) == [
            "heads.a",
            "heads.b",
        ]

    def test_resnet_gives_a_layer_for_each_block(self):
        blocks = ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
        assert names(ResNet()) == ["conv1", "bn1", *blocks, "fc"]

    def test_transformer_encoder_gives_a_layer_for_each_of_its_layers(self):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, norm=nn.LayerNorm(4))
        assert names(root_of(encoder=encoder)) == ["encoder.layers.0", "encoder.layers.1", "encoder.norm"]

    def test_finding_layers_runs_nothing(self):
        class Unrunnable(Decoder):
            def forward(self, tokens):
                raise AssertionError

        with torch.device("meta"):
            assert len(names(root_of(model=Unrunnable()))) == 5


class TestWhatIsNoLayer:
    def test_metrics_and_what_they_hold(self):
        metrics = MetricCollection({"accuracy": BinaryAccuracy(), "learned": Learned()})
        root = root_of(head=nn.Linear(2, 2), learned=Learned(), metrics=metrics, wrapper=nn.Sequential(Learned()))
        assert names(root) == ["head"]

    def test_modules_that_are_never_called(self):
        namespace = root_of(first=nn.Linear(2, 2), second=nn.Embedding(2, 2))
        assert names(root_of(namespace=namespace)) == ["namespace.first", "namespace.second"]

    def test_a_module_whose_forward_was_set_on_it_is_called(self):
        patched = root_of(first=nn.Linear(2, 2))
        patched.forward = patched.first.forward
        assert names(root_of(patched=patched)) == ["patched"]

    def test_lists_of_parameters_are_glue(self):
        scales = nn.ParameterList([torch.ones(2)])
        root = root_of(head=nn.Linear(2, 2), scales=scales, biases=nn.ParameterDict({"a": torch.ones(2)}))
        assert names(root) == ["head"]
        assert unowned(root) == ["scales.0", "biases.a"]

    def test_a_parametrized_module_stays_whole(self):
        linear = parametrizations.weight_norm(parametrizations.weight_norm(nn.Linear(4, 4)), "bias", dim=None)
        assert names(root_of(linear=linear)) == ["linear"]
        assert names(root_of(linear=linear), max_layer_bytes=1) == ["linear"]


class TestCapacity:
    block_bytes = 4 * (2 * 4 + 2 * (4 * 4 + 4))

    def test_weights_and_gradients_of_a_block_just_fit(self):
        root = root_of(blocks=nn.ModuleList([Block(), Block()]))
        assert names(root, max_layer_bytes=2 * self.block_bytes) == ["blocks.0", "blocks.1"]

    def test_a_parameter_that_a_block_has_twice_counts_once(self):
        root = root_of(blocks=nn.ModuleList([Block(), Block()]))
        for block in root.blocks:
            block.mlp[2].weight = block.mlp[0].weight
        assert names(root, max_layer_bytes=2 * (self.block_bytes - 4 * 16)) == ["blocks.0", "blocks.1"]

    def test_a_block_that_does_not_fit_is_descended_into(self):
        root = root_of(blocks=nn.ModuleList([Block(), Block()]))
        inside = ["norm", "mlp.0", "mlp.2"]
        expected = [f"blocks.{index}.{name}" for index in (0, 1) for name in inside]
        assert names(root, max_layer_bytes=2 * self.block_bytes - 1) == expected

    def test_only_what_does_not_fit_is_descended_into(self):
        root = root_of(blocks=nn.ModuleList([Block(4), Block(8)]))
        assert names(root, max_layer_bytes=2 * self.block_bytes) == [
            "blocks.0",
            "blocks.1.norm",
            "blocks.1.mlp.0",
            "blocks.1.mlp.2",
        ]

    def test_a_leftover_that_does_not_fit_is_descended_into(self):
        assert names(root_of(mlp=Mlp()), max_layer_bytes=1184) == ["mlp"]
        assert names(root_of(mlp=Mlp()), max_layer_bytes=1183) == ["mlp.up", "mlp.down"]

    def test_a_leaf_that_does_not_fit_is_a_layer_for_the_caller_to_refuse(self):
        assert names(root_of(head=nn.Linear(100, 100)), max_layer_bytes=10) == ["head"]

    def test_a_module_with_nothing_callable_below_stays_whole(self):
        class Scales(nn.Module):
            def __init__(self):
                super().__init__()
                self.scales = nn.ParameterList([torch.ones(100)])

            def forward(self, x):
                return x * self.scales[0]

        assert names(root_of(scales=Scales()), max_layer_bytes=10) == ["scales"]


class TestSharing:
    def test_a_module_at_two_places_is_one_layer_under_its_first_name(self):
        shared = nn.Linear(2, 2)
        assert names(root_of(first=shared, between=nn.Linear(2, 2), second=shared)) == ["first", "between"]

    def test_a_block_that_is_repeated_by_sharing_is_a_layer(self):
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.steps = nn.ModuleList([Mlp()] * 3)

            def forward(self, x):
                return x

        assert names(root_of(model=Recurrent())) == ["model.steps.0"]

    @pytest.mark.parametrize("shared_first", [True, False])
    def test_no_layer_lies_within_another(self, shared_first):
        mlp = Mlp()
        modules = {"block": mlp, "inner": mlp.up} if not shared_first else {"inner": mlp.up, "block": mlp}
        assert names(root_of(**modules)) == ["block"]

    def test_modules_that_share_a_parameter_are_both_layers(self):
        root = Decoder(2)
        root.head.weight = root.embed.weight
        assert names(root) == ["embed", "blocks.0", "blocks.1", "head"]
        assert unowned(root) == ["positions"]


class TestOverride:
    def test_modules_of_the_classes_are_layers_and_the_rest_is_as_usual(self):
        root = root_of(mlp=Mlp(), decoder=Decoder(2))
        expected = ["mlp.up", "mlp.down", "decoder.embed"]
        expected += [f"decoder.blocks.{index}.{name}" for index in (0, 1) for name in ("norm", "mlp.0", "mlp.2")]
        assert names(root, layers={nn.Linear}) == [*expected, "decoder.head"]

    def test_a_subclass_counts(self):
        class Special(Block):
            pass

        assert names(root_of(model=nn.Sequential(Special(), Mlp())), layers=[Block]) == ["model.0", "model.1"]

    def test_the_outermost_match_is_a_layer_whatever_its_size(self):
        assert names(root_of(model=Decoder()), max_layer_bytes=1, layers=(Decoder, Block)) == ["model"]

    def test_a_sequential_may_be_named(self):
        assert names(root_of(net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), layers={nn.Sequential}) == ["net"]

    def test_a_predicate_sees_names_and_modules(self):
        root = Decoder()

        def middle(name, module):
            assert root.get_submodule(name) is module
            return name == "blocks.1.mlp"

        expected = ["embed", "blocks.0", "blocks.1.norm", "blocks.1.mlp", "blocks.2", "head"]
        assert names(root, layers=middle) == expected

    def test_the_root_and_what_cannot_be_a_layer_are_not_asked_for(self):
        root = root_of(blocks=nn.ModuleList([Block()]), dropout=nn.Dropout(), metric=Learned())
        assert names(root, layers=lambda name, module: True) == ["blocks.0"]

    def test_a_choice_that_matches_nothing_is_refused(self):
        with pytest.raises(ValueError, match="matches no module of Decoder"):
            names(Decoder(2), layers={nn.ReLU})

    @pytest.mark.parametrize("layers", [Block, ["Block"], {Block()}], ids=["class", "name", "module"])
    def test_anything_but_classes_or_a_predicate_is_refused(self, layers):
        with pytest.raises(TypeError, match="collection of module classes or a predicate"):
            names(Decoder(), layers=layers)


class TestHuggingFace:
    sizes: ClassVar = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    tokens: ClassVar = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}

    def gpt2(self, num_blocks=2):
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=num_blocks, n_embd=16, n_head=2, **self.tokens)
        )

    def test_gpt2(self):
        expected = {
            "model.transformer.wte": "Embedding",
            "model.transformer.wpe": "Embedding",
            "model.transformer.h.0": "GPT2Block",
            "model.transformer.h.1": "GPT2Block",
            "model.transformer.ln_f": "LayerNorm",
            "model.lm_head": "Linear",
        }
        assert classes(root_of(model=self.gpt2())) == expected

    def test_a_class_that_must_not_be_split_is_a_block_even_if_alone(self):
        assert classes(root_of(model=self.gpt2(num_blocks=1)))["model.transformer.h.0"] == "GPT2Block"

    def test_tied_embedding_leaves_no_glue(self):
        model = self.gpt2()
        assert model.lm_head.weight is model.transformer.wte.weight
        assert unowned(model) == []

    def test_a_block_that_does_not_fit_is_split_all_the_same(self):
        assert "transformer.h.0.attn.c_attn" in names(self.gpt2(), max_layer_bytes=100)

    def test_llama(self):
        config = transformers.LlamaConfig(**self.sizes, **self.tokens)
        expected = {
            "model.embed_tokens": "Embedding",
            "model.layers.0": "LlamaDecoderLayer",
            "model.layers.1": "LlamaDecoderLayer",
            "model.norm": "LlamaRMSNorm",
            "lm_head": "Linear",
        }
        assert classes(transformers.LlamaForCausalLM(config)) == expected

    def test_bert(self):
        config = transformers.BertConfig(**self.sizes, vocab_size=50)
        expected = {
            "bert.embeddings": "BertEmbeddings",
            "bert.encoder.layer.0": "BertLayer",
            "bert.encoder.layer.1": "BertLayer",
            "bert.pooler": "BertPooler",
            "classifier": "Linear",
        }
        assert classes(transformers.BertForSequenceClassification(config)) == expected
