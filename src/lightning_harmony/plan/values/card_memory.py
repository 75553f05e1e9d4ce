"""How much of a card's memory a process may allocate, of what it may take of the card."""

# What a process takes beside torch's allocator: the context, and the libraries' kernels as they are loaded. Measured on an
# H100 with torch 2.11: 0.8 GiB for BERT in mixed precision.
CONTEXT_BYTES = 1 << 30
# Less than this is no limit of a card, which a context alone would fill, but one of what is allocated.
SMALLEST_CARD_BYTES = 4 << 30
# Freed memory of one stream's pool is unused until that stream wants it again.
UNUSED_SHARE = 0.06


def usable_bytes(limit_bytes: int) -> int:
    """What may be allocated under a limit of what the process may take of a card.

    Args:
        limit_bytes: the context included; less than 4 GiB is a limit of what is allocated.
    """
    if limit_bytes < SMALLEST_CARD_BYTES:
        return limit_bytes
    return allocatable_bytes(limit_bytes - CONTEXT_BYTES)


def allocatable_bytes(reserved_bytes: int) -> int:
    """What may be allocated of that which torch's allocator may take from the driver."""
    return int(reserved_bytes * (1 - UNUSED_SHARE))


def limit_for(num_bytes: int) -> int:
    """The smallest limit under which so much may be allocated: the inverse of `usable_bytes`."""
    if num_bytes < SMALLEST_CARD_BYTES:
        return num_bytes
    return int(num_bytes / (1 - UNUSED_SHARE)) + 1 + CONTEXT_BYTES
