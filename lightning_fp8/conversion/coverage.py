"""How much of a converted model runs in FP8, and the largest parts that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_fp8.conversion.plan import ConversionPlan
from lightning_fp8.conversion.rows import LARGE_SHARE
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.paths import numbered

_MOST_NAMED = 3


def coverage(plan: ConversionPlan) -> str:
    """How many layers of a converted model run in FP8, their share of its parameters, and the largest other parts.

    Each parameter counts once, even if tied. The other parts are those that :func:`lightning_fp8.describe` lists as not
    converted and that hold at least 1% of the model's parameters; paths that differ only in numbers are combined, with
    ``*`` for the number. Embeddings are excluded: they are looked up, not multiplied. PEFT adapters that stay out of
    FP8 are counted separately.

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
    limit = plan.settings.min_features
    adapters = [one.layer for one in plan.layers if one.in_adapter and not isinstance(one.layer, Fp8Module)]
    layers = [(one.path, one.layer) for one in plan.layers if one.layer not in adapters]
    in_fp8 = [layer for _, layer in layers if isinstance(layer, Fp8Module) and layer.in_fp8]
    total = max(1, plan.size)
    counted: set[nn.Parameter] = set()

    def count(parameters: Iterable[nn.Parameter]) -> int:
        new = {parameter for parameter in parameters if not is_lazy(parameter)} - counted
        counted.update(new)
        return sum(parameter.numel() for parameter in new)

    converted = count(parameter for layer in in_fp8 for parameter in layer.parameters(recurse=False))
    others: Counter[str] = Counter()
    for path, layer in layers:
        # the parameters of a layer in FP8 have been counted already
        others[numbered(path)] += count(layer.parameters())
    for row, parameter in plan.large_parameters:
        others[numbered(row.path)] += count([parameter])
    named = [
        f"{path or '(root)'} ({size / total:.0%})"
        for path, size in others.most_common(_MOST_NAMED)
        if size >= LARGE_SHARE * total
    ]
    return (
        f"{len(in_fp8)} of {len(layers)} linear layers run in FP8"
        + (f" (min_features={limit})" if limit else "")
        + f", with {converted / total:.0%} of the parameters"
        + (f"; {len(adapters)} layers of adapters do not (`adapters=True` converts them)" if adapters else "")
        + (f"; the largest others: {', '.join(named)}" if named else "")
    )
