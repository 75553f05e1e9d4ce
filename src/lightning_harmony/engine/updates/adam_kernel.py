"""A kernel for Adam and AdamW that makes the operations of torch's fused implementation on the CPU, rounded as there.

That multiplies and adds at once in two places: where moments are interpolated, and where the square of a gradient is added.
All else is rounded by itself, and so is each division and root. (Seen of torch 2.11 and 2.13, and compared before it is used.)
CUDA's compiler would fuse more of it, and divide less exactly, so each operation is an instruction that says how it rounds.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _mul(a, b):
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def _add(a, b):
    return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def _sub(a, b):
    return tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def _div(a, b):
    return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def _sqrt(a):
    return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)


@triton.jit
def _multiply_add(a, b, c):
    return tl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)


@triton.jit
def _adam(
    parameter,
    gradient,
    average,
    average_of_squares,
    kept,
    part,
    part_of_squares,
    decay_of_squares,
    step,
    root_of_correction,
    eps,
    num_elements,
    block: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < num_elements
    p = tl.load(parameter + places, mask=inside)
    g = tl.load(gradient + places, mask=inside)
    m = tl.load(average + places, mask=inside)
    v = tl.load(average_of_squares + places, mask=inside)
    zeros = tl.zeros_like(p)
    p = _mul(p, kept + zeros)
    m = _multiply_add(part + zeros, _sub(g, m), m)
    v = _multiply_add(_mul(part_of_squares + zeros, g), g, _mul(v, decay_of_squares + zeros))
    denominator = _add(_div(_sqrt(v), root_of_correction + zeros), eps + zeros)
    p = _add(p, _div(_mul(step + zeros, m), denominator))
    tl.store(parameter + places, p, mask=inside)
    tl.store(average + places, m, mask=inside)
    tl.store(average_of_squares + places, v, mask=inside)


def adam_step(
    parameter: Tensor,
    gradient: Tensor | None,
    average: Tensor,
    average_of_squares: Tensor,
    number: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update one parameter in place, and its moments.

    Args:
        parameter: FP32, dense, of any shape. The others lie in memory in the same order.
        gradient: of it; None leaves all as it is.
        average: the first moment.
        average_of_squares: the second moment.
        number: of the step, from 1 on.
        lr: the learning rate.
        betas: what of the moments stays.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient, as in AdamW.
    """
    if gradient is None or parameter.numel() == 0:
        return
    beta1, beta2 = betas
    correction1, correction2 = 1 - beta1**number, 1 - beta2**number
    # In double precision up to here, and rounded to single as they are handed over: so it is on the host.
    numbers = [1 - lr * weight_decay, 1 - beta1, 1 - beta2, beta2, -(lr / correction1), math.sqrt(correction2), eps]
    num_elements = parameter.numel()
    _adam[(triton.cdiv(num_elements, _BLOCK),)](
        parameter, gradient, average, average_of_squares, *map(float, numbers), num_elements, block=_BLOCK
    )
