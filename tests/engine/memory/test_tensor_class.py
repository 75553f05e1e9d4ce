"""What Python code sees of a tensor beside its values."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_harmony.engine.memory.tensor_class import TensorClass


class Tagged(Tensor):
    """A class that only Python sees."""


def test_a_tensor_like_any_other_has_none() -> None:
    assert TensorClass.of(torch.ones(2)) is None
    assert TensorClass.of(nn.Parameter(torch.ones(2))) is None


def test_what_is_computed_from_a_parameter_is_none_but_has_what_was_set_on_it() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.is_shared = True  # type: ignore[attr-defined]
    assert TensorClass.of(parameter) == (Tensor, {"is_shared": True})


def test_a_tensor_puts_it_on_and_stays_in_its_graph() -> None:
    tagged = torch.ones(2).as_subclass(Tagged)
    tagged.scale = 2.0
    found, tensor = TensorClass.of(tagged), torch.ones(2, requires_grad=True)
    assert found is not None
    like = found.on(tensor)
    assert (type(like), like.scale) == (Tagged, 2.0)  # type: ignore[attr-defined]
    assert like.data_ptr() == tensor.data_ptr()
    like.sum().backward()
    assert torch.equal(tensor.grad, torch.ones(2))  # type: ignore[arg-type]


def test_the_class_of_a_tensor_without_values_here_is_not_kept() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    assert vars(fake)
    assert TensorClass.of(fake) is None
