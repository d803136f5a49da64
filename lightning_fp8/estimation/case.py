"""A step in bf16 and in FP8 on one device: its times, what decides them, what would change them, and their range."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp
from typing import Any, NamedTuple

from kernels_cuda.gemm_variants import configurations, mx_configuration
from lightning_fp8.conversion.table import Candidate, LayerTable
from lightning_fp8.estimation.costs import OURS, Pricing, Seconds
from lightning_fp8.estimation.counting import Elementwise, MatrixProduct, Operator, Step
from lightning_fp8.estimation.devices import GPUS, Gpu
from lightning_fp8.ops.formats import Product
from lightning_fp8.scalings.recipe import RECIPES

# Four of five published cases used for the fit, and four of five of their sources, stay within this error. It grows as
# products shrink below _SIZE, to at most twice as much.
_ERROR = 0.11
_SIZE = 2048


class Group(NamedTuple):
    """Equal products or operators.

    Attributes:
        what: the layers and the product, or the operator.
        bf16, fp8: seconds in a step; FP8 includes the casts of the operands.
    """

    what: str
    bf16: float
    fp8: float


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
class Case:
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

    @cached_property
    def _products(self) -> dict[str, Counter[Operator]]:
        """The products of each weight."""
        products: dict[str, Counter[Operator]] = defaultdict(Counter)
        for operator, times in self.step.operators.items():
            if isinstance(operator, MatrixProduct) and operator.weight:
                products[operator.weight][operator] = times
        return products

    def casts(self, weights: tuple[str, ...]) -> bool:
        """Whether one of the weights runs in FP8."""
        return any(name in self.in_fp8 for name in weights)

    def gain_of(self, name: str) -> float:
        """Seconds that a weight's products save in FP8, casts included."""
        alone = {name: self.in_fp8[name]}
        of_weight = replace(
            self.step,
            operators=self._products[name],
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
    paths = [row.path for row in folded(names)]
    return f"{product} {m} x {n} x {k} {paths[0]}".strip() + (f" and {len(paths) - 1} more" if paths[1:] else "")


def folded(paths: Iterable[str]) -> list[Candidate]:
    """The paths, with equal layers of a stack as one."""
    return LayerTable(Candidate(path, "", True, "") for path in paths).folded()


def suggestions(case: Case, slower: list[str]) -> Iterator[tuple[str, float]]:
    """Changes that would gain at least another percent, each with the resulting speed-up."""
    found: list[tuple[str, Case]] = []
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


def unknowns(case: Case, strategy: str | None) -> Iterator[str]:
    """What the estimate does not know, and the range is wider for."""
    if case.fp8.host > case.fp8.device:
        yield "the host's time, which decides here: it depends on the CPU"
    if strategy:
        yield "how much of the communication is hidden"
    if (own := case.fp8.other) > 0.5 * case.fp8.device:
        yield f"operators other than products take {own / case.fp8.device:.0%} of the device's time"


def scaled(step: Step, tokens: int = 1, width: int = 1) -> Step:
    """The step with the batch, or the width of layers, this many times as large."""
    operators: Counter[Operator] = Counter()
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
