"""A model's code finds the copies of its tensors in the places of its own, and what it does to them comes home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.replicas.replica import NotReplicableError, Replica

HOST = torch.device("cpu")


class Net(nn.Module):
    """Parameters, a buffer, a tensor in an attribute, a list of parameters and a list of results."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.scale = torch.ones(2)
        self.weights = [self.linear.weight]
        self.results: list[Any] = []
        self.pair = (self.linear.bias, "bias")


@pytest.fixture
def net() -> Net:
    return Net()


def replica_of(net: nn.Module, *changing: Tensor) -> Replica:
    replica = Replica(net, HOST, HOST, {id(tensor) for tensor in changing})
    replica.refresh()
    return replica


def test_the_models_own_tensors_have_the_memory_of_copies_and_their_own_afterwards(net: Net) -> None:
    own = [net.linear.weight, net.linear.bias, net.count, net.scale]
    memory, values = [each.data_ptr() for each in own], [each.clone() for each in own]
    replica = replica_of(net)
    with replica.entered(carries=False):
        assert all(
            one is other for one, other in zip(own, [net.weights[0], net.pair[0], net.count, net.scale], strict=True)
        )
        assert all(each.data_ptr() != before for each, before in zip(own, memory, strict=True))
        assert all(map(torch.equal, own, values))
    assert [each.data_ptr() for each in own] == memory


def test_even_an_error_leaves_the_model_its_own(net: Net) -> None:
    memory, replica = net.linear.weight.data_ptr(), replica_of(net)
    with pytest.raises(KeyError), replica.entered(carries=False):
        raise KeyError
    assert net.linear.weight.data_ptr() == memory


def test_code_that_gives_a_tensor_other_memory_is_refused(net: Net) -> None:
    replica = replica_of(net)
    with pytest.raises(NotReplicableError, match="other memory"), replica.entered(carries=True):
        net.linear.weight.data = torch.zeros(2, 2)


def test_copies_are_refreshed_whatever_was_done_to_their_tensors(net: Net) -> None:
    replica = replica_of(net)
    net.linear.weight.data.fill_(7)
    net.linear.bias.data = torch.full((2,), 3.0)
    replica.refresh()
    with replica.entered(carries=False):
        assert net.linear.weight.eq(7).all()
        assert net.linear.bias.eq(3).all()


@pytest.mark.parametrize("carries", [True, False])
def test_what_changes_in_place_comes_home_behind_a_forward(net: Net, carries: bool) -> None:
    replica = replica_of(net, net.count)
    with replica.entered(carries=carries):
        net.count.add_(1)
    assert net.count == float(carries)


def test_what_is_assigned_or_appended_stays_and_copies_do_not(net: Net) -> None:
    replica, weight = replica_of(net), net.linear.weight
    with replica.entered(carries=True):
        net.count = net.count + 5
        net.results.append({"weight": net.linear.weight, "sum": net.linear.weight.sum().detach()})
        net.again = net.linear.weight
        del net.scale
    assert net.count == 5
    assert net.results[0]["weight"] is weight
    assert net.again is weight
    assert not hasattr(net, "scale")
    replica.bring()
    with replica.entered(carries=True):
        assert net.count == 5


def test_a_parameter_that_becomes_smaller_is_laid_out_anew_with_all_others(net: Net) -> None:
    replica = replica_of(net)
    net.linear.weight.data = torch.full((1, 2), 7.0)
    net.linear.bias.data.fill_(3)
    replica.refresh()
    with replica.entered(carries=False):
        assert net.linear.weight.tolist() == [[7, 7]]
        assert net.linear.bias.eq(3).all()
    assert net.linear.weight.shape == (1, 2)


def test_a_layer_that_comes_later_is_found(net: Net) -> None:
    replica = replica_of(net)
    net.more = nn.Linear(2, 1)
    memory = net.more.weight.data_ptr()
    replica.refresh()
    with replica.entered(carries=False):
        assert net.more.weight.data_ptr() != memory
    assert net.more.weight.data_ptr() == memory


class Own(Tensor):
    """A class of one's own."""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda net: net.linear.weight.register_hook(lambda gradient: gradient), "a hook"),
        (lambda net: net.register_buffer("part", net.count.view(1)), "share memory"),
        (lambda net: net.register_buffer("sparse", torch.eye(2).to_sparse()), "layout"),
        (lambda net: setattr(net, "own", torch.ones(2).as_subclass(Own)), "Own"),
    ],
    ids=["hook", "alias", "sparse", "class"],
)
def test_what_is_not_the_same_as_a_copy_is_refused(net: Net, change: Any, why: str) -> None:
    change(net)
    with pytest.raises(NotReplicableError, match=why):
        replica_of(net)
