"""Names and colours of what is drawn: packs by their layers, tasks in words, and labels for what follows each other."""

import colorsys
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, takewhile

from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import Span
from lightning_harmony.plan.values.task import Errand, Kind, Phase, Task

# Each differs much from those beside it. After all of them come pale ones, and dark ones after these.
_HUES = (215, 30, 140, 350, 270, 55, 185, 310, 95)
# Lightness, lightness of what is drawn light, saturation.
_TONES = ((0.56, 0.8, 0.7), (0.56, 0.84, 0.26), (0.36, 0.71, 0.5))
_WORDS: dict[Kind, str] = {
    Phase.FORWARD: "forward, microbatch {}",
    Phase.BACKWARD: "backward, microbatch {}",
    Errand.SWAP_IN: "weights to the device",
    Errand.EVICT: "weights leave the device",
    Errand.SWAP_OUT: "gradients to the host",
    Errand.PARK: "sums of gradients to the host",
    Errand.UNPARK: "sums of gradients to the device, microbatch {}",
    Errand.UPDATE: "update",
    Errand.STASH_OUT: "stash to the host, microbatch {}",
    Errand.STASH_IN: "stash to the device, microbatch {}",
    Errand.TRANSFER_FORWARD: "input from another device, microbatch {}",
    Errand.TRANSFER_BACKWARD: "gradient from another device, microbatch {}",
    Errand.GATHER: "gradients to their home, microbatch {}",
    Errand.REDUCE: "gradients from device {}",
}


def pack_name(plan: Plan, pack: int) -> str:
    """A pack by its layers, as in "h.0" or "h.0 to h.3".

    Names are without the parts in front that all layers have in common, unless a number would be the first one then.
    """
    return _pack_names(plan.packs)[pack]


@lru_cache(maxsize=4)
def _pack_names(packs: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    parents = [layer.split(".")[:-1] for layers in packs for layer in layers]
    num_common = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False)))
    while num_common and any(layer.split(".")[num_common].isdigit() for layers in packs for layer in layers):
        num_common -= 1
    short = [[".".join(layer.split(".")[num_common:]) for layer in layers] for layers in packs]
    return tuple(
        f"pack {pack}" if not layers else layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        for pack, layers in enumerate(short)
    )


def task_name(plan: Plan, task: Task) -> str:
    """A task in words, as in "h.0 forward, microbatch 3"."""
    return f"{pack_name(plan, task.pack)} {_WORDS[task.kind].format(task.microbatch)}"


def is_light(span: Span) -> bool:
    """Whether a span is drawn lighter than the others of its pack: a forward, or a stash."""
    return span.task.kind is Phase.FORWARD or "STASH" in span.task.kind.value


def colour_of(pack: int, *, is_light: bool) -> str:
    """The colour of a pack, lighter where ``is_light``; 27 packs in a row have colours of their own."""
    strong, light, saturation = _TONES[pack // len(_HUES) % len(_TONES)]
    red, green, blue = colorsys.hls_to_rgb(_HUES[pack % len(_HUES)] / 360, light if is_light else strong, saturation)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def ink_on(span: Span) -> str:
    """The colour of letters that can be read on a span."""
    is_dark = span.task.pack // len(_HUES) % len(_TONES) == 2
    return "#ffffff" if is_dark and not is_light(span) else "#333333"


def labels(spans: Sequence[Span]) -> list[tuple[str, float, float, str]]:
    """Names for what follows each other in one stream: a task, or a pack where all microbatches run through it.

    Returns:
        For each, the name, from where to where it may reach, and the colour of its letters.
    """
    found = []
    for (pack, kind), group in groupby(spans, lambda span: span.task[:2]):
        several = list(group)
        if isinstance(kind, Errand):
            # Copies of one pack have time between them.
            found += [(str(pack), span.start_seconds, span.end_seconds, ink_on(span)) for span in several]
        else:
            name = str(several[0].task) if len(several) == 1 else f"{pack}{kind.value}"
            found.append((name, *_extent(several), ink_on(several[0])))
    return found


def _extent(several: Sequence[Span]) -> tuple[float, float]:
    """From where to where a name may reach: over all that it is for, or where there are gaps, over the longest part."""
    start, end = several[0].start_seconds, several[-1].end_seconds
    if sum(span.end_seconds - span.start_seconds for span in several) > 0.9 * (end - start):
        return start, end
    longest = max(several, key=lambda span: span.end_seconds - span.start_seconds)
    return longest.start_seconds, longest.end_seconds
