"""``lightning_fp8.estimate``: whether FP8 would pay for a model on a GPU, without that GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from html import escape
from math import exp
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from kernels_cuda.gemm_variants import configurations, mx_configuration
from lightning_fp8.conversion.candidates import gemm_weights
from lightning_fp8.conversion.plan import NothingToConvertError, conversion_plan
from lightning_fp8.conversion.table import Candidate, LayerTable
from lightning_fp8.estimation.costs import OURS, Pricing, Seconds
from lightning_fp8.estimation.counting import Elementwise, MatrixProduct, Step, count
from lightning_fp8.estimation.devices import GPUS, Gpu, gpu_named
from lightning_fp8.ops.formats import PRODUCTS, Product
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.did_you_mean import did_you_mean
from lightning_fp8.scalings.per_tensor import DelayedScaling
from lightning_fp8.scalings.recipe import RECIPES, Recipe, as_recipe

# FP8 pays from this speed-up on: smaller gains are lost in the noise of most runs
PAYS = 1.05
# Four of five published cases used for the fit, and four of five of their sources, stay within this error. It grows as
# products shrink below _SIZE, to at most twice as much.
_ERROR = 0.11
_SIZE = 2048
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


class Group(NamedTuple):
    """Equal products or operators.

    Attributes:
        what: the layers and the product, or the operator.
        bf16, fp8: seconds in a step; FP8 includes the casts of the operands.
    """

    what: str
    bf16: float
    fp8: float


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
        case = _Case(self.step, pricing, of_recipe.precision, self._in_fp8(of_recipe))
        slower = [name for name in case.in_fp8 if case.gain_of(name) < 0]
        uncertain = tuple(_uncertain(case, strategy))
        low, high = spread(case.speedup, size_of_products(self.step, case.in_fp8), len(uncertain))
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
            tuple(row.path for row in _folded(dict.fromkeys(self._layers[name] for name in slower))),
            tuple(_suggestions(case, slower)),
            uncertain,
        )

    def _in_fp8(self, recipe: Recipe) -> dict[str, frozenset[Product]]:
        products = {name: frozenset(PRODUCTS) - {*self._in_bf16[name], *recipe.in_bf16} for name in self._layers}
        return {name: of_weight for name, of_weight in products.items() if of_weight}


def size_of_products(step: Step, in_fp8: Mapping[str, frozenset[Product]]) -> float:
    """The smallest of M, N and K of each FP8 product, averaged over products by FLOPs."""
    products = [
        (operator, times * operator.flops)
        for operator, times in step.operators.items()
        if isinstance(operator, MatrixProduct) and operator.weight in in_fp8
    ]
    flops = sum(of_product for _, of_product in products)
    return sum(min(operator.m, operator.n, operator.k) * share for operator, share in products) / flops


def spread(speedup: float, size: float, unknown: int = 0) -> tuple[float, float]:
    """The range around a speed-up that holds in four of five cases.

    Args:
        speedup: the estimate.
        size: see :func:`size_of_products`.
        unknown: how many unknowns make the range wider.
    """
    error = _ERROR * min(max(1.0, _SIZE / size), 2.0) * (1 + 0.3 * unknown)
    return speedup * exp(-error), speedup * exp(error)


def check_recipe(gpu: Gpu, precision: str) -> None:
    """ValueError if the device cannot run the recipe, or its costs are not known."""
    if gpu.fp8 is None:
        with_fp8 = ", ".join(name for name, other in GPUS.items() if other.fp8)
        raise ValueError(f"{gpu.title} computes no products in FP8. Devices that do are {with_fp8}.")
    data_center = gpu.capability[0] in (10, 11)
    runs = dict.fromkeys(OURS, True) | {
        "fp8-block": bool(configurations(gpu.capability, in_blocks=True)) or data_center,
        "fp8-mx": mx_configuration(gpu.capability) is not None or data_center,
    }
    if not runs.get(precision):
        others = ", ".join(name for name in RECIPES if runs.get(name))
        why = (
            f"{gpu.title} cannot run {precision!r}." if precision in runs else f"What {precision!r} costs is not known."
        )
        raise ValueError(f"{why} {gpu.title} runs {others}.")


@dataclass
class _Case:
    """A step on a device under a recipe."""

    step: Step
    pricing: Pricing
    precision: str
    in_fp8: Mapping[str, frozenset[Product]]
    bf16: Seconds = field(init=False)
    fp8: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self.implementation = OURS[self.precision]
        self.bf16 = self.pricing.step(self.step)
        self.fp8 = self.pricing.step(self.step, self.in_fp8, self.implementation)
        self.speedup = self.bf16.total / self.fp8.total
        self._products: dict[str, list[tuple[MatrixProduct, int]]] = defaultdict(list)
        for operator, times in self.step.operators.items():
            if isinstance(operator, MatrixProduct) and operator.weight:
                self._products[operator.weight].append((operator, times))

    def casts(self, weights: tuple[str, ...]) -> bool:
        """Whether one of the weights runs in FP8."""
        return any(name in self.in_fp8 for name in weights)

    def gain_of(self, name: str) -> float:
        """Seconds that a weight's products save in FP8, casts included."""
        alone = {name: self.in_fp8[name]}
        of_weight = replace(
            self.step,
            operators=self.step.operators.__class__(dict(self._products[name])),
            inputs=[
                replace(tensor, elements=tensor.elements // len(tensor.weights))
                for tensor in self.step.inputs
                if name in tensor.weights
            ],
            trained_bytes=0,
        )
        pricing = replace(self.pricing, gpus=1)
        return pricing.step(of_weight).device - pricing.step(of_weight, alone, self.implementation).device

    def deciding(self, layers: Mapping[str, str], number: int = 5) -> Iterator[Group]:
        """The groups of equal products or operators that take most of the step in bf16."""
        order = {path: index for index, path in enumerate(layers.values())}
        times: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        names: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for operator, number_of_times in self.step.operators.items():
            name = getattr(operator, "weight", None)
            if isinstance(operator, MatrixProduct):
                key: tuple[Any, ...] = operator.product if name else "", operator.m, operator.n, operator.k
                names[key].append(layers.get(name or "", (name or "activations").removesuffix(".weight")))
                fp8 = operator.product in self.in_fp8.get(name or "", ())
            else:
                key, fp8 = (operator.name if isinstance(operator, Elementwise) else "attention",), False
            for index, implementation in enumerate((None, self.implementation if fp8 else None)):
                times[key][index] += number_of_times * self.pricing.operator(operator, implementation)
        for key in sorted(times, key=lambda key: -times[key][0])[:number]:
            # backward comes in the other order
            yield Group(_title(key, sorted(set(names[key]), key=lambda path: order.get(path, 0))), *times[key])


def _title(key: tuple[Any, ...], names: list[str]) -> str:
    if len(key) == 1:
        return str(key[0])
    product, m, n, k = key
    paths = [row.path for row in _folded(names)]
    return f"{product} {m} x {n} x {k} {paths[0]}".strip() + (f" and {len(paths) - 1} more" if paths[1:] else "")


def _folded(paths: Iterable[str]) -> list[Candidate]:
    return LayerTable(Candidate(path, "", True, "") for path in paths).folded()


def _suggestions(case: _Case, slower: list[str]) -> Iterator[tuple[str, float]]:
    """Changes that would gain at least another percent, each with the resulting speed-up."""
    found: list[tuple[str, _Case]] = []
    if slower:
        rest = {name: products for name, products in case.in_fp8.items() if name not in slower}
        found.append(("leave what is faster in bf16 out", replace(case, in_fp8=rest)))
    if not case.pricing.compiled:
        found.append(("compile the model", replace(case, pricing=replace(case.pricing, compiled=True))))
    for precision in RECIPES:
        try:
            check_recipe(case.pricing.gpu, precision)
        except ValueError:
            continue
        found.append((f'recipe="{precision}"', replace(case, precision=precision)))
    found.append(("twice the batch", replace(case, step=scaled(case.step, tokens=2))))
    found.append(("twice the width", replace(case, step=scaled(case.step, width=2))))
    for what, other in found:
        if other.speedup > case.speedup * 1.01:
            yield what, other.speedup


def _uncertain(case: _Case, strategy: str | None) -> Iterator[str]:
    if case.fp8.host > case.fp8.device:
        yield "the host's time, which decides here: it depends on the CPU"
    if strategy:
        yield "how much of the communication is hidden"
    if (own := case.fp8.other) > 0.5 * case.fp8.device:
        yield f"operators other than products take {own / case.fp8.device:.0%} of the device's time"


def scaled(step: Step, tokens: int = 1, width: int = 1) -> Step:
    """The step with the batch, or the width of layers, this many times as large."""
    operators = step.operators.__class__()
    for operator, times in step.operators.items():
        if isinstance(operator, MatrixProduct) and operator.weight:
            sizes = {"m": tokens, "n": width, "k": width}
            if operator.product == "wgrad":
                sizes = {"m": width, "n": width, "k": tokens}
            operators[replace(operator, **{key: getattr(operator, key) * by for key, by in sizes.items()})] += times
        elif isinstance(operator, MatrixProduct):
            operators[replace(operator, batch=operator.batch * tokens * width)] += times
        elif isinstance(operator, Elementwise):
            by = width**2 if operator.copies_for in step.sizes else tokens * width
            operators[replace(operator, bytes=operator.bytes * by, flops=operator.flops * tokens * width**2)] += times
        else:
            operators[replace(operator, flops=operator.flops * tokens * width)] += times
    return Step(
        operators,
        [replace(tensor, elements=tensor.elements * tokens * width) for tensor in step.inputs],
        {name: size * width**2 for name, size in step.sizes.items()},
        step.trained * width**2,
        step.trained_bytes * width**2,
    )


def _in_words(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
