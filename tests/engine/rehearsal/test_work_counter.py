"""What operations on fake tensors are counted as."""

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_harmony.engine.rehearsal.fakes import FakeDevice
from lightning_harmony.engine.rehearsal.work_counter import WorkCounter
from lightning_harmony.plan.outlook.work import Work


def test_products_count_by_type_and_all_else_by_what_it_reads_and_writes() -> None:
    counter = WorkCounter(FakeDevice())
    with FakeTensorMode():
        x, weight = torch.empty(2, 3), torch.empty(3, 5)
        with counter:
            y = x @ weight
            assert counter.take() == Work({"float32": 2 * 2 * 3 * 5}, 0, 1)
            y + y
            assert counter.take() == Work({}, 2 * 4 * 2 * 5, 1)
    assert counter.take() == Work()


def test_views_and_allocations_cost_nothing() -> None:
    counter = WorkCounter(FakeDevice())
    with FakeTensorMode():
        x = torch.empty(2, 3)
        with counter:
            x.view(6, 1).t()[:, 1:]
            torch.empty(4)
            x.detach()
    assert counter.take() == Work()


def test_a_table_is_read_where_rows_are_asked_for() -> None:
    counter = WorkCounter(FakeDevice())
    with FakeTensorMode():
        table, rows = torch.empty(1000, 4), torch.empty(2, dtype=torch.long)
        with counter:
            F.embedding(rows, table)
    assert counter.take() == Work({}, 2 * 4 * 2 * 4, 1)


def test_what_operations_return_is_allocated() -> None:
    device = FakeDevice()
    with FakeTensorMode():
        x = torch.empty(1024)
        with WorkCounter(device):
            y = x + 1
            view = y[:2]
    assert device.allocated_bytes() == 4 * 1024
    del y, view
    assert device.allocated_bytes() == 0


def test_work_that_is_not_done_counts_as_if_it_were() -> None:
    counter = WorkCounter(FakeDevice())
    done = Work({"bfloat16": 8}, 16, 2)
    counter.add(done)
    counter.add(done)
    assert counter.take() == done + done


def test_numbers_that_depend_on_data_are_made_up() -> None:
    with FakeTensorMode(), WorkCounter(FakeDevice()):
        assert torch.empty(()).item() == 1.0
        assert torch.empty((), dtype=torch.bool).item() is False
        assert torch.equal(torch.empty(2), torch.empty(2))
