"""A forward keeps only what the requested gradients are computed from."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from feed_forward_blocks import HIDDEN, WIDTH, converted, llama, vit
from pairwise import pairwise
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling

ROWS, FP8, OUTPUT = 24, torch.uint8, torch.float32
X, FIRST, OF_HIDDEN = (FP8, (WIDTH, ROWS)), (FP8, (WIDTH, HIDDEN)), (FP8, (HIDDEN, ROWS))
LAST, HIDDEN_OUTPUT = (FP8, (HIDDEN, WIDTH)), (OUTPUT, (ROWS, HIDDEN))


def kept(model: nn.Module, x_needs: bool, frozen: list[str]) -> Counter[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of all matrices that a forward keeps for backward."""
    found: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()

    def pack(tensor: Tensor) -> Tensor:
        # an empty tensor stands for a result that was not requested
        if tensor.dim() == 2 and tensor.numel():
            found[tensor.dtype, tuple(tensor.shape)] += 1
        return tensor

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(prefix) for prefix in frozen))
    x = torch.randn(ROWS, WIDTH, requires_grad=x_needs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    if y.requires_grad:
        y.sum().backward()
        assert (x.grad is not None) == x_needs
        assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
    return found


def counted(*wanted: tuple[bool, list[tuple[torch.dtype, tuple[int, ...]]]]) -> Counter[object]:
    return Counter(one for is_needed, tensors in wanted if is_needed for one in tensors)


@pytest.mark.parametrize(("x", "weight", "bias"), pairwise(*[[False, True]] * 3))
def test_linear(x: bool, weight: bool, bias: bool) -> None:
    model = converted(lambda: nn.Linear(WIDTH, HIDDEN))
    frozen = [*["weight"][weight:], *["bias"][bias:]]
    assert kept(model, x, frozen) == counted((weight, [X]), (x, [FIRST]))


class Both(nn.Module):
    """Two layers with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_that_wgrad_takes_in_bf16_is_rounded_once(dtype: torch.dtype) -> None:
    model = converted(Both, recipe=DelayedScaling(wgrad="bf16")).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert kept(model, True, ["q.bias", "k.bias"]) == {(torch.bfloat16, (WIDTH, ROWS)): 2, FIRST: 2}
        # the same memory
        x, storages = torch.randn(ROWS, WIDTH), set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.dtype == torch.bfloat16 and storages.add(t.data_ptr())) or t, lambda t: t
        ):
            model(x.to(dtype))
    assert len(storages) == 1


@pytest.mark.parametrize(("x", "first", "bias", "second"), pairwise(*[[False, True]] * 4))
def test_feed_forward(x: bool, first: bool, bias: bool, second: bool) -> None:
    model = converted(vit)
    frozen = ["fc2.bias", *["fc1.weight"][first:], *["fc1.bias"][bias:], *["fc2.weight"][second:]]
    # for the gradient of the activation's output: the activation's input, and the weight of the layer after it
    needs_hidden = x or first or bias
    assert kept(model, x, frozen) == counted(
        (first, [X]), (x, [FIRST]), (second, [OF_HIDDEN]), (needs_hidden, [LAST, HIDDEN_OUTPUT])
    )


@pytest.mark.parametrize(("x", "gate", "up", "down"), pairwise(*[[False, True]] * 4))
def test_gated_feed_forward(x: bool, gate: bool, up: bool, down: bool) -> None:
    model = converted(llama)
    frozen = [*["gate_proj"][gate:], *["up_proj"][up:], *["down_proj"][down:]]
    needs_hidden = x or gate or up
    assert kept(model, x, frozen) == counted(
        # once for both
        (gate or up, [X]),
        (x, [FIRST] * 2),
        (down, [OF_HIDDEN]),
        (needs_hidden, [LAST, HIDDEN_OUTPUT, HIDDEN_OUTPUT]),
    )
