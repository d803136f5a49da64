"""The operators of an FP8 linear layer, as ``torch.ops.lightning_fp8.*``: schema, fake, autograd, dispatch.

The three GEMMs (``scaled_mm(a, b) = a @ b^T``):

    fprop  y [M, N]  = scaled_mm(x_fp8    [M, K], w_fp8   [N, K])
    dgrad  dx [M, K] = scaled_mm(dy_fp8   [M, N], w_fp8_t [K, N])
    wgrad  dw [N, K] = scaled_mm(dy_fp8_t [N, M], x_fp8_t [K, M])

A transposed payload is a separate tensor on a GPU whose FP8 GEMMs need both operands K-major, else a view.
An FP8 tensor is passed as its ``uint8`` payload and the name of its format, because torch's operator checks lack CPU
kernels for float8 inputs.
"""

from lightning_fp8.ops import flops  # noqa: F401 - registers the FLOP formulas
from lightning_fp8.ops.basic import (
    cast,
    cast_blocks,
    cast_operand,
    cast_weight,
    cast_weight_blocks,
    cast_weight_operand,
    cast_weights,
    measure_weights,
    scaled_mm,
    update_scales,
)
from lightning_fp8.ops.dequantize import keep_values
from lightning_fp8.ops.feed_forward import gated_backward, gated_mlp, mlp, mlp_backward
from lightning_fp8.ops.linear_layer import in_rows, linear, linear_backward

__all__ = [
    "cast",
    "cast_blocks",
    "cast_operand",
    "cast_weight",
    "cast_weight_blocks",
    "cast_weight_operand",
    "cast_weights",
    "gated_backward",
    "gated_mlp",
    "in_rows",
    "keep_values",
    "linear",
    "linear_backward",
    "measure_weights",
    "mlp",
    "mlp_backward",
    "scaled_mm",
    "update_scales",
]
