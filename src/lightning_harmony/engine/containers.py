"""Lists and dicts that a layer is called with: it gets copies, and what it does to these is done to the caller's."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

from torch import Tensor

_MUTABLE = (list, dict, OrderedDict, defaultdict, deque)


class _Given:
    """Stands for something that the caller has: a tensor, or a list or dict among the arguments, by its number."""

    def __init__(self, *, is_tensor: bool, number: int) -> None:
        self.is_tensor = is_tensor
        self.number = number


class Containers:
    """The lists and dicts among the arguments of a call.

    Attributes:
        are_none: whether there is none, as in most calls.

    Args:
        args: the caller's.
        kwargs: the caller's.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._own = list(_containers(args, kwargs))
        self.are_none = not self._own
        self._changed: list[int] | None = None

    def watched(self, args: Any, kwargs: Any, tensors: list[Tensor]) -> Callable[[], list[Any]]:
        """Look at the copies that a layer is called with.

        Args:
            args: of the same structure as the caller's.
            kwargs: likewise.
            tensors: those among them.

        Returns:
            A function to call after the layer: the content of those that it changed. Where a call is repeated, of those that
            it changed the first time.
        """
        if self.are_none:
            return list
        copies = list(_containers(args, kwargs))
        before = [copy.copy() for copy in copies]
        known = {id(tensor): _Given(is_tensor=True, number=number) for number, tensor in enumerate(tensors)}
        known |= {id(copy): _Given(is_tensor=False, number=number) for number, copy in enumerate(copies)}

        def changed() -> list[Any]:
            if self._changed is None:
                pairs = enumerate(zip(copies, before, strict=True))
                self._changed = [number for number, pair in pairs if not have_same_content(*pair)]
            return [_exchange(copies[number], lambda value: known.get(id(value), value)) for number in self._changed]

        return changed

    def write_back(self, contents: list[Any], tensors: list[Tensor]) -> None:
        """Give the caller's lists and dicts the content that the layer left in its copies.

        Args:
            contents: from the function that `watched` returned.
            tensors: the caller's.
        """

        def original(value: Any) -> Any:
            if not isinstance(value, _Given):
                return value
            return tensors[value.number] if value.is_tensor else own[value.number]

        # A backward may come to the call later, but not to what the caller has.
        own, self._own = self._own, []
        for number, content in zip(self._changed or [], contents, strict=True):
            values = _exchange(content, original)
            own[number].clear()
            (own[number].update if isinstance(values, dict) else own[number].extend)(values)


def _containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (tuple, *_MUTABLE)):
            yield from _within(value)


def _within(value: Any) -> Iterator[Any]:
    if type(value) in _MUTABLE:
        yield value
    if isinstance(value, (tuple, *_MUTABLE)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _within(inner)


def have_same_content(one: Any, other: Any) -> bool:
    """Whether two lists, dicts, sets or deques hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))
    return bool(one == other) if isinstance(one, set) else all(map(is_, one, other))


def copied_content(content: Any) -> Any:
    """A list, dict, set or deque as it is, in a list, dict or set: classes of one's own may copy otherwise."""
    if isinstance(content, dict):
        return dict(content)
    return set(content) if isinstance(content, set) else list(content)


def _exchange(content: Any, exchange: Callable[[Any], Any]) -> Any:
    if isinstance(content, dict):
        return {name: exchange(value) for name, value in content.items()}
    return [exchange(value) for value in content]
