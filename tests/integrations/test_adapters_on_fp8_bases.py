"""LoRA and DoRA by PEFT on bases read from FP8 checkpoints, in each kind of loop, against plain dequantized bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
from exported import quantization, tensors_of
from fp8_bases import KINDS, llama, write_base
from frozen_models import frozen_weights
from lightning.fabric import Fabric
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_runs import trainer

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Precision,
    MXScaling,
    convert,
    export,
    load_exported,
    scaling_state,
)
from lightning_fp8.integrations import Fp8Callback
from lightning_fp8.scalings.recipe import Recipe

RECIPES = {"delayed": DelayedScaling(), "current": CurrentScaling(), "block": BlockScaling(), "mx": MXScaling()}
STEPS, RATE = 24, 4e-3
# sequences that can be learned: each token follows from the one before it
TOKENS = (torch.arange(16) * 7 + torch.arange(4 * STEPS)[:, None] * 5) % 96
ADAPTED = ["q_proj", "v_proj", "gate_proj", "down_proj"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """By kind, a checkpoint and the values of its weights."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    return {kind: (folder, write_base(folder, kind)) for kind, folder in folders.items()}


def adapted(model: Any, **config: Any) -> Any:
    """With adapters in bf16, always the same."""
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=4, target_modules=ADAPTED, init_lora_weights=False, **config)
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()


def on_base(folder: Path, recipe: Recipe, **config: Any) -> Any:
    model = load_exported(convert(llama(), recipe, ignore_modules=["lm_head"]), folder, frozen=True)
    assert len(frozen_weights(model)) == 14
    return adapted(model, **config)


def on_values(values: dict[str, Tensor], **config: Any) -> Any:
    """The same base as a plain model of ``code * scale``."""
    model = llama()
    model.load_state_dict(values)
    return adapted(model.requires_grad_(False), **config)


def gradients(model: Any, update: bool = False) -> dict[str, Tensor]:
    """Of the adapters and of the input, in one step."""
    x = model.get_input_embeddings()(TOKENS[:4]).detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs_embeds=x, labels=TOKENS[:4]).loss
    loss.backward()
    if update:
        scaling_state(model).update()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {**found, "input": x.grad.float()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor], of: str) -> float:
    assert one.keys() == other.keys()
    names = [name for name in other if of in name]
    squares = [((one[name] - other[name]).square().sum(), other[name].square().sum()) for name in names]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)


# each kind with a recipe like it and with another one
PAIRS = [
    ("tensor", "delayed"), ("tensor", "block"), ("row", "current"), ("row", "mx"), ("block", "block"),
    ("block", "delayed"), ("group", "mx"), ("group", "current"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "recipe", "dora"), [(*pair, at in (1, 2, 4, 7)) for at, pair in enumerate(PAIRS)])
def test_gradients_are_those_of_a_dequantized_base(kind: str, recipe: str, dora: bool, bases: Any) -> None:
    """The error is FP8's own: below that of masters with these values, which a recipe rounds once more."""
    folder, values = bases[kind]
    expected = gradients(on_values(values, use_dora=dora))
    masters = on_values(values, use_dora=dora)
    convert(masters, RECIPES[recipe], ignore_modules=["*lm_head", "*lora_*"])
    found = on_base(folder, RECIPES[recipe], use_dora=dora)
    assert {p.dtype for p in found.parameters() if p.requires_grad} == {torch.bfloat16}
    # the second step uses the scales of the first, if the recipe has a history
    for model in (masters, found):
        gradients(model, update=True)
    errors = [(gradients(model, update=True), name) for model, name in ((masters, "masters"), (found, "found"))]
    for of in ("lora_A", "lora_B", "input", "magnitude") if dora else ("lora_A", "lora_B", "input"):
        of_masters, of_found = (distance(one, expected, of) for one, _ in errors)
        assert 0 < of_found < max(of_masters, 0.01)
        assert of_found < 0.25


class Tuning(pl.LightningModule):
    def __init__(self, model: Any, rows: int = len(TOKENS)) -> None:
        super().__init__()
        self.model, self.rows, self.losses = model, rows, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=RATE)

    def train_dataloader(self) -> Any:
        return DataLoader(TOKENS[: self.rows], batch_size=4)


def by_hand(model: Any, folder: Path, steps: int = STEPS) -> list[float]:
    tuning, optimizer = Tuning(model), torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for batch in TOKENS.split(4)[:steps]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = tuning.training_step(batch, 0)
        loss.backward()
        if frozen_weights(model):
            scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
    return tuning.losses


def plugin(model: Any) -> Fp8Precision:
    return Fp8Precision(recipe=scaling_state(model).recipe, param_dtype="bfloat16")


def in_trainer(model: Any, folder: Path) -> list[float]:
    tuning = Tuning(model)
    fit(tuning, folder, plugin(model), STEPS)
    return tuning.losses


def fit(tuning: Tuning, folder: Path, precision: Fp8Precision, steps: int, **more: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = pl.Trainer(accelerator="cpu", plugins=precision, max_steps=steps, default_root_dir=folder, **quiet)
    run.fit(tuning, **more)
    return run


def in_fabric(model: Any, folder: Path) -> list[float]:
    tuning, fabric = Tuning(model), Fabric(accelerator="cpu", devices=1, plugins=plugin(model))
    run, optimizer = fabric.setup(tuning, tuning.configure_optimizers())
    run.mark_forward_method("training_step")
    for batch in TOKENS.split(4):
        fabric.backward(run.training_step(batch, 0))
        optimizer.step()
        optimizer.zero_grad()
    return tuning.losses


def in_transformers(model: Any, folder: Path) -> list[float]:
    rows = [{"input_ids": one, "labels": one} for one in TOKENS]
    options = {"max_steps": STEPS, "learning_rate": RATE, "weight_decay": 0.01}
    # in the order of the rows
    run = trainer(folder, model, Fp8Callback(), data=rows, train_sampling_strategy="sequential", **options)
    run.train()
    return [row["loss"] for row in run.state.log_history if "loss" in row]


LOOPS = {"by hand": by_hand, "Trainer": in_trainer, "Fabric": in_fabric, "transformers": in_transformers}
RUNS = [
    ("by hand", "row", "current"),
    ("Trainer", "group", "mx"),
    ("Fabric", "block", "delayed"),
    ("transformers", "tensor", "current"),
]


@pytest.fixture(scope="module")
def expected(bases: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return {kind: by_hand(on_values(bases[kind][1]), tmp_path_factory.mktemp("plain")) for kind in KINDS}


@pytest.mark.parametrize(("loop", "kind", "recipe"), RUNS)
def test_losses_are_those_on_a_dequantized_base(
    loop: str, kind: str, recipe: str, bases: Any, expected: dict[str, list[float]], tmp_path: Path
) -> None:
    model = on_base(bases[kind][0], RECIPES[recipe])
    before = {name: (w.payload.clone(), w.scale_inv.clone()) for name, w in frozen_weights(model).items()}
    losses = torch.tensor(LOOPS[loop](model, tmp_path))
    reference = torch.tensor(expected[kind])
    assert len(losses) == STEPS
    assert losses[-5:].mean() < 0.6 * losses[0]
    # a single step of such a small model differs by up to 1.8% in either direction
    assert losses.mean() == pytest.approx(reference.mean().item(), rel=0.005)
    assert ((losses - reference).abs() < 0.025 * reference).all()
    for name, weight in frozen_weights(model).items():
        assert torch.equal(weight.payload, before[name][0])
        assert torch.equal(weight.scale_inv, before[name][1])


def test_a_resumed_run_is_the_uninterrupted_one(bases: Any, tmp_path: Path) -> None:
    """A checkpoint has the values of the base in bf16: loaded into another base, its codes and scales come back."""
    folder, recipe = bases["group"][0], RECIPES["mx"]
    # one batch: where an epoch goes on is Lightning's matter
    whole = Tuning(on_base(folder, recipe), 4)
    fit(whole, tmp_path, plugin(whole.model), 6)
    half = Tuning(on_base(folder, recipe), 4)
    fit(half, tmp_path, plugin(half.model), 3).save_checkpoint(tmp_path / "half.ckpt")
    resumed = Tuning(on_base(folder, recipe), 4)
    fit(resumed, tmp_path, plugin(resumed.model), 6, ckpt_path=tmp_path / "half.ckpt")
    assert half.losses + resumed.losses == whole.losses
    assert len(resumed.losses) == 3
    for name, weight in frozen_weights(whole).items():
        assert torch.equal(weight.payload, frozen_weights(resumed)[name].payload)
        assert torch.equal(weight.scale_inv, frozen_weights(resumed)[name].scale_inv)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other)


def test_a_resumed_run_of_transformers_is_the_uninterrupted_one(bases: Any, tmp_path: Path) -> None:
    """Its checkpoints have the adapters and the scales, and not the base.

    PEFT loads adapters in fp32 when transformers resumes, so a run whose adapters are in bf16 does not resume exactly,
    with any base.
    """
    rows = [{"input_ids": one, "labels": one} for one in TOKENS[:12]]
    saved = {"save_strategy": "steps", "save_steps": 3}
    options = {**saved, "max_steps": 6, "learning_rate": RATE, "train_sampling_strategy": "sequential"}

    def run() -> Any:
        model = on_base(bases["row"][0], DelayedScaling())
        for parameter in model.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
        return trainer(tmp_path, model, Fp8Callback(), data=rows, **options)

    whole, resumed = run(), run()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    found = [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (whole, resumed)]
    assert len(found[0]) == 6
    assert found[0] == found[1]
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one.data.float(), other.data.float())


@pytest.mark.parametrize("kind", ["row", "group"])
def test_adapters_are_saved_alone_and_a_merge_says_what_it_rounds(kind: str, bases: Any, tmp_path: Path) -> None:
    folder, values = bases[kind]
    model = on_base(folder, CurrentScaling())
    by_hand(model, tmp_path, 2)
    model.save_pretrained(tmp_path / "adapters")
    assert sorted(file.name for file in (tmp_path / "adapters").glob("*.safetensors")) == ["adapter_model.safetensors"]
    with safe_open(tmp_path / "adapters/adapter_model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(saved) == 2 * 2 * len(ADAPTED)
    assert {one.dtype for one in saved.values()} == {torch.bfloat16}
    again = load_exported(convert(llama(), CurrentScaling(), ignore_modules=["lm_head"]), folder, frozen=True)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapters", autocast_adapter_dtype=False)
    ids = TOKENS[:2]
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    # without the adapters, the base is what it was
    base = {name: weight.dequantized().clone() for name, weight in frozen_weights(model).items()}
    deltas = {
        f"{path}.base_layer.weight": layer.get_delta_weight("default").detach()
        for path, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    with pytest.raises(ValueError, match=r"these tensors: .*lora_A.*call `merge_and_unload\(\)` or `unload\(\)`"):
        export(model.get_base_model(), tmp_path / "out")
    merged = model.merge_and_unload()
    for name, delta in deltas.items():
        weight = merged.get_parameter(name.removeprefix("base_model.model.").replace(".base_layer", ""))
        assert not weight.is_fp8
        assert torch.equal(weight.dequantized(), base[name] + delta)
    with pytest.warns(UserWarning, match=r"export: 8 tensors have changed since .*relative RMS error 2\.\d+%"):
        export(merged, tmp_path / "merged")
    convert(merged, ignore_modules=["lm_head"])
    with pytest.warns(
        UserWarning, match=r"state_dict: 8 frozen weights are rounded to FP8.* relative RMS error 2\.\d+%"
    ):
        state = merged.state_dict()
    assert all(
        torch.equal(state[name].float(), value.bfloat16().float()) for name, value in values.items() if "k_proj" in name
    )


def test_an_unloaded_base_is_written_back(bases: Any, tmp_path: Path) -> None:
    folder, _ = bases["block"]
    model = on_base(folder, DelayedScaling())
    by_hand(model, tmp_path, 2)
    export(model.unload(), tmp_path / "out")
    paths = folder, tmp_path / "out"
    read, written = ({name: one.float() for name, one in tensors_of(path).items()} for path in paths)
    assert read.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in read.items())
    assert quantization(tmp_path / "out") == quantization(folder)
