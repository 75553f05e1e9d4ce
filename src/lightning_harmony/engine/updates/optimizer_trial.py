"""A trial of an optimizer that a library brings: whether it updates each parameter, or each element, from its own alone.

A copy of it steps on small parameters, all at once and one after the other, with gradients that are small, ordinary and large.
Where bits are the same, and nothing changes but parameters and their states, nobody can tell the one from the other.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.structures.nested import leaves_of, open_node
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.engine.updates.optimizer_twin import twin_of

# What gradients are multiplied by, step by step.
_SCALES = (1e-3, 1.0, 1e3, 1e-6, 1.0, 1.0)
# Of parameters that are alike so many take part, and of each dimension so much.
_MOST_ALIKE, _SHORT, _LONG = 2, 16, 256
# Of those that differ in what is set on them, at most.
_MOST_MARKED = 64
_FIRST_GROUPS = 4
# What each optimizer has, and what the rest of it may be made of.
_OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(())]))) | {"step", "_step_count", "_opt_called"}
_SIMPLE = (
    str, bytes, int, float, complex, type(None), torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type,
)  # fmt: skip


class Separability(NamedTuple):
    """What an optimizer updates by itself.

    Attributes:
        of_parameters: each parameter.
        of_elements: each element, whatever the shape of its parameter.
    """

    of_parameters: bool
    of_elements: bool


class _Sample(NamedTuple):
    """A small parameter.

    Attributes:
        group: the number of its group.
        value: where it begins.
        gradients: step by step.
        marks: the attributes that are set on it, which code of the optimizer may read.
    """

    group: int
    value: Tensor
    gradients: Sequence[Tensor]
    marks: Mapping[str, Any] = {}

    def parameter(self, *, marked: bool = False) -> nn.Parameter:
        """The parameter, as the optimizer finds it or without what is set on it, as it is where it steps by itself."""
        parameter = nn.Parameter(self.value.clone())
        parameter.__dict__.update(self.marks if marked else {})
        return parameter


def is_installed(kind: type) -> bool:
    """Whether a class, and those that it is made of, are of libraries: a user's may count or print its steps."""
    for base in kind.__mro__[: kind.__mro__.index(Optimizer)]:
        try:
            parts = Path(inspect.getfile(base)).parts
        except (TypeError, OSError):
            return False
        if not {"site-packages", "dist-packages"} & {*parts}:
            return False
    return True


def try_out(optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> Separability:
    """Try an optimizer out. It is not touched.

    Args:
        optimizer: which one.
        step: makes a step of such a one, without its hooks.
    """
    try:
        optimizer = _blank(optimizer, groups := optimizer.param_groups)
        small = _samples(groups, _SHORT)
        marked = [sample for sample in small if sample.marks]
        trained = (p for group in groups for p in group["params"] if _may_be_trained(p))
        if len(marked) > _MOST_MARKED or not all(map(_is_plain, trained)):
            return Separability(of_parameters=False, of_elements=False)
        whole = _stepped_at_once(optimizer, step, small)
        if whole is None or not _are_equal(whole, _stepped_apart(optimizer, step, small)):
            return Separability(of_parameters=False, of_elements=False)
        if marked and not _are_equal(whole, _stepped_at_once(optimizer, step, small, marked=True) or ()):
            return Separability(of_parameters=False, of_elements=False)
    # Whatever it raises, it is left as it is.
    except Exception:
        return Separability(of_parameters=False, of_elements=False)
    try:
        # Of large matrices, some keep sums of rows and columns alone. Those that keep more take long.
        is_elementwise = all(_takes_halves(optimizer, step, _samples(groups, length)) for length in (_SHORT, _LONG))
    except Exception:
        is_elementwise = False
    return Separability(of_parameters=True, of_elements=is_elementwise)


def _takes_halves(optimizer: Optimizer, step: Callable[[Optimizer], Any], samples: Sequence[_Sample]) -> bool:
    """Whether halves of parameters come to what the whole ones do."""
    large = [sample for sample in samples if sample.value.numel() > 1]
    flat = [_Sample(group, value.flatten(), [each.flatten() for each in of]) for group, value, of, _ in large]
    halves = _stepped_apart(
        optimizer, step, [_Sample(group, *h) for group, value, of, _ in flat for h in _halves(value, of)]
    )
    joined = [_joined(one, other) for one, other in zip(halves[::2], halves[1::2], strict=True)]
    return _are_equal([_flat(each) for each in _stepped_apart(optimizer, step, large)], joined)


def _blank(optimizer: Optimizer, param_groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """A copy of an optimizer with these groups, without parameters.

    Raises:
        TypeError: if it has something else than numbers, words, functions and small tensors.
    """
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in param_groups]
    for leaf in leaves_of([own, groups]):
        is_small = isinstance(leaf, Tensor) and leaf.numel() <= _LONG
        if not (is_small or isinstance(leaf, _SIMPLE)):
            raise TypeError(f"a {type(leaf).__name__}")
    blank: Optimizer = object.__new__(type(optimizer))
    blank.__dict__.update({name: value for name, value in vars(optimizer).items() if name in _OF_TORCH - {"step"}})
    blank.__dict__.update(copy.deepcopy(own))
    blank.state = defaultdict(dict)
    blank.param_groups = [group | {"params": []} for group in copy.deepcopy(groups)]
    return blank


def _samples(param_groups: Sequence[Mapping[str, Any]], longest: int) -> list[_Sample]:
    """Parameters of no more than some length in each dimension: two of each kind, from one group or from several alike.

    Of the first groups and the last one, there are some in any case: code may go by a group's number.
    """
    generator, found, num_alike = torch.Generator().manual_seed(0), list[_Sample](), Counter[Any]()
    for number, group in enumerate(param_groups):
        is_apart = number < _FIRST_GROUPS or number == len(param_groups) - 1
        alike = _kind_of(group), number if is_apart else None
        for parameter in group["params"]:
            if not _may_be_trained(parameter):
                continue
            marks = dict(vars(parameter))
            kind = alike, parameter.dim(), parameter.dtype, repr(sorted(marks.items()))
            num_alike[kind] += 1
            if num_alike[kind] <= _MOST_ALIKE:
                shape = [min(length, longest) for length in parameter.shape]
                value, *gradients = (
                    (torch.randn(shape, generator=generator, device="cpu") * scale).to(parameter.dtype)
                    for scale in (1.0, *_SCALES)
                )
                found.append(_Sample(number, value, gradients, marks))
    return found


def _may_be_trained(parameter: Tensor) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not is_composed(parameter)


def _is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is of torch's own class, and nothing but numbers and words is set on it: those can be copied."""
    return type(parameter) in (nn.Parameter, Tensor) and all(
        isinstance(each, _SIMPLE) for each in vars(parameter).values()
    )


def _kind_of(group: Mapping[str, Any]) -> str:
    """What groups have in common that differ in rates alone: a model may have one for each layer."""
    options = {name: value for name, value in group.items() if name != "params"}
    return repr({name: value != 0 if isinstance(value, float) else value for name, value in options.items()})


# What a parameter has come to, and its state.
_Stepped = tuple[Tensor, dict[str, Any]]


def _stepped_at_once(
    optimizer: Optimizer, step: Callable[[Optimizer], Any], samples: Sequence[_Sample], *, marked: bool = False
) -> list[_Stepped] | None:
    """All parameters, stepped together, maybe with what is set on them; None if a step changes anything else."""
    parameters = [each.parameter(marked=marked) for each in samples]
    groups = {parameter: each.group for parameter, each in zip(parameters, samples, strict=True)}
    twin = twin_of(optimizer, groups, {each: each for each in parameters})
    for number in range(len(_SCALES)):
        for parameter, sample in zip(parameters, samples, strict=True):
            parameter.grad = sample.gradients[number].clone()
        before = copy.deepcopy(_others_of(twin)), torch.get_rng_state()
        step(twin)
        if before[0] != _others_of(twin) or not torch.equal(before[1], torch.get_rng_state()):
            return None
    return [(parameter.detach(), twin.state[parameter]) for parameter in parameters]


def _stepped_apart(
    optimizer: Optimizer, step: Callable[[Optimizer], Any], samples: Sequence[_Sample]
) -> list[_Stepped]:
    """Each parameter, stepped by itself."""
    found: list[_Stepped] = []
    for sample in samples:
        parameter, state = sample.parameter(), dict[str, Any]()
        for gradient in sample.gradients:
            twin = twin_of(optimizer, {parameter: sample.group}, {parameter: parameter})
            twin.state[parameter], parameter.grad = state, gradient.clone()
            step(twin)
            state = twin.state[parameter]
        found.append((parameter.detach(), state))
    return found


def _others_of(twin: Optimizer) -> Any:
    """What a step may not change: hyperparameters, and what else an optimizer has of its own."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in twin.param_groups]
    own = {name: value for name, value in vars(twin).items() if name not in ("state", "param_groups", "defaults")}
    return _plain([groups, own])


def _plain(value: Any) -> Any:
    """Numbers, words and containers of them; of anything else, nothing."""
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() == 1 else None
    node = open_node(value)
    if node is not None:
        return [*map(str, node.keys)], [_plain(child) for child in node.children]
    return value if isinstance(value, str | int | float | complex | type(None)) else None


def _are_equal(some: Sequence[_Stepped], others: Sequence[_Stepped]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(value, other)
        and state.keys() == other_state.keys()
        and all(map(_is_equal, state.values(), other_state.values()))
        for (value, state), (other, other_state) in zip(some, others, strict=True)
    )


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    # Of what is nested, it is not known what belongs to which element, or where it has to be.
    return isinstance(one, str | int | float | type(None)) and one == other


def _halves(value: Tensor, gradients: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    middle = value.numel() // 2
    return [(value[part], [each[part] for each in gradients]) for part in (slice(middle), slice(middle, None))]


def _joined(one: _Stepped, other: _Stepped) -> _Stepped:
    """Two parts of a parameter as one."""
    state = {
        name: torch.cat([value, other[1][name]]) if isinstance(value, Tensor) and value.dim() > 0 else value
        for name, value in one[1].items()
    }
    return torch.cat([one[0], other[0]]), state


def _flat(stepped: _Stepped) -> _Stepped:
    value, state = stepped
    return value.flatten(), {
        name: each.flatten() if isinstance(each, Tensor) and each.dim() > 0 else each for name, each in state.items()
    }
