"""Trains each of ``MODELS`` under a precision plugin and measures how far from fp32 it ends."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import bf16_buffer_models  # noqa: F401
import bf16_layer_models  # noqa: F401
import bf16_loss_models  # noqa: F401
import bf16_parameter_models  # noqa: F401
import torch
from bf16_models import MODELS
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Generator, Tensor

from lightning_fp8.plugins import Bf16MixedPrecision, Bf16TruePrecision

MODES = ("bf16-true", "bf16-mixed")
PLUGINS: dict[str, Callable[..., Precision]] = {
    "fp32": Precision,
    "bf16-true": Bf16TruePrecision,
    "bf16-mixed": Bf16MixedPrecision,
    "Lightning's bf16-true": partial(HalfPrecision, "bf16-true"),
    "Lightning's bf16-mixed": partial(MixedPrecision, "bf16-mixed", device="cpu"),
}
# settings of our plugins that a model is for
SETTINGS: dict[str, dict[str, Any]] = {
    name: {"keep_fp32": ["affine"]} for name in ("NamedByKeepFp32", "BufferNamedByKeepFp32")
}
STEPS, ROWS = 20, 32
# The median over the seeds of a model's ratio, ours over Lightning's, is at most this. Where operations differ, the
# logarithm of one seed's ratio has a standard deviation of 0.02 to 0.2, and of up to 0.7 where rounding moves values to
# other bins or codes. With 30 seeds of 36 models whose operations differ: but for one in 50 of one model and one
# in 100 of another, at most one median of five seeds in 150 exceeds 1.25.
TOLERANCE, SEEDS = 1.25, range(5)


class Trained(NamedTuple):
    """Predictions after training for samples that were not trained on, and the losses of all steps, in fp32."""

    predictions: Tensor
    losses: Tensor


class Distances(NamedTuple):
    """Relative norms of the differences from fp32."""

    predictions: float
    losses: float


@cache
def batches(data: Callable[..., Any], seed: int) -> list[tuple[Tensor, Tensor]]:
    """One for each step, and one for the evaluation."""
    g = Generator().manual_seed(seed)
    return [data(ROWS, g) for _ in range(STEPS)] + [data(4 * ROWS, g)]


@cache
def trained(name: str, precision: str, seed: int) -> Trained:
    """As a Trainer does it, by the methods of its plugin."""
    plugin = PLUGINS[precision](**SETTINGS.get(name, {}) if precision in MODES else {})
    torch.manual_seed(seed)
    model = MODELS[name]()
    with plugin.module_init_context():
        model.configure_model()
    plugin.convert_module(model)
    optimizer = model.configure_optimizers()
    *training, evaluation = batches(MODELS[name].data, seed)
    losses = []
    for batch in training:
        with plugin.forward_context():
            loss = model.training_step(plugin.convert_input(batch))
        optimizer.zero_grad()
        with getattr(plugin, "backward_context", nullcontext)():
            loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
    model.eval()
    with torch.no_grad(), plugin.forward_context():
        predictions = model.predict_step(plugin.convert_input(evaluation)).float()
    if not predictions.isfinite().all():
        raise FloatingPointError("Predictions are not finite.")
    return Trained(predictions, torch.stack(losses))


def same_bits(a: Trained, b: Trained) -> bool:
    return all(map(torch.equal, a, b))


def distances(name: str, precision: str, seed: int) -> Distances:
    pairs = zip(trained(name, precision, seed), trained(name, "fp32", seed))
    return Distances(*(((a - b).norm() / b.norm()).item() for a, b in pairs))


def ratios(name: str, mode: str) -> Distances:
    """The medians, over the seeds, of our distances over Lightning's."""
    pairs = [(distances(name, mode, seed), distances(name, f"Lightning's {mode}", seed)) for seed in SEEDS]
    return Distances(*(statistics.median(ours[i] / theirs[i] for ours, theirs in pairs) for i in range(2)))


def failure(name: str, precision: str) -> str | None:
    """The first line of the exception that training raises."""
    try:
        trained(name, precision, 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
