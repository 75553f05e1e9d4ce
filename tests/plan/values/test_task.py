"""A task prints as a short word and reads back."""

from hypothesis import given

from lightning_harmony.plan.values.task import Errand, Phase, Task
from support.plans import parse_task, tasks


@given(task=tasks)
def test_what_str_prints_can_be_read_back(task: Task) -> None:
    assert parse_task(str(task)) == task


def test_a_task_prints_its_pack_kind_and_microbatch() -> None:
    printed = [
        Task(3, Phase.FORWARD, 0),
        Task(12, Phase.BACKWARD, 7),
        Task(3, Errand.SWAP_IN),
        Task(3, Errand.UPDATE),
        Task(3, Errand.STASH_OUT, 2),
        Task(3, Errand.TRANSFER_BACKWARD, 1),
    ]
    assert list(map(str, printed)) == ["3F0", "12B7", "3SWAP_IN", "3U", "3STASH_OUT2", "3TRANSFER_B1"]
