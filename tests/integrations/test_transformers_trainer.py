"""``Fp8Callback`` under the real ``transformers.Trainer``."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lit import LONG_WINDOW, same, warned
from processes import run_script
from repository import ROOT
from small_models import small_mlp
from torch import Tensor, nn
from trainer_runs import Batch, llama, texts, trainer
from transformers import Trainer, TrainingArguments

from lightning_fp8 import CurrentScaling, DelayedScaling, convert, scaling_state
from lightning_fp8.integrations import Fp8Callback
from lightning_fp8.scaling.config import Fp8Config

SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
# the loss falls, so that the first checkpoint is the "best"
BEST: dict[str, Any] = {
    **SAVED,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}


class Regressor(nn.Module):
    """A model that is not from transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_mlp(32)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x).float(), labels)}


def regressor() -> Regressor:
    torch.manual_seed(7)
    return Regressor()


def numbers(rows: int = 64) -> list[Batch]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 32, generator=source)
    return [{"x": one, "labels": torch.sin(one[:4] * 2).repeat(4)} for one in x]


def losses(run: Trainer) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.state.log_history if "loss" in row}


# --- training ---


@pytest.mark.parametrize(("bf16", "accumulate", "clip"), [(False, 1, 0.0), (True, 2, 0.05)])
def test_a_run_equals_a_loop_by_hand(tmp_path: Path, bf16: bool, accumulate: int, clip: float) -> None:
    seen: list[Batch] = []

    def collate(rows: list[Batch]) -> Batch:
        seen.append({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        return dict(seen[-1])

    model, by_hand = regressor(), convert(regressor(), LONG_WINDOW)
    kwargs: dict[str, Any] = {"bf16": bf16, "gradient_accumulation_steps": accumulate, "max_grad_norm": clip}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    updates: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: updates.append(scaling_state(model).updates))
    run = trainer(
        tmp_path,
        model,
        Fp8Callback(LONG_WINDOW),
        data=numbers(96),
        data_collator=collate,
        optimizers=(optimizer, None),
        **kwargs,
    )
    run.train()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2)
    for step in range(6):
        for batch in seen[step * accumulate : (step + 1) * accumulate]:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = by_hand(**batch)["loss"]
            (loss / accumulate).backward()
        scaling_state(by_hand).update()
        if clip:
            nn.utils.clip_grad_norm_(by_hand.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    assert same(model, by_hand)
    state = scaling_state(model)
    # once per step, before the weights change
    assert updates == [1, 2, 3, 4, 5, 6]
    assert state.updates == 6
    assert (state.amax_history > 0).sum(0).tolist() == [6] * 4


@pytest.mark.parametrize("start", [3, 4])
def test_a_schedule_is_resumed_exactly(start: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schedule: dict[Any, Any] = {0: {"net.2": "bf16"}, 0.5: "fp8", 4: {"fprop": "bf16"}}
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    models = [regressor() for _ in range(3)]
    run = trainer(tmp_path, models[0], Fp8Callback(schedule=schedule), data=numbers(), **saved)
    run.train()
    said = [record.message for record in caplog.records if record.name == "lightning_fp8"]
    assert [text.partition(" from")[2].partition(".")[0] for text in said] == [
        f" optimizer step {step} on" for step in (0, 3, 4)
    ]
    again = trainer(tmp_path / "again", models[1], Fp8Callback(schedule=schedule), data=numbers())
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{start}"))
    assert same(models[1], models[0])
    # the checkpoint brings the schedule, whose keys JSON makes strings
    state = json.loads((tmp_path / f"checkpoint-{start}" / "trainer_state.json").read_text())
    arguments = state["stateful_callbacks"]["Fp8Callback"]["args"]
    assert arguments["schedule"] == {str(key): value for key, value in schedule.items()}
    other = trainer(tmp_path / "other", models[2], Fp8Callback(**arguments), data=numbers())
    other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{start}"))
    assert same(models[2], models[0])
    # a schedule belongs to one run
    trainer(tmp_path / "next", models[2], Fp8Callback(), data=numbers(), max_steps=1).train()
    assert [one.in_bf16 for one in scaling_state(models[2]).precisions] == [(), ()]


def test_each_argument_is_that_of_convert(tmp_path: Path) -> None:
    model = llama()
    callback = Fp8Callback({"amax_history_len": 3}, ignore_modules=["lm_head"], min_features=32)
    assert trainer(tmp_path, model, callback).model is model
    state = scaling_state(model)
    assert state.recipe == DelayedScaling(amax_history_len=3)
    gates = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    # `k_proj` and `v_proj` have 16 features out
    assert state.module_names == tuple(f"model.layers.{layer}.{name}" for layer in (0, 1) for name in gates)
    assert state.config == Fp8Config(state.recipe, min_features=32)


def test_a_recipe_by_its_precision_string(tmp_path: Path) -> None:
    model = regressor()
    trainer(tmp_path, model, Fp8Callback("fp8-current"), data=numbers())
    assert scaling_state(model).recipe == CurrentScaling()
    with pytest.raises(ValueError, match="Did you mean 'fp8-current'"):
        Fp8Callback("fp8-curent")


def test_what_an_abandoned_step_recorded_is_dropped(tmp_path: Path) -> None:
    models = llama(), llama()
    runs = [trainer(tmp_path, model, Fp8Callback(), max_steps=2) for model in models]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        models[0](input_ids=texts()[0]["input_ids"][None] * 0, labels=texts()[0]["labels"][None]).loss.mul(
            99
        ).backward()
    for run in runs:
        run.train()
    assert same(*models)


# --- checkpoints ---
# by its name in this version of transformers
RECOMPUTATION = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": False, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
        {"bf16": True, RECOMPUTATION: True, "eval_strategy": "steps", "eval_steps": 2},
    ],
)
def test_a_resumed_run_is_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    whole, second = llama(), llama(seed=8)
    uninterrupted = trainer(tmp_path, whole, Fp8Callback(), **SAVED, **options)
    uninterrupted.train()
    resumed = trainer(tmp_path, second, Fp8Callback(), **SAVED, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed) == losses(uninterrupted)
    assert same(whole, second)
    assert scaling_state(second).updates == 3


def without_scales(folder: Path) -> None:
    file = folder / "trainer_state.json"
    saved = json.loads(file.read_text())
    del saved["stateful_callbacks"]["Fp8Callback"]
    file.write_text(json.dumps(saved))


def stopped_at_3(path: Path, *callbacks: Any, **kwargs: Any) -> Any:
    model = llama()
    trainer(path, model, *callbacks, **SAVED, **kwargs).train()
    return model


def test_a_checkpoint_without_scales_is_said_once(tmp_path: Path) -> None:
    whole, second = stopped_at_3(tmp_path, Fp8Callback()), llama(seed=8)
    without_scales(tmp_path / "checkpoint-3")
    resumed = trainer(tmp_path, second, Fp8Callback(), **SAVED)
    (message,) = warned("Fp8Callback", lambda: resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3")))
    assert message.startswith("Fp8Callback: The checkpoint of step 3 has weights but no FP8 scales.")
    # the run differs
    assert not same(whole, second)
    # and its checkpoints have scales
    third = trainer(tmp_path, llama(), Fp8Callback(), **{**SAVED, "max_steps": 9})
    assert not warned("Fp8Callback", lambda: third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6")))


def test_the_best_model_is_evaluated_as_it_was(tmp_path: Path) -> None:
    model = llama()
    # the loss falls, so that the first checkpoint is the "best"
    run = trainer(tmp_path, model, Fp8Callback(LONG_WINDOW), **BEST)
    run.train()
    assert run.state.best_global_step == 3
    evaluated = {row["step"]: row["eval_loss"] for row in run.state.log_history if "eval_loss" in row}
    assert evaluated[3] != evaluated[6]
    assert run.evaluate()["eval_loss"] == evaluated[3]
    # and without the callback
    other = convert(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-3"))
    assert trainer(tmp_path, other).evaluate()["eval_loss"] == evaluated[3]


def test_a_model_made_by_the_trainer_and_a_callback_that_it_restores(tmp_path: Path) -> None:
    """The restored callback is created from the arguments stored in the checkpoint."""
    recipe = DelayedScaling(amax_history_len=4, margin=1)
    kwargs: dict[str, Any] = {**SAVED, "model_init": lambda: llama()}
    kwargs["restore_callback_states_from_checkpoint"] = True

    def make() -> Trainer:
        return trainer(tmp_path, None, Fp8Callback(recipe, ["lm_head"]), **kwargs)

    uninterrupted, resumed = make(), make()
    uninterrupted.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed) == losses(uninterrupted)
    for run in (uninterrupted, resumed):
        assert scaling_state(run.model).recipe == recipe
        assert "lm_head" not in scaling_state(run.model).module_names
    assert same(uninterrupted.model, resumed.model)


# --- two processes ---

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from pathlib import Path
from lightning_fp8 import scaling_state
from lightning_fp8.integrations import Fp8Callback
from lit import LONG_WINDOW
from trainer_runs import llama, trainer
from torch.distributed.fsdp import fully_shard

path, rank = Path({path!r}), int(os.environ["RANK"])
model = llama()
run = trainer(path, model, Fp8Callback(LONG_WINDOW), max_steps=3, save_strategy="steps", save_steps=2)
run.train()
wrapped = type(run.model_wrapped).__name__
second = llama(8)
resumed = trainer(path, second, Fp8Callback(LONG_WINDOW), max_steps=3)
resumed.train(resume_from_checkpoint=str(path / "checkpoint-2"))
third, callback = llama(), Fp8Callback()
callback.on_init_end(run.args, run.state, run.control, model=third)
fully_shard(third)
run.state.global_step = 0
callback.on_train_begin(run.args, run.state, run.control, model=third)
found = {{
    "wrapped": wrapped,
    "scales": scaling_state(model).state_dict(),
    "weights": model.state_dict(),
    "resumed": [scaling_state(second).state_dict(), second.state_dict()],
    "without copies": sum(
        not rows.weight_cast.is_kept for layer in third.modules() for rows in getattr(layer, "fp8", {{}}).values()
    ),
}}
torch.save(found, path / f"rank{{rank}}.pt")
"""


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    run_script(SCRIPT.format(tests=str(ROOT / "tests" / "support"), path=str(tmp_path)), tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["wrapped"] == second["wrapped"] == "DistributedDataParallel"
    assert first["without copies"] == len(scaling_state(convert(llama())).module_names)
    for name, entry in first["scales"].items():
        assert entry["amax_history"].count_nonzero() == 3
        for values in (second["scales"][name], *(one["resumed"][0][name] for one in (first, second))):
            assert all(torch.equal(entry[field], values[field]) for field in entry), name
    for weights in (second["weights"], first["resumed"][1], second["resumed"][1]):
        assert all(torch.equal(weight, weights[name]) for name, weight in first["weights"].items())


# --- errors ---


def test_a_model_converted_by_hand_stays_as_it_is(tmp_path: Path) -> None:
    model = convert(llama(), DelayedScaling(margin=2), ignore_modules=["lm_head"])
    state = scaling_state(model)
    assert warned("", trainer(tmp_path, model, Fp8Callback()).train) == []
    assert scaling_state(model) is state
    assert "lm_head" not in state.module_names
    assert state.updates == 6
    with pytest.raises(ValueError, match=r"already converted with DelayedScaling\(margin=2.*but this run has"):
        trainer(tmp_path, model, Fp8Callback(DelayedScaling(margin=1)))


@pytest.mark.parametrize("twice", [lambda: [Fp8Callback(), Fp8Callback()], lambda: [Fp8Callback(), ByHand()]])
def test_two_updates_per_step_are_refused(tmp_path: Path, twice: Callable[[], list[Any]]) -> None:
    run = trainer(tmp_path, llama(), *twice())
    with pytest.raises(RuntimeError, match=r"updated by something else too.*Remove the second `Fp8Callback`"):
        run.train()


class ByHand(transformers.TrainerCallback):
    """Updates the scales as well."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        scaling_state(model).update()


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to convert in Embedding"):
        trainer(tmp_path, nn.Embedding(4, 4), Fp8Callback())
    with pytest.raises(ValueError, match="pattern 'head' matches no module"):
        trainer(tmp_path, llama(), Fp8Callback(ignore_modules=["head"]))
    for attribute, value, message in (
        ("mixed_precision", "fp8", 'accelerate\'s own `mixed_precision="fp8"` would convert the layers a second time'),
        ("deepspeed_plugin", object(), "does not run under DeepSpeed"),
        ("_n_gpu", 2, "nn.DataParallel`, which the Trainer uses for 2 GPUs in one process"),
    ):
        run = trainer(tmp_path, llama())
        setattr(run.args, attribute, value)
        with pytest.raises(ValueError, match=message):
            Fp8Callback().on_init_end(run.args, run.state, run.control, model=run.model)


def test_without_transformers_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["lightning_fp8.integrations.transformers_trainer"]
    with monkeypatch.context() as changed, warnings.catch_warnings():
        changed.setitem(sys.modules, "transformers.trainer_callback", None)
        with pytest.raises(ImportError, match=r"pip install 'transformers\[torch\]'"):
            importlib.reload(module)
        changed.undo()
        changed.delattr(transformers.TrainerCallback, "on_pre_optimizer_step")
        with pytest.raises(ImportError, match="pip install --upgrade"):
            importlib.reload(module)
