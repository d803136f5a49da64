"""Export of a trained model to ONNX with FP8 weights and static scales.

An input is multiplied by its scale and quantized by QuantizeLinear, and a weight is stored as its FP8 codes. Each GEMM
is an fp32 MatMul of two such operands, each dequantized by DequantizeLinear with one scale for the tensor. So the codes
are bit-identical to those of the converted model, and results differ by the order of summation in fp32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_fp8.export.layout import state_tensors
from lightning_fp8.export.onnx_operators import OPSET, import_opset, translations
from lightning_fp8.export.write import static_scales
from lightning_fp8.modules.frozen_weight import FrozenWeight
from lightning_fp8.modules.prepared_weights import prepared
from lightning_fp8.modules.weights_unchanged import all_rows

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram


def export_onnx(
    model: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset_version: int = OPSET,
    **options: Any,
) -> ONNXProgram:
    """Write a trained model to an ONNX file with FP8 weights and static scales, in the form that the module describes.

    Scales are those that an evaluation would use now, as in :func:`lightning_fp8.export`. Layers that fell back
    or have fprop in bf16 are written as plain ones. Under autocast the dtypes are those of autocast.

    Args:
        model: a converted model after at least one optimizer step, in eval mode.
        args: example inputs.
        path: the file to write.
        kwargs: example inputs by name.
        dynamic_shapes: as in ``torch.export.export``.
        opset_version: at least 20.
        **options: further options of ``torch.onnx.export``, such as ``input_names``.

    Returns:
        What ``torch.onnx.export`` returns.

    Raises:
        ImportError: without ``onnx`` and ``onnxscript``.
        TypeError: for an entry of the ``state_dict`` that is sharded or not a tensor.
        ValueError: for a model in training mode or without FP8 layers, tensors without a history, parameters that are
            not finite, weights that are computed or kept in FP8 only, a recipe whose forward is not E4M3, or an older
            opset.
    """
    import_opset()
    if opset_version < OPSET:
        raise ValueError(f"export_onnx: `opset_version` must be at least {OPSET}, got {opset_version}.")
    if model.training:
        raise ValueError("export_onnx: the model is in training. Call `model.eval()` first.")
    if any(isinstance(one.weight, FrozenWeight) for one in all_rows(model)):
        raise ValueError(
            'export_onnx: the model keeps weights in FP8 only. Call `convert(model, frozen_weights="master")` first:'
            " the file will have the same codes."
        )
    static_scales(model, {name: tensor for name, (_, tensor) in state_tensors(model).items()})
    with torch.no_grad(), _weights_as_constants(model):
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    made: Any = torch.onnx.export(
        program,
        dynamo=True,
        optimize=False,
        opset_version=opset_version,
        custom_translation_table=translations(),
        **{"verbose": False, **options},
    )
    _as_fp8(made)
    made.optimize()
    made.save(path)
    return made  # type: ignore[no-any-return]


@contextmanager
def _weights_as_constants(model: nn.Module) -> Iterator[None]:
    """Make an export see the cast weights as constants, in place of the operator that casts them."""
    rows = [one for one in all_rows(model) if one.switch.fprop_in_fp8]
    with prepared(rows, record=False):
        without = [one.name for one in rows if not one.is_prepared]
        if without:
            raise ValueError(
                f"export_onnx: the weights of {', '.join(without[:6])}{', ...' if len(without) > 6 else ''} are not"
                " stored as separate parameters with two dimensions. Leave the layers out with `ignore_modules`."
            )
        yield
    for one in rows:
        if not one.preparers:
            one.prepared = None


def _as_fp8(program: Any) -> None:
    """Set the type of payloads to FP8; torch's operators take them as ``uint8``."""
    from onnx_ir import DataType, tensor
    from onnxscript.optimizer import fold_constants

    model, uint8, fp8 = program.model, DataType.UINT8, DataType.FLOAT8E4M3FN
    # ONNX does not slice FP8 tensors, and an attention layer with different inputs uses parts of its weight
    fold_constants(model, should_fold=lambda node: (node.op_type == "Slice" and node.inputs[0].dtype == uint8) or None)
    for payload in {node.inputs[0] for node in model.graph if node.op_type == "DequantizeLinear"}:
        payload.dtype = fp8
        if payload.const_value is not None:
            payload.const_value = tensor(payload.const_value.numpy().view(fp8.numpy()), name=payload.name)
