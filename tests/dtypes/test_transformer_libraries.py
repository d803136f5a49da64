"""Models of third-party libraries train and validate in the three precisions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lit import make_trainer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from transformer_models import HUGGING_FACE, X_TRANSFORMERS, Batch, made
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import scaling_state
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.modules.conv1d import Fp8Conv1D
from lightning_fp8.plugins.trainer import PLUGINS

DTYPES = {"fp8-delayed": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
LINEAR, FP8 = (nn.Linear, Conv1D), (Fp8Linear, Fp8Conv1D)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # the tensors are too small to split; under other load, two threads take ten times as long
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loader(batch: Batch) -> DataLoader[Any]:
    return DataLoader([batch], batch_size=None)


# each model of transformers in FP8, and every second in bf16-true; each of x-transformers in one of the three
RUNS = [(name, "fp8-delayed") for name in HUGGING_FACE]
RUNS += [(name, "bf16-true") for name in [*HUGGING_FACE][1::2]]
RUNS += [(name, [*DTYPES][(at + 1) % 3]) for at, name in enumerate(X_TRANSFORMERS)]


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_trains_and_validates(tmp_path: Path, name: str, precision: str) -> None:
    model, batch = made(name)
    trainer = make_trainer(tmp_path, precision=precision, max_epochs=10, check_val_every_n_epoch=5)
    trainer.fit(model, loader(batch), loader(batch))
    plugin = trainer.precision_plugin
    assert type(plugin) is PLUGINS[precision]
    assert trainer.precision == precision
    assert len(model.losses) == 10
    assert len(model.validation_losses) == 3
    assert all(map(math.isfinite, model.losses + model.validation_losses))
    assert model.losses[-1] < 0.85 * model.losses[0]
    assert model.validation_losses[-1] < 0.85 * model.validation_losses[0]
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {DTYPES[precision]}
    assert not model.bad_gradients

    inputs = plugin.convert_input(batch)

    def forward(train: bool, gradients: bool) -> tuple[Tensor, Tensor]:
        model.train(train)
        with torch.set_grad_enabled(gradients), plugin.forward_context():
            return model.logits(inputs).detach(), model.loss(inputs).detach()

    def agree(training: tuple[Tensor, Tensor], evaluation: tuple[Tensor, Tensor]) -> None:
        for trained, evaluated in zip(training, evaluation, strict=True):
            assert trained.dtype == evaluated.dtype
            if precision == "fp8-delayed":
                # evaluation has scales of its own, so it differs as casts do
                assert (trained - evaluated).float().norm() < 0.1 * trained.float().norm()
            else:
                assert torch.equal(trained, evaluated)

    agree(forward(True, False), forward(False, False))
    if precision == "fp8-delayed":
        state = scaling_state(model)
        assert not state.amax[: state.delayed].any()
    # with gradients, torch chooses another kernel for a learned mask, such as a position bias
    with sdpa_kernel(SDPBackend.MATH):
        agree(forward(True, True), forward(False, False))
