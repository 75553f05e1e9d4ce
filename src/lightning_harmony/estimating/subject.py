"""What an estimate is made of: a model without memory, its step, and a batch without data."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric

from lightning_harmony.engine.batches.merge import loss_of
from lightning_harmony.engine.memory.tensor_class import parameter_like
from lightning_harmony.engine.model.companions import Companions
from lightning_harmony.engine.structures.parts import made_of, parts_of
from lightning_harmony.engine.updates.device_step import ASSUMED_STATE_COPIES
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.setup import compat
from lightning_harmony.updating.optimizer_state import STATE_COPIES

_TRUE_TYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_MIXED_TYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_SHORT = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_DEFAULT_LENGTH = 1024
# Who tells about devices that are not used.
_OF_LIGHTNING = ("lightning.pytorch.utilities.rank_zero", "pytorch_lightning.utilities.rank_zero")


@dataclass
class Subject:
    """A model, its step and its batch, all without data.

    Attributes:
        name: what it is called in the estimate.
        module: on the meta device.
        step: takes a batch, returns its loss.
        batch: tensors on the meta device.
        batch_size: its samples.
        items: what is counted a second: "tokens" or "samples".
        items_per_sample: how many of these a sample has.
        optimizer: its name, and None where it is not known.
        notes: what was assumed.
    """

    name: str
    module: nn.Module
    step: Callable[[Any], Tensor]
    batch: Any
    batch_size: int
    items: str
    items_per_sample: int
    optimizer: str | None
    notes: list[str] = field(default_factory=list)

    @property
    def state_copies(self) -> int:
        """Bytes of optimizer state for each byte of a parameter."""
        return STATE_COPIES.get(self.optimizer or "AdamW", 0 if self.optimizer == "SGD" else ASSUMED_STATE_COPIES)


def precision_name(precision: Any) -> str:
    """A precision as Lightning's Trainer takes it, in full.

    Raises:
        ValueError: if harmony cannot train in it.
    """
    name = _SHORT.get(str(precision), str(precision))
    if name not in ("32-true", *_TRUE_TYPES, *_MIXED_TYPES):
        raise ValueError(
            f"precision={precision!r} cannot be estimated: use one of '32-true', "
            f"{', '.join(map(repr, (*_MIXED_TYPES, *_TRUE_TYPES)))}"
        )
    return name


@contextmanager
def naming_failures(name: str, batch: Any) -> Iterator[None]:
    """Within the context, what a model's own code raises is said to be its own, with the batch that it was given.

    Raises:
        UnsupportedModelError: in its place.
    """
    try:
        # It logs each failure with a traceback of its own.
        with quiet("torch._subclasses.fake_tensor", level=logging.CRITICAL):
            yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise UnsupportedModelError(
            f"{name} cannot run a step on a batch of {described(batch)}: {type(error).__name__}: {first}"
        ) from error


@contextmanager
def quiet(*loggers: str, level: int = logging.ERROR) -> Iterator[None]:
    """The context in which loggers, given by their names, tell nothing below a level."""
    found = [(logger, logger.level) for logger in map(logging.getLogger, loggers)]
    for logger, _ in found:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in found:
            logger.setLevel(before)


def described(batch: Any) -> str:
    """A batch as the command line takes it: types and shapes."""
    named = batch.items() if isinstance(batch, Mapping) else ((None, leaf) for leaf in tree_leaves(batch))
    return ", ".join(
        ("" if name is None else f"{name}=") + f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for name, leaf in named
        if isinstance(leaf, Tensor)
    )


def casting(precision: str) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a step in a precision."""
    if precision not in _MIXED_TYPES:
        return nullcontext
    return lambda: torch.autocast("cpu", _MIXED_TYPES[precision], cache_enabled=False)


def make_subject(
    model: Any,
    batch: Any,
    *,
    batch_size: int | None,
    sequence_length: int | None,
    precision: str,
    optimizer: str | None,
) -> Subject:
    """Get a model ready to be estimated.

    Args:
        model: a LightningModule, a function that makes one, or the configuration of a Hugging Face model.
        batch: an example batch; for a Hugging Face model, it may be left out.
        batch_size: samples of a Hugging Face model's batch.
        sequence_length: tokens of each.
        precision: as `precision_name` returns it.
        optimizer: the name of its class; None to ask the module.

    Raises:
        UnsupportedModelError: if it cannot be built without data.
        ValueError: if there is no batch, or it has no samples.
    """
    is_config = hasattr(model, "model_type") and hasattr(model, "to_dict")
    if (batch_size or sequence_length) and not (is_config and batch is None):
        raise ValueError(
            "batch_size and sequence_length shape the batch of a Hugging Face configuration, where none is given: leave out "
            "batch_size and sequence_length, and give all tensors of the batch"
        )
    subject = _of_config(model, batch, batch_size or 8, sequence_length) if is_config else _of_module(model, batch)
    if precision in _TRUE_TYPES:
        dtype = _TRUE_TYPES[precision]
        subject.module.to(dtype)
        subject.batch = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, subject.batch)
        subject.step = partial(_in_default_dtype, dtype, subject.step)
    subject.module.train()
    if optimizer is not None:
        subject.optimizer = optimizer
    elif subject.optimizer is None:
        subject.notes.append("the optimizer is taken to be AdamW, with two moments for each parameter")
    if subject.optimizer not in (None, "SGD", *STATE_COPIES):
        subject.notes.append(f"{subject.optimizer} is taken to keep {ASSUMED_STATE_COPIES} numbers for each parameter")
    return subject


def _in_default_dtype(dtype: torch.dtype, step: Callable[[Any], Tensor], batch: Any) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return step(batch)
    finally:
        torch.set_default_dtype(before)


# ---- LightningModules --------------------------------------------------------------------------------------------------


def _of_module(model: Any, batch: Any) -> Subject:
    built = model if isinstance(model, nn.Module) else build(model)
    if not callable(getattr(built, "training_step", None)):
        raise UnsupportedModelError(
            f"{type(built).__name__} has no training_step: give a LightningModule, a function that returns one, or the "
            "configuration of a Hugging Face model"
        )
    if batch is None:
        raise ValueError(
            f"the shapes of a batch for {type(built).__name__} are not known: give an example batch, or, on the command "
            'line, its tensors as in --batch "int64[8, 128], int64[8, 128]"'
        )
    module: Any = on_meta(built)
    with torch.device("meta"), quiet(*_OF_LIGHTNING):
        _prepare(module)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), batch)

    def step(microbatch: Any) -> Tensor:
        output = module.training_step(microbatch, *_batch_index(module))
        loss = loss_of(output)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise UnsupportedModelError(
                f"{type(module).__name__}.training_step returned no loss that needs gradients, so no backward can be "
                "estimated"
            )
        return loss

    return _subject(type(module).__name__, module, step, batch, _optimizer_of(module), [])


def _subject(
    name: str, module: nn.Module, step: Callable[[Any], Tensor], batch: Any, optimizer: str | None, notes: list[str]
) -> Subject:
    """A subject with what its batch tells of itself."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not leaves or leaves[0].shape[0] == 0:
        raise ValueError("the batch has no tensor with samples in its first dimension")
    batch_size, *shape = leaves[0].shape
    is_text = len(shape) == 1 and not leaves[0].is_floating_point()
    items, number = ("tokens", shape[0]) if is_text else ("samples", 1)
    return Subject(name, module, step, batch, batch_size, items, number, optimizer, notes)


def build(make: Callable[[], Any]) -> nn.Module:
    """Build a model on the meta device.

    Raises:
        UnsupportedModelError: if its constructor needs numbers, which that device doesn't have.
    """
    try:
        with torch.device("meta"):
            module = make()
    except (NotImplementedError, RuntimeError) as error:
        if not needs_numbers(error):
            raise
        raise UnsupportedModelError(
            f"the model cannot be built without memory: {str(error).splitlines()[0]} Make what its constructor computes "
            'with device="cpu", or build the model yourself and give that'
        ) from error
    if not isinstance(module, nn.Module):
        raise UnsupportedModelError(f"a model was expected, not {type(module).__name__}")
    return module


def needs_numbers(error: Exception) -> bool:
    """Whether an error is torch's, about numbers that a tensor on the meta device does not have."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error)


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors have no data; the module itself stays as it is."""
    memo: dict[int, Any] = {}
    trainer = compat.trainer_of(module)
    if trainer is not None:
        memo[id(trainer)] = None
    # What objects have of a weight has its memory in the copy, too.
    companions = Companions(module.modules(), module.parameters())

    def attribute(tensor: Tensor) -> Tensor:
        known: Tensor | None = memo.get(id(tensor))
        return _without_data(tensor) if known is None else known

    for parameter in module.parameters():
        empty = _without_data(parameter)
        memo.update(companions.within(parameter, empty))
        memo.update({id(tensor): _without_data(tensor) for tensor in companions.apart.get(parameter, ())})
        memo[id(parameter)] = parameter_like(parameter, empty, attribute)
    for buffer in module.buffers():
        memo[id(buffer)] = _without_data(buffer)
    return copy.deepcopy(module, memo)


def _without_data(tensor: Tensor) -> Tensor:
    def empty(part: Tensor) -> Tensor:
        if part.layout is not torch.strided:
            return part.detach().to("meta")
        return torch.empty_strided(part.size(), part.stride(), dtype=part.dtype, device="meta")

    return made_of(tensor, map(empty, parts_of(tensor)))


def _prepare(module: Any) -> None:
    """Give a LightningModule what its step expects around it."""
    is_of_old_tree = any(cls.__module__.startswith("pytorch_lightning.") for cls in type(module).__mro__)
    lightning = import_module("pytorch_lightning" if is_of_old_tree else "lightning.pytorch")
    module.trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if inspect.unwrap(type(module).configure_model) is not inspect.unwrap(lightning.LightningModule.configure_model):
        module.configure_model()
    module.log = module.log_dict = lambda *args, **kwargs: None
    if not module.automatic_optimization:
        raise UnsupportedModelError(
            f"{type(module).__name__} optimizes manually: its step brings each layer's weights whenever it calls it, which "
            "no plan predicts; train a few batches and read trainer.strategy.step_report"
        )
    for metric in module.modules():
        if isinstance(metric, Metric):
            # Their checks look at numbers.
            metric.forward = metric.update = metric.compute = lambda *args, **kwargs: torch.zeros(())  # type: ignore[method-assign,assignment]


def _batch_index(module: Any) -> tuple[int, ...]:
    parameters = inspect.signature(module.training_step).parameters
    return (0,) if "batch_idx" in parameters or len(parameters) > 1 else ()


def _optimizer_of(module: Any) -> str | None:
    """The name of the first optimizer that a module configures; None where it needs more than is here to do so."""
    try:
        with quiet(*_OF_LIGHTNING):
            configured = module.configure_optimizers()
    except Exception:
        return None
    nodes = [configured]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, Optimizer):
            return type(node).__name__
        nodes += node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    return None


# ---- Hugging Face ------------------------------------------------------------------------------------------------------


class _WithLoss(nn.Module):
    """Holds a model as a LightningModule would."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        loss = self.model(**batch).loss
        if not isinstance(loss, Tensor):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} returns no loss for a batch of {', '.join(batch)}: give the batch that it "
                'is trained with, as in --batch "input_ids=int64[8, 128], labels=int64[8]"'
            )
        return loss


def _of_config(config: Any, batch: Any, batch_size: int, sequence_length: int | None) -> Subject:
    model = build(lambda: model_class(config)._from_config(copy.deepcopy(config)))
    notes = []
    if batch is None:
        batch, note = _default_batch(config, model, batch_size, sequence_length)
        notes.append(note)
    if not isinstance(batch, Mapping):
        raise ValueError('the batch of a Hugging Face model has names, as in --batch "input_ids=int64[8, 128], ..."')
    batch = {name: tensor.to("meta") for name, tensor in batch.items()}
    module = _WithLoss(model)
    return _subject(type(model).__name__, module, module.__call__, batch, None, notes)


def model_class(config: Any) -> Any:
    """The class of the transformers library whose models a configuration describes, one with a loss.

    Raises:
        UnsupportedModelError: if none is known.
    """
    transformers = import_module("transformers")
    names = getattr(config, "architectures", None) or []
    if names and hasattr(transformers, names[0]):
        return getattr(transformers, names[0])
    auto = import_module("transformers.models.auto.modeling_auto")
    of_encoder = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ") if getattr(config, "is_encoder_decoder", False) else ()
    for task in (*of_encoder, "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"):
        mapping = getattr(auto, f"MODEL_FOR_{task}_MAPPING", {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, list | tuple) else found
    raise UnsupportedModelError(
        f"{type(config).__name__} belongs to no model with a loss that is known here: name one in its `architectures`"
    )


def _default_batch(config: Any, model: Any, batch_size: int, length: int | None) -> tuple[dict[str, Tensor], str]:
    empty = partial(torch.empty, device="meta")
    main_input = getattr(model, "main_input_name", "input_ids")
    if main_input == "pixel_values":
        if length is not None:
            raise ValueError(f"{type(model).__name__} takes images: leave out sequence_length")
        vision = getattr(config, "vision_config", config)
        size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        pixels = empty(batch_size, getattr(vision, "num_channels", 3), size, size)
        labels = empty(batch_size, dtype=torch.int64)
        return {
            "pixel_values": pixels,
            "labels": labels,
        }, f"the batch is taken to be {batch_size} images of {size} x {size}"
    if main_input != "input_ids":
        raise ValueError(
            f"the shapes of a batch for {type(model).__name__} are not known: give its tensors, as in "
            f'--batch "{main_input}=float32[8, 80, 3000], labels=int64[8, 128]"'
        )
    longest = next(
        (
            value
            for name in ("max_position_embeddings", "n_positions")
            if isinstance(value := getattr(config, name, None), int)
        ),
        _DEFAULT_LENGTH,
    )
    if length is not None and length > longest:
        raise ValueError(
            f"sequences of {length} tokens are longer than the {longest} positions of {type(config).__name__}"
        )
    length = length or min(longest, _DEFAULT_LENGTH)
    tokens = empty(batch_size, length, dtype=torch.int64)
    # Without, some models ask for a setting with which they would make it of the labels.
    of_decoder = {"decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else {}
    return {
        "input_ids": tokens,
        **of_decoder,
        "labels": tokens,
    }, f"the batch is taken to be {batch_size} sequences of {length} tokens"
