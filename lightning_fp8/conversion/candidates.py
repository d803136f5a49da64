"""Which layers of a model can run in FP8, which are to, why the others are not, and which parameters have no layer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_fp8.conversion.min_features import Sizes, too_small
from lightning_fp8.modules.attention import Fp8MultiheadAttention
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.linear import Fp8Linear
from lightning_fp8.modules.paths import modules_inside, named_modules, numbered
from lightning_fp8.ops.formats import CASTABLE_DTYPES

# lookups, convolutions, and the normalisations whose parameters can have 2 dimensions: not matrix products
_WITHOUT_GEMMS = (nn.Embedding, nn.EmbeddingBag, _ConvNd, nn.LayerNorm, nn.RMSNorm)
# from which share of the model's parameters on it matters that some are not in FP8
LARGE_SHARE = 0.01


class Candidate(NamedTuple):
    """A row of :func:`lightning_fp8.describe`: a layer that does matrix multiplications, and whether they run in FP8.

    Or a large parameter of a module that is none of these layers, which FP8 does not reach.

    Attributes:
        path: module path, as ``ignore_modules`` patterns see it; of a parameter its name in the model.
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
        """Whether the path is that of a layer, not of a parameter."""
        return self.kind != "Parameter"

    def __str__(self) -> str:
        return f"{'fp8' if self.converted else '-':4}{self.path or '(root)'} ({self.kind}): {self.reason}"


def fp8_classes() -> dict[type[nn.Module], type[Fp8Module]]:
    """What each kind of layer becomes."""
    classes: dict[type[nn.Module], type[Fp8Module]] = {
        nn.Linear: Fp8Linear,
        nn.MultiheadAttention: Fp8MultiheadAttention,
    }
    # whoever has such a layer has imported its module; nobody else needs transformers
    hugging_face = sys.modules.get("transformers.pytorch_utils")
    if hasattr(hugging_face, "Conv1D"):
        from lightning_fp8.modules.conv1d import Conv1D, Fp8Conv1D

        classes[Conv1D] = Fp8Conv1D
    return classes


def candidates(
    module: nn.Module, ignore_modules: Sequence[str], min_features: int
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Path, layer and the reason against its conversion, None for those to convert, parents before children."""
    kinds = tuple(fp8_classes())
    ignored = modules_inside(module, ignore_modules)
    outputs_of_converted: set[nn.Module] = set()
    for path, layer in named_modules(module):
        if not isinstance(layer, (*kinds, nn.Bilinear)):
            continue
        reason: str | None = "matches `ignore_modules`"
        if layer not in ignored:
            reason = _reason_against(layer, kinds, is_output=layer in outputs_of_converted)
        if reason is None and min_features:
            reason = too_small(sizes(layer), min_features)
        if reason is None and isinstance(layer, nn.MultiheadAttention):
            outputs_of_converted.add(layer.out_proj)
        yield path, layer, reason


def large_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Path, module and parameter of each large matrix, or stack of matrices, that is in no layer known here.

    Those are parameters of 2 or more dimensions outside of the layers that :func:`candidates` yields, and of torch's
    embeddings, convolutions and normalisations. They are large where those whose paths differ only in numbers are, all
    together, at least ``LARGE_SHARE`` of the model's parameters: the layers of a stack count as one.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, (*fp8_classes(), nn.Bilinear))]
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    others = [layer for layer in module.modules() if isinstance(layer, _WITHOUT_GEMMS)]
    passed_over = {part for layer in others for part in layer.modules()}
    found: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for path, owner in named_modules(module):
        for name, parameter in owner.named_parameters(recurse=False):
            is_known = owner in passed_over or parameter in in_layers
            if not is_known and not is_lazy(parameter) and parameter.dim() >= 2:
                found.setdefault(parameter, (".".join(filter(None, (path, name))), owner))
    sizes: Counter[str] = Counter()
    for parameter, (path, _) in found.items():
        sizes[numbered(path)] += parameter.numel()
    least = max(1, LARGE_SHARE * number_of_parameters(module))
    for parameter, (path, owner) in found.items():
        if sizes[numbered(path)] >= least:
            yield path, owner, parameter


def number_of_parameters(module: nn.Module) -> int:
    """Elements of all parameters, tied ones once, those that are not initialised yet as none."""
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in module.parameters())


def table(module: nn.Module, ignore_modules: Sequence[str], min_features: int) -> list[Candidate]:
    """See :func:`lightning_fp8.describe`."""
    found = []
    for path, layer, reason in candidates(module, ignore_modules, min_features):
        if isinstance(layer, Fp8Module):
            shapes = " and ".join(map(str, sizes(layer)))
            fallen = ", ".join(rows.name for rows in layer.fp8.values() if not rows.switch.in_fp8)
            reason = f"converted, {shapes}" + (f"; fell back to bf16: {fallen}" if fallen else "")
            found.append(Candidate(path, layer.plain_class.__name__, layer.in_fp8, reason))
        else:
            found.append(Candidate(path, type(layer).__name__, False, reason or "not converted yet: call `convert`"))
    for path, owner, parameter in large_parameters(module):
        kind = own_class(owner).__name__
        reason = f"{list(parameter.shape)} parameter of {kind}: no layer known here multiplies with it"
        found.append(Candidate(path, "Parameter", False, reason))
    return found


def converted(module: nn.Module) -> Iterator[tuple[str, Fp8Module]]:
    """Path and layer of each that runs in FP8, or has fallen back."""
    for path, layer in named_modules(module):
        if isinstance(layer, Fp8Module):
            yield path, layer


def _reason_against(layer: nn.Module, kinds: tuple[type[nn.Module], ...], is_output: bool) -> str | None:
    """Why this layer is not to be converted; None if it is to be. ``is_output``: of an attention that is converted."""
    if isinstance(layer, Fp8Module):
        left = layer.plain_class is NonDynamicallyQuantizableLinear and not is_output
        return "nn.MultiheadAttention, which is not converted, reads its weight directly" if left else None
    if isinstance(layer, LazyModuleMixin):
        return "is not initialised yet: run a batch through the model before it is converted"
    if is_parametrized(layer):
        return "is parametrized: its weight is made anew at each forward by code of its own"
    if own_class(layer) is NonDynamicallyQuantizableLinear:
        return None if is_output else "nn.MultiheadAttention, which is not converted, reads its weight directly"
    if own_class(layer) not in kinds:
        names = ", ".join(f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn") else kind.__name__
                          for kind in kinds)  # fmt: skip
        return f"a {type(layer).__name__}; converted are {names}, and no subclass of them"
    if "forward" in vars(layer):
        return "its `forward` was replaced on the object, and a conversion by class would have no effect"
    if any(weight.numel() == 0 for weight in weights(layer)):
        return "has no elements"
    return None


def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The weights of the GEMMs that a layer, converted or plain, holds itself, by the names of these."""
    kind = Fp8MultiheadAttention if isinstance(layer, nn.MultiheadAttention) else Fp8Module
    return kind.gemm_weights(layer)


def weights(layer: nn.Module) -> list[Tensor]:
    """The same without the names."""
    return list(gemm_weights(layer).values())


def sizes(layer: nn.Module) -> list[Sizes]:
    """Of these weights, whichever way round the layer keeps them."""
    kind = type(layer) if isinstance(layer, Fp8Module) else fp8_classes().get(own_class(layer), Fp8Module)
    return [Sizes(*(weight.shape if kind.weight_is_k_by_n else reversed(weight.shape))) for weight in weights(layer)]


def of_what_size(module: nn.Module, ignore_modules: Sequence[str], min_features: int) -> str:
    """The end of the sentence that FP8 needs a linear layer, with the largest of those that are too small."""
    small = [
        (path, min(sizes(layer), key=min))
        for path, layer, reason in candidates(module, ignore_modules, 0)
        if reason is None and too_small(sizes(layer), min_features)
    ]
    if not small:
        return "."
    path, largest = max(small, key=lambda of: (min(of[1]), max(of[1])))
    return (
        f" with `min_features={min_features}` or more features in and out. The largest here is {path or '(root)'},"
        f" {largest}: pass a smaller `min_features`, or 0."
    )


def check_dtype(path: str, layer: nn.Module) -> None:
    """TypeError for a layer whose parameters cannot be cast."""
    for name, parameter in layer.named_parameters(recurse=False):
        if parameter.dtype not in CASTABLE_DTYPES:
            raise TypeError(
                f"{path or '(root)'}.{name} is {parameter.dtype}, and FP8 layers take float32, bfloat16 or float16"
                " parameters. Call `model.float()` first, or leave the layer out with `ignore_modules`."
            )
