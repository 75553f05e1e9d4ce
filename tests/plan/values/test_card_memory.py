"""What may be allocated under a limit of a card."""

import pytest

from lightning_harmony.plan.values.card_memory import limit_for, usable_bytes

GIB = 2**30


@pytest.mark.parametrize("num_bytes", [1, 3 * GIB, 4 * GIB, 10 * GIB + 7, 75 * GIB])
def test_the_limit_for_an_amount_lets_it_be_allocated(num_bytes: int) -> None:
    limit = limit_for(num_bytes)
    assert usable_bytes(limit) >= num_bytes
    assert limit == num_bytes if limit < 4 * GIB else limit > num_bytes


def test_less_than_4_gib_is_a_limit_of_what_is_allocated() -> None:
    assert usable_bytes(4 * GIB - 1) == 4 * GIB - 1
    assert usable_bytes(4 * GIB) < 3 * GIB
