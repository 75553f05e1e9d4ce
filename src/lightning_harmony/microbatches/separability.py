"""Whether the loss of a batch follows from the losses of its microbatches, as far as one split can tell."""

from __future__ import annotations

from collections.abc import Sequence

#: Relative differences that no rounding explains, by whether values are rounded to 16 bits on the way.
_TOLERANCE = {False: 1e-3, True: 3e-2}


def explain_difference(
    whole: float, parts: Sequence[float], sizes: Sequence[int], *, reduction: str, is_narrow: bool
) -> str | None:
    """Say how a loss differs from what its parts give, and what to do.

    Args:
        whole: the loss of some samples.
        parts: the losses of parts of them.
        sizes: samples in each part.
        reduction: "mean" or "sum", by which losses are merged.
        is_narrow: whether values are rounded to 16 bits.

    Returns:
        None if there is no difference.
    """
    merged = {
        "mean": sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes),
        "sum": sum(parts),
    }
    if _is_close(whole, merged[reduction], is_narrow):
        return None
    other = "sum" if reduction == "mean" else "mean"
    found = (
        f"the loss of {sum(sizes)} samples is {whole:.6g}, but the {reduction} of its microbatches' losses is "
        f"{merged[reduction]:.6g} ({_difference(whole, merged[reduction]):.2g} of it)"
    )
    if _is_close(whole, merged[other], is_narrow):
        return f"{found}: their {other} is the same, so use HarmonyStrategy(loss_reduction={other!r})"
    return (
        f"{found}. It is no {reduction} over samples (negatives within the batch, a mean over tokens that are not padding "
        "or the like), so a batch in microbatches trains as under accumulate_grad_batches, not as one batch; "
        f"HarmonyStrategy(num_microbatches=1) keeps it whole, HarmonyStrategy(loss_reduction={reduction!r}) accepts it"
    )


def _difference(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def _is_close(one: float, other: float, is_narrow: bool) -> bool:
    # Losses near zero are differences of larger numbers, with their rounding.
    return abs(one - other) <= _TOLERANCE[is_narrow] * max(abs(one), abs(other), 1e-3)
