"""The package's operators in ONNX, for models in evaluation: casts, GEMMs, and the activations of fused blocks.

Payloads are tensors of type FLOAT8E4M3FN. Everything between them is computed in fp32, rounded where the operators
round. Results that only backward reads are removed as dead code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_fp8 import ops
from lightning_fp8.ops.library import Operator, with_flat_arguments
from lightning_fp8.ops.operand import Fp8Operand, Layer, Slot

# numbers of ONNX's TensorProto.DataType
FLOAT, FLOAT8 = 1, 17
# the first opset with Gelu; FP8 came with 19
OPSET = 20


def import_opset() -> Any:
    """ONNX's operators as functions.

    Raises:
        ImportError: if ``onnxscript`` is not installed; the message says how to.
    """
    try:
        from onnxscript import opset20
    except ImportError as error:
        raise ImportError(
            "ONNX files are written by `onnx` and `onnxscript`, which are not installed."
            " Install them with: pip install onnx onnxscript"
        ) from error
    return opset20


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translation of each operator, as ``custom_translation_table`` of ``torch.onnx.export``."""
    op = import_opset()
    by_operator: dict[Operator, Callable[..., Any]] = {
        ops.cast: _cast,
        ops.linear: _linear,
        ops.mlp: _mlp,
        ops.gated_mlp: _gated_mlp,
    }
    return {
        operator.op: with_flat_arguments(operator.signature, partial(translation, op))
        for operator, translation in by_operator.items()
    }


def _cast(op: Any, x: Any, slot: Slot, activation: str, layout: str) -> tuple[Any, Any, Any]:
    payload, scale_inv = _quantized(op, _activated(op, op.Cast(x, to=FLOAT), activation, x.dtype), slot)
    return payload, op.Identity(payload), scale_inv


def _linear(
    op: Any, x: Any, weight: Any, bias: Any, bias_value: Any, x_fp8: Fp8Operand, w_fp8: Fp8Operand, dy: Slot, dtype: int
) -> Any:
    return _like_x(op, op.Cast(_product(op, x_fp8, w_fp8, bias_value), to=dtype), x, weight)


def _mlp(op: Any, x: Any, first: Layer, second: Layer, x_fp8: Fp8Operand, a: Slot, *rest: Any) -> tuple[Any, ...]:
    _, _, activation, *_, dtype = rest
    h = _rounded(op, _product(op, x_fp8, first.operand, first.bias_value), dtype)
    return _second(op, x, _activated(op, h, activation, dtype), a, second, dtype, results=4)


def _gated_mlp(
    op: Any, x: Any, gate: Layer, up: Layer, down: Layer, x_fp8: Fp8Operand, a: Slot, *rest: Any
) -> tuple[Any, ...]:
    *_, dtype = rest
    h_gate, h_up = (_rounded(op, _product(op, x_fp8, layer.operand, layer.bias_value), dtype) for layer in (gate, up))
    return _second(op, x, _gated(op, h_gate, h_up, dtype), a, down, dtype, results=5)


def _second(op: Any, x: Any, a: Any, slot: Slot, layer: Layer, dtype: int, results: int) -> tuple[Any, ...]:
    """The layer that follows an activation; its payload stands in for the results that only backward reads."""
    payload, scale_inv = _quantized(op, a, slot)
    y = _product(op, Fp8Operand(payload, payload, scale_inv, scale_inv, slot.format), layer.operand, layer.bias_value)
    unused = (op.Identity(payload) for _ in range(results - 1))
    return _like_x(op, op.Cast(y, to=dtype), x, layer.weight), *unused


def _quantized(op: Any, x: Any, slot: Slot) -> tuple[Any, Any]:
    """``sat(x * scale)`` of an x in fp32, and scale_inv, a scalar.

    QuantizeLinear would divide by scale_inv, which may round to a neighbouring code. Also, without the product in
    between, onnxruntime drops a ReLU before QuantizeLinear, which is correct only for unsigned integers.
    """
    scale = op.Squeeze(op.Gather(slot.scale, slot.index, axis=0))
    one = op.Constant(value_float=1.0)
    return op.QuantizeLinear(op.Mul(x, scale), one, _zero(op), saturate=1), op.Reciprocal(scale)


def _product(op: Any, x: Fp8Operand, w: Fp8Operand, bias: Any) -> Any:
    """``x @ w^T + bias`` in fp32: ``[M, K] x [N, K] -> [M, N]``."""
    x_value, w_value = (op.DequantizeLinear(one.rows, one.scale_inv, _zero(op)) for one in (x, w))
    y = op.MatMul(x_value, op.Transpose(w_value, perm=[1, 0]))
    return y if bias is None else op.Add(y, op.Cast(bias, to=FLOAT))


def _zero(op: Any) -> Any:
    # its type sets the type of the payload
    return op.Cast(op.Constant(value_float=0.0), to=FLOAT8)


def _like_x(op: Any, y: Any, x: Any, weight: Any) -> Any:
    """y ``[M, N]`` for an x ``[*, K]`` -> ``[*, N]``."""
    if len(x.shape) == 2:
        return y
    features = op.Constant(value_ints=[weight.shape[0]])
    return op.Reshape(y, op.Concat(op.Shape(x, end=-1), features, axis=0), allowzero=1)


def _rounded(op: Any, x: Any, dtype: int) -> Any:
    """The fp32 ``x`` rounded to ``dtype``, in fp32."""
    return x if dtype == FLOAT else op.Cast(op.Cast(x, to=dtype), to=FLOAT)


def _activated(op: Any, x: Any, activation: str, dtype: int) -> Any:
    """``activation(x)`` as torch computes it for an x of ``dtype``: in fp32, rounded once."""
    if activation == "swiglu":
        gate, up = op.Split(x, num_outputs=2, axis=-1)
        return _gated(op, gate, up, dtype)
    of: dict[str, Callable[[], Any]] = {
        "relu": lambda: op.Relu(x),
        "gelu": lambda: op.Gelu(x, approximate="none"),
        "gelu_tanh": lambda: op.Gelu(x, approximate="tanh"),
        "silu": lambda: op.Mul(x, op.Sigmoid(x)),
    }
    return x if activation == "none" else _rounded(op, of[activation](), dtype)


def _gated(op: Any, gate: Any, up: Any, dtype: int) -> Any:
    return _rounded(op, op.Mul(_activated(op, gate, "silu", dtype), up), dtype)
