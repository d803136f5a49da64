"""``Bf16MixedPrecision(weight_copy=True)``: fp32 masters, one bf16 copy per optimizer step."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lit import Regression, loader, make_trainer, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import Bf16MixedPrecision, Fp8Precision
from lightning_fp8.modules import weight_copy
from lightning_fp8.modules.weight_copy import WeightCopyLinear, WeightCopyModule, WeightCopyMultiheadAttention


class Mixed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.separate = nn.MultiheadAttention(32, 2, kdim=16, vdim=16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        x = self.attention(x, x, x, need_weights=False)[0] + x
        x = self.separate(x, x[..., :16], x[..., 16:], need_weights=False)[0] + x
        return self.net(x.mean(dim=1))


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the weights that were copied, in order."""
    made: list[torch.Size] = []
    original = weight_copy.KeptCast.put

    def counting(self: Any, weight: Tensor, cast: tuple[Tensor, ...]) -> None:
        made.append(weight.shape)
        original(self, weight, cast)

    monkeypatch.setattr(weight_copy.KeptCast, "put", counting)
    return made


@pytest.mark.parametrize("accumulate", [1, 4])
def test_same_training_and_one_cast_per_optimizer_step(tmp_path: Path, accumulate: int, casts: list[Any]) -> None:
    models: list[Regression] = []
    for copies in (True, False):
        model = seeded(Mixed)
        trainer = make_trainer(
            tmp_path,
            plugins=Bf16MixedPrecision(weight_copy=copies),
            accumulate_grad_batches=accumulate,
            max_epochs=2,
        )
        trainer.fit(model, loader(), loader())
        models.append(model)
        if copies:
            # in_proj, out_proj; q, k, v, out; two linear layers
            assert len(casts) == 8 * trainer.global_step
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(casts) == 8 * 8 // accumulate
    for mine, stock in zip(models[0].losses, models[1].losses, strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-3, atol=1e-4)
    assert type(models[0].net[0]) is WeightCopyLinear
    assert type(models[1].net[0]) is nn.Linear


def test_no_copy_outlives_a_switch_between_training_and_evaluation(casts: list[Any]) -> None:
    # changes through `.data`, such as averages that are swapped in for evaluation, leave no other trace
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(4, 32)
    weight_copy.keep_copies(model, set())

    def outputs() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    before = outputs()
    assert torch.equal(outputs(), before)
    assert len(casts) == 1
    model.eval()
    model[0].weight.data.neg_()
    model.train()
    assert torch.equal(outputs(), nn.functional.linear(x.bfloat16(), *(p.bfloat16() for p in model.parameters())))
    assert len(casts) == 2


def made(plugin: Bf16MixedPrecision | None = None) -> tuple[Bf16MixedPrecision, nn.Linear]:
    torch.manual_seed(0)
    plugin = plugin or Bf16MixedPrecision(weight_copy=True)
    return plugin, plugin.convert_module(nn.Sequential(nn.Linear(8, 8)))


EDITS = {
    "optimizer": lambda w: torch.optim.SGD([w], lr=0.1).step(),
    "in place": lambda w: w.detach().add_(1.0),
    # leaves no trace, and is used from the next optimizer step on
    "through data": lambda w: (w.data.mul_(2.0), torch.optim.SGD([w], lr=0.0).step()),
    "new data": lambda w: setattr(w, "data", w.data + 1),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_stale_copy_is_never_used(edit: str) -> None:
    plugin, model = made()
    x = torch.randn(4, 8)
    for _ in range(2):
        with plugin.forward_context():
            y = model(x)
            expected = nn.functional.linear(x, model[0].weight, model[0].bias)
        assert torch.equal(y, expected)
        y.sum().backward()
        EDITS[edit](model[0].weight)
        with plugin.forward_context():
            assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
            assert not torch.equal(model(x), y)


def test_evaluation_graphs_and_a_loop_without_autocast_make_no_copies(
    casts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, model = made()
    x = torch.randn(4, 8)
    assert model(x).dtype == torch.float32
    with plugin.forward_context():
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        model.train()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        with monkeypatch.context() as capture:
            capture.setattr("lightning_fp8.ops.library.is_capturing", lambda _: True)
            model(x)
        assert casts == []
        assert torch.equal(compiled, model(x))
    assert casts == [torch.Size([8, 8])]


def test_recomputation_uses_the_copy(casts: list[Any]) -> None:
    plugin, model = made()
    x = torch.randn(4, 8, requires_grad=True)
    with plugin.forward_context():
        y = checkpoint(model, x, use_reentrant=False)
    y.sum().backward()
    assert casts == [torch.Size([8, 8])]
    reference = copy.deepcopy(model)
    reference.zero_grad()
    with plugin.forward_context():
        reference(x).sum().backward()
    assert torch.equal(model[0].weight.grad, reference[0].weight.grad)
    assert model[0].weight.grad.dtype == torch.float32


def test_parameters_and_keys_stay_and_the_next_run_takes_the_copies_away() -> None:
    plugin = Bf16MixedPrecision(weight_copy=True, keep_fp32=("0",))
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
    keys, parameters = list(net.state_dict()), list(net.parameters())
    plugin.convert_module(net)
    assert [type(layer) for layer in net] == [nn.Linear, WeightCopyLinear, WeightCopyMultiheadAttention]
    assert type(net[2].out_proj) is WeightCopyLinear
    assert list(net.state_dict()) == keys
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with plugin.forward_context():
            other[1](torch.randn(2, 16)).sum().backward()
    Fp8Precision().convert_module(net)
    assert not any(isinstance(layer, WeightCopyModule) for layer in net.modules())
    Bf16MixedPrecision().convert_module(net)
    assert [type(layer).__name__ for layer in net.modules()][1:] == [
        "Linear",
        "Linear",
        "MultiheadAttention",
        "NonDynamicallyQuantizableLinear",
    ]
