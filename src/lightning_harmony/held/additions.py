"""Whether code that asks for an attribute does so only to add to a list or set: it then finds nothing of what is in there."""

from __future__ import annotations

import dis
from collections import deque
from types import CodeType, FrameType
from typing import Any

from lightning_harmony.held.files import by_identity
from lightning_harmony.held.held_state import SWITCHED

_ADDING = frozenset(("append", "extend", "add", "update"))
# What goes on elsewhere in the code.
_ELSEWHERE = frozenset((*dis.hasjrel, *dis.hasjabs))
_OF_NAMES, _OF_ITEMS = ("LOAD_ATTR", "LOAD_METHOD"), ("BINARY_SUBSCR", "BINARY_OP")


def added_to(frame: FrameType, name: str, value: Any) -> list[Any]:
    """The lists and sets to one of which code adds that asks for an attribute, and does nothing else with it.

    Args:
        frame: where it is asked for.
        name: of the attribute.
        value: what is there: one of these, or a dict or list that leads to them.
    """
    depth = _depth_of_addition(frame.f_code, frame.f_lasti, name)
    if depth is None:
        return []
    values = [value]
    for _ in range(depth):
        if any(type(each) not in SWITCHED or issubclass(type(each), set) for each in values):
            return []
        values = [item for each in values for item in (each.values() if isinstance(each, dict) else each)]
    # The methods of other classes may read what they add to.
    return values if all(type(each) in (list, set, deque) for each in values) else []


@by_identity
def _depth_of_addition(code: CodeType, offset: int, name: str) -> int | None:
    """Of how many entries of entries an item is asked for, to add to it; None if something else happens to what is there.

    Args:
        code: what runs.
        offset: of the instruction that asks for the attribute.
        name: of that.
    """
    left = iter(each for each in dis.get_instructions(code) if each.offset >= offset)
    first = next(left, None)
    if first is None or first.offset != offset or first.opname not in _OF_NAMES or first.argval != name:
        return None
    depth = above = 0
    for each in left:
        effect = dis.stack_effect(each.opcode, each.arg, jump=False)
        if above == 0 and each.opname in _OF_NAMES:
            return depth if each.argval in _ADDING else None
        if above == 1 and each.opname in _OF_ITEMS and each.argrepr in ("", "[]"):
            depth, above = depth + 1, 0
        elif each.opname.startswith("LOAD_") if effect > 0 else each.opcode not in _ELSEWHERE and 1 - effect <= above:
            # It puts something on top, or makes one thing of what is there.
            above += effect
        else:
            return None
    return None
