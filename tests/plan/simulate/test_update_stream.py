"""Updates of a device one at a time, and room for gradients that wait for theirs."""

from lightning_harmony.plan.simulate.device_memory import DeviceMemory
from lightning_harmony.plan.simulate.update_stream import UpdateStream, room_on_host_at


def stream() -> UpdateStream:
    """Three packs, updated in 5, 2 and 1 s; the next forward needs them in that order."""
    updates = UpdateStream({0: 0, 1: 1, 2: 2}, [5.0, 2.0, 1.0])
    for pack, seconds in ((2, 10.0), (1, 10.5), (0, 11.0)):
        updates.add(pack, seconds)
    return updates


def test_when_all_have_arrived_that_comes_first_which_is_needed_first() -> None:
    updates = stream()
    updates.run_all()
    assert updates.done == [(2, 10.0, 11.0), (0, 11.0, 16.0), (1, 16.0, 18.0)]


def test_the_update_stream_waits_for_gradients_on_their_way() -> None:
    updates = UpdateStream({0: 0}, [1.0])
    assert 0 not in updates
    updates.add(0, 20.0)
    assert 0 in updates
    updates.run_all()
    assert updates.done == [(0, 20.0, 21.0)]


def test_there_is_room_on_the_host_when_few_enough_wait_there() -> None:
    updates = stream()
    assert room_on_host_at(updates, [updates], 4) == 0.0
    assert room_on_host_at(updates, [updates], 3) == 11.0
    # In order of arrival.
    assert room_on_host_at(updates, [updates], 2) == 13.0
    assert room_on_host_at(updates, [updates], 1) == 18.0


def test_gradients_of_all_devices_share_the_room_on_the_host() -> None:
    own, other = UpdateStream({0: 0, 1: 1}, [5.0, 2.0]), UpdateStream({0: 0, 1: 1}, [5.0, 2.0])
    own.add(0, 1.0)
    other.add(1, 2.0)
    assert room_on_host_at(own, [own, other], 3) == 0.0
    # The two run beside each other: the first that has begun is waited for.
    assert room_on_host_at(own, [own, other], 2) == 6.0
    assert room_on_host_at(own, [own, other], 1) == 6.0
    assert other.done == [(1, 2.0, 4.0)]


def test_gradients_that_stay_on_a_device_take_no_room_there() -> None:
    updates = UpdateStream({0: 0, 1: 1}, [5.0, 2.0])
    updates.add(1, 1.0, 10)
    updates.add(0, 2.0)
    assert room_on_host_at(updates, [updates], 2) == 0.0
    # Behind the other one, which came first.
    assert room_on_host_at(updates, [updates], 1) == 8.0


def test_gradients_that_stay_on_a_device_are_there_until_their_update_has_ended() -> None:
    memory = DeviceMemory(100)
    updates = UpdateStream({0: 0, 1: 1}, [5.0, 2.0], [memory])
    updates.add(1, 1.0, 10)
    memory.take(100, 0.0)
    assert memory.room_at(10) is None
    updates.run_all()
    assert memory.room_at(10) == 3.0


def test_updates_of_gradients_on_a_device_may_outlast_the_step() -> None:
    updates = UpdateStream({0: 0, 1: 1}, [5.0, 2.0])
    updates.add(1, 1.0, 10)
    updates.add(0, 2.0)
    updates.run_all()
    assert updates.left_behind(2.5) == [(10, 0.5)]
    assert updates.left_behind(3.0) == []


def test_what_begins_by_a_moment_is_updated_by_then() -> None:
    updates = stream()
    updates.run_until(10.0)
    assert updates.done == []
    updates.run_until(11.5)
    assert [pack for pack, _, _ in updates.done] == [2, 1]
    updates.run_until(100.0)
    assert [pack for pack, _, _ in updates.done] == [2, 1, 0]
    assert not updates.run_next()
