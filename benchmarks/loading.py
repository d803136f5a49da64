"""Peak memory of `load_exported`: random FP8 weights in several files are read into a model on the meta device.

Run `python -m benchmarks.loading --out docs/results/loading-cpu.jsonl`. Each row is measured in a process of its own.
The peak is that of the resident memory, which includes the pages of the file that is being read.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.memory import bytes_of
from lightning_fp8 import load_exported
from lightning_fp8.modules.fp8_parameter import is_frozen
from lightning_fp8.runtime.environment import environment

_WIDTH = 2048
_MIB = 2**20


def _model(layers: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def write(folder: Path, layers: int, shards: int) -> None:
    """Write a checkpoint of 128 x 128 blocks with random codes."""
    blocks = _WIDTH // 128
    places: dict[str, str] = {}
    for shard in range(shards):
        file, tensors = f"model-{shard + 1:05}-of-{shards:05}.safetensors", {}
        for layer in range(shard * layers // shards, (shard + 1) * layers // shards):
            codes = torch.randint(0, 0x7F, (_WIDTH, _WIDTH), dtype=torch.uint8)
            tensors[f"{layer}.weight"] = codes.view(torch.float8_e4m3fn)
            tensors[f"{layer}.weight_scale_inv"] = torch.rand(blocks, blocks) + 1e-3
        places |= dict.fromkeys(tensors, file)
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": method}))


def _memory(field: str) -> int:
    """Bytes of resident memory of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(lines[field].split()[0]) * 1024


def measure(folder: Path, frozen: bool) -> dict[str, Any]:
    """Load the checkpoint in this process, after a small one: what the first call imports is not counted."""
    with tempfile.TemporaryDirectory() as small:
        write(Path(small), 1, 1)
        load_exported(_model(1), small, frozen=frozen)
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    model = _model(len(index["weight_map"]) // 2)
    before, start = _memory("VmRSS"), time.perf_counter()
    load_exported(model, folder, frozen=frozen)
    seconds = time.perf_counter() - start
    tensors: list[Tensor] = []
    for weight in model.parameters():
        tensors += [weight.payload, weight.scale_inv] if is_frozen(weight) else [weight]
    return {
        "frozen": frozen,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "model_bytes": bytes_of(tensors),
        "largest_file_bytes": max(files),
        "peak_bytes": _memory("VmHWM") - before,
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Print a row for each way to load, and append it to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=256, help="of 4 MiB each (default: 256, which make 1 GiB)")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", choices=("frozen", "masters"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.folder, arguments.measure == "frozen")))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.layers, arguments.shards)
        for how in ("frozen", "masters"):
            command = [sys.executable, "-m", "benchmarks.loading", "--measure", how, "--folder", folder]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            row = {**json.loads(run.stdout.splitlines()[-1]), **environment()}
            row["command"] = shlex.join(["python", "-m", "benchmarks.loading", *sys.argv[1:]])
            print(json.dumps(row))
            if arguments.out:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
