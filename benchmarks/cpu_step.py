"""A training step of the demo's model on the CPU: plain bf16, fp8-delayed and torchao's emulated float8, in one run.

    python benchmarks/cpu_step.py [--config configs/tiny_gpt_fp8.yaml] [--rounds 3] [--steps 8] [--out FILE]

Each variant trains in a process of its own, as a user's would: what one leaves in the allocator would help or harm the
next. The variants take turns, and the first steps of each process do not count. torchao's is
``convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))``, its tensor-wise dynamic scaling with the
GEMMs emulated, as its own tests run it on a CPU. Before it times, each variant's loss is checked against bf16's.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

VARIANTS = ("bf16-mixed", "fp8-delayed", "torchao emulated")
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
        with torch.autocast("cpu", dtype=torch.bfloat16):
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
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.rounds):
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--config", str(arguments.config), "--steps", str(arguments.steps)]
            child = subprocess.run([*command, "--variant", variant], check=True, capture_output=True, text=True)
            runs[variant].append(json.loads(child.stdout.splitlines()[-1]))
    expected = runs["bf16-mixed"][0]["losses"][-1]
    rows = []
    for variant in VARIANTS:
        loss = runs[variant][0]["losses"][-1]
        assert abs(loss / expected - 1) < 0.05, f"{variant}: loss {loss}, bf16 {expected}"
        p20, p50, p80 = statistics.quantiles([t for run in runs[variant] for t in run["times"]], n=10)[1::3]
        faults = round(statistics.median(run["page_faults"] for run in runs[variant]))
        rows.append(
            {"variant": variant, "p20_ms": p20, "p50_ms": p50, "p80_ms": p80, "page_faults": faults, "loss": loss}
        )
    ours = next(row["p50_ms"] for row in rows if row["variant"] == "fp8-delayed")
    return [{**row, "times_fp8_delayed": row["p50_ms"] / ours, **environment()} for row in rows]


def environment() -> dict[str, Any]:
    """What a row needs to be read later."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    try:
        torchao = version("torchao")
    except PackageNotFoundError:
        torchao = None
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torchao": torchao,
        "commit": git.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
    }


def cpu_name() -> str:
    """The CPU, with the matrix extension that bf16 speed depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    text = info.read_text()
    name = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return name + (" with amx_bf16" if "amx_bf16" in text else " with avx512_bf16" if "avx512_bf16" in text else "")


def main() -> None:
    """Parse, compare, print, and append rows to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "configs" / "tiny_gpt_fp8.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        result = train(arguments.variant, yaml.safe_load(arguments.config.read_text()), arguments.steps)
        print(json.dumps(result))
        return
    rows = compare(arguments)
    for row in rows:
        print("{variant:18} p20 {p20_ms:7.1f}  p50 {p50_ms:7.1f}  p80 {p80_ms:7.1f} ms,".format(**row), end=" ")
        print("{times_fp8_delayed:.2f} x fp8-delayed, {page_faults} page faults a step".format(**row))
    if arguments.out:
        with arguments.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
