"""Lists, dicts, sets and deques: whether they hold the same objects, and how to let them."""

from __future__ import annotations

from collections import deque
from operator import is_
from typing import Any


def have_same_content(one: Any, other: Any) -> bool:
    """Whether two lists, dicts, sets or deques hold the same objects."""
    if len(one) != len(other):
        return False
    if not one:
        return True
    if isinstance(one, dict):
        return all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))
    return bool(one == other) if isinstance(one, set) else all(map(is_, one, other))


def copied_content(content: Any) -> Any:
    """A list, dict, set or deque as it is, in a list, dict or set: classes of one's own may copy otherwise."""
    if isinstance(content, dict):
        return dict(content)
    return set(content) if isinstance(content, set) else list(content)


def put_content(content: Any, before: Any) -> None:
    """Let a list, dict, set or deque hold what it held before, and nothing else."""
    content.clear()
    (content.extend if isinstance(content, list | deque) else content.update)(before)
