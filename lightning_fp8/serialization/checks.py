"""Checks that a checkpoint fits a model, all made before the model is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_fp8.conversion.candidates import gemm_weights
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.paths import plain_path
from lightning_fp8.ops import e8m0
from lightning_fp8.ops.formats import E4M3, dtype_name
from lightning_fp8.serialization.fill import Source, assembled
from lightning_fp8.serialization.layouts.base import Scheme, kind_of
from lightning_fp8.serialization.names import Placed
from lightning_fp8.serialization.shards import Stored
from lightning_fp8.serialization.tensors import SCALE_RULE, Scales, joined, listed, memory_of, weight_name
from lightning_fp8.serialization.values import NAN_CODE, Scale

Tensors = Mapping[str, Tensor]
# what is wrong, and the names of the affected tensors
Misfits = Iterator[tuple[str, Iterable[str]]]
_LOST = "do not keep the values of the file in the model's dtype (call `model.float()` first)"
# a layer, what it becomes, and its name for a GEMM
Product = tuple[nn.Module, type[Fp8Module], str]


def refuse(file: Path, misfits: Misfits) -> None:
    """ValueError for the first misfit that has tensors; later misfits may be consequences of it."""
    for misfit, names in misfits:
        if wrong := list(names):
            raise ValueError(f"load_exported: {file}: tensors that {misfit}: {listed(wrong)}.")


def misfits_of_file(stored: Mapping[str, Stored], scheme: Scheme, twins: Mapping[str, str]) -> Misfits:
    """Each FP8 weight is in E4M3, and it and its input have scales of the right shapes; dynamic inputs have none."""
    in_fp8 = {name: entry.shape for name, entry in stored.items() if entry.dtype == E4M3.dtype}
    in_fp8 |= {twin: in_fp8[name] for twin, name in twins.items()}
    other_formats = (
        f"{name} ({dtype_name(entry.dtype)})"
        for name, entry in stored.items()
        if entry.dtype.is_floating_point and entry.dtype.itemsize == 1 and entry.dtype != E4M3.dtype
        if not name.endswith((scheme.suffix, scheme.input_name))
    )
    yield f"hold codes of another format than {dtype_name(E4M3.dtype)}", other_formats
    inputs = [scheme.input_of(name) for name in in_fp8]
    if not scheme.static:
        there = (name for name in inputs if name in stored)
        yield "are static scales, where the config has dynamic ones", there
    yield (
        f"lack scales in the form of {scheme.in_words}",
        (
            _described(scheme.scale_of(name), stored)
            for name, shape in in_fp8.items()
            if not _is_scale(stored, scheme.scale_of(name), scheme)
            or kind_of(scheme.kinds, shape, stored[scheme.scale_of(name)].shape) is None
        ),
    )
    if scheme.static:
        wrong = (name for name in inputs if not _is_number(stored, name) or stored[name].shape not in ((), (1,)))
        yield "lack scales in the form of single numbers", (_described(name, stored) for name in wrong)


def _is_number(stored: Mapping[str, Stored], name: str) -> bool:
    return name in stored and stored[name].dtype.is_floating_point and stored[name].dtype.itemsize > 1


def _is_scale(stored: Mapping[str, Stored], name: str, scheme: Scheme) -> bool:
    if scheme.in_e8m0:
        return name in stored and stored[name].dtype == torch.uint8
    return _is_number(stored, name)


def _described(name: str, stored: Mapping[str, Stored]) -> str:
    return f"{name} ({stored[name].shape} {dtype_name(stored[name].dtype)})" if name in stored else name


def misfits_of_scales(scales: Tensors, in_e8m0: bool) -> Misfits:
    """Each scale is a valid number. E8M0 scales are given as codes."""

    def is_valid(scale: Tensor) -> Tensor:
        return scale != e8m0.NAN if in_e8m0 else (scale >= 2.0**-118) & (scale <= 2.0**118)

    rule = f"a number from 2**-127 to 2**127, not the code {e8m0.NAN}, NaN" if in_e8m0 else SCALE_RULE
    yield (
        f"are invalid scales; each must be {rule}",
        (f"{name} ({scale[~good][0].item()})" for name, scale in scales.items() if not (good := is_valid(scale)).all()),
    )


def misfits_of_pairs(scheme: Scheme, in_fp8: Sequence[str], numbers: Tensors) -> Misfits:
    """The scales of a weight and of its input have a product in fp32."""
    inputs = {name: numbers[scheme.input_of(name)] for name in in_fp8 if scheme.input_of(name) in numbers}
    yield (
        "have scales whose product with those of their inputs is not finite in float32",
        (name for name, scale in inputs.items() if not (numbers[scheme.scale_of(name)] * scale).isfinite().all()),
    )


def misfits_of_twins(scheme: Scheme, twins: Mapping[str, str], numbers: Tensors) -> Misfits:
    """A weight has the same scales under all its names."""

    def scales(name: str) -> Tensor:
        return numbers[scheme.scale_of(name)].flatten()

    yield (
        "are scales of one weight of the model and differ",
        (
            f"{scheme.scale_of(twin)} and {scheme.scale_of(name)}"
            for twin, name in twins.items()
            if not torch.equal(scales(twin), scales(name))
        ),
    )


def misfits_of_metadata(
    scheme: Scheme, in_fp8: Sequence[str], numbers: Tensors, metadata: Mapping[str, Scales | None]
) -> Misfits:
    """The metadata contain the FP8 weights, with the same scales."""
    yield (
        "have scales other than those in the file's metadata",
        (
            name
            for name in in_fp8
            if (scales := metadata.get(name)) is None
            or any(
                numbers.get(of) is None or not torch.equal(numbers[of].reshape(()), scale.reciprocal())
                for of, scale in zip((scheme.scale_of(name), scheme.input_of(name)), scales.static.values())
            )
        ),
    )


def misfits_of_names(placed: Placed, own: Tensors, stored: Mapping[str, Stored]) -> Misfits:
    """Each tensor of the model, or a tensor tied to it, is in the file, and the file has no other tensors."""
    yield "cannot be put together as transformers' rules for the model say", placed.unmerged
    there = {memory_of(tensor) for name, tensor in own.items() if name in placed.shapes}
    lacking = (name for name, tensor in own.items() if name not in placed.shapes and memory_of(tensor) not in there)
    yield "the model has and the file lacks", (*placed.lacking, *lacking)
    yield (
        "the file has and the model lacks",
        dict.fromkeys(piece.name for piece in placed.pieces if piece.target not in own),
    )
    yield "are one tensor of the model", placed.twice
    kinds = {piece.target: stored[piece.name].dtype for piece in placed.pieces}
    for piece in placed.pieces:
        if _kind(stored[piece.name].dtype) != _kind(own[piece.target].dtype):
            kinds[piece.target] = stored[piece.name].dtype
    yield (
        "differ between file and model in shape or kind of dtype",
        (
            f"{name} ({placed.shapes[name]} {dtype_name(kinds[name])} in the file,"
            f" {tuple(tensor.shape)} {dtype_name(tensor.dtype)} in the model)"
            for name, tensor in own.items()
            if name in kinds and (placed.shapes[name], _kind(kinds[name])) != (tuple(tensor.shape), _kind(tensor.dtype))
        ),
    )
    in_part: dict[str, set[bool]] = {}
    for piece in placed.pieces:
        in_part.setdefault(piece.target, set()).add(stored[piece.name].dtype == E4M3.dtype)
    yield "are in FP8 in part", (name for name, flags in in_part.items() if len(flags) > 1)


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def products_of(model: nn.Module, plain: Sequence[str]) -> dict[str, Product]:
    """The GEMMs of layers to convert, without layers that ``plain`` matches, by :func:`gemm_key`.

    A shared layer has its GEMMs under each of its names.
    """
    kinds = {spec.layer: kind for spec, kind in conversion_plan(model, plain, min_features=0).chosen}
    return {
        gemm_key(plain_path(path), kinds[layer], gemm): (layer, kinds[layer], gemm)
        for path, layer in model.named_modules(remove_duplicate=False)
        if layer in kinds
        for gemm in gemm_weights(layer)
    }


def gemm_key(path: str, kind: type[Fp8Module], gemm: str) -> str:
    """Name of a GEMM's weight; ``<parameter>.<expert>`` if the parameter holds the weights of several experts."""
    return joined(path, gemm) if kind.weights_are_stacked else weight_name(path, gemm)


def parameter_of(key: str, product: Product) -> str:
    """Name of the parameter that holds the weight of a GEMM."""
    return key.rpartition(".")[0] if product[1].weights_are_stacked else key


def misfits_of_layers(gemms: Mapping[str, object], products: Mapping[str, Product]) -> Misfits:
    """Each of these GEMMs belongs to a layer that will be converted; one layer has the same scales under all names."""
    yield "ran in FP8 and cannot here, see `describe(model)`", (name for name in gemms if name not in products)
    first: dict[tuple[nn.Module, str], object] = {}
    yield (
        "have different scales for one layer",
        (
            name
            for name, scales in gemms.items()
            if first.setdefault((products[name][0], products[name][2]), scales) != scales
        ),
    )


def misfits_of_codes(
    largest: Mapping[str, Tensor], scales: Mapping[str, Scale], dtypes: Mapping[str, torch.dtype]
) -> Misfits:
    """No code is NaN, and the largest value is finite in the model's dtype."""
    yield "hold codes that are NaN", (name for name, codes in largest.items() if bool((codes == NAN_CODE).any()))
    yield (
        _LOST,
        (
            f"{name} ({dtype_name(dtypes[name])})"
            for name, codes in largest.items()
            if not (codes.view(E4M3.dtype).float() * scales[name].numbers).to(dtypes[name]).isfinite().all()
        ),
    )


def misfits_of_merges(source: Source, in_fp8: Collection[str], products: Mapping[str, Product]) -> Misfits:
    """The scales of a weight's parts can form scales of the whole weight, without rounding its codes again."""
    by_target = source.placed.by_target
    rows = [parameter_of(key, product) for key, product in products.items() if product[1].weight_is_k_by_n]
    yield (
        "have scales from which no scales of the weight can be made that consists of them (load it without `frozen`)",
        (
            ", ".join(piece.name for piece in by_target[target][:2])
            for target in in_fp8
            if (scale := source.scale_of(target)) is None or (scale.kind in ("row", "group") and target in rows)
        ),
    )


def misfits_of_values(source: Source, own: Tensors, lost: Sequence[str]) -> Misfits:
    """Weights keep their values in the model's dtypes, and tied weights have the same values."""
    yield _LOST, lost
    first: dict[object, str] = {}
    yield (
        "are one tensor in the model and differ in the file",
        (
            f"{name} and {first[memory_of(own[name])]}"
            for name in source.placed.shapes
            if first.setdefault(memory_of(own[name]), name) != name
            and not torch.equal(*(assembled(source, alias, own[name]) for alias in (name, first[memory_of(own[name])])))
        ),
    )
