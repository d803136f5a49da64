"""How much of a converted model runs in FP8, and what does not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from lightning_fp8.conversion.candidates import PlannedLayer
from lightning_fp8.conversion.plan import ConversionPlan
from lightning_fp8.conversion.rows import LARGE_SHARE
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.paths import numbered

_MOST_NAMED = 3


def coverage(plan: ConversionPlan) -> str:
    """How many layers of a converted model run in FP8, their share of its parameters, and what does not.

    Each parameter counts once, even if tied. What does not are the layers that :func:`lightning_fp8.describe` lists as
    not converted, by reason, and convolutions and other parameters that hold at least 1% of the model's. Paths that
    differ only in numbers are combined, with ``*`` for the number. Embeddings are excluded: they are looked up, not
    multiplied. The adapters of PEFT are counted separately.

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
    if size >= LARGE_SHARE * whole:
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
    """The elements of those parameters that are not counted yet; None if all are."""
    new = set(parameters) - counted
    counted.update(new)
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in new) if new else None


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= LARGE_SHARE else "under 1%"


def _names(sizes: Counter[str]) -> str:
    """The paths with the largest sizes; those that differ only in numbers are one."""
    paths: dict[str, list[str]] = {}
    for path in sizes:
        pattern = numbered(path)
        # a pattern of numbers alone says nothing
        paths.setdefault(pattern if pattern.strip("*.") else path, []).append(path)
    largest = sorted(paths, key=lambda pattern: -sum(sizes[path] for path in paths[pattern]))
    names = [pattern if len(paths[pattern]) > 1 else paths[pattern][0] or "(root)" for pattern in largest]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
