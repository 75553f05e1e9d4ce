"""Interception: what takes the place of a layer's forward, and makes each call of it one that swaps."""

from __future__ import annotations

import copy
import copyreg
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_harmony.engine.glue.one_device import BringsHostOperands
from lightning_harmony.engine.lanes.lane import AnyLane, Lane, this_thread
from lightning_harmony.engine.layers.layer_call import LayerCall, OwnForward
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.model.compiled import compiled_whole, is_compiled
from lightning_harmony.engine.model.derived import derives_weights
from lightning_harmony.engine.model.layer import SwappedLayer, layer_of_caller
from lightning_harmony.engine.updates.requested_gradients import anchored
from lightning_harmony.errors import BorrowsModuleError, UnsupportedModelError

_CALL_IMPL = nn.Module._call_impl.__code__
# The code of torch that calls the forward of a module, or what is compiled of it.
_CALLS = {
    nn.Module._wrapped_call_impl.__code__,
    _CALL_IMPL,
    *(each for each in _CALL_IMPL.co_consts if isinstance(each, types.CodeType) and "self" in each.co_freevars),
}
_DISABLES = "torch._dynamo."


class InterceptedForward:
    """Takes the place of a layer's ``forward``. Copies of the module get the original back.

    Where ``module.compile()`` compiled the call of the module, it takes the place of that.

    Args:
        layer: the layer, with a module.
        runtime: the engine.
        compile_options: of `torch.compile`, with which to compile the layer unless the user did; None to leave it as it is.
    """

    def __init__(self, layer: SwappedLayer, runtime: Runtime, compile_options: Mapping[str, Any] | None = None) -> None:
        module = layer.module
        assert module is not None
        self._module = module
        derives = derives_weights(module) and not compiled_whole(module)
        self._attribute = "_compiled_call_impl" if compiled_whole(module) or derives else "forward"
        # Compiled or patched modules carry a forward of their own, which this one hides.
        self.own: Callable[..., Any] | None = vars(module).get(self._attribute)
        # A hook that computes weights from parameters has to find those: it runs within.
        original: Callable[..., Any] = module._call_impl if derives else getattr(module, self._attribute)
        if compile_options is None or is_compiled(module):
            self.original = OwnForward(layer, original, is_compiled(module))
        else:
            self.original = OwnForward(layer, torch.compile(original, **compile_options), is_compiled=True)
        self.layer = layer
        self._runtime = runtime
        # Its gradient is never used: it makes weights part of the graph of a call.
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)
        self._is_removed = False
        setattr(module, self._attribute, self)
        _copies.begin(module)

    def remove(self) -> None:
        """Give the module its own forward back, unless the user has put another one there since, which may call this one."""
        if not self._is_removed:
            _copies.end(self._module)
        self._is_removed = True
        if vars(self._module).get(self._attribute) is not self:
            return
        if self.own is None:
            delattr(self._module, self._attribute)
        else:
            setattr(self._module, self._attribute, self.own)

    # A container around layers may be compiled: not what comes in between.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, swapped in.

        Raises:
            UnsupportedModelError: within `torch.func` transformations, or if the layer does what would be lost.
        """
        called = _called_module()
        if called is not None and called is not self._module and self._is_copied_to(called):
            return self._forward_of(called)(*args, **kwargs)
        if self._is_removed:
            return self.original.run(*args, **kwargs)
        lane, caller = this_thread.lane, layer_of_caller()
        if caller is not None and caller.uses(self._module):
            return self.original.run(*args, **kwargs)
        if self.layer.is_given_weights():
            return self._run_with_given_weights(lane, args, kwargs)
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedModelError(
                f"layer {self.layer.name!r} is called within a transformation of torch.func (vmap, grad, jvp), which cannot "
                "see through the swapping: make the module that does so a layer with HarmonyStrategy(layers=...)"
            )
        if caller is not None:
            raise BorrowsModuleError(
                f"layer {caller.name!r} calls layer {self.layer.name!r}, which is not a part of it and is swapped by itself: "
                "call that outside and pass on what it returns, or make a layer of what has both with "
                "HarmonyStrategy(layers=...)",
                caller.name,
                _called_by(caller, self._module),
            )
        if torch._C._is_tracing() and lane is None:
            # A logger that draws the model, or an export: between steps weights are the model's own.
            return self.original.run(*args, **kwargs)
        # In a lane, user's code sees stand-ins for parameters.
        anchor = self._anchor if lane is not None else anchored(self._anchor, self.layer.parameters)
        return self._run(anchor, args, kwargs)

    def _is_copied_to(self, module: nn.Module) -> bool:
        """Whether a module has this one because it got all attributes of the layer, as `copy.copy` gives them.

        Without a forward of the layer's own, it would have that of its class.
        """
        has_it = vars(module).get(self._attribute) is self
        return has_it and self.own is None and isinstance(module, type(self._module))

    def _forward_of(self, copied: nn.Module) -> Callable[..., Any]:
        """What a copy of the layer runs: it may have other weights, and is code between layers."""
        forward: Callable[..., Any] = _bound_forward(copied) if self._attribute == "forward" else copied._call_impl
        return forward

    def _run_with_given_weights(self, lane: AnyLane | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """There is nothing to swap: it is code between layers."""
        if isinstance(lane, Lane):
            # The module has these weights for all microbatches. This ends the turns: the step runs again.
            raise UnsupportedModelError(f"layer {self.layer.name!r} is called with other weights than its own")
        device = self._runtime.device_of(self.layer)
        # Outside of lanes, parameters are on the host, and what is made of them.
        brings = BringsHostOperands(device) if lane is None and device.type == "cuda" else nullcontext()
        with brings:
            return self.original.run(*args, **kwargs)

    def _run(self, anchor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return LayerCall(self.original, self._runtime, anchor).run(args, kwargs)

    @property
    def __globals__(self) -> NoReturn:
        # `torch.jit.script` looks for the names in it that a function uses.
        raise AttributeError(
            f"layer {self.layer.name!r} has no forward of its own while it trains, which torch.jit.script would compile: "
            "script a copy, torch.jit.script(copy.deepcopy(module)), or trace the module, torch.jit.trace(module, inputs), as "
            "to_torchscript(method='trace') does"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy of the forward that a module was given is bound to the copy of the module.
        return _bound_forward(memo[id(self._module)]) if self.own is None else copy.deepcopy(self.own, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own is not None:
            raise TypeError(f"layer {self.layer.name} cannot be pickled while it trains")
        return _bound_forward, (self._module,)


class _Copies:
    """Lets `copy.copy` give copies of layers what these had themselves. An intercepted forward knows the original alone.

    A class has its entry in `copyreg.dispatch_table` while the forward of one of its modules is intercepted.
    """

    def __init__(self) -> None:
        self._modules = Counter[type]()
        # Several fits may run, each in a thread of its own.
        self._lock = threading.Lock()

    def begin(self, module: nn.Module) -> None:
        """The forward of a module is intercepted."""
        with self._lock:
            self._modules[type(module)] += 1
            copyreg.dispatch_table.setdefault(type(module), self._reduced)

    def end(self, module: nn.Module) -> None:
        """It is so no longer."""
        kind = type(module)
        with self._lock:
            self._modules[kind] -= 1
            if self._modules[kind] <= 0 and copyreg.dispatch_table.get(kind) == self._reduced:
                del copyreg.dispatch_table[kind]

    def _reduced(self, module: nn.Module) -> Any:
        made, arguments, state, *rest = (*module.__reduce_ex__(4), None)[:5]
        if isinstance(state, dict):
            own = {name: value.own if isinstance(value, InterceptedForward) else value for name, value in state.items()}
            state = {name: value for name, value in own.items() if value is not None or state[name] is None}
        return made, arguments, state, *rest


_copies = _Copies()


def _called_module() -> nn.Module | None:
    """The module whose call runs what an intercepted forward takes the place of; None if other code calls that."""
    frame: types.FrameType | None = sys._getframe(2)
    # That of `torch.compiler.disable` is between.
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_DISABLES):
        frame = frame.f_back
    return frame.f_locals["self"] if frame is not None and frame.f_code in _CALLS else None


def _called_by(layer: SwappedLayer, module: nn.Module) -> nn.Module:
    """The module that a layer's own code calls, within which another one is called."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            called = frame.f_locals["self"]
            if layer.uses(called):
                break
            module = called
        frame = frame.f_back
    return module


def _bound_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)
