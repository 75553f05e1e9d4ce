"""What of a swapped parameter is refused to the code between layers, and why."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.errors import BorrowsModuleError, UnsupportedModelError

if TYPE_CHECKING:
    from lightning_harmony.engine.glue.glue import StandIn
    from lightning_harmony.engine.glue.runtime import Runtime

GRADIENTS_ASKED = (
    "torch.autograd.grad asks for gradients of parameters within the step, which come to p.grad alone, at its end: read them "
    "in on_after_backward, or optimize manually (self.automatic_optimization = False), call backward() and read p.grad"
)
# Code that lies between an operation on a stand-in and who calls it.
_BETWEEN = (
    __name__.rpartition(".")[0],
    "torch._dynamo",
    "torch._compile",
    "torch.overrides",
    "torch.utils._contextlib",
)

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
SETTING_FLAGS = frozenset({Tensor.requires_grad.__set__, Tensor.requires_grad_})  # type: ignore[attr-defined]
# They return the tensor itself where it is of that type, and there.
_CONVERTING = {
    Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.type, Tensor.type_as,
    Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
}  # fmt: skip


def _name(stand_in: StandIn) -> str:
    return stand_in._runtime.glue_layer(stand_in.parameter).name


def refuse_lost_gradient(stand_in: StandIn | None) -> None:
    """Refuse a gradient that comes to a stand-in.

    Raises:
        UnsupportedModelError: if there still is one.
    """
    if stand_in is None:
        return
    raise UnsupportedModelError(
        f"a gradient of parameter {_name(stand_in)!r} comes to what stands for it while it is swapped out: code that torch "
        "tells nobody of, such as torch.jit.script, a function that is vectorized over the parameter (torch.vmap) or an "
        "extension, computes with the parameter itself. Give it a copy, parameter.clone(), or make a layer of the module that "
        "runs it with HarmonyStrategy(layers=...)"
    )


def refuse_gradients_of(parameter: nn.Parameter, runtime: Runtime) -> RemovableHandle:
    """Refuse a gradient that autograd itself adds to a parameter's: it came past the layers, and would be lost."""

    def refuse(parameter: nn.Parameter) -> None:
        raise UnsupportedModelError(
            f"the step uses parameter {runtime.glue_layer(parameter).name!r} where swapping does not see it, such as in a "
            "functools.partial, slots of an object or the optimizer's groups: use it as the attribute of its module, or keep "
            "it in a list, dict, tuple or attribute of an object that is one"
        )

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(refuse)
    return handle


def gradient_in_step(stand_in: StandIn) -> Tensor | None:
    """The `grad` of a parameter, which code asks its stand-in for.

    Torch's own code, such as that of `zero_grad`, finds none where gradients of earlier steps are not for the step's code.

    Raises:
        UnsupportedModelError: if other code asks for it there.
    """
    if not stand_in.requires_grad or not stand_in._runtime.hides_gradients():
        return None if stand_in.stands_for is stand_in else stand_in.parameter.grad
    if _is_asked_by_torch():
        return None
    raise UnsupportedModelError(
        f"the gradient of parameter {_name(stand_in)!r} is read within a step, where those of the last step or microbatch are "
        "gone or incomplete while layers are swapped: read p.grad in a hook such as on_after_backward, and keep there what "
        "the next step needs of it"
    )


def _is_asked_by_torch() -> bool:
    """Whether torch's own code, or ours, asks a stand-in, and computes nothing with the answer."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] in ("torch", "lightning_harmony") and name != "torch.nn.utils.clip_grad"


def changes_nothing(func: Any, stand_in: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call is to make of a parameter what it is already, as ``self.to(self.device)`` does in a step.

    Args:
        func: what is called.
        stand_in: what with, if the parameter's comes first.
        args: what with, behind that.
        kwargs: what with, too.
    """
    if func in SETTING_FLAGS:
        flag = args[0] if args else kwargs.get("requires_grad", True)
        return bool(flag == stand_in.requires_grad)
    if func == _SET_DATA:
        return type(args[0]) is type(stand_in) and bool(args[0].parameter is stand_in.parameter)
    if func not in _CONVERTING or kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        number = torch.empty((), dtype=stand_in.dtype, device=stand_in.device)
        return bool(func(number, *args, **kwargs) is number)


def changed_in_step(stand_in: StandIn) -> str:
    """A message: the step changes a parameter."""
    return (
        f"parameter {_name(stand_in)!r} is changed inside the step, while it is swapped out; do that in a hook such as "
        "on_train_batch_start, on_train_batch_end or on_validation_start, or optimize manually "
        "(self.automatic_optimization = False), where the training_step may. Where the first call alone sets it, run the "
        "model once before the fit; where a module has it beside those that the step trains, as an average of these, make "
        "layers of smaller modules with HarmonyStrategy(layers=...)"
    )


def made_into_parameter(stand_in: StandIn) -> str:
    """A message: the step makes a parameter of another one, on the same memory."""
    return (
        f"the step makes an nn.Parameter in the memory of parameter {_name(stand_in)!r}, which is swapped: make it of a copy, "
        "weight.detach().clone(), or before the fit"
    )


def not_its_own(caller: SwappedLayer, layer: SwappedLayer) -> UnsupportedModelError:
    """The refusal where a layer uses a parameter that is none of its own."""
    return BorrowsModuleError(
        f"layer {caller.name!r} uses parameter {layer.name!r}, which is not its own and is swapped by itself: pass it to the "
        "layer as a tensor (not the module that has it), or make a layer of what has both with HarmonyStrategy(layers=...)",
        caller.name,
        layer.name.rpartition(".")[0],
    )


def used_by_compiled_code(stand_in: StandIn) -> str:
    """A message: compiled code between layers uses a parameter."""
    return (
        f"compiled code outside of layers uses parameter {_name(stand_in)!r}, which is swapped: compile the layers alone, "
        "with HarmonyStrategy(compile_layers=True) or module.compile() on each, and not the model around them"
    )
