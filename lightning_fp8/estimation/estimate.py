"""``lightning_fp8.estimate``: whether FP8 would pay for a model on a GPU, without that GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_fp8.conversion.candidates import gemm_weights
from lightning_fp8.conversion.plan import NothingToConvertError, conversion_plan
from lightning_fp8.estimation.case import (
    Case,
    Group,
    check_recipe,
    folded,
    size_of_products,
    spread,
    suggestions,
    unknowns,
)
from lightning_fp8.estimation.costs import Pricing, Seconds
from lightning_fp8.estimation.counting import MatrixProduct, count
from lightning_fp8.estimation.devices import gpu_named
from lightning_fp8.ops.formats import PRODUCTS, Product
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.did_you_mean import did_you_mean
from lightning_fp8.scalings.per_tensor import DelayedScaling
from lightning_fp8.scalings.recipe import Recipe, as_recipe

# FP8 pays from this speed-up on: smaller gains are lost in the noise of most runs
PAYS = 1.05
STRATEGIES = ("ddp", "fsdp")
_ARGUMENTS = ("gpu", "recipe", "compiled", "strategy", "gpus")
_SETTINGS = ("ignore_modules", "min_features", "overrides", "keep_fp32")
_PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "casts": "casts to FP8",
    "other": "other operators",
    "optimizer": "optimizer (AdamW, fused)",
    "communication": "communication",
}


@dataclass(frozen=True)
class Estimate:
    """What :func:`estimate` found. It prints as one screen, and shows as a table in notebooks.

    Attributes:
        gpu: the device's name.
        recipe: the precision string.
        compiled: whether ``torch.compile`` was assumed.
        speedup: a step's time in bf16-mixed over that in FP8.
        low, high: the range that contains the speed-up in four of five cases.
        bf16, fp8: seconds of a step, by purpose.
        memory_saved: how many fewer bytes of activations autograd keeps.
        converted: how many layers run in FP8.
        deciding: the five groups of products or operators that take most of the step.
        better_in_bf16: paths of layers that would be faster in bf16.
        suggestions: what would make FP8 pay more, with the speed-up that it would give.
        uncertain: what makes the range wider.
    """

    gpu: str
    recipe: str
    compiled: bool
    speedup: float
    low: float
    high: float
    bf16: Seconds
    fp8: Seconds
    memory_saved: float
    converted: int
    deciding: tuple[Group, ...]
    better_in_bf16: tuple[str, ...]
    suggestions: tuple[tuple[str, float], ...]
    uncertain: tuple[str, ...]

    @property
    def pays(self) -> bool:
        """Whether FP8 gains at least 5%."""
        return self.speedup >= PAYS

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        pays = "pays" if self.pays else "does not pay"
        doubt = ", perhaps" if self.low < PAYS <= self.high else ""
        how = "compiled" if self.compiled else "eager"
        return (
            f"Estimate: FP8 {pays}{doubt}: {self.speedup:.2f}x ({self.low:.2f} to {self.high:.2f}) on one {self.gpu},"
            f" {how}, {self.recipe}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        seconds = {key: vars(getattr(self, key)) | {"total": getattr(self, key).total} for key in ("bf16", "fp8")}
        deciding = [group._asdict() for group in self.deciding]
        suggestions = [{"what": what, "speedup": speedup} for what, speedup in self.suggestions]
        return {**vars(self), **seconds, "deciding": deciding, "suggestions": suggestions, "pays": self.pays}

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield "a step", "bf16", "FP8"
        for key, title in _PARTS.items():
            bf16, fp8 = (getattr(seconds, key) for seconds in (self.bf16, self.fp8))
            if bf16 or fp8:
                yield title, _in_words(bf16), _in_words(fp8)
        for title, key in (("the device", "device"), ("the host, beside it", "host"), ("the slower of both", "total")):
            yield title, _in_words(getattr(self.bf16, key)), _in_words(getattr(self.fp8, key))
        yield "", "", ""
        yield "what takes most", "bf16", "FP8"
        for group in self.deciding:
            yield group.what, _in_words(group.bf16), _in_words(group.fp8)

    def _notes(self) -> Iterator[str]:
        yield f"{self.converted} layers in FP8; activations take {self.memory_saved / 1e9:.2f} GB less"
        if self.better_in_bf16:
            paths = ", ".join(self.better_in_bf16[:5]) + (" ..." if len(self.better_in_bf16) > 5 else "")
            yield f"faster in bf16 (`ignore_modules`): {paths}"
        for what, speedup in self.suggestions:
            yield f"{what}: {speedup:.2f}x"
        for what in self.uncertain:
            yield f"not known: {what}"

    def __repr__(self) -> str:
        rows = list(self._rows())
        width = max(len(title) for title, _, _ in rows)
        table = [f"  {title.ljust(width)} {bf16:>9} {fp8:>9}".rstrip() for title, bf16, fp8 in rows]
        return "\n".join([self.verdict, "", *table, "", *self._notes()])

    def _repr_html_(self) -> str:
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._rows())
        notes = "".join(f"<li>{escape(note)}</li>" for note in self._notes())
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<p><b>{escape(self.verdict)}</b></p><table>{rows}</table><ul>{notes}</ul>"


def estimate(
    model: nn.Module,
    batch: Any,
    gpu: str = "h100",
    recipe: str | Mapping[str, Any] | Recipe = "fp8-delayed",
    compiled: bool = False,
    *,
    strategy: str | None = None,
    gpus: int = 8,
    **settings: Any,
) -> Estimate:
    """Estimate how much faster a training step is in FP8 than in ``bf16-mixed`` on a GPU. It does not need that GPU.

    One forward and one backward run on tensors without values or memory, and each operator is priced by its FLOPs and
    bytes. Nothing is measured, and neither model nor batch is changed. ``docs/estimate.md`` compares estimates with
    published measurements.

    Args:
        model: any module, also on the meta device. Of a ``LightningModule``, ``training_step(batch, 0)`` is counted.
        batch: for one device. For a ``LightningModule``, what its dataloader gives, such as ``(x, y)``; else a mapping
            of keyword arguments, a tuple or list of arguments, or one argument. Tensors may be on the meta device.
        gpu: one of ``h100``, ``h100-pcie``, ``h100-nvl``, ``h200``, ``h200-nvl``, ``b200``, ``b300``, ``l40s``,
            ``rtx-4090``, ``rtx-5090``.
        recipe: see :class:`lightning_fp8.Fp8Precision`.
        compiled: whether the model is compiled by ``torch.compile``.
        strategy: ``"ddp"`` or ``"fsdp"`` for training on several devices of a machine, a rough estimate.
        gpus: the number of devices, with a strategy.
        settings: ``ignore_modules``, ``min_features``, ``overrides``: see :func:`lightning_fp8.convert`.

    Returns:
        An object that prints as one screen, with ``speedup`` and its range ``low`` to ``high``, ``pays``, the seconds
        of a step in ``bf16`` and ``fp8``, ``memory_saved`` in bytes, ``deciding``, ``better_in_bf16``, ``suggestions``
        and ``as_dict()``.

    Raises:
        ValueError: for an unknown device, strategy or recipe, a recipe that the device cannot run, or a model in which
            no layer can run in FP8, no such layer runs in the step, or which is converted already.
        TypeError: for an argument that it does not have.
        RuntimeError: for a model that does not run without values; it names the operator.
    """
    # before the model runs
    gpu_named(gpu)
    return Estimator(model, batch, **settings).estimate(gpu, recipe, compiled, strategy, gpus)


class Estimator:
    """A model's operators, counted once, for estimates on several devices.

    Raises:
        ValueError, RuntimeError: see :func:`estimate`.
    """

    def __init__(self, model: nn.Module, batch: Any, **settings: Any) -> None:
        for name in settings:
            if name not in _SETTINGS:
                raise TypeError(f"estimate has no argument {name!r}.{did_you_mean(name, (*_ARGUMENTS, *_SETTINGS))}")
        if isinstance(model, LightningModule) and is_overridden("configure_model", model):
            model = deepcopy(model)
            with torch.device("meta"):
                model.configure_model()
        plan = conversion_plan(model, **settings)
        if plan.converted:
            raise ValueError(
                f"{type(model).__name__} is converted already: estimate it before, or after `unconvert(model)`."
            )
        try:
            plan.check()
        except NothingToConvertError as error:
            raise ValueError(str(error)) from None
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._layers: dict[str, str] = {}
        self._in_bf16: dict[str, tuple[Product, ...]] = {}
        for spec, _ in plan.chosen:
            for weight in gemm_weights(spec.layer).values():
                if id(weight) in names:
                    self._layers[names[id(weight)]] = spec.path
                    self._in_bf16[names[id(weight)]] = spec.in_bf16
        self.step = count(model, batch)
        ran = {operator.weight for operator in self.step.operators if isinstance(operator, MatrixProduct)}
        self._layers = {name: path for name, path in self._layers.items() if name in ran}
        if not self._layers:
            raise ValueError(
                f"No layer of {type(model).__name__} that would run in FP8 runs in the step on this batch."
            )

    def estimate(
        self,
        gpu: str = "h100",
        recipe: str | Mapping[str, Any] | Recipe = "fp8-delayed",
        compiled: bool = False,
        strategy: str | None = None,
        gpus: int = 8,
    ) -> Estimate:
        """See :func:`estimate`."""
        device, of_recipe = gpu_named(gpu), as_recipe(recipe) or DelayedScaling()
        check_recipe(device, of_recipe.precision)
        if strategy is not None:
            check_choice("`strategy`", strategy, STRATEGIES)
            if gpus < 1:
                raise ValueError(f"`gpus` must be at least 1, got {gpus}.")
        pricing = Pricing(device, compiled, gpus if strategy else 1, strategy == "fsdp")
        case = Case(self.step, pricing, of_recipe.precision, self._in_fp8(of_recipe))
        slower = [name for name in case.in_fp8 if case.gain_of(name) < 0]
        unknown = tuple(unknowns(case, strategy))
        low, high = spread(case.speedup, size_of_products(self.step, case.in_fp8), len(unknown))
        return Estimate(
            device.title,
            of_recipe.precision,
            compiled,
            case.speedup,
            low,
            high,
            case.bf16,
            case.fp8,
            sum(tensor.elements for tensor in self.step.inputs if tensor.is_kept and case.casts(tensor.weights)),
            len({self._layers[name] for name in case.in_fp8}),
            tuple(case.deciding(self._layers)),
            tuple(row.path for row in folded(dict.fromkeys(self._layers[name] for name in slower))),
            tuple(suggestions(case, slower)),
            unknown,
        )

    def _in_fp8(self, recipe: Recipe) -> dict[str, frozenset[Product]]:
        products = {name: frozenset(PRODUCTS) - {*self._in_bf16[name], *recipe.in_bf16} for name in self._layers}
        return {name: of_weight for name, of_weight in products.items() if of_weight}


def _in_words(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
