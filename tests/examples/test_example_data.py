"""The example models' data and optimizer."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from lightning_fp8.examples import Digits, StdlibText, optimization

# the data


def test_digits() -> None:
    data = Digits()
    data.setup("fit")
    images, labels = data.train_set.tensors
    held_out, held_out_labels = data.val_set.tensors
    assert (images.shape, held_out.shape) == ((1348, 8, 8), (449, 8, 8))
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (images.min().item(), images.max().item()) == (-1, 1)
    original = load_digits()
    np.testing.assert_array_equal(held_out.numpy(), original.images[3::4] / 8 - 1)
    np.testing.assert_array_equal(held_out_labels.numpy(), original.target[3::4])
    np.testing.assert_array_equal(labels.numpy(), np.delete(original.target, np.s_[3::4]))
    large = Digits(size=32)
    large.setup("fit")
    # where the pixels of a large image are in the small one
    at = np.clip((np.arange(32) + 0.5) / 4 - 0.5, 0, 7)
    weights = np.stack([np.interp(at, np.arange(8), row) for row in np.eye(8)], 1)
    expected = weights @ images.double().numpy() @ weights.T
    np.testing.assert_allclose(large.train_set.tensors[0].numpy(), expected, atol=1e-6)


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install scikit-learn"):
        Digits().setup("fit")


def test_text_that_is_held_out_is_other_text() -> None:
    data = StdlibText(context=64, batch_size=8, val_windows=32, max_bytes=200_000)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert (batch.shape, batch.dtype, len(data.val_set)) == ((8, 65), torch.uint8, 32)
    text = bytes(data.train_set.flatten().tolist())
    assert text.count(b"import ") > 20
    assert not any(bytes(data.val_set[i].tolist()) in text for i in range(32))


# the optimizer


def test_learning_rate_warms_up_then_follows_a_cosine() -> None:
    trainer = SimpleNamespace(estimated_stepping_batches=50)
    model = SimpleNamespace(device=torch.device("cpu"), parameters=nn.Linear(3, 1).parameters, trainer=trainer)
    made = optimization.adamw_with_cosine(model, 2e-3, 10)
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    assert made["lr_scheduler"]["interval"] == "step"
    rates = []
    for _ in range(52):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    warmup = [2e-3 * (step + 1) / 10 for step in range(10)]
    progress = np.linspace(0, 1, 41)
    cosine = 2e-3 * (0.1 + 0.9 * np.cos(np.pi * progress / 2) ** 2)
    np.testing.assert_allclose(rates, [*warmup, *cosine, 2e-4], rtol=1e-12)
    # one kernel for many parameters where there is a GPU
    for kind, fused in (("cuda", True), ("cpu", None)):
        assert optimization.adamw(nn.Linear(3, 1), 1e-3, torch.device(kind)).defaults["fused"] is fused
