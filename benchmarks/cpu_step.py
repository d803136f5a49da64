"""A training step of the demo's model on the CPU: plain bf16, fp8-delayed and torchao's emulated float8, in one run.

    python -m benchmarks.cpu_step [--config configs/tiny_gpt_fp8.yaml] [--rounds 3] [--steps 8] [--out FILE]

Each variant trains in a separate process, as a user's model would, so that no variant affects the allocator of the
next. The variants take turns, and the first steps of each process do not count. torchao's variant is
``convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))``: tensor-wise dynamic scaling with
emulated GEMMs, as its own tests run it on a CPU. Each variant's loss is checked against bf16's before a time is shown.
On a CPU that emulates bf16 products, fp32 replaces plain bf16.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from typing import Any

import torch
import yaml

from benchmarks.harness import append, baseline, environment, parser, percentiles, take_turns

VARIANTS = ("bf16-mixed", "32-true", "fp8-delayed", "torchao emulated")
WARM_UP = 3


def train(variant: str, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Step times in ms, the losses, and page faults per step, of one variant in this process."""
    import lightning_fp8
    from lightning_fp8.examples import ByteGPT

    torch.manual_seed(0)
    model = ByteGPT(**config["model"]["init_args"])
    data = config["data"]["init_args"]
    batch = torch.randint(0, 256, (data["batch_size"], data["context"] + 1), dtype=torch.uint8)
    state = None
    if variant == "fp8-delayed":
        state = lightning_fp8.scaling_state(lightning_fp8.convert(model))
    elif variant == "torchao emulated":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times, losses = [], []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant != "32-true"):
            loss = model.loss(batch)
        loss.backward()
        if state is not None:
            state.update()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // steps
    return {"times": times[WARM_UP:], "losses": losses, "page_faults": faults}


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of percentiles, one per variant, each with its ratio to fp8-delayed."""
    first = baseline("cpu")
    runs = take_turns((first, "fp8-delayed", "torchao emulated"), arguments.rounds)
    expected = runs[first][0]["losses"][-1]
    rows = []
    for variant, made in runs.items():
        loss = made[0]["losses"][-1]
        assert abs(loss / expected - 1) < 0.05, f"{variant}: loss {loss}, {first} {expected}"
        faults = round(statistics.median(run["page_faults"] for run in made))
        rows.append({"variant": variant, **percentiles(made), "page_faults": faults, "loss": loss, "baseline": first})
    ours = next(row["p50_ms"] for row in rows if row["variant"] == "fp8-delayed")
    return [{**row, "times_fp8_delayed": row["p50_ms"] / ours, **environment("torchao")} for row in rows]


def main() -> None:
    """Parse, compare, print, and append rows to ``--out``."""
    arguments = parser(__doc__, VARIANTS, steps=8).parse_args()
    if arguments.variant:
        result = train(arguments.variant, yaml.safe_load(arguments.config.read_text()), arguments.steps)
        print(json.dumps(result))
        return
    rows = compare(arguments)
    for row in rows:
        print("{variant:18} p20 {p20_ms:7.1f}  p50 {p50_ms:7.1f}  p80 {p80_ms:7.1f} ms,".format(**row), end=" ")
        print("{times_fp8_delayed:.2f} x fp8-delayed, {page_faults} page faults a step".format(**row))
    append(rows, arguments.out)


if __name__ == "__main__":
    main()
