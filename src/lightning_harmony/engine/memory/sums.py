"""Sums of gradients on a device: from the first that is added to where they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.utils._mode_utils import no_dispatch

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.stash import copy_to
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import lay_out, views_in
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Accumulator, GradientKey, SummedGradients, SwappedPack
from lightning_harmony.engine.updates.norms import norms_of
from lightning_harmony.plan.values.task import Errand


@dataclass(eq=False, repr=False)
class Sums:
    """The sums of gradients that packs have on one device.

    Args:
        device: where they are summed.
        pool: host buffers for them.
        traffic: counts the copies.
        is_shared: whether several layers own a parameter.
        is_only_user: whether of these the step uses this one alone.
    """

    _device: Device
    _pool: HostPool
    _traffic: Traffic
    _is_shared: Callable[[nn.Parameter], bool]
    _is_only_user: Callable[[SwappedLayer, nn.Parameter], bool]

    def accumulate(
        self,
        pack: SwappedPack,
        layer: SwappedLayer,
        use: int,
        gradients: Sequence[tuple[nn.Parameter, Tensor]],
        *,
        add_to_earlier: bool,
    ) -> None:
        """Add the gradients of one microbatch to the sums on the device, in the parameters' own precision.

        Args:
            pack: the pack.
            layer: the layer of the pack that the gradients are of.
            use: which call of the layer they are of.
            gradients: of each parameter that has one.
            add_to_earlier: whether sums begin with the parameters' `grad`, as accumulation over batches does.
        """
        accumulator = pack.accumulators.get(use) or self._open(pack, use, add_to_earlier=add_to_earlier)
        accumulator.adding({(layer, p): gradient for p, gradient in gradients})()

    def gather(
        self,
        pack: SwappedPack,
        layer: SwappedLayer,
        use: int,
        gradients: Sequence[tuple[nn.Parameter, Tensor]],
        source: Device,
        *,
        add_to_earlier: bool,
    ) -> None:
        """Start to add the gradients of one microbatch, as `accumulate` does, from whichever device has them.

        They are added in the order of these calls, beside all that computes.

        Args:
            pack: the pack, as it is on this device.
            layer: the layer of the pack that the gradients are of.
            use: which call of the layer they are of.
            gradients: of each parameter that has one.
            source: the device that has made them, in whose computing this is called.
            add_to_earlier: whether sums begin with the parameters' `grad`, as accumulation over batches does.
        """
        device, after = self._device, [source.record()]
        arriving, num_bytes = gradients, 0
        with DisableTorchFunction(), no_dispatch(), device.scheduling():
            if source is not device:
                slots, num_bytes = lay_out([gradient for _, gradient in gradients])
                # In the pool of the stream: only what it does later finds this memory again.
                buffer = device.empty(num_bytes, device.gather)
                arriving = [(p, slot.view(buffer)) for (p, _), slot in zip(gradients, slots, strict=True)]
            accumulator = pack.accumulators.get(use)
            if accumulator is None:
                accumulator = self._open(pack, use, add_to_earlier=add_to_earlier)
                after.append(device.record())
            add = accumulator.adding({(layer, p): gradient for p, gradient in arriving})

            def bring_and_add() -> None:
                if source is not device:
                    with source.sending():
                        for (_, copy), (_, gradient) in zip(arriving, gradients, strict=True):
                            copy_to(copy, gradient)
                add()

            event = device.start_copy(Errand.GATHER, "gradients", num_bytes, bring_and_add, after, pack.index)
        accumulator.gathered = event
        for _, gradient in gradients:
            source.leaving.keep(event, gradient)
        self._traffic.transferred += num_bytes

    def finish_gathering(self) -> None:
        """Wait until all that was to be added here has been: sums may go, and so may what is added to them."""
        self._device.gather.submit_brief(lambda: None).synchronize()

    def _open(self, pack: SwappedPack, use: int, *, add_to_earlier: bool) -> Accumulator:
        """A new accumulator. It begins with what the host has: parked sums, or the `grad` of earlier batches."""
        slots, num_bytes = pack.gradient_layout()
        buffer = self._device.sums(num_bytes)
        accumulator = Accumulator(buffer, views_in(buffer, slots))
        pack.accumulators[use] = accumulator
        parked = pack.parked.pop(use, None)
        if parked is not None:
            self._unpark(pack, accumulator, parked)
        elif use == 0 and add_to_earlier:
            earlier = {key: p.grad for key in slots if (p := key[1]).grad is not None and self._is_only_user(*key)}
            accumulator.includes_earlier = {p for _, p in earlier}
            self._load(pack, accumulator, earlier)
        return accumulator

    def _unpark(self, pack: SwappedPack, accumulator: Accumulator, parked: SummedGradients) -> None:
        """Bring sums back, in one copy. Nothing but the device waits for it."""
        accumulator.includes_earlier = parked.includes_earlier
        accumulator.touched.update(parked.sums)
        num_bytes = parked.buffer.numel()
        copy = partial(copy_to, accumulator.buffer, parked.buffer)
        after = [self._device.record(), parked.event]
        loaded = self._device.start_copy(Errand.UNPARK, "gradients", num_bytes, copy, after, pack.index)
        loaded.wait()
        self._pool.give(parked.buffer, loaded)
        self._traffic.count_in("gradients", num_bytes)

    def _load(self, pack: SwappedPack, accumulator: Accumulator, earlier: dict[GradientKey, Tensor]) -> None:
        if not earlier:
            return
        sums = accumulator.sums
        num_bytes = sum(g.numel() * g.element_size() for g in earlier.values())

        def copy() -> None:
            for key, gradient in earlier.items():
                sums[key].copy_(gradient)

        after = [self._device.record()]
        loaded = self._device.start_copy(Errand.SWAP_IN, "gradients", num_bytes, copy, after, pack.index)
        # The host buffers of `earlier` may be used again from here on.
        loaded.synchronize()
        accumulator.touched.update(earlier)
        self._traffic.count_in("gradients", num_bytes)

    def add(self, pack: SwappedPack, use: int, accumulator: Accumulator, buffer: Tensor) -> None:
        """Add the sums of another device.

        Args:
            pack: the pack, which has sums of the same use, or none.
            use: which call of its layers they are of.
            accumulator: the other device's.
            buffer: its buffer, on this device.
        """
        slots, _ = pack.gradient_layout()
        own, arrived = pack.accumulators.get(use), views_in(buffer, slots)
        if own is None:
            pack.accumulators[use] = Accumulator(buffer, arrived, accumulator.touched, accumulator.includes_earlier)
            return
        own.adding({key: arrived[key] for key in accumulator.touched})()
        own.includes_earlier |= accumulator.includes_earlier

    def provide_buffers(self, pack: SwappedPack) -> None:
        """Make the host buffers that a pack's gradients will be copied to."""
        with self._device.on_host():
            for accumulator in pack.accumulators.values():
                self._pool.provide(accumulator.buffer.numel())

    def swap_out(
        self, pack: SwappedPack, kind: Errand = Errand.SWAP_OUT, *, with_norms: bool = False
    ) -> list[SummedGradients]:
        """Start to copy a pack's gradients to the host, and close its accumulators. Norms are computed before."""
        gradients = list(pack.parked.values())
        for use, accumulator in pack.accumulators.items():
            num_bytes = accumulator.buffer.numel()
            slots, _ = pack.gradient_layout()
            with self._device.on_host():
                host, free = self._pool.take(num_bytes, may_overflow=True)
                sums = views_in(host, {key: slot for key, slot in slots.items() if key in accumulator.touched})
                if with_norms and accumulator.gathered is not None:
                    accumulator.gathered.wait()
                norms = norms_of([accumulator.sums[key] for key in sums]) if with_norms else ()
            copy = partial(copy_to, host, accumulator.buffer)
            after = [self._device.record(), *free]
            if accumulator.gathered is not None:
                after.append(accumulator.gathered)
            event = self._device.start_copy(kind, "gradients", num_bytes, copy, after, pack.index)
            self._device.leaving.keep(event, accumulator.buffer)
            self._traffic.count_out("gradients", num_bytes)
            norm_of = dict(zip(sums, norms, strict=False))
            gradients.append(SummedGradients(use, host, event, sums, accumulator.includes_earlier, norm_of))
        pack.accumulators, pack.parked = {}, {}
        return gradients

    def may_stay(self, pack: SwappedPack) -> bool:
        """Whether the sums that a pack has here are all of its gradients, so that it can be updated with them as they are."""
        if len(pack.accumulators) != 1 or pack.parked:
            return False
        (accumulator,) = pack.accumulators.values()
        return not any(
            self._is_shared(p) or (p.grad is not None and p not in accumulator.includes_earlier)
            for _, p in accumulator.touched
        )

    def leave(self, pack: SwappedPack) -> SummedGradients:
        """Close the accumulator of a pack whose sums may stay, and leave them where they are, for an update there."""
        ((use, accumulator),) = pack.accumulators.items()
        if accumulator.gathered is not None:
            accumulator.gathered.wait()
        sums = {key: gradient for key, gradient in accumulator.sums.items() if key in accumulator.touched}
        masters = None
        if pack.residency is not None:
            pack.residency.ready.wait()
            masters = pack.residency.hand_over()
        event, earlier = self._device.record(), accumulator.includes_earlier
        pack.accumulators = {}
        return SummedGradients(use, accumulator.buffer, event, sums, earlier, is_on_host=False, masters=masters)

    def park(self, pack: SwappedPack) -> None:
        """Make room: keep the sums that are not final yet on the host."""
        pack.parked = {gradients.use: gradients for gradients in self.swap_out(pack, Errand.PARK)}

    def drop(self, pack: SwappedPack) -> None:
        """Forget the sums that a pack has, here and on the host, where a copy may still write to them."""
        for accumulator in pack.accumulators.values():
            self.free(accumulator)
        for parked in pack.parked.values():
            self._device.leaving.keep(parked.event, parked.buffer)
        pack.accumulators, pack.parked = {}, {}

    def free(self, accumulator: Accumulator) -> None:
        """Called before sums are dropped that something may still be added to, or read of."""
        gathered = [] if accumulator.gathered is None else [accumulator.gathered]
        self._device.free(accumulator.buffer, [self._device.record(), *gathered])

    def unpark(self, pack: SwappedPack) -> None:
        """Bring sums back that made room before."""
        for use in list(pack.parked):
            self._open(pack, use, add_to_earlier=False)

    def scale(self, pack: SwappedPack, factor: float) -> None:
        """Multiply the sums that a pack has."""
        for accumulator in pack.accumulators.values():
            if accumulator.gathered is not None:
                accumulator.gathered.wait()
            torch._foreach_mul_([accumulator.sums[key] for key in accumulator.touched], factor)
        for parked in pack.parked.values():
            parked.event.synchronize()
            torch._foreach_mul_(list(parked.sums.values()), factor)
