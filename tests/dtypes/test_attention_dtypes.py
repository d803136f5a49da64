"""Operands of different dtypes in ``scaled_dot_product_attention``, inside our contexts and outside."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lit import Regression, loader, make_trainer, seeded
from pairwise import pairwise
from sqnr import sqnr
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as held_under_another_name
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import Fp8Precision
from lightning_fp8.plugins import Bf16TruePrecision
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.trainer import PLUGINS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# with autocast and without; operands agree before any recipe counts
CONTEXTS = ("fp8-delayed", "bf16-true")
SHAPE = (2, 2, 5, 8)
captured = [held_under_another_name]


def qkv(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).to(dtype) for dtype in dtypes]


@pytest.mark.parametrize(("precision", "query", "key", "value"), pairwise(CONTEXTS, FLOATS, FLOATS, FLOATS))
def test_each_pair_of_dtypes(precision: Any, query: torch.dtype, key: torch.dtype, value: torch.dtype) -> None:
    operands = qkv(query, key, value)
    expected = F.scaled_dot_product_attention(*(x.float() for x in operands))
    functions = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention, captured[0])
    with PLUGINS[precision]().forward_context():
        for function in functions:
            y = function(*operands)
            # if all operands agree they are unchanged, unless autocast requires another dtype
            assert y.dtype == (query if query == key == value and precision == "bf16-true" else torch.bfloat16)
            assert sqnr(y, expected) > 40
    if not query == key == value:
        with pytest.raises(RuntimeError, match="same dtype"):
            F.scaled_dot_product_attention(*operands)


@pytest.mark.parametrize("precision", CONTEXTS)
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_floating_masks_follow_and_bool_masks_stay(precision: Any, dtype: torch.dtype) -> None:
    operands = qkv(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    bias = torch.randn(5, 5).to(dtype)
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(*operands, attn_mask=bias.to(torch.bfloat16))
    with PLUGINS[precision]().forward_context():
        assert torch.equal(F.scaled_dot_product_attention(*operands, attn_mask=bias), expected)
        assert torch.equal(
            F.scaled_dot_product_attention(*operands, attn_mask=keep),
            F.scaled_dot_product_attention(*operands, is_causal=True),
        )
        # a mask alone does not change the dtype of the others
        exact = F.scaled_dot_product_attention(*qkv(*[torch.float32] * 3), attn_mask=bias)
    assert exact.dtype == (torch.float32 if precision == "bf16-true" else torch.bfloat16)


def test_compute_dtype_fp32() -> None:
    operands = qkv(torch.float32, torch.bfloat16, torch.bfloat16)
    with Fp8Precision(compute_dtype="float32").forward_context():
        assert F.scaled_dot_product_attention(*operands).dtype == torch.float32


def test_gradients_come_in_the_dtypes_of_the_operands() -> None:
    operands = [x.requires_grad_() for x in qkv(*FLOATS)]
    exact = [x.detach().float().requires_grad_() for x in operands]
    with Bf16TruePrecision().forward_context():
        F.scaled_dot_product_attention(*operands).float().square().sum().backward()
    F.scaled_dot_product_attention(*exact).square().sum().backward()
    for x, e in zip(operands, exact, strict=True):
        assert x.grad.dtype == x.dtype
        assert sqnr(x.grad, e.grad) > 35


class Rotary(nn.Module):
    """Attention whose query leaves its rotary embedding in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return captured[0](q.float() * 0.5, k, v).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Rotary()), nn.Sequential(Rotary())])
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


WORDS = "scaled_dot_product_attention in blocks.0.0 (Rotary) got query float32, key bfloat16, value bfloat16"


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "scaled_dot_product_attention" in str(w.message)]


def prepared(precision: Any, mismatch: Any) -> tuple[PrecisionCore, nn.Module]:
    torch.manual_seed(0)
    plugin = PLUGINS[precision](dtype_mismatch=mismatch)
    return plugin, plugin.convert_module(Stack())


# the captured graph is the same for every backend; test_attention.py compiles attention with Inductor
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("precision", CONTEXTS)
def test_warn_names_each_place_once(precision: Any, backend: str | None) -> None:
    torch._dynamo.reset()
    plugin, model = prepared(precision, "warn")
    call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught, plugin.forward_context():
        warnings.simplefilter("always")
        for _ in range(2):
            assert call(x).dtype == torch.bfloat16
    assert [text.partition(":")[0] for text in said(caught)] == [WORDS, WORDS.replace("blocks.0", "blocks.1")]


@pytest.mark.parametrize("precision", CONTEXTS)
def test_align_says_nothing_and_makes_no_graph_break(precision: Any) -> None:
    torch._dynamo.reset()
    plugin, model = prepared(precision, "align")
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with warnings.catch_warnings(record=True) as caught, plugin.forward_context():
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(compiled(x), model(x))
    assert counter.frame_count == 1
    assert said(caught) == []


@pytest.mark.parametrize("precision", CONTEXTS)
def test_error_raises_with_the_same_words(precision: Any) -> None:
    plugin, model = prepared(precision, "error")
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    with plugin.forward_context(), pytest.raises(TypeError) as error:
        model(x)
    assert str(error.value).startswith(WORDS)
    torch._dynamo.reset()
    with plugin.forward_context(), pytest.raises(Exception, match=r"blocks\.0\.0 \(Rotary\) got query float32"):
        torch.compile(model, backend="eager", fullgraph=True)(x)


def test_outside_of_modules_the_line_is_named() -> None:
    with (
        Bf16TruePrecision(dtype_mismatch="warn").forward_context(),
        pytest.warns(UserWarning, match=r"in a function \(.*test_attention_dtypes.py:\d+\) got query float32"),
    ):
        F.scaled_dot_product_attention(*qkv(torch.float32, torch.bfloat16, torch.bfloat16))


@pytest.mark.parametrize("precision", CONTEXTS)
def test_recomputation_runs_forwards_inside_backward(tmp_path: Path, precision: str) -> None:
    class Rotated(Regression):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.stack = Stack(recompute)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.stack(x.unflatten(-1, (2, 16))).flatten(1))

    models = [seeded(Rotated, recompute=recompute) for recompute in (False, True)]
    for model in models:
        make_trainer(tmp_path, precision=precision).fit(model, loader(), loader())
    assert torch.equal(*(torch.stack(model.losses) for model in models))


def test_pickling() -> None:
    plugin, model = prepared("bf16-true", "warn")
    other = pickle.loads(pickle.dumps(plugin))
    with other.forward_context(), pytest.warns(UserWarning, match=r"\(Rotary\) got query float32"):
        model(torch.randn(2, 5, 16, dtype=torch.bfloat16))
