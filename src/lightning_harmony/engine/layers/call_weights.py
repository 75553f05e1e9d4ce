"""The weights of one call in the caller's graph: what its code finds in their places, and where their gradients go."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.autograd.graph import saved_tensors_hooks

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.layers.narrow_weight import NarrowUse, NarrowWeight, can_show, show
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.operations import detached
from lightning_harmony.engine.structures.parts import num_bytes_of
from lightning_harmony.engine.updates.requested_gradients import requested_gradients
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.task import Phase

if TYPE_CHECKING:
    from lightning_harmony.engine.layers.layer_call import LayerCall


_IS_LEAF: Any = Tensor.is_leaf.__get__  # type: ignore[attr-defined]


class CallWeights:
    """The weights of one call. It does not hold the call, which holds it: nothing would free the two at once.

    Args:
        layer: what is called.
        runtime: the engine.
        anchor: makes them part of the graph; None where they are leaves of one.
        is_compiled: whether the layer's code is compiled.
        with_graph: whether a graph is made of the call.

    Attributes:
        trained: the parameters that need gradients.
    """

    def __init__(
        self,
        layer: SwappedLayer,
        runtime: Runtime,
        anchor: Tensor | None = None,
        *,
        is_compiled: bool = False,
        with_graph: bool = True,
    ) -> None:
        self._layer, self._runtime, self._anchor = layer, runtime, anchor
        self._is_compiled, self._with_graph = is_compiled, with_graph
        self._flags = [parameter.requires_grad for parameter in layer.parameters]
        self.trained = list(compress(layer.parameters, self._flags))
        if layer.held and not layer.held.keys().isdisjoint(self.trained):
            raise UnsupportedModelError(
                f"layer {layer.name!r} is to train a parameter that it has set in its forward while that was frozen: freeze "
                "it, or set it in a hook such as on_train_batch_start"
            )
        # What the running code does with narrow weights.
        self._uses: list[NarrowUse] = []
        # In the graph, too: with it the node of the weights lives where no other node is behind that.
        self._end: Tensor | None = None

    def bind(self, call: LayerCall) -> Mapping[nn.Parameter, Tensor]:
        """The weights for the layer's code, in the caller's graph: their gradients go to the pack's sum."""
        trained, residency = self.trained, call.residency
        own = self._flag(residency)
        leaves = residency.leaves
        if not (trained and self._with_graph):
            return self._shown(leaves, residency)
        self._gradients = WeightGradients(call, trained)
        weights = list(map(detached, compress(own, self._flags)))
        with saved_tensors_hooks(self._gradients.save, self._gradients.load):
            *taps, self._end = _apply(self._anchor, self._gradients, weights)
        return self._shown(self.as_found(trained, taps, residency), residency)

    def _flag(self, residency: Residency) -> Sequence[nn.Parameter]:
        """Have those need gradients that did so when the layer was called: a step may say otherwise for a while.

        Returns:
            All of the layer's, in the order of its parameters.
        """
        layer, found = self._layer, residency.leaves_by_layer.get(self._layer)
        if found is None:
            found = residency.leaves_by_layer[layer] = [residency.leaves[parameter] for parameter in layer.parameters]
        for leaf, flag in zip(found, self._flags, strict=True):
            if leaf.requires_grad is not flag:
                leaf.requires_grad_(flag)
        return found

    def bind_again(self, residency: Residency) -> Mapping[nn.Parameter, Tensor]:
        """The same weights, in the same graph: code that runs in the backward may differentiate to them."""
        self._flag(residency)
        if self._end is None or not self._with_graph:
            return self._shown(residency.leaves, residency)
        node: Any = self._end.grad_fn
        return self._shown(self.as_found(self._gradients.parameters, node.saved_tensors, residency), residency)

    def of_leaves(self, weights: Sequence[Tensor], residency: Residency) -> Mapping[nn.Parameter, Tensor]:
        """The weights for code whose graph begins with them: the trained ones are given, in their order."""
        return self._shown(self.as_found(self.trained, weights, residency), residency)

    def have_read_wide(self) -> bool:
        """Whether the code has needed one as the parameter is that is narrow."""
        return any(use.is_read for use in self._uses)

    def _shown(self, weights: Mapping[nn.Parameter, Tensor], residency: Residency) -> Mapping[nn.Parameter, Tensor]:
        """The weights, each as wide as the parameter is: what is shown of narrow ones computes as they are needed."""
        layer = self._layer
        if self._is_compiled or layer.compute_dtype is not None or not layer.narrow:
            return weights
        shown: Sequence[tuple[nn.Parameter, NarrowWeight]] | None = residency.shown.get(layer)
        if shown is None:
            with torch.inference_mode(False):
                shown = residency.shown[layer] = list(self._shown_of(residency.leaves))
        found = dict(weights)
        for parameter, stand_in in shown:
            use = self._use_of(parameter, weights[parameter], residency.device)
            self._uses.append(use)
            found[parameter] = stand_in.of(use)
        return found

    def _shown_of(self, leaves: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[tuple[nn.Parameter, NarrowWeight]]:
        """What all calls are shown of weights that are narrow, while they are there."""
        refuse = partial(_refuse_gradient, self._layer)
        for parameter, dtype in self._layer.narrow.items():
            leaf = leaves[parameter]
            if leaf.dtype is dtype is not parameter.dtype and can_show(parameter, leaf):
                yield parameter, show(parameter, leaf, refuse)

    def tried(
        self, narrow: Mapping[nn.Parameter, Tensor], wide: Mapping[nn.Parameter, Tensor], residency: Residency
    ) -> tuple[Mapping[nn.Parameter, Tensor], dict[nn.Parameter, NarrowUse]]:
        """What the code would find if some weights were narrow, and what it then does with these.

        Args:
            narrow: those, which the residency has already.
            wide: the same as they are.
            residency: of the pack.
        """
        trained = self.trained if self._with_graph else []
        # Leaves of no graph, and else what the layer found.
        weights = [residency.leaves[parameter].detach().requires_grad_() for parameter in trained]
        found = self.as_found(trained, weights, residency)
        uses = {p: NarrowUse(found[p], partial(Tensor.detach, wide[p])) for p in narrow if can_show(p, found[p])}
        refuse = partial(_refuse_gradient, self._layer)
        return {**found, **{p: show(p, narrow[p], refuse).of(use) for p, use in uses.items()}}, uses

    def forget_uses(self) -> None:
        """The code has run: what was shown of narrow weights keeps nothing."""
        for use in self._uses:
            use.close()
        self._uses = []

    def _use_of(self, parameter: nn.Parameter, narrow: Tensor, device: Device) -> NarrowUse:
        # Not the weight itself, which would be kept with what code keeps.
        runtime, layer, place = self._runtime, self._layer, narrow.device

        def load() -> Tensor:
            layer.read_wide.add(parameter)
            # For its gradient, too.
            runtime.make_room(2 * num_bytes_of(parameter), device)
            with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
                return parameter.detach().to(place, copy=True)

        # Code of a layer finds a leaf in any case.
        if _IS_LEAF(narrow) or not narrow.requires_grad:
            return NarrowUse(narrow, load)
        end, take = self._end, partial(self._gradients.take_wide, parameter)

        def attach(value: Tensor) -> Tensor:
            tap: Tensor = _Widened.apply(end, value, take)
            return tap

        return NarrowUse(narrow, load, attach)

    def have_changed_wide(self) -> bool:
        """Whether the code has changed what it was given as a parameter in the place of a narrow weight."""
        return bool(self._uses) and any(use.has_changed() for use in self._uses)

    def as_found(
        self, parameters: Sequence[nn.Parameter], taps: Sequence[Tensor], residency: Residency
    ) -> Mapping[nn.Parameter, Tensor]:
        """The weights, some of them in a graph: of the classes that the layer's code finds, and with the same attributes."""
        leaves = residency.leaves
        for parameter, tap in zip(parameters, taps, strict=True):
            leaf = leaves[parameter]
            # The compiler knows no classes of ours.
            kind = type(parameter) if self._is_compiled else type(leaf)
            if kind is not nn.Parameter:
                tap.__class__ = kind
            # What is set on one is on both.
            tap.__dict__ = leaf.__dict__
        return {**leaves, **dict(zip(parameters, taps, strict=True))}


class WeightGradients:
    """The other end of the node that has a layer's weights in the graph of one call: takes their gradients.

    The node holds it, and the call holds the node. So it does not hold the call: nothing would free the three where no
    backward comes, as where a checkpoint around layers runs them again for the sake of another tensor.

    Args:
        call: the call.
        parameters: those that need gradients.
    """

    def __init__(self, call: LayerCall, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._layer, self._runtime, self._use = call.layer, call.runtime, call.use
        self._call = weakref.ref(call)
        self._unsaved = iter(parameters)
        # Of parameters that were needed as they are, where the weights are narrow.
        self._wide: dict[nn.Parameter, Tensor] = {}

    def save(self, weight: Tensor) -> tuple[nn.Parameter, torch.dtype]:
        """The node saves the next weight."""
        return next(self._unsaved), weight.dtype

    def load(self, saved: tuple[nn.Parameter, torch.dtype]) -> Tensor:
        """The weight for the call, while a backward is in it."""
        call, (parameter, dtype) = self._call(), saved
        assert call is not None
        # It may have come in another type since.
        leaf = detached(call.residency.leaves[parameter])
        return leaf if leaf.dtype is dtype else leaf.to(dtype)

    def take_wide(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """The gradient of a parameter that was needed as it is. That of the narrow weight comes last, if one does."""
        earlier = self._wide.get(parameter)
        self._wide[parameter] = gradient if earlier is None else earlier + gradient

    def _summed(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
        wide = self._wide.pop(parameter, None)
        return gradient if wide is None else wide if gradient is None else wide + gradient

    def take(self, gradients: Sequence[Tensor | None], anchor: Any) -> None:
        """Gradients have come.

        Args:
            gradients: of each parameter; None for one that the backward has not come to.
            anchor: the node that knows whose gradients are asked for.
        """
        layer, runtime, call = self._layer, self._runtime, self._call()
        if torch.is_grad_enabled():
            raise double_backward(layer)
        summed = requested_gradients(anchor, layer.parameters, f"layer {layer.name!r}")
        pairs = list(zip(self.parameters, gradients, strict=True))
        if self._wide:
            pairs = [(p, self._summed(p, gradient)) for p, gradient in pairs]
        wanted = [(p, gradient) for p, gradient in pairs if gradient is not None and p in summed]
        with runtime.calling():
            if call is not None:
                call.enter()
                runtime.accumulate(layer, self._use, wanted)
                if call.is_through():
                    runtime.open_call.leave()
                return
            # It saved nothing.
            with runtime.visit(layer, Phase.BACKWARD):
                runtime.accumulate(layer, self._use, wanted)
                if runtime.is_last_backward():
                    runtime.end_backward(layer)


class _Weights(torch.autograd.Function):
    """The weights of a layer in the graph of one call."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: WeightGradients, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        return *weights, torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients.take(gradients[:-1], ctx.next_functions[0][0])
        return None, None, None


# Not by way of `apply` of torch's own, which looks for transformations: no layer is called in one.
_apply: Callable[..., tuple[Tensor, ...]] = vars(torch._C._FunctionBase)["apply"].__get__(None, _Weights)


class _Widened(torch.autograd.Function):
    """A parameter as it is in the graph of a call whose weight is narrow: behind the node of the weights, which runs later."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, value: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.take(gradient)
        return None, None, None


def _refuse_gradient(layer: SwappedLayer, gradient: Tensor) -> None:
    raise UnsupportedModelError(
        f"a gradient of a parameter of layer {layer.name!r} comes to what stands for it while it is narrow: code that torch "
        "tells nobody of, such as torch.jit.script, a function that is vectorized over the parameter (torch.vmap) or an "
        "extension, computes with the parameter itself. Give it a copy, parameter.clone()"
    )


def second_backward(layer: SwappedLayer) -> UnsupportedModelError:
    """What is raised where a backward comes to a call that has had its last one."""
    return UnsupportedModelError(
        f"a second backward comes to one call of layer {layer.name!r}: the losses of two microbatches depend on it, "
        "as through a tensor that one of them left where the other found it, in a closure or an object; use "
        "num_microbatches=1"
    )


def double_backward(layer: SwappedLayer) -> UnsupportedModelError:
    """What is raised where a backward is to be differentiated."""
    around = _called_around(layer)
    if around is None:
        way_out = "compute the gradient in the forward of a module that has the layer, and make a layer of that"
    else:
        way_out = (
            f"make a layer of {around[0]!r} ({type(around[1]).__name__}), in whose forward the gradient is computed,"
        )
    return UnsupportedModelError(
        f"double backward (create_graph=True) goes through swapped layer {layer.name!r}, which recomputes and keeps no graph: "
        f"{way_out} with HarmonyStrategy(layers=...), use Trainer(strategy='auto'), or penalize a difference of two outputs "
        "instead of a gradient"
    )


def _called_around(layer: SwappedLayer) -> tuple[str, nn.Module] | None:
    """The innermost module whose forward runs now and that has the layer, with its name; None if that is the whole model."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            called = frame.f_locals["self"]
            inside = next((name for name, module in called.named_modules() if module is layer.module), "")
            if inside and layer.name.endswith(f".{inside}"):
                return layer.name.removesuffix(f".{inside}"), called
        frame = frame.f_back
    return None
