"""Real processes for the tests: a script in each of them, and what each has saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import ROOT

_HEAD = """
import copy, sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from lightning_fp8 import DelayedScaling, convert, scaling_state, unconvert

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
result = {{}}
"""
_TAIL = """
torch.save(result, {path!r} + f"/rank{{rank}}.pt")
dist.barrier()
dist.destroy_process_group()
"""


def run_processes(body: str, path: Path, processes: int = 2) -> list[dict[str, Any]]:
    """Run ``body`` under torchrun with gloo; gives what each process has put into ``result``."""
    script = path / "script.py"
    script.write_text(_HEAD.format(tests=str(ROOT / "tests")) + body + _TAIL.format(path=str(path)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run([*command, str(script)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(path / f"rank{rank}.pt", weights_only=True) for rank in range(processes)]
