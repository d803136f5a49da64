"""FLOPs of the operators for ``torch.utils.flop_counter``: those of the bf16 GEMMs that they replace.

A counter sees the operator that a layer calls and nothing of what that operator runs, so each formula has all GEMMs of
its operator, and nothing is counted twice. Casts count as nothing, as elementwise operators do there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from lightning_fp8.ops.basic import scaled_mm, scaled_mm_add_
from lightning_fp8.ops.feed_forward import mlp, mlp_backward
from lightning_fp8.ops.linear_layer import linear, linear_backward

# tensors arrive as their shapes
Shape = Sequence[int]


@register_flop_formula(scaled_mm.op.overloadpacket)
def _scaled_mm(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return _gemm(a, b)


@register_flop_formula(scaled_mm_add_.op.overloadpacket)
def _scaled_mm_add(out: Shape, a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return _gemm(a, b)


@register_flop_formula(linear.op.overloadpacket)
def _linear(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return _gemm(_rows(x), weight)


@register_flop_formula(linear_backward.op.overloadpacket)
def _linear_backward(
    dy: Shape,
    h: Shape | None,
    activation: str,
    x_fp8_t: Shape | None,
    x_scale_inv: Shape,
    w_fp8_t: Shape | None,
    *_: Any,
    **__: Any,
) -> int:
    return _gradients(dy if h is None else h, x_fp8_t, w_fp8_t)


@register_flop_formula(mlp.op.overloadpacket)
def _mlp(x: Shape, weight_1: Shape, bias_1: Shape | None, weight_2: Shape, *_: Any, **__: Any) -> int:
    return _gemm(_rows(x), weight_1) + _gemm((_rows(x)[0], weight_2[1]), weight_2)


@register_flop_formula(mlp_backward.op.overloadpacket)
def _mlp_backward(
    dy: Shape,
    h: Shape,
    activation: str,
    x_fp8_t: Shape | None,
    x_scale_inv: Shape,
    w1_fp8_t: Shape | None,
    w1_scale_inv: Shape,
    a_fp8_t: Shape | None,
    a_scale_inv: Shape,
    w2_fp8_t: Shape | None,
    *_: Any,
    **__: Any,
) -> int:
    return _gradients(dy, a_fp8_t, w2_fp8_t) + _gradients(h, x_fp8_t, w1_fp8_t)


def _rows(x: Shape) -> Shape:
    """Of ``[*, K]`` as ``[M, K]``."""
    return math.prod(x[:-1]), x[-1]


def _gemm(a: Shape, b: Shape) -> int:
    """Of ``a [M, K] @ b [N, K]^T``: M N K multiplications and as many additions."""
    (m, k), n = a, b[0]
    return 2 * m * n * k


def _gradients(dy: Shape, x_fp8_t: Shape | None, w_fp8_t: Shape | None) -> int:
    """Of wgrad and dgrad of dy ``[M, N]``, whose other operands are ``[K, M]`` and ``[K, N]``, None if it is left out.

    The rows of each are the K of its result; M and N are summed over in turn.
    """
    m, n = dy
    return sum(2 * m * n * operand[0] for operand in (x_fp8_t, w_fp8_t) if operand is not None)
