"""Functions with a cache of `functools`: what that held when a layer was called, its code finds when it runs again.

A function that draws random numbers draws them where its cache is filled. To find the result there is to draw none: what the
layer draws next would be others. Nothing can be taken out of such a cache, so another function takes its place for that.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from lightning_harmony.engine.model.attributes import LONGEST

Cached: Any = type(functools.lru_cache(lambda: None))


def cached_in(value: Any) -> Any:
    """A function with a cache that is not too large to be copied: a value itself, or what a static method is; else None."""
    function = value.__func__ if type(value) in (staticmethod, classmethod) else value
    return function if type(function) is Cached and filling_of(function)[2] <= LONGEST else None


def filling_of(function: Any) -> tuple[int, ...]:
    """What changes whenever a cache is filled or cleared: misses, how much goes in, and how much is in it."""
    return tuple(Cached.cache_info(function)[1:])


class CacheThen:
    """What the cache of a function holds now.

    Args:
        value: the one, or a static method of it.
    """

    def __init__(self, value: Any) -> None:
        self._value, self._function = value, cached_in(value)
        self._results = _results_of(self._function)

    def again(self) -> Any:
        """A function that does the same, with a cache that holds that."""
        own, coming = self._function, list[Any]()

        def call(*args: Any, **kwargs: Any) -> Any:
            return coming.pop() if coming else own.__wrapped__(*args, **kwargs)

        parameters = own.cache_parameters()
        twin = functools.lru_cache(**parameters)(call)
        for key, result in self._results:
            args, kwargs = _arguments_of(key, own, is_typed=parameters["typed"])
            coming.append(result)
            twin(*args, **kwargs)
        vars(twin).update(vars(own))
        return twin if own is self._value else type(self._value)(twin)


def _results_of(function: Any) -> list[tuple[Any, Any]]:
    """What is in a cache, by the keys that functools makes: first what it would let go of first."""
    found = gc.get_referents(function)
    # Behind the results.
    last = max(number for number, each in enumerate(found) if type(each) is dict and each is not vars(function))
    if function.cache_parameters()["maxsize"] is None:
        return list(found[last].items())
    # They are in links, for which the cache itself answers: one by one their keys, their results and their class.
    links = set(map(type, found[last].values()))
    ends = [number for number, each in enumerate(found[:last]) if isinstance(each, type) and each in links]
    return [(found[end - 2], found[end - 1]) for end in ends]


def _arguments_of(key: Any, function: Any, *, is_typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function was called with, by the key of its result."""
    if type(key) in (int, str):
        return (key,), {}
    parts, mark = tuple(key), next(each for each in reversed(gc.get_referents(function)) if type(each) is object)
    number = next((number for number, each in enumerate(parts) if each is mark), None)
    if number is None:
        return parts[: len(parts) // 2] if is_typed else parts, {}
    # Names and values, and if it is typed the classes of all.
    num_named = len(parts) - number - 1
    num_named = (num_named - number) // 3 if is_typed else num_named // 2
    named = parts[number + 1 : number + 1 + 2 * num_named]
    return parts[:number], dict(zip(named[::2], named[1::2], strict=True))
