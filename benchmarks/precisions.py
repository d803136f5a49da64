"""Which bf16 precision to choose: compares one model in fp32, the bf16 precisions and fp8-delayed, in one run.

    python -m benchmarks.precisions [--config configs/tiny_gpt_fp8.yaml] [--accumulate 4] [--rounds 3] [--steps 6]
                                    [--device auto|cpu|cuda] [--markdown] [--out FILE]

A step is ``--accumulate`` micro-batches of random bytes, the same at each step and for each variant, then AdamW with
the model's own settings. Each variant trains in a separate process, the variants take turns, and the first steps of
each process do not count. Before anything is timed, each variant's first loss and gradient are checked against fp32's.
On a CPU that emulates bf16 products the bf16 precisions are left out, and times are relative to fp32.

One more step, not timed, gives the other figures. In those of memory each storage counts once:

- weight copies: copies of weights in another dtype that layers keep until the next optimizer step.
- saved: what one forward saves for backward, without parameters, kept copies and the FP8 state.
- peak: peak of torch's allocator over the timed steps; torch does not count it on the CPU.
- loss: of the first micro-batch, after that step.
- unchanged: share of the parameter elements with a non-zero gradient that this step did not change. In bf16 an update
  below half a unit in the last place is lost, and a smaller learning rate loses more of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import yaml
from torch import Tensor

import lightning_fp8
from benchmarks.harness import append, baseline, environment, parser, percentiles, table, take_turns
from benchmarks.memory import bytes_of, saved_bytes, weight_copies
from lightning_fp8.examples import ByteGPT

# creates the plugin; None: no plugin
VARIANTS: dict[str, Callable[[], Any] | None] = {
    "32-true": None,
    "bf16-true": lightning_fp8.Bf16TruePrecision,
    "bf16-mixed": lightning_fp8.Bf16MixedPrecision,
    "bf16-mixed, weight_copy": partial(lightning_fp8.Bf16MixedPrecision, weight_copy=True),
    "fp8-delayed": lightning_fp8.Fp8Precision,
}
WARM_UP = 3
MIB = 2**20
# title, unit and format
COLUMNS: dict[str, tuple[str, float, str]] = {
    "p20_ms": ("p20 ms", 1, ".1f"),
    "p50_ms": ("p50 ms", 1, ".1f"),
    "p80_ms": ("p80 ms", 1, ".1f"),
    "times_baseline": ("x the baseline", 1, ".2f"),
    "parameter_bytes": ("parameters MiB", MIB, ".2f"),
    "gradient_bytes": ("gradients MiB", MIB, ".2f"),
    "optimizer_bytes": ("optimizer MiB", MIB, ".2f"),
    "weight_copy_bytes": ("weight copies MiB", MIB, ".2f"),
    "saved_bytes": ("saved MiB", MIB, ".1f"),
    "peak_bytes": ("peak MiB", MIB, ".1f"),
    "loss": ("loss", 1, ".4f"),
    "unchanged_fraction": ("unchanged", 1, ".4%"),
}


class Training:
    """One variant's model, optimizer and micro-batches, stepped as a Trainer steps them."""

    def __init__(self, variant: str, arguments: argparse.Namespace) -> None:
        config = yaml.safe_load(arguments.config.read_text())
        torch.manual_seed(0)
        self.model = ByteGPT(**config["model"]["init_args"])
        data = config["data"]["init_args"]
        shape = (arguments.accumulate, data["batch_size"], data["context"] + 1)
        self.batches = torch.randint(0, 256, shape, dtype=torch.uint8).to(arguments.device)
        make = VARIANTS[variant]
        self.plugin = make() if make else None
        if self.plugin:
            self.plugin.convert_module(self.model)
        self.model.to(arguments.device)
        self.scaling = lightning_fp8.scaling_state(self.model) if variant == "fp8-delayed" else None
        # as in the model's `configure_optimizers`, without the schedule
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.model.learning_rate, betas=(0.9, 0.95))

    def loss(self, batch: Tensor) -> Tensor:
        """The loss of a micro-batch, in the variant's precision."""
        with self.plugin.forward_context() if self.plugin else nullcontext():
            return self.model.loss(batch)

    def accumulate(self) -> None:
        """Gradients of all micro-batches."""
        for batch in self.batches:
            (self.loss(batch) / len(self.batches)).backward()

    def step(self) -> None:
        """Change the weights; the gradients stay."""
        if self.scaling is not None:
            self.scaling.update()
        self.optimizer.step()


def train(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one variant in this process: step times in ms, and the figures of one more step."""
    on_cuda = arguments.device == "cuda"
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    training = Training(variant, arguments)
    times = []
    for step in range(WARM_UP + arguments.steps):
        if on_cuda and step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        training.accumulate()
        training.step()
        training.optimizer.zero_grad()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() if on_cuda else None
    return {"times": times[WARM_UP:], "peak_bytes": peak, **one_more_step(training)}


def one_more_step(training: Training) -> dict[str, Any]:
    """Bytes by purpose, the share of elements that the step did not change, and the loss after it."""
    parameters = list(training.model.parameters())
    training.accumulate()
    before = [parameter.detach().clone() for parameter in parameters]
    training.step()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    counted = [gradient.ne(0) for gradient in gradients]
    unchanged = [was.eq(now) & count for was, now, count in zip(before, parameters, counted, strict=True)]
    moments = [x for state in training.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return {
        "parameter_bytes": bytes_of(parameters),
        "gradient_bytes": bytes_of(gradients),
        "optimizer_bytes": bytes_of(moments),
        "weight_copy_bytes": bytes_of(weight_copies(training.model)),
        "saved_bytes": saved_bytes(training.model, lambda: training.loss(training.batches[0])),
        "loss": training.loss(training.batches[0]).item(),
        "unchanged_fraction": sum(int(x.sum()) for x in unchanged) / sum(int(x.sum()) for x in counted),
        "learning_rate": training.model.learning_rate,
    }


def check(arguments: argparse.Namespace, variants: list[str]) -> None:
    """Check that each first loss is within 5 % of fp32's, as for any untrained model, and the gradient within 20 %."""
    expected: list[Tensor] = []
    for variant in variants:
        training = Training(variant, arguments)
        loss = training.loss(training.batches[0])
        loss.backward()
        gradients = [x.grad.float().flatten() for x in training.model.parameters() if x.grad is not None]
        gradient = torch.cat(gradients)
        expected = expected or [loss.detach(), gradient]
        for name, got, fp32, limit in zip(("loss", "gradient"), (loss, gradient), expected, (0.05, 0.2)):
            error = ((got - fp32).norm() / fp32.norm()).item()
            assert error < limit, f"{variant}: the first {name} is {error:.1%} away from that of fp32"


def compare(arguments: argparse.Namespace, variants: list[str], first: str) -> list[dict[str, Any]]:
    """Rows of percentiles and bytes, one per variant, each with its ratio to the baseline, ``first``."""
    rows = []
    for variant, runs in take_turns(variants, arguments.rounds).items():
        rows.append({"variant": variant, **percentiles(runs), **{k: x for k, x in runs[0].items() if k != "times"}})
    base = next(row["p50_ms"] for row in rows if row["variant"] == first)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    settings = {"accumulate": arguments.accumulate, "device": device, "baseline": first, **environment()}
    return [{**row, "times_baseline": row["p50_ms"] / base, **settings} for row in rows]


def main() -> None:
    """Parse, check, compare, print, and append rows to ``--out``."""
    options = parser(__doc__, VARIANTS, steps=6)
    options.add_argument("--accumulate", type=int, default=4)
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--markdown", action="store_true", help="print the table for a Markdown file")
    arguments = options.parse_args()
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if arguments.variant:
        print(json.dumps(train(arguments.variant, arguments)))
        return
    first = baseline(arguments.device)
    variants = [name for name in VARIANTS if first == "bf16-mixed" or not name.startswith("bf16-")]
    check(arguments, variants)
    rows = compare(arguments, variants, first)
    print(table(rows, {**COLUMNS, "times_baseline": (f"x {first}", 1, ".2f")}, arguments.markdown))
    append(rows, arguments.out)


if __name__ == "__main__":
    main()
