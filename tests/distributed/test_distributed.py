"""DDP under a Trainer, with Lightning's own launcher on the CPU: scales agree on every rank, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from repository import ROOT
from warm import run_warm

SCRIPT = """
import sys
sys.path.insert(0, {support!r})
import torch, torch.distributed as dist
from lit import loader, long_window, make_trainer, seeded
from lightning_fp8 import scaling_state

torch.set_num_threads(1)
model = seeded()
trainer = make_trainer({path!r}, strategy="ddp", devices=2, max_epochs=2, plugins=long_window())
trainer.fit(model, loader(), loader())
state = scaling_state(model)
result = {{
    "scale": state.scale, "amax_history": state.amax_history, "steps": trainer.global_step,
    "weight": model.net[0].weight.detach(), "losses": torch.stack(model.losses),
}}
torch.save(result, {path!r} + f"/rank{{dist.get_rank()}}.pt")
"""


@pytest.mark.slow
def test_scales_agree_on_every_rank(tmp_path: Path) -> None:
    # with Lightning's own launcher, which runs the script again for the second rank
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(support=str(ROOT / "tests" / "support"), path=str(tmp_path)))
    run = run_warm(str(script))
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["steps"] == 4
    for name in ("scale", "amax_history", "weight"):
        assert torch.equal(first[name], second[name]), name
    # the ranks saw different data, so they do not agree by accident
    assert not torch.equal(first["losses"], second["losses"])
    assert (first["amax_history"] > 0).sum(0).tolist() == [4] * 4
