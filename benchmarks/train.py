"""The suite ``train``: whole training steps of GPTs on real text, eager and compiled, in each precision.

Sizes and sequences per step are those of ``configs/``, but without activation checkpointing, as precisions differ in
what they keep for backward. To fit on a GPU of 80 GB, the 16 sequences of 2048 bytes of the 1.3B model are split into 4
micro-batches of 4. For ``bf16-mixed`` the estimate is 21 GB for parameters, gradients and the optimizer's two moments,
3 GB for weights cast to bf16, and 17 GB for activations. The smaller models take their 16 sequences of 1024 bytes at
once. On the CPU there are a tiny model, and the demo's with one and with four micro-batches, in further precisions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Case
from benchmarks.settings import Setting, every_setting, settings
from benchmarks.training import Task, casts_are_served, variants
from lightning_fp8.examples import ByteGPT, StdlibText

# number of steps whose text is kept on the device and repeated
_STEPS_OF_TEXT = 4


class Gpt(NamedTuple):
    """Sizes of a GPT, and the sequences of a step.

    Attributes:
        layers: number of blocks.
        width: of the residual stream.
        heads: of attention.
        context: bytes in a sequence, each of them a token.
        batch: sequences in a micro-batch.
        accumulate: micro-batches in a step.
        learning_rate: of AdamW.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    accumulate: int
    learning_rate: float = 1e-4


MODELS = {
    "1.3B": Gpt(26, 2048, 16, 2048, 4, 4),
    "124M": Gpt(17, 768, 12, 1024, 16, 1),
    "350M": Gpt(28, 1024, 16, 1024, 16, 1),
}
TINY, DEMO = Gpt(1, 64, 2, 32, 4, 2), Gpt(2, 256, 2, 128, 64, 1, 1e-3)


def cases(device: torch.device) -> list[Case]:
    """Eager and compiled models; the demo's only eager."""
    models = MODELS if device.type == "cuda" else {"tiny": TINY}
    trainings = [case(name, of, settings, compiled) for name, of in models.items() for compiled in (False, True)]
    if device.type != "cuda":
        trainings += [case("demo", DEMO._replace(accumulate=count), every_setting) for count in (1, 4)]
    return trainings


def case(name: str, of: Gpt, settings: Callable[[torch.device], dict[str, Setting]], compiled: bool = False) -> Case:
    """A model in these precisions, from bytes to the loss and the optimizer's step."""
    task = Task(
        lambda: ByteGPT(of.layers, of.width, of.heads, of.context),
        tokens=of.accumulate * of.batch * of.context,
        text=functools.partial(text_of, of),
        learning_rate=of.learning_rate,
        compiled=compiled,
    )
    sequences = f"{of.accumulate} x {of.batch} x {of.context} tokens"
    return Case(
        f"GPT {name}, {sequences}, {'compiled' if compiled else 'eager'}",
        lambda device: variants(task, settings(device), device),
        casts_are_served,
    )


@functools.cache
def text_of(of: Gpt) -> Tensor:
    """Python's own source: ``[steps, accumulate, batch, context + 1] uint8``."""
    count = _STEPS_OF_TEXT * of.accumulate * of.batch
    data = StdlibText(of.context, of.batch, val_windows=1, max_bytes=count * (of.context + 1))
    data.setup("fit")
    return data.train_set.view(_STEPS_OF_TEXT, of.accumulate, of.batch, of.context + 1)
