"""Updates one at a time, and room for gradients that wait for theirs."""

from lightning_harmony.plan.simulate.update_stream import UpdateStream


def stream() -> UpdateStream:
    """Three packs, updated in 5, 2 and 1 s; the next forward needs them in that order."""
    updates = UpdateStream({0: 0, 1: 1, 2: 2}, [5.0, 2.0, 1.0])
    for pack, seconds in ((2, 10.0), (1, 10.5), (0, 11.0)):
        updates.add(pack, seconds)
    return updates


def test_of_what_has_arrived_that_comes_first_which_is_needed_first() -> None:
    updates = stream()
    updates.run_all()
    assert updates.done == [(2, 10.0, 11.0), (0, 11.0, 16.0), (1, 16.0, 18.0)]


def test_it_waits_for_what_is_on_its_way() -> None:
    updates = UpdateStream({0: 0}, [1.0])
    assert 0 not in updates
    updates.add(0, 20.0)
    assert 0 in updates
    updates.run_all()
    assert updates.done == [(0, 20.0, 21.0)]


def test_there_is_room_when_few_enough_wait() -> None:
    updates = stream()
    assert updates.room_at(4) == 0.0
    assert updates.room_at(3) == 11.0
    assert updates.room_at(2) == 16.0
    assert updates.room_at(1) == 18.0
