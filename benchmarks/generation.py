"""Time per token of greedy generation: a small converted Hugging Face Llama, and the same model in bf16.

    python -m benchmarks.generation [--rounds 5] [--tokens 64] [--device cpu]

Both models take turns in one process, with a key-value cache and one prompt of 16 tokens, on one CPU thread; the first
round does not count. The converted model has the scales of one training step. Generation runs under no_grad and
autocast without a cache, as in a Trainer's ``predict`` loop. "once" casts each weight once (``weights_unchanged``);
"each" casts it in every forward, as a model in evaluation mode does by default, since its weights may change. On a CPU
that emulates bf16 products, everything outside FP8 computes in fp32 in both models, and the baseline is 32-true.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.harness import baseline, environment
from lightning_fp8 import convert, scaling_state, weights_unchanged

PROMPT = 16


def llama() -> nn.Module:
    """Four layers of width 256, with a vocabulary of 1,000."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8
    )
    return LlamaForCausalLM(config).eval()


def compare(rounds: int, tokens: int, device: str, first: str) -> dict[str, list[float]]:
    """Milliseconds per token of each round, by variant; ``first`` is the baseline's precision."""
    plain = llama().to(device)
    fp8 = convert(copy.deepcopy(plain))
    # scales, as training leaves them
    tokens_of_training = torch.randint(0, 1000, (4, PROMPT), device=device)
    fp8.train()(tokens_of_training, labels=tokens_of_training).loss.backward()
    scaling_state(fp8).update()
    fp8.eval().zero_grad()
    prompt = torch.randint(0, 1000, (1, PROMPT), device=device)

    def generate(model: nn.Module, context: Callable[[nn.Module], AbstractContextManager[Any]]) -> float:
        autocast = torch.autocast(device, torch.bfloat16, enabled=first == "bf16-mixed", cache_enabled=False)
        start = time.perf_counter()
        with torch.no_grad(), autocast, context(model):
            made = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)  # type: ignore[operator]
            assert made[0, -1].item() >= 0  # waits for the device
        return 1e3 * (time.perf_counter() - start) / tokens

    variants: dict[str, tuple[nn.Module, Callable[[nn.Module], AbstractContextManager[Any]]]] = {
        first: (plain, lambda model: nullcontext()),
        "fp8, once": (fp8, weights_unchanged),
        "fp8, each": (fp8, lambda model: nullcontext()),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 + rounds):
        for name, (model, context) in variants.items():
            times[name].append(generate(model, context))
    return {name: all_rounds[1:] for name, all_rounds in times.items()}


def main() -> None:
    """Parse, compare and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--device", default="cpu")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    first = baseline(arguments.device)
    times = compare(arguments.rounds, arguments.tokens, arguments.device, first)
    base = statistics.median(times[first])
    print(environment("transformers"))
    for name, rounds in times.items():
        p50 = statistics.median(rounds)
        print(f"{name:12} {p50:7.2f} ms a token, {p50 / base:.2f} x {first}")


if __name__ == "__main__":
    main()
