"""Notices that are given once: scales that nobody updates, the first inf or NaN."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lit import Regression, loader, long_window, make_trainer, seeded
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import convert, scaling_state

WITHOUT_UPDATE, NONFINITE = "nothing has updated its scales", "inf or NaN in"


@contextmanager
def told(*subjects: str) -> Iterator[None]:
    """Each of these is said once inside, at a line of this package, and nothing else by it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    ours = [one for one in said if str(one.message).startswith("lightning_fp8:")]
    assert all("lightning_fp8" in one.filename for one in ours)
    messages = [str(one.message) for one in ours]
    assert len(messages) == len(subjects), messages
    for subject in subjects:
        assert any(subject in message for message in messages), (subject, messages)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, update: bool = True, x: Tensor | None = None) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 32) if x is None else x).square().mean().backward()
    if update:
        scaling_state(model).update()
    optimizer.step()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


class Evaluates(Regression):
    """Calls its own layers without gradients before the first update: in the summary, at the start and in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(4, 32)

    def on_fit_start(self) -> None:
        with torch.no_grad():
            for x, _ in loader():
                self(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net.eval()(batch[0])
        self.net.train()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("model", [Regression, Evaluates])
def test_a_trainer_that_fits_has_nothing_to_say(model: type[Regression], tmp_path: Path) -> None:
    with told():
        trainer = make_trainer(tmp_path, max_steps=4, num_sanity_val_steps=-1, enable_model_summary=True)
        trainer.fit(seeded(model), loader(), loader())


# --- scales that nobody updates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_forgets_to_update(compiled: bool) -> None:
    model = convert(small_mlp())
    call = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters())
    with told():
        for _ in range(2):
            step(call, optimizer, update=False)
    with told(WITHOUT_UPDATE):
        for _ in range(10):
            step(call, optimizer, update=False)


def test_loops_that_need_no_other_update() -> None:
    models = [convert(small_mlp()) for _ in range(2)]
    # records nothing
    models.append(convert(small_mlp()).eval())
    optimizers = list(map(sgd, models))
    with told():
        for _ in range(6):
            # the second is stepped five times as often, like a critic
            step(models[0], optimizers[0])
            for _ in range(5):
                step(models[1], optimizers[1])
            step(models[2], optimizers[2], update=False)
            with torch.no_grad():
                models[0](torch.randn(4, 32))
            # an optimizer of another model, and steps without a forward
            sgd(nn.Linear(2, 2)).step()
        step(models[0], optimizers[0])
        for parameter in models[0].parameters():
            parameter.grad.zero_()
        for _ in range(4):
            optimizers[0].step()


def test_an_optimizer_in_backward() -> None:
    model = convert(small_mlp())
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with told():
        for _ in range(2):
            model(torch.randn(8, 32)).sum().backward()
    with told(WITHOUT_UPDATE):
        for _ in range(4):
            model(torch.randn(8, 32)).sum().backward()


class RawOptimizer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.step(batch))
        optimizer.step()


def test_a_raw_optimizer_under_the_trainer(tmp_path: Path) -> None:
    with told(WITHOUT_UPDATE):
        make_trainer(tmp_path, max_epochs=2, max_steps=-1).fit(seeded(RawOptimizer), loader())


def test_an_optimizer_that_calls_its_closure_several_times(tmp_path: Path) -> None:
    class Lbfgs(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=5)

    model = seeded(Lbfgs)
    make_trainer(tmp_path, max_steps=4, plugins=long_window()).fit(model, loader())
    assert len(model.losses) > 2 * 4
    assert scaling_state(model).updates == 4
    assert (scaling_state(model).amax_history > 0).sum(0).tolist() == [4] * 4


# --- inf and NaN ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_the_first_inf_or_nan_is_named_with_its_step(value: float) -> None:
    model, x = convert(small_mlp()), torch.randn(8, 32)
    optimizer = sgd(model, lr=0.0)
    with told():
        for _ in range(4):
            step(model, optimizer)
    x[3, 5] = value
    with told(f"{NONFINITE} '0.input'"):
        for _ in range(3):
            model(x).sum().backward()
            scaling_state(model).update()
    # a copy does not report what was before it
    with told():
        scaling_state(copy.deepcopy(model)).update()
    model = convert(small_mlp())
    with torch.no_grad():
        model[2].weight[0, 0] = float("inf")
    with told("'2.weight' at optimizer step 1 of this model"):
        step(model, sgd(model))


def test_what_a_checkpoint_counts_is_no_news() -> None:
    model, bad = convert(small_mlp()), torch.full((8, 32), float("inf"))
    with told(NONFINITE):
        step(model, sgd(model, lr=0.0), x=bad)
    saved, other = scaling_state(model).state_dict(), convert(small_mlp())
    with told():
        scaling_state(other).load_state_dict(saved)
        step(other, sgd(other))
    with told(NONFINITE):
        step(other, sgd(other), x=bad)


# --- amaxes that wait -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["training_step", "backward", "on_before_optimizer_step"])
def test_an_error_leaves_no_amax_for_the_next_update(where: str, tmp_path: Path) -> None:
    class Breaks(Regression):
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step((batch[0] * (1e6 if self.broken else 1), batch[1]), batch_idx)
            self.fail("training_step")
            return loss

        def on_after_backward(self) -> None:
            self.fail("backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.fail("on_before_optimizer_step")

        def fail(self, place: str) -> None:
            if self.broken and place == where:
                raise RuntimeError("given up")

    model = seeded(Breaks)
    with pytest.raises(RuntimeError, match="given up"):
        make_trainer(tmp_path, max_steps=2).fit(model, loader())
    state = scaling_state(model)
    assert state.amax[: state.delayed].tolist() == [0] * 4
    model.broken = False
    make_trainer(tmp_path, max_steps=1).fit(model, loader())
    assert state.amax_history[0].max() < 1e3
