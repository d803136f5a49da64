"""Losses of small transformers models in bf16 and FP8: mixtures of experts, and linear layers of classes of their own.

    python -m benchmarks.model_losses --out docs/results/model-losses-cpu.jsonl [--seeds 5] [--steps 200]

Each model, two layers of 64 features, learns from the same batches and weights in bf16, the baseline, and in FP8
that a token follows from the one before it, or, one time in four, from nothing. The loss is the mean of the last tenth
of the steps. At the end a table is printed, with the share of the matrices in FP8, embeddings and biases apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.harness import Row, append
from benchmarks.recipes import BASELINE, by_seed, excess, interval, recipe_of
from lightning_fp8 import convert, scaling_state
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.runtime.environment import environment
from lightning_fp8.tools.tables import markdown_table

FP8 = "fp8-delayed"
VOCABULARY = 96
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 128}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
# by class, the fields of its configuration
MODELS: dict[str, dict[str, Any]] = {
    "GptOss": {**_EXPERTS, "num_local_experts": 4, "head_dim": 16},
    "Qwen3Moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16},
    "GraniteMoe": {**_EXPERTS, "num_local_experts": 4},
    "DeepseekV3": _EXPERTS | _LATENT | {"n_routed_experts": 4, "moe_intermediate_size": 64, "first_k_dense_replace": 1},
    "Falcon": {"ffn_hidden_size": 256},
}


def model_of(name: str) -> nn.Module:
    """The model with random weights; it takes up to ``VOCABULARY`` different tokens."""
    config = getattr(transformers, f"{name}Config")(**_SIZES, **MODELS[name])
    config._attn_implementation = "eager"
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def train(name: str, variant: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: its loss, and the share of the matrices that layers in FP8 have."""
    torch.manual_seed(seed)
    model, recipe = model_of(name), recipe_of(variant)
    if recipe is not None:
        convert(model, recipe)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(VOCABULARY, (8, 32), generator=generator)
        follows = torch.rand(8, 32, generator=generator) < 0.75
        for at in range(1, 32):
            tokens[:, at] = torch.where(follows[:, at], (tokens[:, at - 1] * 7 + 5) % VOCABULARY, tokens[:, at])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if recipe is not None:
            scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": mean(losses[-(steps // 10) :]), "share": share(model)}


def share(model: nn.Module) -> float:
    """The share of the elements of matrices that layers in FP8 have, without embeddings and biases."""
    embeddings = {one.weight for one in model.modules() if isinstance(one, nn.Embedding)}
    named = {one: name for name, one in model.named_parameters() if one.dim() >= 2}
    matrices = {one for one, name in named.items() if not name.endswith("bias")} - embeddings
    in_fp8 = {one for layer in model.modules() if isinstance(layer, Fp8Module) for _, one in layer.gemms()}
    return sum(one.numel() for one in matrices & in_fp8) / sum(one.numel() for one in matrices)


def table(rows: Sequence[Row]) -> str:
    """A line for each model: means over seeds, and the difference in percent with its 95% interval."""
    lines = [("model", "matrices in FP8", "bf16", FP8, "difference")]
    for name in dict.fromkeys(row["case"] for row in rows):
        losses = (f"{mean(by_seed(rows, name, variant, 'loss').values()):.4f}" for variant in (BASELINE, FP8))
        in_fp8 = f"{mean(by_seed(rows, name, FP8, 'share').values()):.1%}"
        apart = "{:+.2f}% ± {:.2f}".format(*interval([*excess(rows, name, FP8, "loss").values()]))
        lines.append((name, in_fp8, *losses, apart))
    return markdown_table(lines)


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--steps", type=int, default=200)
    asked, rows = options.parse_args(), []
    known = environment("transformers", command=f"python -m benchmarks.model_losses --out {asked.out}")
    for name in MODELS:
        for seed in range(asked.seeds):
            for variant in (BASELINE, FP8):
                row = {"case": name, "variant": variant, "seed": seed, "steps": asked.steps}
                row |= train(name, variant, seed, asked.steps) | known
                print(name, seed, variant, f"{row['loss']:.4f}", file=sys.stderr, flush=True)
                append([row], asked.out)
                rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
