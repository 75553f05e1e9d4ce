"""A task: the smallest thing that a plan orders, and the stream that it runs on."""

from enum import Enum
from typing import NamedTuple


class Kind:
    """What a task does: a phase, or an errand for one."""

    value: str
    # An enum's own is Python code, which takes several times as long.
    __hash__ = object.__hash__


class Phase(Kind, Enum):
    """Which way a lane goes through a pack."""

    FORWARD = "F"
    BACKWARD = "B"


class Errand(Kind, Enum):
    """What is done for the phases: the copies, and the update.

    Attributes:
        SWAP_IN: the pack's weights come from the host.
        EVICT: they leave the device; the host has them.
        SWAP_OUT: the pack's gradients go to the host.
        PARK: what is summed of them so far goes there.
        UNPARK: it comes back, for the backward of a microbatch.
        UPDATE: the pack is updated with its gradients, from the host or where they were summed.
        STASH_OUT: what a forward leaves for its backward goes to the host.
        STASH_IN: it comes back.
        TRANSFER_FORWARD: the input of a forward comes from the device where the lane was.
        TRANSFER_BACKWARD: the gradient that a backward starts from does.
        GATHER: the gradients of a microbatch come to the home of a pack that is spread, if they are elsewhere, and are added.
        REDUCE: the gradients that another device has summed come, and are added. Its number is that of the device.
    """

    SWAP_IN = "SWAP_IN"
    EVICT = "EVICT"
    SWAP_OUT = "SWAP_OUT"
    PARK = "PARK"
    UNPARK = "UNPARK"
    UPDATE = "U"
    STASH_OUT = "STASH_OUT"
    STASH_IN = "STASH_IN"
    TRANSFER_FORWARD = "TRANSFER_F"
    TRANSFER_BACKWARD = "TRANSFER_B"
    GATHER = "GATHER"
    REDUCE = "REDUCE"


KINDS: dict[str, Kind] = {kind.value: kind for kinds in (Phase, Errand) for kind in kinds}


class Task(NamedTuple):
    """What is done to one pack, and for which microbatch.

    Prints as ``3F0`` (pack 3, forward, microbatch 0) or, where all microbatches share it, as ``3SWAP_IN``.

    Attributes:
        pack: its index.
        kind: what is done.
        microbatch: for which one; None where all share it.
    """

    pack: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.pack}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"


COMPUTE, UPDATE = "compute", "update"
STREAMS = ("swap-in", "stash-in", "transfer", "gather", COMPUTE, "swap-out", UPDATE)
STREAM_OF: dict[Kind, str] = {
    Phase.FORWARD: COMPUTE,
    Phase.BACKWARD: COMPUTE,
    Errand.SWAP_IN: "swap-in",
    Errand.UNPARK: "swap-in",
    Errand.STASH_IN: "stash-in",
    Errand.TRANSFER_FORWARD: "transfer",
    Errand.TRANSFER_BACKWARD: "transfer",
    Errand.GATHER: "gather",
    Errand.REDUCE: "transfer",
    Errand.STASH_OUT: "swap-out",
    Errand.SWAP_OUT: "swap-out",
    Errand.PARK: "swap-out",
    Errand.UPDATE: UPDATE,
}
