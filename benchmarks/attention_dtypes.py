"""The cost of watching the dtypes of attention operands: an eager step of the demo's model, with and without watching.

    python -m benchmarks.attention_dtypes [--config configs/tiny_gpt_fp8.yaml] [--rounds 20] [--out FILE]

Steps with and without watching take turns in one process, so that both run under the same conditions; their losses are
checked to be equal bit for bit. The difference is smaller than the noise between steps, so the cost is also measured
directly: for one attention call on tensors of a few bytes and for one entry into the context, times their number per
step. bf16-mixed is left out on a CPU that emulates bf16 products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from benchmarks.harness import append, baseline, environment, parser
from lightning_fp8 import scaling_state
from lightning_fp8.conversion.convert import is_converted
from lightning_fp8.examples import ByteGPT
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.trainer import PLUGINS

PRECISIONS = ("fp8-delayed", "bf16-mixed")
CALLS = 3000


def microseconds(run: Callable[[], Any], times: int = CALLS) -> float:
    """Microseconds per call: the median of five rounds."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times):
            run()
        found.append(1e6 * (time.perf_counter() - start) / times)
    return statistics.median(found)


def cost_of_a_call_and_an_entry(plugin: PrecisionCore) -> tuple[float, float]:
    """Microseconds that the context adds to an attention call, and that entering and leaving it takes."""
    context = plugin._attention.context
    x = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    attend = torch.no_grad()(lambda: F.scaled_dot_product_attention(x, x, x))
    attend()
    plain = microseconds(attend)
    with context():
        watched = microseconds(attend)

    def enter() -> None:
        with context():
            pass

    return watched - plain, microseconds(enter)


def step(plugin: PrecisionCore, model: ByteGPT, optimizer: torch.optim.Optimizer, batch: Tensor) -> tuple[float, float]:
    """Milliseconds and loss of one eager training step as a Trainer makes it."""
    start = time.perf_counter()
    with plugin.forward_context():
        loss = model.loss(batch)
    with plugin.recomputation_context():
        loss.backward()
    if is_converted(model):
        scaling_state(model).update()
    optimizer.step()
    optimizer.zero_grad()
    return 1e3 * (time.perf_counter() - start), loss.item()


def compare(precision: Any, config: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One row: both medians, and the cost measured directly as a share of a step."""
    data = config["data"]["init_args"]
    batch = torch.randint(0, 256, (data["batch_size"], data["context"] + 1), dtype=torch.uint8)
    variants: list[tuple[PrecisionCore, ByteGPT, torch.optim.Optimizer, list[float], list[float]]] = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        plugin, model = PLUGINS[precision](), ByteGPT(**config["model"]["init_args"])
        plugin.convert_module(model)
        if not is_watched:
            plugin._attention.context = nullcontext  # type: ignore[method-assign, assignment]
        variants.append((plugin, model, torch.optim.AdamW(model.parameters()), [], []))
    for _ in range(rounds + 2):
        for plugin, model, optimizer, times, losses in variants:
            milliseconds, loss = step(plugin, model, optimizer, batch)
            times.append(milliseconds)
            losses.append(loss)
    assert variants[0][4] == variants[1][4], "watching changed the training"
    watched, unwatched = (statistics.median(times[2:]) for *_, times, _ in variants)
    call, entry = cost_of_a_call_and_an_entry(PLUGINS[precision]())
    added = config["model"]["init_args"]["layers"] * call + 2 * entry
    return {
        "variant": precision,
        "p50_ms": watched,
        "p50_without_ms": unwatched,
        "call_us": call,
        "entry_us": entry,
        "added_us_per_step": added,
        "added_share": added / (1e3 * unwatched),
    }


def main() -> None:
    """Parse, compare, print, and append rows to ``--out``."""
    arguments = parser(__doc__, PRECISIONS, steps=1).parse_args()
    config = yaml.safe_load(arguments.config.read_text())
    precisions = PRECISIONS if baseline("cpu") in PRECISIONS else ("fp8-delayed",)
    rows = [{**compare(precision, config, arguments.rounds), **environment()} for precision in precisions]
    for row in rows:
        print("{variant:12} step {p50_ms:.1f} ms, without {p50_without_ms:.1f} ms; ".format(**row), end="")
        print("attention call +{call_us:.1f} us, context {entry_us:.1f} us, ".format(**row), end="")
        print("together {added_us_per_step:.0f} us a step: {added_share:.3%}".format(**row))
    append(rows, arguments.out)


if __name__ == "__main__":
    main()
