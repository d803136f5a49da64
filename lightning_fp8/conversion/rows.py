"""The rows of :func:`lightning_fp8.describe`, for layers and large parameters, and the one-line summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from lightning_fp8.conversion.candidates import PlannedLayer, sizes
from lightning_fp8.conversion.linear_layers import how_recognised
from lightning_fp8.conversion.table import Candidate
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.computed_weight import computed_by
from lightning_fp8.modules.linear import Fp8Linear, LinearForward
from lightning_fp8.modules.paths import numbered
from lightning_fp8.scaling.precision import AS_SET

if TYPE_CHECKING:
    from lightning_fp8.conversion.plan import ConversionPlan

# parameters outside of FP8 are reported from this share of the model's parameters on
_LARGE_SHARE = 0.01
# parts that are named in one line
_MOST_NAMED = 3
# lookups, convolutions, and the normalisations whose parameters can have 2 dimensions: none is a matrix product
_WITHOUT_GEMMS = (nn.Embedding, nn.EmbeddingBag, _ConvNd, nn.LayerNorm, nn.RMSNorm)


def row_of(spec: PlannedLayer, left_out: str | None, fused: str | None, weight_note: str | None) -> Candidate:
    """A layer's row: why the last conversion left it out, and the remarks on its fused block and on its weights."""
    layer, in_bf16 = spec.layer, f"{' and '.join(spec.in_bf16)} in bf16" if spec.in_bf16 else ""
    if not isinstance(layer, Fp8Module):
        planned = f"not converted yet: call `convert`{f'; then {in_bf16}' if in_bf16 else ''}"
        # a layer of `keep_fp32` has a `forward` of its own since
        reason = spec.reason if spec.is_ignored else left_out or spec.reason
        return Candidate(spec.path, type(layer).__name__, False, reason or planned)
    gemms, of_gemms = sizes(layer), list(layer.fp8.values())
    shapes = " and ".join(map(str, gemms))
    if layer.weights_are_stacked:
        shapes = f"{len(gemms) // 2} experts, {gemms[0]} and {gemms[-1]}"
    owners = [gemm.input_owner.name for gemm in of_gemms if gemm.input_owner is not None]
    moves = {gemm.name: gemm.precision.of("move") for gemm in of_gemms}
    current = [name for name, move in moves.items() if move.is_current]
    fallen = [name for name, move in moves.items() if move.is_bf16]
    scheduled = dict.fromkeys(str(choice) for gemm in of_gemms if (choice := gemm.precision.of("schedule")) != AS_SET)
    named = (
        ("shares its input with ", owners),
        ("moved to current scaling: ", current),
        ("fell back to bf16: ", fallen),
        ("by the schedule ", scheduled),
    )
    is_linear = isinstance(layer, LinearForward) and not isinstance(layer, Fp8Linear)
    how = how_recognised(layer.plain_class) if is_linear else None
    remarks = [
        how,
        computed_by(layer),
        in_bf16,
        *(prefix + ", ".join(names) for prefix, names in named if names),
        fused,
        weight_note,
        "`convert(unconvert(model))` undoes that" if fallen else None,
    ]
    reason = "; ".join([f"converted, {shapes}", *filter(None, remarks)])
    return Candidate(spec.path, layer.plain_class.__name__, layer.in_fp8, reason)


def elements_of(modules: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, int]:
    """The number of elements of each parameter of a model, without parameters that are not initialised yet."""
    parameters = (parameter for _, module in modules for parameter in module.parameters(recurse=False))
    return {parameter: 0 if is_lazy(parameter) else parameter.numel() for parameter in parameters}


def large_parameters(
    modules: Sequence[tuple[str, nn.Module]], layers: Sequence[PlannedLayer]
) -> Iterator[tuple[Candidate, nn.Parameter]]:
    """Parameters of 2 or more dimensions outside of ``layers`` and of torch's embeddings, convolutions, normalisations.

    Parameters whose paths differ only in numbers, as in a stack of layers, count together: they are large if they make
    up at least 1% of the model's parameters.
    """
    in_layers = {parameter for spec in layers for parameter in spec.layer.parameters()}
    passed_over = {part for _, layer in modules if isinstance(layer, _WITHOUT_GEMMS) for part in layer.modules()}
    matrices: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for path, owner in modules:
        for name, parameter in owner.named_parameters(recurse=False):
            is_known = owner in passed_over or parameter in in_layers
            if not is_known and not is_lazy(parameter) and parameter.dim() >= 2:
                matrices.setdefault(parameter, (f"{path}.{name}" if path else name, owner))
    of_stacks: Counter[str] = Counter()
    for parameter, (path, _) in matrices.items():
        of_stacks[numbered(path)] += parameter.numel()
    least = max(1, _LARGE_SHARE * sum(elements_of(modules).values())) if matrices else 1
    for parameter, (path, owner) in matrices.items():
        if of_stacks[numbered(path)] >= least:
            shape, kind = list(parameter.shape), own_class(owner).__name__
            reason = f"{shape} parameter of {kind}: no layer known here multiplies with it"
            if parameter.dim() == 3:
                reason += "; as one `nn.Linear` for each of its matrices it could run in FP8"
            yield Candidate(path, "Parameter", False, reason), parameter


def coverage(plan: ConversionPlan) -> str:
    """How many layers of a converted model run in FP8, their share of its parameters, and what does not.

    Each parameter counts once, even if tied. "What does not" means the layers that :func:`lightning_fp8.describe` lists
    as not converted, by reason, and convolutions and other parameters with at least 1% of the model's parameters. Paths
    that differ only in numbers are combined, with ``*`` for the number. Embeddings are excluded: they are looked up,
    not multiplied. The adapters of PEFT are counted separately.

    Raises:
        ValueError: if the model is not converted.

    >>> from lightning_fp8 import convert
    >>> from lightning_fp8.conversion.plan import conversion_plan
    >>> model = convert(nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 30, bias=False)))
    >>> coverage(conversion_plan(model))
    '1 of 1 linear layers run in FP8, with 75% of the parameters'
    """
    if not plan.converted:
        raise ValueError("The model has no FP8 layers: call `lightning_fp8.convert` on it first.")
    layers = [spec for spec in plan.layers if isinstance(spec.layer, Fp8Module) or not spec.in_adapter]
    adapters, whole = len(plan.layers) - len(layers), max(1, plan.size)
    in_fp8 = {spec.layer for spec in layers if isinstance(spec.layer, Fp8Module) and spec.layer.in_fp8}
    limit = plan.config.min_features if any(spec.is_too_small for spec in layers) else 0
    counted: set[nn.Parameter] = set()
    converted = _count((parameter for layer in in_fp8 for parameter in layer.parameters(recurse=False)), counted) or 0
    parts = [(spec.path, _reason(spec), spec.layer.parameters()) for spec in layers if spec.layer not in in_fp8]
    parts += [(row.path, "outside of linear layers", iter([parameter])) for row, parameter in plan.large_parameters]
    groups: dict[str, Counter[str]] = {}
    for path, reason, parameters in parts:
        # None for a part of a layer that has been counted
        if (size := _count(parameters, counted)) is not None:
            groups.setdefault(re.split("[:;]", reason)[0], Counter())[path] = size
    rest = [(sizes.total(), _names(sizes), f", {reason}") for reason, sizes in groups.items()]
    convolutions = [layer for _, layer in plan.modules if isinstance(layer, _ConvNd)]
    size = _count((parameter for layer in convolutions for parameter in layer.parameters()), counted) or 0
    if size >= _LARGE_SHARE * whole:
        rest.append((size, f"{len(convolutions)} convolution{'s' if len(convolutions) > 1 else ''}", ""))
    rest.sort(key=lambda other: -other[0])
    named = "; ".join(f"{names} ({_share(size / whole)}{reason})" for size, names, reason in rest)
    return (
        f"{len(in_fp8)} of {len(layers)} linear layers run in FP8"
        + (f" (min_features={limit})" if limit else "")
        + f", with {converted / whole:.0%} of the parameters"
        + (f"; {adapters} layers of adapters do not" if adapters else "")
        + (f"; not in FP8: {named}" if named else "")
    )


def _reason(spec: PlannedLayer) -> str:
    return spec.reason or ("fell back to bf16" if isinstance(spec.layer, Fp8Module) else "not converted")


def _count(parameters: Iterable[nn.Parameter], counted: set[nn.Parameter]) -> int | None:
    """The number of elements of parameters not counted yet; None if all are counted."""
    new = set(parameters) - counted
    counted.update(new)
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in new) if new else None


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= _LARGE_SHARE else "under 1%"


def _names(sizes: Counter[str]) -> str:
    """The paths with the largest sizes; paths that differ only in numbers are combined."""
    paths: dict[str, list[str]] = {}
    for path in sizes:
        pattern = numbered(path)
        # a pattern that consists only of numbers says nothing
        paths.setdefault(pattern if pattern.strip("*.") else path, []).append(path)
    largest = sorted(paths, key=lambda pattern: -sum(sizes[path] for path in paths[pattern]))
    names = [pattern if len(paths[pattern]) > 1 else paths[pattern][0] or "(root)" for pattern in largest]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
