"""How the microbatches of a step run: where the model is, watched or not, or spread over its replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_harmony.engine.model.compiled import is_compiled
from lightning_harmony.engine.replicas.replica import Holders, NotReplicableError
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import version_of

_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__


class Runs:
    """Runs the microbatches of a step where the model is."""

    def step(self, parts: Sequence[Any]) -> AbstractContextManager[Sequence[Any]]:
        """The context of the step; it gives its microbatches, each where it runs."""
        return nullcontext(parts)

    def forward(self, number: int) -> AbstractContextManager[None]:
        """The context of a microbatch's forward."""
        return nullcontext()

    def backward(self, number: int) -> AbstractContextManager[None]:
        """The context of its backward."""
        return nullcontext()


class _ReadsGradients(TorchFunctionMode):
    """Tells whether code asks for gradients.

    Attributes:
        has_read: whether it has.
    """

    has_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_read = self.has_read or func == _GRADIENT
        return func(*args, **(kwargs or {}))


class Watched(Runs):
    """Runs microbatches where the model is, and finds which of its tensors they change in place.

    Args:
        module: the model.
        home: the device where it is.

    Attributes:
        changing: those tensors, by their identities.
        refused: why other devices could not do the same; None if they can, as far as was seen.
    """

    def __init__(self, module: nn.Module, home: torch.device) -> None:
        self.changing: dict[int, Tensor] = {}
        self.refused: str | None = None
        self._module = module
        self._holders = Holders(module, home)
        self._seen: dict[Tensor, tuple[int | None, Tensor]] = {}

    @contextmanager
    def step(self, parts: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """The context of the step."""
        for name, module in self._module.named_modules():
            if isinstance(module, torch.jit.ScriptModule) or is_compiled(module):
                self.refused = f"{name or 'the model'!r} is compiled"
        self._look()
        computed = {id(tensor): tensor for tensor in self._seen if not tensor.is_leaf}
        yield parts
        self._look()
        if any(id(tensor) in computed for tensor in self._seen):
            self.refused = "it keeps a tensor that was computed of others, with its graph"

    @contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """The context of a microbatch's forward."""
        with _ReadsGradients() as reads:
            yield
        if reads.has_read:
            self.refused = "the step reads gradients, which are elsewhere until all microbatches have run"
        changed = self._look()
        if any(isinstance(tensor, nn.Parameter) for tensor in changed):
            self.refused = "the step changes parameters"
        self.changing.update((id(tensor), tensor) for tensor in changed)

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """The context of a microbatch's backward."""
        yield
        if self._look():
            self.refused = "the backward changes buffers"
        gradients = [tensor.grad for tensor in self._seen if tensor.is_leaf]
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
            self.refused = "it has sparse gradients"

    def _look(self) -> list[Tensor]:
        """The tensors that have changed since the last look."""
        if self.refused is not None:
            return []
        try:
            self._holders.look()
            tensors = self._holders.tensors()
        except NotReplicableError as error:
            self.refused = str(error)
            return []
        before, self._seen = self._seen, {tensor: (version_of(tensor), checksum(tensor)) for tensor in tensors}
        return [tensor for tensor, seen in before.items() if tensor in self._seen and not self._is_as(tensor, *seen)]

    def _is_as(self, tensor: Tensor, version: int | None, total: Tensor) -> bool:
        # What is written may be what was there, as where a power iteration has converged.
        version_now, total_now = self._seen[tensor]
        return version == version_now and torch.equal(total, total_now)
