"""Train in plain PyTorch, without Lightning: convert, update the scales at each step, save and load them.

The model predicts a byte of a text from the bytes before it.

python examples/torch_loop.py
python examples/torch_loop.py --steps 300 --resume runs/torch_loop.pt
python examples/torch_loop.py --text corpus.txt --context 128 --width 64 --hidden 8192 --steps 10000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import convert, describe, scaling_state, weights_unchanged


def read(path: str, context: int) -> Tensor:
    """All windows of a text, ``[windows, context + 1] uint8``; the model predicts the last byte of a window."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    if len(text) < 20 * (context + 1):
        raise ValueError(f"{path} has {len(text)} bytes: --context {context} needs {20 * (context + 1)} or more.")
    return text.unfold(0, context + 1, 1)


def make_model(context: int, width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, width),
        nn.Flatten(),
        nn.Linear(context * width, hidden),
        nn.GELU(),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.Linear(hidden, 256),
    )


def loss_of(model: nn.Module, batch: Tensor, precision: str) -> Tensor:
    """Mean cross-entropy in nats of a batch ``[batch, context + 1]``."""
    batch = batch.to(next(model.parameters()).device).long()
    # what does not run in FP8 runs in bf16
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=precision != "32-true"):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float(), batch[:, -1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["fp8-delayed", "bf16-mixed", "32-true"], default="fp8-delayed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", default=argparse.__file__, help="a file; by default the source of argparse")
    parser.add_argument("--context", type=int, default=16, help="bytes that the model sees")
    parser.add_argument("--width", type=int, default=16, help="of a byte's embedding")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--checkpoint", default="runs/torch_loop.pt", help="is written at the end")
    parser.add_argument("--resume", help="a checkpoint; --steps counts from the start of its run")
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    windows = read(arguments.text, arguments.context)
    held_out = len(windows) // 10
    training, validation = windows[: -held_out - arguments.context], windows[-held_out:]
    model = make_model(arguments.context, arguments.width, arguments.hidden).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state = None
    if arguments.precision == "fp8-delayed":
        convert(model)
        print(describe(model))
        # the scales are not in the model's `state_dict`
        saved["scaling"] = state = scaling_state(model)
    start = 0
    if arguments.resume:
        checkpoint = torch.load(arguments.resume, weights_only=True)
        start = checkpoint["step"]
        for name, part in saved.items():
            part.load_state_dict(checkpoint[name])

    for step in range(start, arguments.steps):
        # a resumed run draws the same batches as an uninterrupted one
        generator = torch.Generator().manual_seed(step)
        for _ in range(arguments.accumulate):
            batch = training[torch.randint(len(training), (arguments.batch_size,), generator=generator)]
            (loss_of(model, batch, arguments.precision) / arguments.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if state is not None:
            state.update()  # once per optimizer step, after backward
        optimizer.step()
        optimizer.zero_grad()

    Path(arguments.checkpoint).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"step": arguments.steps, **{k: part.state_dict() for k, part in saved.items()}}, arguments.checkpoint)
    model.eval()
    with torch.inference_mode(), weights_unchanged(model):
        losses = [loss_of(model, batch, arguments.precision) for batch in validation.split(1024)]
    print(f"{arguments.precision}: validation loss {torch.stack(losses).mean():.3f}")


if __name__ == "__main__":
    main()
