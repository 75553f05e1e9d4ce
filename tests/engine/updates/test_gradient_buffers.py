"""Buffers of gradients: nobody's gradient is overwritten, and none is kept for nobody."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import lay_out
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SummedGradients
from lightning_harmony.engine.updates.gradient_buffers import GradientBuffers


@pytest.fixture
def pool() -> HostPool:
    return HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))


@pytest.fixture
def buffers(pool: HostPool) -> GradientBuffers:
    return GradientBuffers(pool)


def some_parameters(number: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(5, 3 + index)) for index in range(number)]


def delivered(pool: HostPool, buffers: GradientBuffers, *parameters: nn.Parameter) -> SummedGradients:
    """Gradients in one buffer, none of which has been used."""
    layer = SwappedLayer(0, "layer", None, parameters)
    slots, num_bytes = lay_out([parameter.detach() for parameter in parameters])
    buffer, _ = pool.take(num_bytes)
    sums = {(layer, p): slot.view(buffer).fill_(1.0) for p, slot in zip(parameters, slots, strict=True)}
    source = SummedGradients(0, buffer, Happened(), sums, set())
    buffers.add(source)
    return source


def collected(pool: HostPool, buffers: GradientBuffers, *parameters: nn.Parameter) -> SummedGradients:
    """The same when each is the `grad` of its parameter."""
    source = delivered(pool, buffers, *parameters)
    for (_, parameter), gradient in source.sums.items():
        parameter.grad = gradient.detach()
    for _ in parameters:
        buffers.use(source, as_grad=True, free=True)
    return source


def is_free(pool: HostPool, source: SummedGradients) -> bool:
    taken, _ = pool.take(source.buffer.numel())
    return taken is source.buffer


class TestGradientsOfParameters:
    def test_a_buffer_is_kept_while_any_gradient_in_it_is_used(self, pool: HostPool, buffers: GradientBuffers) -> None:
        one, other = some_parameters(2)
        source = collected(pool, buffers, one, other)
        buffers.reclaim()
        assert not is_free(pool, source)
        one.grad = None
        buffers.reclaim()
        assert not is_free(pool, source)
        assert buffers.kept_bytes == source.buffer.numel()
        other.grad = None
        buffers.reclaim()
        assert is_free(pool, source)
        assert buffers.kept_bytes == 0

    def test_a_buffer_is_free_when_another_gradient_took_the_place(
        self, pool: HostPool, buffers: GradientBuffers
    ) -> None:
        (parameter,) = some_parameters(1)
        source = collected(pool, buffers, parameter)
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()
        buffers.reclaim()
        assert is_free(pool, source)

    @pytest.mark.parametrize("keep", [lambda g: g, lambda g: g[0], lambda g: g.detach()], ids=["it", "part", "alias"])
    def test_a_gradient_that_the_user_keeps_is_not_overwritten(
        self, pool: HostPool, buffers: GradientBuffers, keep: Callable[[Tensor | None], Tensor]
    ) -> None:
        (parameter,) = some_parameters(1)
        source = collected(pool, buffers, parameter)
        kept = keep(parameter.grad)
        parameter.grad = None
        buffers.reclaim()
        assert not is_free(pool, source)
        assert torch.equal(kept, torch.ones_like(kept))
        del kept
        buffers.reclaim()
        assert is_free(pool, source)

    def test_a_buffer_is_given_back_once(self, pool: HostPool, buffers: GradientBuffers) -> None:
        (parameter,) = some_parameters(1)
        source = collected(pool, buffers, parameter)
        parameter.grad = None
        buffers.reclaim()
        buffers.reclaim()
        assert is_free(pool, source)
        assert not is_free(pool, source)


class TestGradientsOfAnUpdate:
    def test_a_buffer_is_free_when_its_last_gradient_is_used(self, pool: HostPool, buffers: GradientBuffers) -> None:
        source = delivered(pool, buffers, *some_parameters(2))
        buffers.use(source, as_grad=False, free=True)
        assert not is_free(pool, source)
        buffers.use(source, as_grad=False, free=True)
        assert is_free(pool, source)

    def test_a_buffer_that_is_not_to_be_free_is_given_to_nobody(self, pool: HostPool, buffers: GradientBuffers) -> None:
        source = delivered(pool, buffers, *some_parameters(1))
        buffers.use(source, as_grad=False, free=False)
        buffers.reclaim()
        assert not is_free(pool, source)

    def test_a_buffer_on_the_device_does_not_come_to_the_pool(self, pool: HostPool, buffers: GradientBuffers) -> None:
        source = delivered(pool, buffers, *some_parameters(1))
        source.is_on_host = False
        buffers.use(source, as_grad=False, free=True)
        assert not is_free(pool, source)
