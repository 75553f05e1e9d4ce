"""How much memory can still be taken."""

from lightning_harmony.engine.free_memory import free_host_bytes


def test_free_host_memory_is_positive_where_the_system_tells() -> None:
    free = free_host_bytes()
    assert free is None or free > 0
