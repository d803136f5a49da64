from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.fabric as lf
import pytest
import torch
from lit import loader, seeded
from test_trainer import by_hand, same
from torch import nn

from lightning_fp8 import DelayedScaling, Fp8Precision, scaling_state


def fabric(**kwargs: Any) -> lf.Fabric:
    return lf.Fabric(accelerator="cpu", devices=1, **kwargs)


@pytest.mark.parametrize(("accumulate", "with_closure"), [(1, False), (2, False), (1, True)])
def test_raw_loop_equals_a_plain_one(accumulate: int, with_closure: bool) -> None:
    runner, net = fabric(precision="fp8-delayed"), seeded()
    model, optimizer = runner.setup(net, net.configure_optimizers())
    for index, (x, y) in enumerate(runner.setup_dataloaders(loader())):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            with runner.autocast():
                loss = nn.functional.mse_loss(net(x).float(), y) / accumulate
            runner.backward(loss)
            return loss

        if with_closure:
            optimizer.step(closure)
            optimizer.zero_grad()
            continue
        closure()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert same(net, by_hand(4 // accumulate, accumulate))
    assert model(torch.randn(2, 32)).dtype == torch.float32


def test_plugin_object_and_two_models() -> None:
    runner = fabric(plugins=Fp8Precision(recipe=DelayedScaling(amax_history_len=2)))
    models = [seeded(), seeded(width=16)]
    optimizers = [model.configure_optimizers() for model in models]
    ready = [runner.setup(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for (model, optimizer), width in zip(ready, (32, 16), strict=True):
        runner.backward(model(torch.randn(4, width)).sum())
        optimizer.step()
    for model in models:
        assert scaling_state(model).recipe.amax_history_len == 2
        assert (scaling_state(model).amax_history > 0).sum(0).tolist() == [1] * 6


def test_scales_in_a_checkpoint(tmp_path: Path) -> None:
    runner, net = fabric(precision="fp8-delayed"), seeded()
    model, optimizer = runner.setup(net, net.configure_optimizers())
    runner.backward(model(torch.randn(4, 32)).sum())
    optimizer.step()
    runner.save(tmp_path / "c.ckpt", {"model": model, "optimizer": optimizer, "scaling": scaling_state(net)})
    fresh = seeded()
    other, other_optimizer = runner.setup(fresh, fresh.configure_optimizers())
    runner.load(tmp_path / "c.ckpt", {"model": other, "optimizer": other_optimizer, "scaling": scaling_state(fresh)})
    assert same(net, fresh)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16(precision: Any) -> None:
    runner, net = fabric(precision=precision), seeded()
    model, optimizer = runner.setup(net, net.configure_optimizers())
    runner.backward(model(torch.randn(4, 32)).sum())
    optimizer.step()
    assert {p.dtype for p in net.parameters()} == {torch.float32 if precision == "bf16-mixed" else torch.bfloat16}


def test_init_module() -> None:
    with fabric(plugins=Fp8Precision(param_dtype=torch.bfloat16)).init_module():
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    with fabric(precision="fp8-delayed").init_module():
        assert nn.Linear(2, 2).weight.dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "bf16-true"])
def test_transformer_encoder_evaluates_what_it_trains(precision: Any) -> None:
    runner = fabric(precision=precision)
    with runner.init_module():
        layer = nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True)
        net = nn.TransformerEncoder(layer, 2)
    model = runner.setup(net)
    x, padded = torch.randn(3, 5, 32), torch.zeros(3, 5, dtype=torch.bool)
    padded[0, 3:] = True
    with torch.no_grad():
        trained = model.train()(x, src_key_padding_mask=padded)
        evaluated = model.eval()(x, src_key_padding_mask=padded)
    assert torch.equal(trained, evaluated)
    assert trained.dtype == torch.float32
    assert torch.backends.mha.get_fastpath_enabled()


def test_inputs_arrive_in_the_compute_dtype() -> None:
    for compute_dtype in (torch.float32, torch.bfloat16):
        seen: list[torch.dtype] = []
        net = seeded()
        net.net[0].register_forward_pre_hook(lambda layer, args, seen=seen: seen.append(args[0].dtype))
        fabric(plugins=Fp8Precision(compute_dtype=compute_dtype)).setup(net)(torch.randn(2, 32))
        assert seen == [compute_dtype]
