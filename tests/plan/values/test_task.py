"""A task prints as a short word and reads back."""

import pytest
from hypothesis import given

from lightning_harmony.plan.values.task import Errand, Phase, Task
from support.plans import tasks


@given(task=tasks)
def test_parse_reads_what_str_prints(task: Task) -> None:
    assert Task.parse(str(task)) == task


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


@pytest.mark.parametrize(
    "text",
    ["", "3F", "F0", "3X0", "3f0", "-1F0", "3F0 ", " 3F0", "3F0\n", "3F0B1", "3U0", "3SWAP_IN1", "3STASH_IN", "٣F0"],
)
def test_what_is_not_a_task_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a task: expected <pack><F\|B\|SWAP_IN\|.*><microbatch>") as refused:
        Task.parse(text)
    assert repr(text) in str(refused.value)
