"""The layouts that :func:`lightning_fp8.export` writes: names and shapes of scales, and what ``config.json`` says.

A weight in FP8 is ``code * scale``, with codes ``float8_e4m3fn [N, K]`` and scales in fp32 of one kind in a whole file:

===========  ==============================  ====================================================
kind         shape                           a scale is for
===========  ==============================  ====================================================
``tensor``   ``[]`` or ``[1]``               the whole weight
``row``  ``[N, 1]``                      a row: an output of the layer
``block``    ``[ceil(N/128), ceil(K/128)]``  128 x 128, or what is left of it at the weight's ends
===========  ==============================  ====================================================

======================  ==================  =======================  =============================  ====================
layout                  kinds               scale of the weight      static scale of the input      layers without scale
======================  ==================  =======================  =============================  ====================
None                    tensor              ``weight_scale``         ``input_scale``                ``ignored_layers``
None                    block               ``weight_scale_inv``                                    ``ignored_layers``
``hf-fp8``              tensor, block       ``weight_scale_inv``     ``activation_scale``           as transformers says
``compressed-tensors``  all                 ``weight_scale``         ``input_scale``                ``ignore``
======================  ==================  =======================  =============================  ====================

With blocks, readers scale inputs by their own values: none of them takes static scales there.

Sources: vllm-project/vllm, ``model_executor/layers/quantization/fp8.py`` and ``model_executor/models/utils.py``, which
maps transformers' names to its own; huggingface/transformers 5.23, ``integrations/finegrained_fp8.py``;
vllm-project/compressed-tensors 0.20, ``quantization/quant_args.py`` and ``quant_scheme.py`` (``FP8``, ``FP8_DYNAMIC``,
``FP8_BLOCK``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Size, Tensor

from lightning_fp8.export.layout import listed
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.runtime.choice import check_choice

Kind = Literal["tensor", "row", "block"]


class Layout(NamedTuple):
    """How a layout calls its scales, and which it has.

    Attributes:
        name: the value of ``export``'s argument.
        scales: by kind, what the name of a weight's scale has in place of ``weight``.
        input_scale: the same for the static scale of a layer's input.
        single: shape of a scale for a whole tensor.
        ragged: whether its readers take incomplete blocks.
        linear_only: whether its readers take only weights of ``nn.Linear``.
        plain_by_end: whether its readers take a path for that of a plain layer if it ends like one.
    """

    name: str | None
    scales: Mapping[Kind, str]
    input_scale: str
    single: tuple[int, ...]
    ragged: bool
    linear_only: bool
    plain_by_end: bool = False


_INV, _SCALE, _COMPRESSED = "weight_scale_inv", "weight_scale", "compressed-tensors"
_LAYOUTS = {
    one.name: one
    for one in (
        Layout(None, {"tensor": _SCALE, "block": _INV}, "input_scale", (), False, False),
        # transformers 5.23 computes the size of a block from the number of scales when it dequantizes
        Layout("hf-fp8", {"tensor": _INV, "block": _INV}, "activation_scale", (), False, True, True),
        Layout(_COMPRESSED, dict.fromkeys(("tensor", "row", "block"), _SCALE), "input_scale", (1,), True, True),
    )
}


def layout_named(name: str | None) -> Layout:
    """The layout.

    Raises:
        ValueError: if there is none of this name.
    """
    if name is not None:
        check_choice("export: `layout`", name, (one for one in _LAYOUTS if one is not None))
    return _LAYOUTS[name]


class Quantized(NamedTuple):
    """A weight in FP8 as a file holds it, on the CPU.

    Attributes:
        codes: ``float8_e4m3fn``, in the weight's own shape.
        scale_inv: what its codes are multiplied by, of the shape of its kind, in the dtype of the file.
        input_scale_inv: ``[] float32``, the same for the codes of the layer's input; None if they have no static scale.
    """

    codes: Tensor
    scale_inv: Tensor
    input_scale_inv: Tensor | None = None


def kind_of(scale: Size, weight: Size) -> Kind:
    """The kind of a scale, by its shape and that of the weight ``[N, K]``."""
    if not scale:
        return "tensor"
    return "row" if scale == (weight[0], 1) and weight[0] > 1 else "block"


def kind_of_file(layout: Layout, kinds: Mapping[str, Kind]) -> Kind:
    """The kind that all weights of a file have: one scale for a tensor is written as that of each row or block too.

    Raises:
        ValueError: if there is none, or the layout has no such scales.
    """
    rows, blocks = ([name for name, of in kinds.items() if of == kind] for kind in ("row", "block"))
    if rows and blocks:
        raise ValueError(
            f"export: weights with a scale for each row ({listed(rows)}) and for each block ({listed(blocks)}) cannot"
            " be written to one file: it has one kind of scale. Export the model in parts, or give one of the two kinds"
            " masters (`convert(model, frozen_weights='master')`)."
        )
    kind: Kind = "row" if rows else "block" if blocks else "tensor"
    if kind not in layout.scales:
        raise ValueError(
            f"export: layout={layout.name!r} has no place for scales of rows, and these weights have one for each row:"
            f" {listed(rows)}. Pass `layout={_COMPRESSED!r}`."
        )
    return kind


def tensors_of(layout: Layout, kind: Kind, name: str, quantized: Quantized) -> dict[str, Tensor]:
    """The scales of a weight by their names in the file."""
    scale, stem = quantized.scale_inv, name.removesuffix("weight")
    if kind == "tensor":
        scale = scale.reshape(layout.single)
    elif scale.dim() == 0:
        rows, columns = quantized.codes.shape
        shape = (rows, 1) if kind == "row" else (-(-rows // BLOCK), -(-columns // BLOCK))
        scale = scale.expand(shape).contiguous()
    found = {f"{stem}{layout.scales[kind]}": scale}
    if quantized.input_scale_inv is not None and kind != "block":
        found[f"{stem}{layout.input_scale}"] = quantized.input_scale_inv.reshape(layout.single)
    return found


def check_plain(layout: Layout, plain: Sequence[str], in_fp8: Collection[str]) -> None:
    """ValueError if transformers would take a layer in FP8 for a plain one: it also compares the ends of paths."""
    paths = [name.removesuffix("weight").rstrip(".") for name in in_fp8]
    wrong = [f"{path} (as {one})" for one in plain for path in paths if path.endswith(one)]
    if wrong and layout.plain_by_end:
        raise ValueError(
            f"export: layout={layout.name!r} lists layers that are not in FP8, and its readers would find these among"
            f" them, whose paths end like theirs: {listed(wrong)}. Pass `layout={_COMPRESSED!r}`, which takes whole"
            " paths."
        )


def quantization_config(layout: Layout, kind: Kind, static: bool, plain: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``.

    Args:
        layout: the layout.
        kind: of all scales of weights.
        static: whether inputs have static scales.
        plain: paths of the linear layers whose weights are not in FP8.
    """
    static = static and kind != "block"
    if layout.name == _COMPRESSED:
        return _compressed(kind, static, plain)
    method = {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        "weight_block_size": [BLOCK, BLOCK] if kind == "block" else None,
    }
    if layout.name is None:
        return {**method, "ignored_layers": [*plain]}
    return {**method, "fmt": "e4m3", "modules_to_not_convert": [*plain]}


def _compressed(kind: Kind, static: bool, plain: Sequence[str]) -> dict[str, Any]:
    codes = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**codes, "strategy": "channel" if kind == "row" else kind, "dynamic": False}
    inputs: dict[str, Any] = {**codes, "strategy": "tensor", "dynamic": not static}
    if kind == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
        inputs |= {"strategy": "group", "group_size": BLOCK}
    elif kind == "row" and not static:
        inputs["strategy"] = "token"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": _COMPRESSED,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*plain],
    }
