"""A task prints as a short word and reads back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.plan.task import Phase, Task


@given(pack=st.integers(0, 10**6), phase=st.sampled_from(Phase), microbatch=st.integers(0, 10**6))
def test_parse_reads_what_str_prints(pack: int, phase: Phase, microbatch: int) -> None:
    task = Task(pack, phase, microbatch)
    assert Task.parse(str(task)) == task


def test_prints_pack_phase_microbatch() -> None:
    assert [str(Task(3, Phase.FORWARD, 0)), str(Task(12, Phase.BACKWARD, 7))] == ["3F0", "12B7"]


@pytest.mark.parametrize("text", ["", "3F", "F0", "3X0", "3f0", "-1F0", "3F0 ", " 3F0", "3F0\n", "3F0B1"])
def test_what_is_not_a_task_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a task: expected <pack><F\|B><microbatch>") as refused:
        Task.parse(text)
    assert repr(text) in str(refused.value)
