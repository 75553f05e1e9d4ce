"""Streams: what runs beside what. Each device has one of each kind, and the host has one for updates."""

from lightning_harmony.plan.values.task import Errand, Kind, Phase

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
