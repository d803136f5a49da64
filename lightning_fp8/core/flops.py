"""FLOPs of the operators for ``torch.utils.flop_counter``: those of the bf16 GEMMs that they replace.

A counter sees the operator that a layer calls, but not what the operator runs, so each formula includes all GEMMs of
its operator, and nothing is counted twice. Casts count as zero, like elementwise operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from lightning_fp8.core.casts import scaled_mm
from lightning_fp8.core.feed_forward import gated_backward, gated_mlp, mlp, mlp_backward
from lightning_fp8.core.groups import linear_groups, linear_groups_backward
from lightning_fp8.core.linear import linear, linear_backward
from lightning_fp8.core.operators import Operator

# tensors arrive as their shapes
Shape = Sequence[int]


def _count(operator: Operator) -> Callable[[Callable[..., int]], None]:
    """Register a FLOP formula for an operator; it takes the arguments of the function behind the operator."""

    def register(formula: Callable[..., int]) -> None:
        def of_operator(*flat: Any, **_: Any) -> int:
            return formula(*operator.signature.assembled(flat))

        register_flop_formula(operator.op.overloadpacket)(of_operator)

    return register


@_count(scaled_mm)
def _scaled_mm(a: Any, b: Any, *_: Any) -> int:
    return _gemm(a.codes, b.codes)


@_count(linear)
def _linear(x: Shape, weight: Shape, *_: Any) -> int:
    return _gemm(_rows(x), weight)


@_count(linear_backward)
def _linear_backward(dy: Shape, x: Any, w: Any, *_: Any) -> int:
    return _gradients(dy, x, w)


@_count(mlp)
def _mlp(x: Shape, first: Any, second: Any, *_: Any) -> int:
    return _gemm(_rows(x), first.weight) + _gemm((_rows(x)[0], second.weight[1]), second.weight)


@_count(mlp_backward)
def _mlp_backward(dy: Shape, h: Shape, activation: str, x: Any, w1: Any, a: Any, w2: Any, *_: Any) -> int:
    return _gradients(dy, a, w2) + _gradients(h, x, w1)


@_count(gated_mlp)
def _gated_mlp(x: Shape, gate: Any, up: Any, down: Any, *_: Any) -> int:
    return 2 * _gemm(_rows(x), gate.weight) + _gemm((_rows(x)[0], down.weight[1]), down.weight)


@_count(gated_backward)
def _gated_backward(da: Shape, gate: Shape, up: Shape, x: Any, w_gate: Any, w_up: Any, *_: Any) -> int:
    return _gradients(gate, x, w_gate) + _gradients(up, x, w_up)


@_count(linear_groups)
def _linear_groups(x: Shape, weight: Shape, *_: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


@_count(linear_groups_backward)
def _linear_groups_backward(dy: Shape, x: Any, w: Any, *_: Any) -> int:
    t, n = dy
    # codes by columns [K, P] and [E, K, N]
    return sum(2 * t * n * operand.codes[at] for at, operand in enumerate((x, w)) if operand is not None)


def _rows(x: Shape) -> Shape:
    """The shape ``[*, K]`` flattened to ``[M, K]``."""
    return math.prod(x[:-1]), x[-1]


def _gemm(a: Shape, b: Shape) -> int:
    """FLOPs of ``a [M, K] @ b [N, K]^T``: M N K multiplications and as many additions. One K may be padded."""
    return 2 * a[0] * b[0] * min(a[1], b[1])


def _gradients(dy: Shape, x: Any, w: Any) -> int:
    """FLOPs of wgrad and dgrad for dy ``[M, N]`` and operands by columns; None if a product is left out.

    Each product has 2 M N K FLOPs, where K is the number of rows of its codes.
    """
    m, n = dy
    return sum(2 * m * n * operand.codes[0] for operand in (x, w) if operand is not None)
