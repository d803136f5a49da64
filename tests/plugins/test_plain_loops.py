"""Custom loops, with Fabric or with torch alone, match a Trainer bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import pytest
import torch
from lit import Regression, dataset, make_trainer, same, seeded
from processes import all_end_well, as_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import PrecisionSchedule, convert, scaling_state

Batches = list[tuple[Tensor, Tensor]]


def data() -> TensorDataset:
    """Numbers that bf16 represents exactly: like its own mixed precision, Fabric gives a model its inputs in bf16."""
    x, y = dataset(64).tensors
    return TensorDataset(x.bfloat16().float(), y)


def batches(epochs: int = 1, size: int = 8) -> Batches:
    x, y = data().tensors
    return list(zip(x.split(size), y.split(size), strict=True)) * epochs


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def fabric(**kwargs: Any) -> lf.Fabric:
    return lf.Fabric(**{"accelerator": "cpu", "devices": 1, "precision": "fp8-delayed", **kwargs})


# --- one loop, three ways ---


def plain_loop(
    model: Regression, optimizer: torch.optim.Optimizer, given: Batches, accumulate: int = 1, clip: float | None = None
) -> None:
    for index, batch in enumerate(given):
        with autocast():
            loss = model.step(batch) / accumulate
        loss.backward()
        if (index + 1) % accumulate:
            continue
        scaling_state(model).update()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def fabric_loop(
    runner: lf.Fabric, model: Any, optimizer: Any, given: Batches, accumulate: int = 1, clip: float | None = None
) -> None:
    for index, (x, y) in enumerate(given):
        accumulating = (index + 1) % accumulate != 0
        with runner.no_backward_sync(model, enabled=accumulating) if runner.world_size > 1 else nullcontext():
            loss = nn.functional.mse_loss(model(x).float(), y) / accumulate
            runner.backward(loss)
        if accumulating:
            continue
        if clip is not None:
            runner.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("options", "setup"), [({}, "apart"), ({"accumulate": 4, "clip": 0.05}, "together")])
def test_trainer_fabric_and_plain_loop_are_the_same(tmp_path: Path, options: dict[str, Any], setup: str) -> None:
    epochs, accumulate, clip = 3, options.get("accumulate", 1), options.get("clip")
    by_trainer, by_fabric, by_hand = seeded(), seeded(), convert(seeded())
    how: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    make_trainer(tmp_path, max_epochs=epochs, **how).fit(by_trainer, DataLoader(data(), batch_size=8))
    runner = fabric()
    if setup == "together":
        model, optimizer = runner.setup(by_fabric, by_fabric.configure_optimizers())
    else:
        model = runner.setup_module(by_fabric)
        optimizer = runner.setup_optimizers(by_fabric.configure_optimizers())
    fabric_loop(runner, model, optimizer, batches(epochs), **options)
    plain_loop(by_hand, by_hand.configure_optimizers(), batches(epochs), **options)
    assert same(by_trainer, by_hand)
    assert same(by_fabric, by_hand)
    # scales changed at `optimizer.step`, and nowhere else
    steps = 8 * epochs // accumulate
    state = scaling_state(by_fabric)
    assert state.updates == steps
    assert (state.amax_history > 0).sum(0).tolist() == [min(steps, state.recipe.window)] * 4


def test_a_schedule_is_the_same_in_all_three(tmp_path: Path) -> None:
    by_trainer, by_fabric, by_hand = seeded(), seeded(), convert(seeded())
    schedule: Any = {0.25: {"fprop": "bf16"}, 5: "bf16"}
    loader, callbacks = DataLoader(data(), batch_size=8), [PrecisionSchedule(schedule)]
    make_trainer(tmp_path, callbacks=callbacks).fit(by_trainer, loader)
    runner, changes = fabric(callbacks=[PrecisionSchedule(schedule)]), PrecisionSchedule(schedule)
    model, optimizer = runner.setup(by_fabric, by_fabric.configure_optimizers())
    other = by_hand.configure_optimizers()
    for step, batch in enumerate(batches()):
        runner.call("before_step", model, step, len(batches()))
        fabric_loop(runner, model, optimizer, [batch])
        changes.before_step(by_hand, step, len(batches()))
        plain_loop(by_hand, other, [batch])
    assert same(by_trainer, by_hand)
    assert same(by_fabric, by_hand)
    assert not any(one.in_fp8 for one in scaling_state(by_fabric).precisions)


# --- two processes ---


def train_on_one_of_two(path: Path, accumulate: int, clip: float | None) -> None:
    runner, net = fabric(devices=2, strategy="ddp"), seeded()
    runner.launch()
    model, optimizer = runner.setup(net, net.configure_optimizers())
    own = batches()[runner.global_rank :: 2]
    fabric_loop(runner, model, optimizer, own, accumulate, clip)
    runner.save(path / "two.ckpt", {"model": model, "optimizer": optimizer, "scaling": scaling_state(net)})
    found = {"weights": list(net.state_dict().values()), "scaling": scaling_state(net).state_dict()}
    torch.save(found, path / f"rank{runner.global_rank}.pt")


def both_by_hand(accumulate: int, clip: float | None, models: tuple[Regression, Regression]) -> None:
    """The computation of two processes in one: mean of the gradients, maximum of the amaxes."""
    optimizers = [model.configure_optimizers() for model in models]
    states = [scaling_state(model) for model in models]
    for step in range(len(batches()) // 2 // accumulate):
        for rank, model in enumerate(models):
            for batch in batches()[rank::2][step * accumulate : (step + 1) * accumulate]:
                with autocast():
                    loss = model.step(batch) / accumulate
                loss.backward()
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(p.grad / 2 for p in pair if p.grad is not None)
            for p in pair:
                p.grad = mean.clone()  # type: ignore[union-attr]
        largest = torch.maximum(states[0].amax, states[1].amax)
        for model, optimizer, state in zip(models, optimizers, states, strict=True):
            state.amax.copy_(largest)
            state.update()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def forward_and_same(loaded: Regression, other: Regression) -> bool:
    """Scales of weights are not part of a checkpoint: the next forward computes them."""
    assert (scaling_state(loaded).scale[4:] == 1).all()
    for model in (loaded, other):
        model(torch.randn(4, 32))
    return same(loaded, other)


def test_two_processes_with_fabric(tmp_path: Path) -> None:
    accumulate, clip = 2, 0.05
    with as_ranks(train_on_one_of_two, 2, tmp_path, accumulate, clip) as processes:
        all_end_well(processes, tmp_path)
    models = (convert(seeded()), convert(seeded()))
    both_by_hand(accumulate, clip, models)
    assert same(*models)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        other = convert(seeded())
        other.load_state_dict(dict(zip(other.state_dict(), found["weights"], strict=True)))
        scaling_state(other).load_state_dict(found["scaling"])
        assert forward_and_same(other, models[0])
    # and then continued in one process
    net, runner = seeded(), fabric()
    model, optimizer = runner.setup(net, net.configure_optimizers())
    runner.load(tmp_path / "two.ckpt", {"model": model, "optimizer": optimizer, "scaling": scaling_state(net)})
    assert forward_and_same(net, models[0])


# --- several models, several optimizers ---


def generator_and_critic() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(11)
    generator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return generator, nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def sgd(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in modules]


def noise() -> Iterable[Tensor]:
    source = torch.Generator().manual_seed(3)
    for _ in range(6):
        yield torch.randn(16, 16, generator=source)


def test_two_models_that_meet_in_one_fabric() -> None:
    """Each step of either optimizer updates the scales of all models, as it does for all parts of one model."""
    runner, nets = fabric(), generator_and_critic()
    pairs = [runner.setup(net, optimizer) for net, optimizer in zip(nets, sgd(*nets), strict=True)]
    (generator, for_generator), (critic, for_critic) = pairs
    by_hand = [convert(net) for net in generator_and_critic()]
    optimizers = sgd(*by_hand)
    for x, real in zip(noise(), dataset(96).tensors[1].split(16), strict=True):
        runner.backward(-critic(generator(x)).mean())
        for_generator.step()
        for_generator.zero_grad()
        for_critic.zero_grad()
        runner.backward((critic(generator(x).detach()) - critic(real)).mean())
        for_critic.step()
        for_critic.zero_grad()
        for which in (0, 1):
            # like a Fabric model
            def run(net: nn.Module, given: Tensor) -> Tensor:
                with autocast():
                    return net(given.bfloat16()).float()

            fake = run(by_hand[0], x)
            if which == 0:
                (-run(by_hand[1], fake).mean()).backward()
            else:
                (run(by_hand[1], fake.detach()) - run(by_hand[1], real)).mean().backward()
            for net in by_hand:
                scaling_state(net).update()
            optimizers[which].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert same(nets[0], by_hand[0])
    assert same(nets[1], by_hand[1])
    assert scaling_state(nets[0]) is not scaling_state(nets[1])
    entries = [(scaling_state(net).amax_history > 0).sum(0).tolist() for net in nets]
    # the generator runs forward in both steps of each batch and backward in one; the critic runs both in both
    assert entries == [[12, 12, 6, 6], [12] * 4]
