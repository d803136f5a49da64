"""The rows of :func:`lightning_fp8.describe`: layers, and large parameters outside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from lightning_fp8.conversion.candidates import PlannedLayer, sizes
from lightning_fp8.conversion.linear_layers import how_recognised
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.computed_weight import computed_by
from lightning_fp8.modules.experts import Fp8Experts
from lightning_fp8.modules.linear import Fp8Linear, LinearForward
from lightning_fp8.modules.paths import numbered
from lightning_fp8.scaling.precision import AS_SET

# the smallest share of the model's parameters that is reported if it is not in FP8
LARGE_SHARE = 0.01
# lookups, convolutions, and the normalisations whose parameters can have 2 dimensions: none is a matrix product
_WITHOUT_GEMMS = (nn.Embedding, nn.EmbeddingBag, _ConvNd, nn.LayerNorm, nn.RMSNorm)


class Candidate(NamedTuple):
    """A row of :func:`lightning_fp8.describe`: a layer that does matrix multiplications, and whether they run in FP8.

    It may also be a large parameter of another module, which stays out of FP8.

    Attributes:
        path: module path, as ``ignore_modules`` patterns see it; for a parameter, its name in the model.
        kind: class name; ``"Parameter"`` for a parameter.
        converted: whether it runs in FP8.
        reason: why, or why not.
    """

    path: str
    kind: str
    converted: bool
    reason: str

    @property
    def is_layer(self) -> bool:
        """True for a layer, False for a parameter."""
        return self.kind != "Parameter"

    def __str__(self) -> str:
        return f"{'fp8' if self.converted else '-':4}{self.path or '(root)'} ({self.kind}): {self.reason}"


def row_of(spec: PlannedLayer, fused: str | None, weight_note: str | None) -> Candidate:
    """A layer's row, with the remarks on its fused block and on its weights."""
    layer, in_bf16 = spec.layer, f"{' and '.join(spec.in_bf16)} in bf16" if spec.in_bf16 else ""
    if not isinstance(layer, Fp8Module):
        planned = f"not converted yet: call `convert`{f'; then {in_bf16}' if in_bf16 else ''}"
        return Candidate(spec.path, type(layer).__name__, False, spec.reason or planned)
    gemms, of_gemms = sizes(layer), list(layer.fp8.values())
    shapes = " and ".join(map(str, gemms))
    if isinstance(layer, Fp8Experts):
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
    ]
    reason = "; ".join([f"converted, {shapes}", *filter(None, remarks)])
    return Candidate(spec.path, layer.plain_class.__name__, layer.in_fp8, reason)


def elements_of(modules: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, int]:
    """The number of elements of each parameter of a model; none for one that is not initialised yet."""
    parameters = (parameter for _, module in modules for parameter in module.parameters(recurse=False))
    return {parameter: 0 if is_lazy(parameter) else parameter.numel() for parameter in parameters}


def large_parameters(
    modules: Sequence[tuple[str, nn.Module]], layers: Sequence[PlannedLayer]
) -> Iterator[tuple[Candidate, nn.Parameter]]:
    """Parameters of 2 or more dimensions outside of ``layers`` and of torch's embeddings, convolutions, normalisations.

    Parameters whose paths differ only in numbers are counted together, as in a stack of layers: they are large if they
    make up at least ``LARGE_SHARE`` of the model's parameters.
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
    least = max(1, LARGE_SHARE * sum(elements_of(modules).values())) if matrices else 1
    for parameter, (path, owner) in matrices.items():
        if of_stacks[numbered(path)] >= least:
            shape, kind = list(parameter.shape), own_class(owner).__name__
            reason = f"{shape} parameter of {kind}: no layer known here multiplies with it"
            if parameter.dim() == 3:
                reason += "; as one `nn.Linear` for each of its matrices it could run in FP8"
            yield Candidate(path, "Parameter", False, reason), parameter
