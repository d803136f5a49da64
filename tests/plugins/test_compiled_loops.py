"""Compiled steps of a Trainer read casts that were made at the start of the step, of the right weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from counted_casts import Compiled, count_weight_casts
from lit import Regression, loader, make_trainer, same, seeded, warned
from torch import nn
from torch.func import functional_call

from lightning_fp8 import convert, weights_unchanged
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.modules.weights_unchanged import all_gemms


@pytest.fixture
def backend() -> Iterator[Compiled]:
    torch._dynamo.reset()
    yield Compiled()
    torch._dynamo.reset()


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    return count_weight_casts(monkeypatch)


def fp8_layers(model: nn.Module) -> list[Fp8Linear]:
    return [layer for layer in model.modules() if isinstance(layer, Fp8Linear)]


class Follows(pl.Callback):
    """Records the addresses of the payloads, and changes the weights between two steps."""

    def __init__(self, change: Callable[[Regression], None] | None = None) -> None:
        self.change = change
        self.payloads: set[tuple[int, int]] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Regression, *_: Any) -> None:  # type: ignore[override]
        for layer in fp8_layers(module):
            made = layer.fp8[""].weight_cast.compiled_cast
            if made is not None:
                self.payloads.add((made.rows.codes.data_ptr(), made.rows.scale_inv.data_ptr()))
        if self.change is not None:
            self.change(module)


def compile_model(model: Regression, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def compile_part(model: Regression, backend: Any) -> Any:
    model.net = torch.compile(model.net, backend=backend, fullgraph=True)
    return model


def compile_in_place(model: Regression, backend: Any) -> Any:
    model.net.compile(backend=backend)
    return model


def trains_alike(
    path: Path,
    backend: Compiled,
    kind: type[Regression] = Regression,
    compile: Callable[..., Any] = compile_part,
    change: Callable[[Regression], None] | None = None,
    is_frozen: bool = False,
    **options: Any,
) -> tuple[Any, Follows]:
    """Train a model as it is and compiled, with the same results; gives the compiled one and what has followed it."""
    eager, model, follows = seeded(kind), seeded(kind), Follows(change)
    for one in (eager, model):
        one.net[0].requires_grad_(not is_frozen)
    make_trainer(path, callbacks=[Follows(change)], **options).fit(eager, loader())
    compiled = compile(model, backend)
    make_trainer(path, callbacks=[follows], **options).fit(compiled, loader())
    assert backend.graphs
    assert torch.equal(torch.stack(eager.losses), torch.stack(model.losses))
    assert same(eager, model)
    return model, follows


@pytest.mark.parametrize(("compile", "accumulate"), [(compile_model, 2), (compile_in_place, 1)])
def test_one_cast_per_optimizer_step(
    tmp_path: Path, compile: Callable[..., Any], accumulate: int, backend: Compiled, casts: Counter[int]
) -> None:
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    model, follows = trains_alike(tmp_path, backend, compile=compile, **options)
    assert backend.weight_casts == 0
    assert [casts[layer.weight.data_ptr()] for layer in fp8_layers(model)] == [8 // accumulate] * 2
    # two layers, whose payloads kept their addresses
    assert len(follows.payloads) == 2
    # the run has freed them
    assert all(gemm.weight_cast.compiled_cast is None for gemm in all_gemms(model))


def scale_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for layer in fp8_layers(model):
            layer.weight.mul_(0.9)


def scale_through_data(model: nn.Module) -> None:
    for layer in fp8_layers(model):
        layer.weight.data.mul_(0.9)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def new_data(model: nn.Module) -> None:
    for layer in fp8_layers(model):
        layer.weight.data = layer.weight.data * 0.9


@pytest.mark.parametrize("change", [scale_through_data, new_data])
def test_a_change_between_steps_is_seen(tmp_path: Path, change: Callable[[nn.Module], None], backend: Compiled) -> None:
    """In the middle of an accumulation, too, where there is no optimizer step in between."""
    trains_alike(tmp_path, backend, change=change, accumulate_grad_batches=2)
    assert backend.weight_casts == 0


class TwoStepsInOne(Regression):
    """Runs a forward after an optimizer step within one training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            loss = self.step(batch)
            self.losses.append(loss.detach().clone())
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()


class BackwardAfterAStep(TwoStepsInOne):
    """An optimizer changes the weights before the second loss's backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = [self.step(batch), self.step((batch[0] * 2, batch[1]))]
        self.losses += [loss.detach().clone() for loss in losses]
        for loss in losses:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()


class Reentrant(Regression):
    """Recomputes its forward in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.net, x.requires_grad_(), use_reentrant=True)


# casts in graphs: of two layers in the second forward of each of four steps; none in backward
@pytest.mark.parametrize(("kind", "casts"), [(TwoStepsInOne, 8), (BackwardAfterAStep, 0), (Reentrant, 0)])
def test_optimizer_steps_and_recomputation_within_a_step(
    kind: type[Regression], casts: int, tmp_path: Path, backend: Compiled
) -> None:
    trains_alike(tmp_path, backend, kind)
    assert backend.weight_casts == casts


def test_a_frozen_weight_is_cast_in_the_graph_of_training(tmp_path: Path, backend: Compiled) -> None:
    """It may belong to a target network, which its owner changes within a step."""
    trains_alike(tmp_path, backend, is_frozen=True)
    assert backend.weight_casts == 4


def test_a_change_within_a_step_is_warned_of(tmp_path: Path, backend: Compiled) -> None:
    class Edits(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            scale_in_place(self)
            return super().training_step(batch, batch_idx)

    model = seeded(Edits)
    said = warned("The weight of", lambda: make_trainer(tmp_path).fit(compile_part(model, backend), loader()))
    assert [text.split("'")[1] for text in said] == [layer.fp8[""].name for layer in fp8_layers(model)]
    # all steps except the first
    assert backend.weight_casts == 2 * 3


def test_weights_declared_unchanged(backend: Compiled, casts: Counter[int]) -> None:
    model, x = convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))).eval(), torch.randn(4, 16)
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        expected = model(x)
        casts.clear()
        for _ in range(2):
            with weights_unchanged(compiled):
                assert all(torch.equal(compiled(x), expected) for _ in range(3))
            scale_through_data(model)
            expected = model(x)
        assert backend.weight_casts == 0
        # once in each context, and once for the expected result
        assert sorted(casts.values()) == [4, 4]
        assert torch.equal(compiled(x), expected)
        assert backend.weight_casts == 2
        with weights_unchanged(compiled):
            compiled(x)
            load(model)
            assert torch.equal(compiled(x), model(x))


def test_lent_weights_are_those_that_compiled_code_multiplies_with(backend: Compiled) -> None:
    model, x = convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))).eval(), torch.randn(4, 16)
    compiled = torch.compile(model, backend=backend)
    lent = {f"_orig_mod.{name}": nn.Parameter(torch.randn_like(one)) for name, one in model.named_parameters()}
    with torch.no_grad():
        own, others = model(x), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        others.load_state_dict({name.removeprefix("_orig_mod."): weight for name, weight in lent.items()})
        expected = others(x)
        with weights_unchanged(compiled):
            for _ in range(2):
                assert torch.equal(compiled(x), own)
                assert (functional_call(compiled, lent, x) - expected).norm() < 0.1 * expected.norm()
