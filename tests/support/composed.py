"""Weights that are composed of other tensors, as those of torchao are: classes of tensors with ``__tensor_flatten__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class Composed(Tensor):
    """The values of a tensor in tensors of its own, which a subclass names.

    Operations that it does not know run on what the values are, which is made anew each time.
    """

    names: tuple[str, ...]
    # Whether a clone is made of its values, as that of NF4Tensor is, and has others where they are rounded.
    clones_values = False

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, **inner: Tensor) -> Any:
        device = next(iter(inner.values())).device
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]

    def __init__(self, shape: torch.Size, dtype: torch.dtype, **inner: Tensor) -> None:
        for name in self.names:
            setattr(self, name, inner[name])

    def values_(self) -> Tensor:
        """What the values are."""
        raise NotImplementedError

    def with_inner(self, function: Callable[[Tensor], Tensor]) -> Any:
        """Another one, each of its tensors made by a function."""
        return type(self)(self.shape, self.dtype, **{name: function(getattr(self, name)) for name in self.names})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.names), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Any:
        return cls(size, dtype, **inner)

    def __repr__(self, **kwargs: Any) -> str:
        return f"{type(self).__name__}({self.shape})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.clone.default and cls.clones_values:
            return type(args[0]).of(args[0].values_())  # type: ignore[attr-defined]
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return args[0].with_inner(lambda tensor: func(tensor, *args[1:], **kwargs))
        if func is aten._to_copy.default:
            # Another type is that of what the values are.
            dtype = kwargs.pop("dtype", args[0].dtype)
            inner = {name: func(getattr(args[0], name), **kwargs) for name in cls.names}
            return cls(args[0].shape, dtype, **inner)
        if func is aten.copy_.default and type(args[1]) is type(args[0]):
            for name in cls.names:
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if func is aten.equal.default:
            raise NotImplementedError(f"{cls.__name__} compares nothing, as those of torchao")
        args, kwargs = tree_map_only(Composed, lambda tensor: tensor.values_(), (args, kwargs))
        return func(*args, **kwargs)


class Packed(Composed):
    """Four bits an element, two in a byte, and a scale and a zero point of each row."""

    names = ("codes", "scale", "zero")
    codes: Tensor
    scale: Tensor
    zero: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """Values, rounded to sixteen steps between the least and the largest of a row."""
        least, most = values.aminmax(dim=1, keepdim=True)
        # A power of two: a GPU multiplies by the inverse of any other number, and the host divides.
        scale = (most - least) / 16
        codes = ((values - least) / scale).round().clamp(max=15).to(torch.uint8)
        return cls(values.shape, values.dtype, codes=codes[:, ::2] * 16 + codes[:, 1::2], scale=scale, zero=least)

    def values_(self) -> Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], 2).reshape(self.shape)
        return codes.to(self.dtype) * self.scale.to(self.dtype) + self.zero.to(self.dtype)


class Scaled(Composed):
    """Eight bits an element and a scale of each row. Its product is one of its codes, whose rows are then scaled."""

    names = ("codes", "scale")
    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """Values, rounded to steps of a row."""
        scale = values.abs().amax(1, keepdim=True) / 128
        codes = (values / scale).round().clamp(max=127).to(torch.int8)
        return cls(values.shape, values.dtype, codes=codes, scale=scale)

    def values_(self) -> Tensor:
        return self.codes.to(self.dtype) * self.scale.to(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and isinstance(args[1], Scaled):
            x, weight, bias = (*args, None)[:3]
            product = (x @ weight.codes.to(x.dtype).t()) * weight.scale.t()
            return product if bias is None else product + bias
        return super().__torch_function__(func, types, args, kwargs or {})


class Nested(Composed):
    """A packed tensor, and a plain one that is added to it."""

    names = ("packed", "offset")
    packed: Packed
    offset: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """Packed values, and a row that is added."""
        return cls(values.shape, values.dtype, packed=Packed.of(values), offset=values[:1].clone())

    def values_(self) -> Tensor:
        return self.packed.values_().to(self.dtype) + self.offset.to(self.dtype)


class Unsteady(Packed):
    """Packed anew, and with a larger zero, whenever it is cloned."""

    clones_values = True

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """Packed values, moved by a little."""
        return super().of(values + 0.001)


class Views(Composed):
    """Halves that are views of one tensor, one of them with its elements in another order."""

    names = ("upper", "lower")
    upper: Tensor
    lower: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """Values in half precision."""
        whole = values.half()
        middle = len(whole) // 2
        return cls(values.shape, values.dtype, upper=whole[:middle], lower=whole[middle:].t())

    def values_(self) -> Tensor:
        return torch.cat([self.upper, self.lower.t()]).to(self.dtype)


class Overlapping(Composed):
    """A tensor in eight bits, and some of its rows once more, as scales: they share its memory."""

    names = ("codes", "rows", "again")
    codes: Tensor
    rows: Tensor
    again: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """Values as eighths."""
        codes = (values * 8).round().to(torch.int8)
        return cls(values.shape, values.dtype, codes=codes, rows=codes[:2], again=codes)

    def values_(self) -> Tensor:
        return self.codes.to(self.dtype) / 8 + self.rows.sum() / 1024 + self.again.to(self.dtype) / 64


class Lookup(Composed):
    """Codes of values in a table that all such tensors have in common."""

    names = ("codes", "table")
    codes: Tensor
    table: Tensor
    common = torch.linspace(-1, 1, 256).tanh()

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """The nearest values of the table."""
        codes = torch.bucketize(values.contiguous(), cls.common).clamp(max=255).to(torch.uint8)
        return cls(values.shape, values.dtype, codes=codes, table=cls.common)

    def values_(self) -> Tensor:
        return self.table[self.codes.int()].to(self.dtype)

    def with_inner(self, function: Callable[[Tensor], Tensor]) -> Any:
        return type(self)(self.shape, self.dtype, codes=function(self.codes), table=self.table)
