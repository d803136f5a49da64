"""What a training step of a layer copies, pads and fills besides its casts and products, to the byte."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from copied_bytes import copied_bytes
from feed_forward_blocks import HIDDEN, WIDTH, llama
from torch import Tensor, nn

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm_variants import configurations
from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, scaling_state
from lightning_fp8.ops.cuda import kernels, plain, rule
from lightning_fp8.scalings.operand import Operand
from lightning_fp8.scalings.recipe import Recipe

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, HIDDEN),
    "feed-forward": lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)),
    "gated": llama,
}
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": CurrentScaling(),
    "block": BlockScaling(),
    "mx": MXScaling(),
}


@pytest.fixture
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """This package's GEMMs, which write a constant."""

    def write(kernel: object, configuration: object, a: Tensor, b: Tensor, out: Tensor, *_: Any) -> None:
        ctypes.memset(out.data_ptr(), 0x3C, out.untyped_storage().nbytes())

    monkeypatch.setattr(kernel_gemm, "gemm", write)
    monkeypatch.setattr(rule, "configuration_for", lambda *_: configurations((9, 0))[-1])
    monkeypatch.setattr(kernels, "gemm_kernel", lambda *_: object())

    def write_mx(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(a.codes), len(b.codes), dtype=dtype)
        write(None, None, a.codes, b.codes, out)
        return out

    monkeypatch.setattr(plain, "scaled_mm_mx", write_mx)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int) -> tuple[Counter[str], Counter[str]]:
    """What forward and backward, and what the step of the optimizer copies."""
    x = torch.randn(tokens, WIDTH).bfloat16().requires_grad_()
    with copied_bytes() as of_layer, torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        y.backward(torch.empty_like(y).normal_())
    with copied_bytes() as of_step:
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
    return of_layer, of_step


# whatever the number of tokens: biases rounded to bf16, and the table from which a launch casts all weights, or the
# amax of a single one; with current scaling the amaxes of inputs and gradients begin at 0
OF_LAYER = {
    ("linear", "delayed"): {"_to_copy": 96, "zeros": 8},
    ("linear", "current"): {"_to_copy": 96, "zeros": 16},
    ("linear", "block"): {"_to_copy": 96, "zeros": 8},
    ("linear", "mx"): {"_to_copy": 96, "zeros": 8},
    ("feed-forward", "delayed"): {"_to_copy": 160, "zeros": 256, "copy_": 492},
    ("feed-forward", "current"): {"_to_copy": 160, "zeros": 272, "copy_": 492},
    ("feed-forward", "block"): {"_to_copy": 160, "zeros": 256, "copy_": 492},
    ("feed-forward", "mx"): {"_to_copy": 160, "zeros": 256, "copy_": 492},
    ("gated", "delayed"): {"zeros": 376, "copy_": 728},
    ("gated", "current"): {"zeros": 396, "copy_": 728},
    ("gated", "block"): {"zeros": 376, "copy_": 728},
    ("gated", "mx"): {"zeros": 376, "copy_": 728},
}
# counters on the host, and the amax of an input that gate and up share
OF_STEP = {
    "linear": {"zeros_like": 24},
    "feed-forward": {"zeros_like": 48},
    "gated": {"zeros_like": 72, "index_select": 4},
}
# the scales that are shown, of the input and the gradient of each layer, come from codes in one byte
OF_MX_SCALES = {"_to_copy": 18, "copy_": 8}
# columns of the first operand of each fprop and dgrad, and of the results that get a bias
WIDE, NARROW = HIDDEN, WIDTH
COLUMNS = {
    "linear": ((NARROW, WIDE), (WIDE,)),
    "feed-forward": ((NARROW, WIDE, NARROW, WIDE), (WIDE, NARROW)),
    "gated": ((NARROW, NARROW, WIDE, NARROW, WIDE, WIDE), ()),
}


def of_torchs_products_in_blocks(layer: str, tokens: int) -> dict[str, int]:
    """Rows and their scales padded to a multiple of four, a weight's scales to four blocks, results rounded to bf16."""
    operands, biased = COLUMNS[layer]
    rows = tokens + -tokens % 4
    padded = sum(rows * (columns + 4) for columns in operands) if tokens % 4 else 0
    return {"constant_pad_nd": padded + 16 * len(operands), "_to_copy": 2 * tokens * sum(biased)}


@pytest.mark.parametrize(
    ("recipe", "products"),
    # the CPU has no product in MX by torch that copies what a GPU's does, and GPUs that take every layout have no
    # product of blocks of 128
    [
        (recipe, products)
        for recipe in RECIPES
        for products in ("torch's", "own", "every layout")
        if products == "own" or recipe in ("delayed", "current") or (recipe, products) == ("block", "torch's")
    ],
)
@pytest.mark.parametrize(("layer", "tokens"), [("linear", 64), ("feed-forward", 77), ("gated", 64), ("gated", 77)])
@pytest.mark.usefixtures("cuda_half")
def test_a_step(layer: str, recipe: str, tokens: int, products: str, request: pytest.FixtureRequest) -> None:
    """No tensor whose size grows with that of the batch is copied, also where the batch is no multiple of 16."""
    expected = Counter(OF_LAYER[layer, recipe])
    if products == "every layout":
        request.getfixturevalue("every_layout")
    elif products == "own":
        request.getfixturevalue("own_products")
    elif recipe == "block":
        expected.update(of_torchs_products_in_blocks(layer, tokens))
    torch.manual_seed(0)
    model = convert(LAYERS[layer](), RECIPES[recipe])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        found = step(model, optimizer, tokens)
    of_step = Counter(OF_STEP[layer])
    if recipe == "mx":
        of_step.update({name: size * len(scaling_state(model).module_names) for name, size in OF_MX_SCALES.items()})
    assert found == (expected, of_step)
