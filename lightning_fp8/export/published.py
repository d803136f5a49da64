"""The layouts that :func:`lightning_fp8.export` writes: names and shapes of scales, and what ``config.json`` says.

A weight in FP8 is ``code * scale``, with codes ``float8_e4m3fn [N, K]`` and scales in fp32 of one kind in a whole file:

===========  ==============================  ====================================================
kind         shape                           a scale is for
===========  ==============================  ====================================================
``tensor``   ``[]`` or ``[1]``               the whole weight
``row``  ``[N, 1]``                      a row: an output of the layer
``block``    ``[ceil(N/128), ceil(K/128)]``  128 x 128, or what is left of it at the weight's ends
``group``    ``[N, K/32] uint8``             32 elements of a row: a power of two in E8M0
===========  ==============================  ====================================================

======================  ==================  =======================  =============================  ====================
layout                  kinds               scale of the weight      static scale of the input      layers without scale
======================  ==================  =======================  =============================  ====================
None                    tensor              ``weight_scale``         ``input_scale``                ``ignored_layers``
None                    block               ``weight_scale_inv``                                    ``ignored_layers``
``hf-fp8``              tensor, block       ``weight_scale_inv``     ``activation_scale``           as transformers says
``compressed-tensors``  all                 ``weight_scale``         ``input_scale``                ``ignore``
======================  ==================  =======================  =============================  ====================

With blocks and groups, readers scale inputs by their own values: none of them takes static scales there.

Sources: vllm-project/vllm, ``model_executor/layers/quantization/fp8.py`` and ``model_executor/models/utils.py``, which
maps transformers' names to its own; huggingface/transformers 5.23, ``integrations/finegrained_fp8.py``;
vllm-project/compressed-tensors 0.20, ``quantization/quant_args.py`` and ``quant_scheme.py`` (``FP8``, ``FP8_DYNAMIC``,
``FP8_BLOCK``, ``MXFP8``) and ``compressors/mxfp8/base.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.export.layout import listed
from lightning_fp8.export.scheme import FLOAT_QUANTIZED, MXFP8_QUANTIZED, Kind, Scheme
from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.runtime.choice import check_choice


class Layout(NamedTuple):
    """How a layout calls its scales, and which it has.

    Attributes:
        name: the value of ``export``'s argument.
        suffixes: by kind, what follows the name of a weight in that of its scale.
        input_name: what the name of its input's scale has in place of ``weight``.
        single: shape of a scale for a whole tensor.
        ragged: whether its readers take incomplete blocks.
        linear_only: whether its readers take only weights of ``nn.Linear``.
        plain_by_end: whether its readers take a path for that of a plain layer if it ends like one.
    """

    name: str | None
    suffixes: Mapping[Kind, str]
    input_name: str
    single: tuple[int, ...] = ()
    ragged: bool = False
    linear_only: bool = True
    plain_by_end: bool = False

    def scheme(self, kind: Kind, static: bool) -> Scheme:
        """How weights with scales of this kind are quantized: with blocks, no reader takes static scales of inputs."""
        return Scheme((kind,), self.suffixes[kind], self.input_name, static and kind not in ("block", "group"))


COMPRESSED_TENSORS, HF_FP8 = "compressed-tensors", "hf-fp8"
_INV, _SCALE = "_scale_inv", "_scale"
_WORDS: dict[Kind, str] = {"tensor": "a weight", "row": "each row", "block": "each block", "group": "every 32 elements"}
_LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(None, {"tensor": _SCALE, "block": _INV}, "input_scale", linear_only=False),
        # transformers 5.23 computes the size of a block from the number of scales when it dequantizes
        Layout(HF_FP8, {"tensor": _INV, "block": _INV}, "activation_scale", plain_by_end=True),
        Layout(COMPRESSED_TENSORS, dict.fromkeys(_WORDS, _SCALE), "input_scale", (1,), ragged=True),
    )
}


def layout_named(name: str | None) -> Layout:
    """The layout.

    Raises:
        ValueError: if there is none of this name.
    """
    if name is not None:
        check_choice("export: `layout`", name, (choice for choice in _LAYOUTS if choice is not None))
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


def kind_of_file(layout: Layout, kinds: Mapping[str, Kind]) -> Kind:
    """The kind that all weights of a file have: one scale for a tensor is written as that of each row or block too.

    Raises:
        ValueError: if there is none, or the layout has no such scales.
    """
    by_kind = {kind: [name for name, of in kinds.items() if of == kind] for kind in _WORDS if kind in kinds.values()}
    if "group" not in by_kind and len(by_kind) > 1:
        # repeated where others have one for each row or block
        by_kind.pop("tensor", None)
    if len(by_kind) > 1:
        (first, firsts), (second, seconds) = [*by_kind.items()][:2]
        raise ValueError(
            f"export: weights with a scale for {_WORDS[first]} ({listed(firsts)}) and for {_WORDS[second]}"
            f" ({listed(seconds)}) cannot be written to one file: it has one kind of scale. Export the model in parts,"
            " or give one of the two kinds masters (`convert(model, frozen_weights='master')`)."
        )
    kind, names = next(iter(by_kind.items()), ("tensor", []))
    if kind not in layout.suffixes:
        raise ValueError(
            f"export: layout={layout.name!r} has no place for such scales, and these weights have one for"
            f" {_WORDS[kind]}: {listed(names)}. Pass `layout={COMPRESSED_TENSORS!r}`."
        )
    return kind


def tensors_of(layout: Layout, scheme: Scheme, name: str, weight: Quantized) -> dict[str, Tensor]:
    """The scales of a weight by their names in the file."""
    scale, (kind,) = weight.scale_inv, scheme.kinds
    *experts, rows, columns = weight.codes.shape
    if kind == "tensor":
        scale = scale.reshape((*experts, *layout.single))
    elif scale.shape == torch.Size(experts):
        grid = (rows, 1) if kind == "row" else (-(-rows // BLOCK), -(-columns // BLOCK))
        scale = scale[..., None, None].expand(*experts, *grid)
    # a weight with several names has them once for each, and safetensors refuses tensors in the same memory
    tensors = {scheme.scale_of(name): scale.clone(memory_format=torch.contiguous_format)}
    if scheme.static and weight.input_scale_inv is not None:
        tensors[scheme.input_of(name)] = weight.input_scale_inv.reshape(layout.single)
    return tensors


def check_plain(layout: Layout, plain: Sequence[str], in_fp8: Collection[str]) -> None:
    """ValueError if transformers would take a layer in FP8 for a plain one: it also compares the ends of paths."""
    paths = [name.removesuffix("weight").rstrip(".") for name in in_fp8]
    wrong = [f"{path} (as {ending})" for ending in plain for path in paths if path.endswith(ending)]
    if wrong and layout.plain_by_end:
        raise ValueError(
            f"export: layout={layout.name!r} lists layers that are not in FP8, and its readers would find these among"
            f" them, whose paths end like theirs: {listed(wrong)}. Pass `layout={COMPRESSED_TENSORS!r}`, which"
            " takes whole paths."
        )


def quantization_config(layout: Layout, scheme: Scheme, plain: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``.

    Args:
        layout: the layout.
        scheme: how its weights are quantized.
        plain: paths of the linear layers whose weights are not in FP8.
    """
    (kind,) = scheme.kinds
    if layout.name == COMPRESSED_TENSORS:
        return _compressed(kind, scheme.static, plain)
    method = {
        "quant_method": "fp8",
        "activation_scheme": "static" if scheme.static else "dynamic",
        "weight_block_size": [BLOCK, BLOCK] if kind == "block" else None,
    }
    if layout.name is None:
        return {**method, "ignored_layers": [*plain]}
    return {**method, "fmt": "e4m3", "modules_to_not_convert": [*plain]}


def _compressed(kind: Kind, static: bool, plain: Sequence[str]) -> dict[str, Any]:
    codes: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    if kind == "group":
        codes |= {"group_size": e8m0.BLOCK, "scale_dtype": "torch.uint8"}
    weights = {**codes, "strategy": "channel" if kind == "row" else kind, "dynamic": False}
    inputs: dict[str, Any] = {**codes, "strategy": "tensor", "dynamic": not static}
    if kind == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
        inputs |= {"strategy": "group", "group_size": BLOCK}
    elif kind == "group":
        inputs["strategy"] = "group"
    elif kind == "row" and not static:
        inputs["strategy"] = "token"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": MXFP8_QUANTIZED if kind == "group" else FLOAT_QUANTIZED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*plain],
    }
