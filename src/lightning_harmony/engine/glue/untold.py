"""Operations on stand-ins of which torch tells no class, such as those of `torch.tensor`, TorchScript and `torch.vmap`."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_harmony.engine.structures.memory_users import memory_of

# While one exists, its thread's dispatch keys are those of the call that a class is told of.
_AsCalled: Any = getattr(torch._C, "_RestorePythonTLSSnapshot")  # noqa: B009


class Untold(Tensor):
    """A stand-in. It has one element: what torch computes with that would be no number.

    Its class is told of most operations by ``__torch_function__``. The others come to ``__torch_dispatch__``, below autograd:
    their gradients come to the stand-in itself.
    """

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute with what is stood in for."""
        kwargs = kwargs or {}
        stand_ins = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, Untold)}
        written = _written(func, args, kwargs)
        is_changed = {id(each) for each in written}
        with _AsCalled(), temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.no_grad():
            content = {key: each.content(to_change=key in is_changed) for key, each in stand_ins.items()}
        args, kwargs = tree_map_only(Untold, lambda each: content[id(each)], (args, kwargs))
        result = func(*args, **kwargs)
        for tensor in (*tree_leaves(result), *written):
            of = _whose_memory(tensor, content) if isinstance(tensor, Tensor) else None
            if of is not None:
                stand_ins[of].note_view(tensor, content[of])
        return result

    @property
    def __tensor_flatten__(self) -> NoReturn:
        """Have none. A compiler looks for it where code is to be traced that has the stand-in."""
        if torch._guards.TracingContext.try_get() is not None:
            self.refuse_compiler()
        raise AttributeError("__tensor_flatten__")

    def refuse_compiler(self) -> None:
        """Refuse that compiled code uses it, if that is to be."""

    def as_subclass(self, cls: Any) -> Any:
        """Give what it stands for as a tensor of a class, as torch does without telling anybody."""
        return type(self).__torch_function__(Tensor.as_subclass, (), (self, cls))

    def content(self, *, to_change: bool) -> Tensor:
        """What it stands for, without a graph.

        Args:
            to_change: whether it is about to be changed in place.

        Raises:
            UnsupportedModelError: if that may not be.
        """
        raise NotImplementedError

    def note_view(self, view: Tensor, content: Tensor) -> None:
        """Code has a tensor in the memory of what an operation was given as the content."""


class Itself(NamedTuple):
    """What a checkpoint saves of a stand-in that it is called with."""

    stand_in: Untold

    def load(self) -> Tensor:
        """What it is called with again."""
        return self.stand_in


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes, or gives other memory."""
    given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    names = {each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    return [each for each in tree_leaves([given.get(name) for name in names]) if isinstance(each, Tensor)]


def _whose_memory(tensor: Tensor, content: dict[int, Tensor]) -> int | None:
    memory = memory_of(tensor)
    return next((key for key, each in content.items() if memory is not None and memory_of(each) == memory), None)
