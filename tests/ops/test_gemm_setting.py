"""The setting ``gemm`` of a model reaches the choice of GEMM in all its layers, and no checkpoint."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from connectors import trainer
from gemm_in_fp64 import Gemms
from gemm_setting import with_gemm
from lit import Regression, loader
from small_models import small_mlp
from torch import nn

from lightning_fp8 import Fp8Precision, convert, scaling_state, unconvert
from lightning_fp8.ops.cuda.gemm_choice import GEMMS, Choice

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")


@pytest.fixture
def gemms(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Gemms:
    found = Gemms(monkeypatch)
    found.choice = Choice(None)
    return found


def asked_by(gemms: Gemms, model: Any, x: torch.Tensor | None = None) -> set[str]:
    """The settings that forward and backward requested."""
    gemms.asked.clear()
    model(torch.randn(8, 32, requires_grad=True) if x is None else x).sum().backward()
    assert len(gemms.asked) >= 6
    return {asked[0] for asked in gemms.asked}


def test_it_decides_for_all_layers(gemms: Gemms) -> None:
    model = convert(small_mlp())
    assert asked_by(gemms, model) == {"auto"}
    for value in GEMMS:
        assert asked_by(gemms, with_gemm(model, value)) == {value}
    # another conversion leaves it as it is, whatever layers the model has
    with_gemm(model, "rawkernel").append(nn.Linear(16, 16))
    assert asked_by(gemms, convert(model)) == {"rawkernel"}
    assert asked_by(gemms, convert(unconvert(model))) == {"auto"}
    # in a feed-forward block too
    layer = convert(nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True))
    assert asked_by(gemms, with_gemm(layer, "cublaslt"), torch.randn(2, 5, 32, requires_grad=True)) == {"cublaslt"}


def test_copies_have_it_and_checkpoints_have_not(gemms: Gemms) -> None:
    model, other = with_gemm(convert(small_mlp()), "rawkernel"), convert(small_mlp())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert asked_by(gemms, copied) == {"rawkernel"}
    scaling_state(other).load_state_dict(scaling_state(model).state_dict())
    assert asked_by(gemms, other) == {"auto"}


def test_a_compiled_model_follows_it(gemms: Gemms) -> None:
    torch._dynamo.reset()
    model = convert(small_mlp())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for value in GEMMS:
        with_gemm(model, value)
        assert asked_by(gemms, compiled) == {value}


def test_a_run_leaves_it_as_it_is(gemms: Gemms) -> None:
    model = Regression()
    with_gemm(convert(model), "rawkernel")
    for plugin in (Fp8Precision(), Fp8Precision(ignore_modules=["net.0"])):
        gemms.asked.clear()
        trainer(plugins=plugin, max_steps=1, limit_val_batches=0).fit(model, loader())
        assert {asked[0] for asked in gemms.asked} == {"rawkernel"}
    assert len(scaling_state(model).module_names) == 1
