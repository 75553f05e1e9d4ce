"""Work beside the lanes: in order, after what it waits for, with its errors brought back."""

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_harmony.engine.devices.stream import CudaStream, Happened, HostStream, Urgency, wait_for_one


@pytest.fixture
def stream() -> Iterator[HostStream]:
    stream = HostStream("test")
    yield stream
    stream.close()


@pytest.fixture
def other() -> Iterator[HostStream]:
    stream = HostStream("other")
    yield stream
    stream.close()


def test_work_runs_in_order_of_submission(stream: HostStream) -> None:
    done: list[int] = []
    events = [stream.submit(lambda number=number: done.append(number)) for number in range(20)]
    events[-1].synchronize()
    assert done == list(range(20))


def test_of_what_may_begin_the_most_urgent_begins_first(stream: HostStream, other: HostStream) -> None:
    done: list[str] = []
    go, late = threading.Event(), threading.Event()
    arrives = other.submit(partial(_wait, late))
    stream.submit(partial(_wait, go))
    for rank, name in ((3, "third"), (1, "first"), (2, "second")):
        stream.submit(partial(done.append, name), [Happened()], Urgency(rank))
    # More urgent, but it has to wait for something.
    waits = stream.submit(partial(done.append, "late"), [arrives], Urgency(0))
    in_order = stream.submit(partial(done.append, "in order"))
    stream.submit(partial(done.append, "urgent, but after that"), [], Urgency(0))
    go.set()
    while len(done) < 3:
        time.sleep(0.001)
    assert done == ["first", "second", "third"]
    late.set()
    waits.synchronize()
    in_order.synchronize()
    stream.submit(lambda: None).synchronize()
    assert done[3:] == ["late", "in order", "urgent, but after that"]


def test_within_work_the_more_urgent_goes_first(stream: HostStream, other: HostStream) -> None:
    done: list[str] = []
    go, late = threading.Event(), threading.Event()
    arrives = other.submit(partial(_wait, late))

    def work() -> None:
        go.wait(10)
        stream.run_more_urgent(Urgency(2))
        done.append("the work")

    first = stream.submit(work, urgency=Urgency(2))
    stream.submit(partial(done.append, "less urgent"), urgency=Urgency(3))
    stream.submit(partial(done.append, "as urgent"), urgency=Urgency(2))
    urgent = stream.submit(partial(done.append, "urgent"), urgency=Urgency(1))
    failing = stream.submit(_fail, urgency=Urgency(0))
    waits = stream.submit(partial(done.append, "late"), [arrives], Urgency(0))
    stream.submit(partial(done.append, "in order"))
    stream.submit(partial(done.append, "urgent, but after that"), urgency=Urgency(0))
    go.set()
    first.synchronize()
    assert done[:2] == ["urgent", "the work"]
    assert urgent.done()
    # What fails within another piece of work is none of that one's.
    with pytest.raises(ZeroDivisionError):
        failing.synchronize()
    late.set()
    waits.synchronize()
    stream.submit(lambda: None).synchronize()
    assert sorted(done[2:5]) == ["as urgent", "late", "less urgent"]
    assert done[5:] == ["in order", "urgent, but after that"]


def test_where_ranks_do_not_count_what_gives_way_comes_behind_all_else(stream: HostStream) -> None:
    """What waits for an update on a device keeps its memory, so the oldest goes first, and before what is on the host."""
    done: list[str] = []
    go = threading.Event()
    stream.goes_by_rank = False

    def work() -> None:
        go.wait(10)
        stream.run_more_urgent(Urgency(9, gives_way=True))
        done.append("the work")

    stream.submit(work, urgency=Urgency(9, gives_way=True))
    stream.submit(partial(done.append, "on the host"), urgency=Urgency(8, gives_way=True))
    stream.submit(partial(done.append, "older"), urgency=Urgency(7))
    stream.submit(partial(done.append, "newer"), urgency=Urgency(6))
    go.set()
    stream.submit(lambda: None).synchronize()
    assert done == ["older", "newer", "the work", "on the host"]


class TestBriefWork:
    """To wake a thread took longer than a small copy, and held lanes up: 120 us a turn instead of 80."""

    def test_is_done_by_who_submits_it(self, stream: HostStream) -> None:
        done_by: list[threading.Thread] = []
        event = stream.submit_brief(lambda: done_by.append(threading.current_thread()), [Happened()])
        assert event.done()
        assert done_by == [threading.current_thread()]

    def test_comes_behind_what_was_submitted_before(self, stream: HostStream) -> None:
        go, done = threading.Event(), list[str]()
        stream.submit(partial(_wait, go))
        stream.submit(partial(done.append, "long"))
        event = stream.submit_brief(partial(done.append, "brief"))
        assert not event.done()
        go.set()
        event.synchronize()
        assert done == ["long", "brief"]

    def test_comes_behind_what_it_has_to_wait_for(self, stream: HostStream, other: HostStream) -> None:
        go, done = threading.Event(), list[str]()
        first = other.submit(lambda: (_wait(go), done.append("first"))[0])
        event = stream.submit_brief(partial(done.append, "then"), [first])
        assert not event.done()
        go.set()
        event.synchronize()
        assert done == ["first", "then"]

    def test_is_done_at_once_again_when_a_thread_has_done_what_was_before(self, stream: HostStream) -> None:
        with pytest.raises(ZeroDivisionError):
            stream.submit(_fail).synchronize()
        done_by: list[threading.Thread] = []
        deadline = time.monotonic() + 60
        # The event happens a moment before the thread has finished with it.
        while threading.current_thread() not in done_by and time.monotonic() < deadline:
            stream.submit_brief(lambda: done_by.append(threading.current_thread())).synchronize()
        assert threading.current_thread() in done_by

    @pytest.mark.parametrize("on_gpu", [False, True])
    def test_is_seen_by_no_mode_and_recorded_in_no_graph(
        self, stream: HostStream, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A mode that a user's code had switched on saw the copies of a GPU, and not those of a host."""
        monkeypatch.setattr("lightning_harmony.engine.devices.stream.CudaEvent", lambda stream: Happened())
        submit_brief = stream.submit_brief
        if on_gpu:
            monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: None)
            monkeypatch.setattr(CudaStream, "selected", lambda stream: nullcontext())
            submit_brief = CudaStream(torch.device("cuda", 0)).submit_brief
        seen: list[str] = []

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append("operation")
                return func(*args, **(kwargs or {}))

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append("function")
                return func(*args, **(kwargs or {}))

        source, target = torch.ones(3, requires_grad=True), torch.zeros(3)
        made: list[Tensor] = []
        with Operations(), Functions(), torch.inference_mode():
            seen.clear()
            submit_brief(lambda: (target.copy_(source), made.append(torch.zeros(1)))[1])
            assert seen == []
        assert target.tolist() == [1, 1, 1]
        assert not target.requires_grad
        assert not made[0].is_inference()

    def test_work_that_fails_raises_its_error(self, stream: HostStream, other: HostStream) -> None:
        with pytest.raises(ZeroDivisionError):
            stream.submit_brief(_fail)
        failed = other.submit(_fail)
        while not failed.done():
            time.sleep(0.001)
        with pytest.raises(ZeroDivisionError):
            stream.submit_brief(lambda: None, [failed])


def test_waiting_for_one_of_several_events_ends_with_the_first_of_them(stream: HostStream, other: HostStream) -> None:
    never = threading.Event()
    waits, fails = stream.submit(partial(_wait, never)), other.submit(_fail)
    wait_for_one([waits, fails])
    assert fails.done()
    assert not waits.done()
    never.set()


def test_work_runs_beside_the_caller(stream: HostStream) -> None:
    go = threading.Event()
    event = stream.submit(partial(_wait, go))
    assert not event.done()
    go.set()
    event.wait()
    assert event.done()


def test_work_waits_for_the_events_of_another_stream(stream: HostStream, other: HostStream) -> None:
    done: list[str] = []
    go = threading.Event()

    def produce() -> None:
        go.wait(60)
        done.append("produced")

    produced = other.submit(produce)
    consumed = stream.submit(lambda: done.append("consumed"), after=[Happened(), produced])
    assert not consumed.done()
    go.set()
    consumed.synchronize()
    assert done == ["produced", "consumed"]


def test_the_events_to_wait_for_are_those_of_the_time_of_submission(stream: HostStream) -> None:
    never = threading.Event()
    after = [Happened()]
    event = stream.submit(lambda: None, after)
    after.append(never)  # type: ignore[arg-type]
    event.synchronize()


@pytest.mark.parametrize("wait", ["wait", "synchronize"])
def test_an_event_raises_what_its_work_raised(stream: HostStream, wait: str) -> None:
    event = stream.submit(_fail)
    with pytest.raises(ZeroDivisionError, match="in the stream") as raised:
        getattr(event, wait)()
    assert raised.traceback[-1].name == "_fail"
    assert event.done()


def test_work_does_not_run_on_what_failed(stream: HostStream, other: HostStream) -> None:
    done: list[str] = []
    failed = other.submit(_fail)
    event = stream.submit(lambda: done.append("ran"), after=[failed])
    with pytest.raises(ZeroDivisionError):
        event.synchronize()
    assert not done


def test_a_failure_does_not_stop_later_work(stream: HostStream) -> None:
    done: list[str] = []
    stream.submit(_fail)
    stream.submit(lambda: done.append("ran")).synchronize()
    assert done == ["ran"]


def test_copies_are_not_recorded_by_autograd(stream: HostStream) -> None:
    source = torch.ones(3, requires_grad=True)
    target = torch.zeros(3)
    stream.submit(lambda: target.copy_(source)).synchronize()
    assert torch.equal(target, source)
    assert not target.requires_grad


def test_when_the_event_happens_the_work_holds_nothing_any_more(stream: HostStream) -> None:
    buffer = torch.ones(1)
    known = weakref.ref(buffer)
    found: list[torch.Tensor | None] = []
    go = threading.Event()
    stream.submit(partial(_wait, go))
    event = stream.submit(partial(buffer.add_, 1))
    del buffer
    event._future.add_done_callback(lambda _: found.append(known()))
    go.set()
    stream.close()
    assert found == [None]


def test_close_finishes_what_was_submitted_and_joins_the_thread() -> None:
    stream = HostStream("closing")
    done: list[int] = []
    threads: list[threading.Thread] = []
    stream.submit(lambda: threads.append(threading.current_thread()))
    for number in range(10):
        stream.submit(lambda number=number: done.append(number))
    stream.close()
    assert done == list(range(10))
    assert "harmony-closing" in threads[0].name
    assert not threads[0].is_alive()


def test_what_has_happened_never_blocks() -> None:
    event = Happened()
    event.wait()
    event.synchronize()
    assert event.done()


def _wait(go: threading.Event) -> None:
    go.wait(60)


def _fail() -> None:
    raise ZeroDivisionError("in the stream")
