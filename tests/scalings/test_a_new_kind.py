"""A kind of scaling that the package does not know, in one class and one recipe: all else follows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fp8_numpy import code_values, saturating_cast
from lit import Regression, loader, make_trainer, seeded
from torch import Tensor, nn

from lightning_fp8 import Fp8Precision, convert, describe, estimate, export, scaling_state, unconvert
from lightning_fp8.ops import arithmetic
from lightning_fp8.ops.amaxes import scale_of_current
from lightning_fp8.scalings import base, emulation
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.operand import Operand
from lightning_fp8.scalings.recipe import RECIPES, Recipe, as_recipe
from lightning_fp8.tools.doctor import examine

SIZE = 24


@dataclass(frozen=True)
class Of24(Scaling):
    """A scale in fp32 for every 24 elements along K."""

    kind: ClassVar[str] = "of_24"

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, -(-columns // SIZE)

    def scale(self, amax: Tensor) -> Tensor:
        return scale_of_current(amax, self.fp8)

    def quantize(self, x: Tensor, width: int) -> tuple[Operand, Tensor]:
        amaxes = arithmetic.block_amaxes(x, SIZE)
        scale = self.scale(amaxes)
        codes = arithmetic.saturated_blocks(x, scale, self.fp8, SIZE, width)
        return Operand(codes, scale.reciprocal(), self), arithmetic.largest(amaxes)

    def spread(self, scales: Tensor, like: Tensor) -> Tensor:
        return arithmetic.per_element(scales, SIZE, like)

    def emulated_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return emulation.product_of_values(a, b, bias, dtype)


@dataclass(frozen=True)
class Scaling24(Recipe):
    """All tensors by 24 elements."""

    precision: ClassVar[str] = "fp8-of-24"

    def scaling(self, role: str) -> Scaling:
        return Of24()


NEW = RECIPES.pop("fp8-of-24"), base._KINDS.pop("of_24")


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    """Only the tests of this file know the recipe and the kind."""
    RECIPES["fp8-of-24"], base._KINDS["of_24"] = NEW
    yield
    del RECIPES["fp8-of-24"], base._KINDS["of_24"]


def rounded(x: Tensor) -> np.ndarray:
    """x as its product sees it, in fp64, from the definition."""
    values = x.detach().float().numpy()
    out = np.zeros(values.shape)
    for row, line in enumerate(values):
        for at in range(0, len(line), SIZE):
            part = line[at : at + SIZE]
            scale = np.float32(448) / np.abs(part).max()
            codes = saturating_cast(part, scale, "e4m3")
            out[row, at : at + SIZE] = code_values("e4m3")[codes] * np.float64(np.float32(1) / scale)
    return out


def test_products_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    layer = convert(nn.Linear(50, 40), Scaling24())
    x, dy = torch.randn(30, 50, requires_grad=True), torch.randn(30, 40)
    y = layer(x)
    y.backward(dy)
    w = layer.weight
    expected = {
        "y": rounded(x) @ rounded(w).T + layer.bias.detach().numpy(),
        "dx": rounded(dy) @ rounded(w.t()).T,
        "dw": rounded(dy.t()) @ rounded(x.t()).T,
    }
    for name, found in (("y", y), ("dx", x.grad), ("dw", w.grad)):
        error = np.abs(found.detach().numpy() - expected[name]).max()  # type: ignore[union-attr]
        assert error < 1e-5 * np.abs(expected[name]).max(), name
    assert layer.eval()(x).equal(y)


class Block(nn.Module):
    """Attention with a memory, whose packed weight is taken in parts, and a fused feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(x, x * 0.5, x * 0.5, need_weights=False)[0])


def step(model: nn.Module, call: Any, seed: int) -> list[Tensor]:
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x)
    y.float().square().mean().backward()
    scaling_state(model).update()
    found = [y.detach(), x.grad, *(weight.grad for weight in model.parameters())]
    model.zero_grad()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", [Scaling24(), Scaling24(wgrad="bf16"), Scaling24(dgrad="bf16")], ids=repr)
def test_compiled_and_copied(recipe: Recipe) -> None:
    torch.manual_seed(1)
    torch._dynamo.reset()
    model = convert(Block(), recipe)
    compiled, copied = copy.deepcopy(model), copy.deepcopy(model)
    call = torch.compile(compiled, backend="aot_eager")
    for seed in range(2):
        expected = step(model, model, seed)
        assert all(map(torch.equal, step(compiled, call, seed), expected))
        assert all(map(torch.equal, step(copied, copied, seed), expected))
    # amaxes are recorded, and shown with the scale of the block that has them
    state = scaling_state(model)
    newest = state.amax_history[0]
    assert (newest > 0).all()
    assert torch.equal(state.scale[: len(newest)], torch.full_like(newest, 448.0) / newest)
    assert all(row.converted for row in describe(model) if row.is_layer)
    plain = unconvert(model)
    assert isinstance(plain.mlp[0], nn.Linear)
    torch._dynamo.reset()


def test_under_a_trainer_with_exact_resumption(tmp_path: Path) -> None:
    whole, first, second = (seeded(Regression) for _ in range(3))
    make_trainer(tmp_path / "a", plugins=Fp8Precision("fp8-of-24"), max_epochs=2, max_steps=-1).fit(whole, loader())
    trainer = make_trainer(tmp_path / "b", plugins=Fp8Precision(Scaling24()), max_epochs=1, max_steps=-1)
    trainer.fit(first, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer = make_trainer(tmp_path / "b", plugins=Fp8Precision({"precision": "fp8-of-24"}), max_epochs=2, max_steps=-1)
    trainer.fit(second, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert all(map(torch.equal, whole.state_dict().values(), second.state_dict().values()))
    assert trainer.precision == "fp8-of-24"


def test_names() -> None:
    assert as_recipe({"precision": "fp8-of-24"}) == Scaling24()
    assert Scaling.from_json(Of24().name) == Of24()
    with pytest.raises(ValueError, match=r"no kind of scaling 'none'\. The kinds are mx, of_24, per_block"):
        base.kind_of("none")
    with pytest.raises(TypeError, match="Two kinds of scaling are called 'of_24'"):
        type("Other", (Scaling,), {"kind": "of_24"})


def test_what_a_kind_does_not_define_is_refused_by_name(tmp_path: Path) -> None:
    layer = convert(nn.Linear(48, 48), Scaling24())
    with pytest.raises(ValueError, match="no layout of files has the scales of Of24"):
        export(layer, tmp_path / "model.safetensors")
    frozen = convert(nn.MultiheadAttention(48, 4).requires_grad_(False), Scaling24(), frozen_weights="fp8")
    x = torch.randn(5, 2, 48)
    with pytest.raises(NotImplementedError, match=r"Of24 has no `split_part`.*leave `frozen_weights` out"):
        frozen(x, x + 1, x + 2)


def test_tools_know_it() -> None:
    assert examine(try_kernels=False).runs["CPU"]["fp8-of-24"].startswith("as a reference")
    # what others cost is not changed by it
    assert estimate(nn.Linear(4096, 4096), torch.zeros(64, 4096)).recipe == "fp8-delayed"
    with pytest.raises(ValueError, match="What 'fp8-of-24' costs is not known"):
        estimate(nn.Linear(48, 48), torch.zeros(4, 48), recipe="fp8-of-24")
