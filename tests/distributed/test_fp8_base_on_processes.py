"""LoRA by PEFT on a base read from an FP8 checkpoint, in two processes under DDP, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_processes

pytestmark = pytest.mark.slow

BODY = """
import peft
from pathlib import Path
from fp8_bases import llama, write_base
from frozen_models import frozen_weights
from torch.nn.parallel import DistributedDataParallel
from lightning_fp8 import BlockScaling, load_exported

folder = Path("base") / str(rank)
folder.mkdir(parents=True)
write_base(folder, "block")
TOKENS = (torch.arange(16) * 7 + torch.arange(24)[:, None] * 5) % 96


def train(wrap, rows):
    model = load_exported(llama(), folder, frozen=True)
    before = [weight.payload.clone() for weight in frozen_weights(model).values()]
    torch.manual_seed(3)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, adapters).train()
    run, losses = wrap(model), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for batch in TOKENS.split(8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(input_ids=batch[rows], labels=batch[rows]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kept = all(map(torch.equal, before, (weight.payload for weight in frozen_weights(model).values())))
    return kept, losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


result["ddp"] = train(DistributedDataParallel, slice(4 * rank, 4 * rank + 4))
result["alone"] = train(lambda model: model, slice(0, 8))
"""


def test_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = run_processes(BODY, tmp_path)
    (kept, losses, adapters), (_, alone, expected) = first["ddp"], first["alone"]
    assert kept
    assert second["ddp"][0]
    assert losses != second["ddp"][1]
    # blocks of a token are scaled alike in any batch, so only the order of sums differs
    mean = [(one + other) / 2 for one, other in zip(losses, second["ddp"][1], strict=True)]
    assert mean == pytest.approx(alone, rel=2e-3)
    for name, adapter in adapters.items():
        assert torch.equal(adapter, second["ddp"][2][name])
        assert (adapter - expected[name]).norm() < 0.05 * expected[name].norm()
