from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import pytest
import torch
from lightning.fabric.plugins.precision import Precision
from lit import by_hand, loader, same, seeded, warned
from processes import run_script
from torch import nn

from lightning_fp8 import Fp8Precision, convert, scaling_state
from lightning_fp8.plugins import Bf16MixedPrecision, Bf16TruePrecision
from lightning_fp8.plugins.settings import FP8_PRECISIONS
from lightning_fp8.scalings.recipe import RECIPES


def fabric(**kwargs: Any) -> lf.Fabric:
    return lf.Fabric(accelerator="cpu", devices=1, **kwargs)


def test_scales_are_updated_once_for_a_closure() -> None:
    runner, net = fabric(precision="fp8-delayed"), seeded()
    _, optimizer = runner.setup(net, net.configure_optimizers())
    for batch in runner.setup_dataloaders(loader()):

        def closure(batch: Any = batch) -> torch.Tensor:
            with runner.autocast():
                loss = net.step(batch)
            runner.backward(loss)
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()
    assert same(net, by_hand(4))


@pytest.mark.parametrize("precision", FP8_PRECISIONS)
def test_a_resumed_run_is_the_whole_one(precision: Any, tmp_path: Path) -> None:
    runner, batches = fabric(precision=precision), list(loader())

    def set_up() -> tuple[Any, Any, Any]:
        net = seeded()
        return net, *runner.setup(net, net.configure_optimizers())

    def train(net: Any, model: Any, optimizer: Any, batches: list[Any]) -> None:
        model.train()
        for batch in batches:
            with runner.autocast():
                loss = net.step(batch)
            runner.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(net: Any) -> torch.Tensor:
        net.eval()
        with torch.no_grad(), runner.autocast():
            return net(batches[0][0])

    whole, resumed = set_up(), set_up()
    first = set_up()
    train(*first, batches[:2])
    evaluated = evaluate(first[0])
    runner.save(tmp_path / "c.ckpt", {"model": first[1], "optimizer": first[2]})
    runner.load(tmp_path / "c.ckpt", {"model": resumed[1], "optimizer": resumed[2]})
    assert torch.equal(evaluate(resumed[0]), evaluated)
    train(*resumed, batches[2:])
    train(*whole, batches)
    expected = by_hand(4, recipe=RECIPES[precision]())
    assert same(whole[0], expected)
    assert same(resumed[0], expected)
    assert torch.equal(evaluate(resumed[0]), evaluate(expected))


def trained(runner: lf.Fabric, **kwargs: Any) -> tuple[Any, Any, Any]:
    """A model after ``setup`` and its optimizer, after one step."""
    net = seeded(**kwargs)
    model, optimizer = runner.setup(net, net.configure_optimizers())
    runner.backward(model(torch.randn(4, net.net[0].in_features)).sum())
    optimizer.step()
    return net, model, optimizer


def same_scales(a: nn.Module, b: nn.Module) -> bool:
    one, other = scaling_state(a), scaling_state(b)
    mine, theirs = (torch.cat([of.scale[None, : of.delayed], of.amax_history]) for of in (one, other))
    return torch.equal(mine, theirs) and bool(mine[1].all())


FORMS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "fabric": lambda net, model: model,
    "module": lambda net, model: net,
    "compiled": lambda net, model: torch.compile(model),
    "part": lambda net, model: net.net,
}


@pytest.mark.parametrize("form", FORMS)
def test_save_and_load_take_the_scales_along(form: str, tmp_path: Path) -> None:
    runner = fabric(precision="fp8-delayed")
    net, model, optimizer = trained(runner)
    saved = {"net": FORMS[form](net, model), "optimizer": optimizer, "step": 3}
    runner.save(tmp_path / "c.ckpt", saved)
    assert set(saved) == {"net", "optimizer", "step"}
    assert set(torch.load(tmp_path / "c.ckpt", weights_only=True)) == {*saved, "net_fp8_scales"}
    fresh = seeded()
    other, its_optimizer = runner.setup(fresh, fresh.configure_optimizers())
    asked = {"net": FORMS[form](fresh, other), "optimizer": its_optimizer}
    assert runner.load(tmp_path / "c.ckpt", asked) == {"step": 3}
    assert same_scales(fresh, net)


def test_a_load_before_setup(tmp_path: Path) -> None:
    runner = fabric(precision="fp8-delayed")
    net, model, _ = trained(runner)
    runner.save(tmp_path / "c.ckpt", {"model": model})
    fresh = seeded()
    (said,) = warned("fabric.load", lambda: runner.load(tmp_path / "c.ckpt", {"model": fresh}))
    assert "has FP8 scales for 'model'" in said
    assert "after `fabric.setup`" in said
    assert type(fresh.net[0]) is nn.Linear
    runner.setup(fresh)
    assert torch.equal(fresh.net[0].weight, net.net[0].weight)
    assert not scaling_state(fresh).amax_history.any()


def test_several_models_have_their_own_scales(tmp_path: Path) -> None:
    runner = fabric(precision="fp8-delayed")
    (net, model, _), (second, other, _) = trained(runner), trained(runner)
    doubled = scaling_state(second).state_dict()
    for entry in doubled.values():
        entry["amax_history"].mul_(2)
    scaling_state(second).load_state_dict(doubled)
    runner.save(tmp_path / "c.ckpt", {"first": model, "second": other})
    fresh, another = seeded(), seeded()
    runner.load(tmp_path / "c.ckpt", {"second": runner.setup(another), "first": runner.setup(fresh)})
    assert same_scales(fresh, net)
    assert same_scales(another, second)
    assert not same_scales(fresh, another)


def test_scales_under_a_key_of_ones_own(tmp_path: Path) -> None:
    runner = fabric(precision="fp8-delayed")
    net, model, _ = trained(runner)
    runner.save(tmp_path / "c.ckpt", {"model": model, "scales": scaling_state(net).state_dict()})
    fresh = seeded()
    # whether or not they are asked for
    assert set(runner.load(tmp_path / "c.ckpt", {"model": runner.setup(fresh)})) == {"scales"}
    assert same_scales(fresh, net)


def test_without_fp8_nothing_is_added_or_loaded(tmp_path: Path) -> None:
    runner = fabric(precision="32-true")
    net = seeded()
    model, optimizer = runner.setup(net, net.configure_optimizers())
    runner.save(tmp_path / "c.ckpt", {"model": model, "optimizer": optimizer})
    assert set(torch.load(tmp_path / "c.ckpt", weights_only=True)) == {"model", "optimizer"}
    runner.save(tmp_path / "weights.ckpt", net.state_dict())
    assert torch.load(tmp_path / "weights.ckpt", weights_only=True).keys() == net.state_dict().keys()
    assert set(runner.load(tmp_path / "c.ckpt")) == {"model", "optimizer"}
    # and an FP8 run takes such a checkpoint
    fresh = seeded()
    fp8 = fabric(precision="fp8-delayed")
    fp8.load(tmp_path / "c.ckpt", {"model": fp8.setup(fresh)}, strict=False)
    assert not scaling_state(fresh).amax_history.any()


SHARDED = """
import os
import lightning.fabric as lf
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from lit import seeded
from torch.distributed.fsdp import fully_shard
from lightning_fp8 import scaling_state
from lightning_fp8.plugins import fsdp2_policy


def sharded(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=fsdp2_policy())


def set_up():
    net = seeded()
    model = runner.setup(net)
    return net, model, runner.setup_optimizers(torch.optim.AdamW(model.parameters()))


def train(model, optimizer, factor):
    runner.backward(model(factor * torch.ones(4, 32)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


strategy = ModelParallelStrategy(sharded, save_distributed_checkpoint={distributed})
runner = lf.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="fp8-delayed")
runner.launch()
net, model, optimizer = set_up()
train(model, optimizer, 1)
path = {path!r} + "/checkpoint"
by_name = {{"scaling": scaling_state(net)}} if {by_name} else {{}}
runner.save(path, {{"model": model, "optimizer": optimizer, **by_name}})
fresh, other, other_optimizer = set_up()
by_name = {{"scaling": scaling_state(fresh)}} if {by_name} else {{}}
asked = {{"model": other, "optimizer": other_optimizer, **by_name}}
runner.load(path, asked)
assert by_name.items() <= asked.items()
found = [scaling_state(net).state_dict(), scaling_state(fresh).state_dict()]
# and on from there
for one in ((model, optimizer), (other, other_optimizer)):
    train(*one, 2)
    train(*one, 3)
for one in (net, fresh):
    found.append([parameter.to_local() for parameter in one.parameters()])
    found.append(scaling_state(one).state_dict()["net.2.grad_output"])
torch.save(found, {path!r} + f"/rank{{os.environ['RANK']}}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("distributed", "by_name"), [(True, True), (False, False)])
def test_scales_in_a_checkpoint_of_shards(tmp_path: Path, distributed: bool, by_name: bool) -> None:
    run_script(SHARDED.format(path=str(tmp_path), distributed=distributed, by_name=by_name), tmp_path)
    assert (tmp_path / "checkpoint").is_dir() == distributed
    for rank in (0, 1):
        saved, loaded, *later = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert saved["net.0.input"]["amax_history"].tolist() == [1.0] + 15 * [0.0]
        assert set(saved) == set(loaded)
        for name, entry in saved.items():
            assert all(torch.equal(value, loaded[name][field]) for field, value in entry.items())
        whole, its_last, resumed, the_same = later
        assert all(map(torch.equal, whole, resumed))
        assert its_last["amax_history"].count_nonzero() == 3
        assert torch.equal(its_last["amax_history"], the_same["amax_history"])


class Mine(Precision):
    """A user's plugin without a name."""

    precision: Any = None


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"precision": "32-true"}, "'32-true' (Precision)"),
        ({"plugins": Mine()}, "None (Mine)"),
    ],
)
def test_another_precision_says_that_scales_stand_still(choice: dict[str, Any], name: str) -> None:
    runner, net = fabric(**choice), convert(seeded())
    made: list[Any] = []
    (message,) = warned("Fabric", lambda: made.extend(runner.setup(net, net.configure_optimizers())))
    for words in (f"precision {name}", "2 converted layers", ": net.0, net.2.", 'precision="fp8-delayed"'):
        assert words in message
    model, optimizer = made
    runner.backward(model(torch.randn(4, 32)).sum())
    optimizer.step()
    state = scaling_state(net)
    assert (state.scale[: state.delayed] == 1).all()
    assert len(warned("Fabric", lambda: runner.setup_module(module=convert(seeded())))) == 1
    assert warned("Fabric", lambda: runner.setup(seeded())) == []


@pytest.mark.parametrize(
    "plugin", [Fp8Precision(compute_dtype="float32"), Fp8Precision(), Bf16MixedPrecision(), Bf16TruePrecision()]
)
def test_inputs_arrive_in_the_compute_dtype_and_outputs_in_the_default_one(plugin: Any) -> None:
    seen: list[torch.dtype] = []
    net = seeded()
    net.net[0].register_forward_pre_hook(lambda layer, args: seen.append(args[0].dtype))
    runner = fabric(plugins=plugin)
    model, optimizer = runner.setup(net, net.configure_optimizers())
    y = model(torch.randn(2, 32))
    assert seen == [plugin.compute_dtype]
    assert y.dtype == torch.float32
    runner.backward(y.sum())
    optimizer.step()
    assert {p.dtype for p in net.parameters()} == {plugin.param_dtype}


def test_one_plugin_for_two_fabrics() -> None:
    plugin, nets = Fp8Precision(), []
    for _ in range(2):
        net, _, _ = trained(fabric(plugins=plugin))
        nets.append(net)
    assert [scaling_state(net).updates for net in nets] == [1, 1]
