"""Compare the estimate with what others have published, in ``published.jsonl``.

    python -m benchmarks.published [--fit] [--sizes] [--out FILE]

Each row is a published number with its source, model or layer, device, recipe and implementation. Two rules were
written down before any constant was fitted.

**What is compared**: training (forward and backward, or whole steps) of single linear layers, and of models on one
device or data-parallel on at most 8 of one machine, on a device of the table, by an implementation described in
``IMPLEMENTATIONS``. Tensor, pipeline and context parallel runs, several machines and runs of forward alone are not.

**What is held out**: sources, never rows, so that two rows of one table never stand on both sides. Sources are put into
three groups: those of linear layers alone; others with a row below 1.05; the rest. In each group they are ordered by
the SHA-256 of their name; the first is held out, the next is for the fit, and so on in turns. If more rows would be for
the fit than are held out, the two sides change places.

``--fit`` fits the constants of the estimate to that side, each source weighted by the root of its cases, and prints
them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import append
from lightning_fp8.estimation.case import size_of_products, spread
from lightning_fp8.estimation.costs import OURS, Constants, Implementation, Pricing
from lightning_fp8.estimation.counting import Step, count
from lightning_fp8.estimation.devices import GPUS
from lightning_fp8.estimation.estimate import PAYS, Estimator
from lightning_fp8.ops.formats import PRODUCTS
from lightning_fp8.tools.tables import aligned, markdown_table

ROWS = Path(__file__).with_name("published.jsonl")
DEVICES = {"h100-sxm": "h100"}
# Passes over memory as the sources of these packages make them: see Implementation. TransformerEngine casts to both
# layouts at once. torchao casts each operand of each product for itself; compiled, a cast is one or two passes, and in
# eager mode one for each operator.
IMPLEMENTATIONS = {
    ("te", "tensorwise-delayed"): Implementation(4, 4, 20, 4),
    ("te", "tensorwise-current"): Implementation(6, 6, 24, 6),
    ("te", "block-1x128"): Implementation(4.1, 4, 24, 4, speed=0.83),
    ("te", "mxfp8"): Implementation(4.1, 4, 24, 4),
    ("torchao", "tensorwise-delayed"): Implementation(6, 6, 60, 6),
    ("torchao", "tensorwise-current"): Implementation(8, 8, 60, 6),
    ("torchao", "rowwise"): Implementation(8, 8, 70, 6, speed=0.9),
    ("torchao", "mxfp8"): Implementation(6.2, 6.2, 60, 6),
    ("torchao eager", "rowwise"): Implementation(60, 60, 70, 60, speed=0.9),
    ("own:torchao-triton-nocompile", "tensorwise-current"): Implementation(8, 8, 40, 9),
    ("own:kohakuwullm", "mxfp8"): Implementation(6.2, 6.2, 40, 6),
    # C++ and CUDA, where the steps of hundreds of thousands of tokens are CUDA graphs
    ("own:llmq", "tensorwise-current"): Implementation(6, 6, 0, 5),
}
_GROUPS = ("linear layers", "models, some without a gain", "models that gain")
# layers, width, and sequences of 2,048 tokens
SIZES = ((4, 256, 16), (12, 768, 16), (24, 1024, 16), (24, 2048, 8), (32, 4096, 4))
# those that are fitted, with a range to search
_FITTED = {
    "bf16": (0.5, 0.85),
    "fp8": (0.4, 0.8),
    "attention": (0.25, 0.65),
    "bandwidth": (0.6, 0.92),
    "fused": (0.2, 0.7),
    "operator": (4e-6, 15e-6),
    "kernel": (1e-6, 6e-6),
    "ramp": (32.0, 800.0),
    "overlap": (0.5, 0.95),
}


@dataclass(frozen=True)
class Case:
    """A published row with what is estimated for it."""

    row: dict[str, Any]
    held_out: bool = False

    @property
    def published(self) -> float:
        """The speed-up that the source gives."""
        return float(self.row["speedup"])

    def estimated(self, constants: Constants) -> tuple[float, float, float]:
        """The speed-up by these constants, and its range."""
        row, gpus = self.row, self.row.get("gpus") or 1
        strategy = row.get("strategy") or "single"
        is_compiled = bool(row.get("compiled")) or row["implementation"] == "own:llmq"
        pricing = Pricing(GPUS[_device(row)], is_compiled, gpus, strategy.startswith("fsdp"), constants)
        step, in_fp8 = _step(row)
        fp8 = pricing.step(step, in_fp8, _implementation(row), bool(row.get("fp8_all_gather")))
        speedup = pricing.step(step).total / fp8.total
        return speedup, *spread(speedup, size_of_products(step, in_fp8))


def cases() -> list[Case]:
    """The rows that are compared, each with its side."""
    rows = [row for row in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines()) if is_compared(row)]
    held_out = sources_held_out(rows)
    return [Case(row, row["source"] in held_out) for row in rows]


def is_compared(row: dict[str, Any]) -> bool:
    """The first rule."""
    whole = row["what"] in ("step", "forward+backward") or (row["kind"] == "model" and row["what"] == "gemm+casts")
    strategy = row.get("strategy") or "single"
    parallel = strategy.startswith(("single", "ddp", "fsdp", "zero1")) and not any(x in strategy for x in ("tp", "cp2"))
    known = _device(row) in GPUS and _implementation(row) is not None
    one_machine = (row.get("gpus") or 1) <= 8
    return whole and parallel and known and one_machine and (row["kind"] == "linear" or _is_built(row["model"]))


def sources_held_out(rows: Sequence[dict[str, Any]]) -> set[str]:
    """The second rule."""
    of_source = defaultdict(list)
    for row in rows:
        of_source[row["source"]].append(row)
    groups: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for source, of in of_source.items():
        if all(row["kind"] == "linear" for row in of):
            group = _GROUPS[0]
        else:
            group = _GROUPS[1] if any(row["speedup"] < PAYS for row in of) else _GROUPS[2]
        groups[group].append(source)
    sides: tuple[set[str], set[str]] = set(), set()
    for sources in groups.values():
        for index, source in enumerate(sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest())):
            sides[index % 2].add(source)
    return max(sides, key=lambda side: sum(len(of_source[source]) for source in side))


def _device(row: dict[str, Any]) -> str:
    return DEVICES.get(row.get("device", ""), row.get("device", ""))


def _implementation(row: dict[str, Any]) -> Implementation | None:
    name = row["implementation"]
    if name == "torchao" and row.get("compiled") is False:
        name = "torchao eager"
    # rows of ours have our precision strings as recipes
    return OURS.get(row["recipe"]) if name == "lightning_fp8" else IMPLEMENTATIONS.get((name, row["recipe"]))


def _is_built(model: dict[str, Any]) -> bool:
    return not model["family"].startswith(("flux", "z-image"))


def _step(row: dict[str, Any]) -> tuple[Step, dict[str, frozenset[Any]]]:
    if row["kind"] == "linear":
        step = _counted_layer(row["m"], row["k"], row["n"], row.get("around", ""))
        return step, {"linear.weight": frozenset(PRODUCTS)}
    model = row["model"]
    shapes = tuple((key, model.get(key)) for key in ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocab"))
    kind = "linears" if "linears only" in model["family"] else "bert" if "bert" in model["family"] else "causal"
    how = (kind, bool(model["gated"]), row["batch"], row["sequence"], row.get("recompute") == "full")
    step = _counted(shapes, *how)
    if row["implementation"] == "own:llmq" or row["what"] != "step":
        # without an optimizer, or many micro-batches to each of its steps
        step = Step(step.operators, step.inputs, step.sizes, 0, 0)
    in_head = {"head.weight"} if not row.get("head_in_fp8") else set()
    products = frozenset(PRODUCTS) - ({"wgrad"} if "kohaku" in row["implementation"] else set())
    weights = {
        name for name in step.sizes if name.endswith("weight") and "norm" not in name and "embedding" not in name
    }
    return step, dict.fromkeys(sorted(weights - in_head), products)


@functools.cache
def _counted_layer(m: int, k: int, n: int, around: str) -> Step:
    with torch.device("meta"):
        layer = _Layer(k, n, around)
        step = count(layer, torch.zeros(m, k, dtype=torch.bfloat16, requires_grad=True))
    # weights are in bf16, and no optimizer runs
    return Step(step.operators, step.inputs, step.sizes)


class _Layer(nn.Module):
    """A linear layer as torchao measures it: after a norm and before a sigmoid."""

    def __init__(self, k: int, n: int, around: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(k, dtype=torch.bfloat16) if "norm" in around else nn.Identity()
        self.linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
        self.after = nn.Sigmoid() if "sigmoid" in around else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.linear(self.norm(x)))


@functools.cache
def _counted(
    shapes: tuple[tuple[str, int], ...], kind: str, gated: bool, batch: int, sequence: int, recompute: bool
) -> Step:
    sizes = dict(shapes)
    with torch.device("meta"):
        model = _Transformer(**sizes, kind=kind, gated=gated, recompute=recompute)
        if sizes["vocab"]:
            return count(model, torch.zeros(batch, sequence, dtype=torch.long))
        return count(model, torch.zeros(batch, sequence, sizes["hidden"], dtype=torch.bfloat16))


class _Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, kind: str, gated: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.kind = heads, kv_heads, kind
        self.size = hidden // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, self.size * (heads + 2 * kv_heads), bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.gate = nn.Linear(hidden, intermediate, bias=False) if gated else None
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "linears":
            return self.down(self.up(self.out(self.qkv(x)[..., : x.shape[-1]])))
        y = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = y.split((self.heads, self.kv_heads, self.kv_heads), 1)
        y = scaled_dot_product_attention(q, k, v, is_causal=self.kind == "causal", enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        inner = gelu(self.up(y)) if self.gate is None else silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


class _Transformer(nn.Module):
    def __init__(self, layers: int, hidden: int, vocab: int, recompute: bool, **block: Any) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(vocab, hidden) if vocab else nn.Identity()
        self.blocks = nn.ModuleList(_Block(hidden, **block) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False) if vocab else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        target, x = x, self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.head(self.norm(x))
        return x.sum() if target.is_floating_point() else nn.functional.cross_entropy(x.flatten(0, 1), target.flatten())


def error_of(of: Iterable[Case], constants: Constants) -> float:
    """What the fit makes small: each source's mean error of the logarithm, weighted by the root of its cases."""
    errors = defaultdict(list)
    for case in of:
        errors[case.row["source"]].append(abs(log(case.estimated(constants)[0] / case.published)))
    weights = [len(of_source) ** 0.5 for of_source in errors.values()]
    return statistics.fmean(map(statistics.mean, errors.values()), weights)


def fit(of: Sequence[Case], constants: Constants) -> Constants:
    """Search one constant after the other, with ever smaller steps; far from the start costs a little."""
    start = vars(constants)

    def cost(values: dict[str, float]) -> float:
        far = sum(log(values[name] / start[name]) ** 2 for name in _FITTED)
        return error_of(of, Constants(**values)) + 0.01 * far

    values, factor = dict(start), 1.2
    best = cost(values)
    while factor > 1.005:
        improved = False
        for name, (low, high) in _FITTED.items():
            for by in (factor, 1 / factor):
                trial = {**values, name: min(max(values[name] * by, low), high)}
                if (found := cost(trial)) < best - 1e-6:
                    values, best, improved = trial, found, True
        factor = factor if improved else factor**0.5
    return Constants(**values)


def report(of: Sequence[Case], constants: Constants, constant: float) -> str:
    """One side as a table, with what its estimates are worth beside a constant."""
    lines: list[tuple[str, ...]] = [("source", "case", "published", "estimate", "range", "error")]
    inside: dict[str, list[bool]] = defaultdict(list)
    right, widths, errors, constant_errors = 0, list[float](), list[float](), list[float]()
    for case in of:
        (estimated, low, high), published = case.estimated(constants), case.published
        inside[case.row["source"]].append(low <= published <= high)
        right += (estimated >= PAYS) == (published >= PAYS)
        widths.append((high - low) / estimated)
        errors.append(abs(estimated / published - 1))
        constant_errors.append(abs(constant / published - 1))
        numbers = (f"{published:.2f}", f"{estimated:.2f}", f"{low:.2f} to {high:.2f}")
        lines.append((case.row["source"], case.row["id"], *numbers, f"{estimated / published - 1:+.0%}"))
    by_source = statistics.mean(map(statistics.mean, inside.values()))
    by_case = statistics.mean(is_inside for of_source in inside.values() for is_inside in of_source)
    summary = (
        f"{len(of)} cases of {len(inside)} sources: {by_case:.0%} are in the range, {by_source:.0%} if each source"
        f" counts once; the range's median width is {statistics.median(widths):.0%}; whether FP8 pays is right in"
        f" {right / len(of):.0%}; the median error is {statistics.median(errors):.1%}, that of the constant"
        f" {constant:.2f} {statistics.median(constant_errors):.1%}"
    )
    return "\n".join([*map("  ".join, aligned(lines, words=2)), summary])


def sizes() -> str:
    """What is estimated for Llama-like models of several sizes, on each device, compiled: a Markdown table."""
    lines = [["parameters", "layers x width", *(gpu.title for gpu in GPUS.values() if gpu.fp8)]]
    for layers, hidden, batch in SIZES:
        shapes = {"layers": layers, "hidden": hidden, "intermediate": hidden * 8 // 3 // 64 * 64, "vocab": 32768}
        heads = {"heads": hidden // 64, "kv_heads": hidden // 64}
        with torch.device("meta"):
            model = _Transformer(**shapes, **heads, kind="causal", gated=True, recompute=False)
            estimator = Estimator(model, torch.zeros(batch, 2048, dtype=torch.long), ignore_modules=["head"])
        found = [estimator.estimate(name, compiled=True) for name, gpu in GPUS.items() if gpu.fp8]
        number = sum(parameter.numel() for parameter in model.parameters())
        cells = [f"{one.speedup:.2f} ({one.low:.2f} to {one.high:.2f})" for one in found]
        lines.append([f"{number / 1e9:.2g} billion", f"{layers} x {hidden}", *cells])
    return markdown_table([list(line) for line in zip(*lines)])


def main() -> None:
    """Print both sides, after a fit if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants, and print them")
    parser.add_argument("--sizes", action="store_true", help="a table of sizes and devices instead")
    parser.add_argument("--out", type=Path, help="append a row for each case")
    options = parser.parse_args()
    if options.sizes:
        print(sizes())
        return
    of_both, constants = cases(), Constants()
    sides = {held_out: [case for case in of_both if case.held_out is held_out] for held_out in (False, True)}
    if options.fit:
        constants = fit(sides[False], constants)
        print(constants)
    # the constant to beat: the geometric mean of the published speed-ups of the side for the fit
    constant = exp(statistics.mean(log(case.published) for case in sides[False]))
    for held_out, title in ((False, "For the fit"), (True, "Held out")):
        print(f"\n{title}\n{report(sides[held_out], constants, constant)}")
    if options.out:
        rows = [
            {"id": case.row["id"], "published": case.published, "estimate": case.estimated(constants)[0]}
            for case in of_both
        ]
        append(rows, options.out)


if __name__ == "__main__":
    main()
