"""The scripts of ``examples/`` on little data, run as by a user: they train in FP8 to bf16's loss.

An untrained model has a loss of ``ln(256)`` on the bytes of a text, and of ``ln(10)`` on the ten digits.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from example_scripts import EXAMPLES, Runner, fp8_layers_in, loss_in
from processes import run_script
from safetensors import safe_open

from lightning_fp8 import describe

# a CPU without bf16 instructions takes ten times as long for bf16 products as for fp32 ones
BASELINE = "bf16-mixed" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "32-true"
NO_CONTEXT, NO_DIGIT = math.log(256), math.log(10)

# linear layers, counted by hand: per block of the GPTs and of the ViT, and per block of Llama; plus a head
BLOCKS_AND_HEAD = 2 * 4 + 1
LLAMA = 2 * 7 + 1


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Runner:
    monkeypatch.chdir(tmp_path)
    return Runner(tmp_path, capsys, caplog)


@pytest.mark.parametrize(
    ("script", "arguments", "most", "fp8_layers"),
    [
        ("fabric_loop", ("--epochs", "1"), NO_CONTEXT - 1.5, BLOCKS_AND_HEAD),
        ("pretrain_gpt", ("--epochs", "2"), NO_CONTEXT - 2, BLOCKS_AND_HEAD),
        # the embedding of 2 x 2 pixels and the head of 10 classes have fewer than 16 features
        ("train_vit", ("--epochs", "1"), NO_DIGIT - 0.4, BLOCKS_AND_HEAD - 1),
        ("finetune_transformers", ("--epochs", "1", "--precision", "fp8-current"), NO_CONTEXT - 1.5, LLAMA),
    ],
)
def test_it_trains_in_fp8(script: str, arguments: tuple[str, ...], most: float, fp8_layers: int, run: Runner) -> None:
    found = run(script, *arguments)
    assert found.loss < most
    assert found.fp8_layers == fp8_layers


def test_plain_torch_as_in_bf16(run: Runner) -> None:
    found = run("torch_loop", "--steps", "60")
    assert found.loss < NO_CONTEXT - 2.5
    assert found.fp8_layers == 3
    baseline = run("torch_loop", "--steps", "60", "--precision", BASELINE)
    assert found.loss == pytest.approx(baseline.loss, rel=0.04)
    assert baseline.fp8_layers == 0


def test_lora_on_a_base_in_fp8(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[Any] = []
    fit = pl.Trainer.fit

    def keep(trainer: pl.Trainer, model: Any, *loaders: Any) -> None:
        fitted.append(model)
        fit(trainer, model, *loaders)

    monkeypatch.setattr(pl.Trainer, "fit", keep)
    found = run("finetune_transformers", "--lora", "--epochs", "1")
    assert found.loss < NO_CONTEXT - 0.5
    assert found.fp8_layers == LLAMA
    assert sum("weight in FP8 only" in str(row) for row in describe(fitted[0])) == LLAMA
    with safe_open("runs/adapters/adapter_model.safetensors", "pt") as file:
        # two matrices for each layer except the head
        assert sum("lora_" in key for key in file.keys()) == len(file.keys()) == 2 * (LLAMA - 1)  # noqa: SIM118


def test_lora_on_a_checkpoint_in_fp8(run: Runner) -> None:
    run.cut_text(16_000)
    found = run("fp8_checkpoint", "--epochs", "1")
    assert found.loss < NO_CONTEXT - 0.7
    with safe_open("runs/fp8_checkpoint/model.safetensors", "pt") as file:
        scales = [key for key in file.keys() if key.endswith("weight_scale_inv")]  # noqa: SIM118
    assert len(scales) == LLAMA - 1
    baseline = run("fp8_checkpoint", "--epochs", "1", "--precision", BASELINE)
    assert found.loss == pytest.approx(baseline.loss, rel=0.03)
    with safe_open("runs/fp8_adapters/adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == 2 * (LLAMA - 1)


def test_a_pretrained_model_with_its_tokenizer(run: Runner) -> None:
    """Loaded from a folder, as from the hub."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(run.text)], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("pretrained")
    config = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained("pretrained")
    found = run("finetune_transformers", "--model", "pretrained", "--epochs", "1", "--out", "out")
    assert found.loss < math.log(300) - 0.2
    assert found.fp8_layers == 5
    transformers.AutoModelForCausalLM.from_pretrained("out")


@pytest.mark.parametrize(
    ("script", "option", "steps", "checkpoint"),
    [
        ("pretrain_gpt", "--epochs", (1, 2), "runs/pretrain_gpt/version_{}/checkpoints/last.ckpt"),
        ("fabric_loop", "--epochs", (1, 2), "runs/fabric_loop.ckpt"),
        ("torch_loop", "--steps", (4, 8), "runs/torch_loop.pt"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    script: str, option: str, steps: tuple[int, int], checkpoint: str, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args, **kw: (taken.append(0), step(*args, **kw))[1])
    run.cut_text(8_000)
    half, whole = map(str, steps)
    run(script, option, whole)
    expected = torch.load(checkpoint.format(0), weights_only=True)
    in_a_row = len(taken)
    run(script, option, half)
    taken.clear()
    run(script, option, whole, "--resume", checkpoint.format(1))
    assert len(taken) == in_a_row // 2
    found = torch.load(checkpoint.format(2), weights_only=True)
    of_weights, of_scales = {"model", "state_dict", "optimizer", "optimizer_states"}, {"scaling", "Fp8Precision"}
    compared = set(expected) & {*of_weights, *of_scales, "model_fp8_scales"}
    assert len(compared) == 3, expected.keys()
    for key in compared:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)


# in each process, as torchrun starts it
SHARDED = """
import contextlib, logging, os, pathlib, runpy, sys
folder, script, *arguments = sys.argv[1:]
os.chdir(folder)
logging.getLogger("lightning.pytorch").addHandler(logging.FileHandler(f"log{os.environ['RANK']}"))
with open(f"out{os.environ['RANK']}", "w") as out, contextlib.redirect_stdout(out):
    runpy.run_path(script)["main"](arguments)
"""


@pytest.mark.slow
def test_fsdp2_in_two_processes(run: Runner, tmp_path: Path) -> None:
    arguments = ("--accelerator", "cpu", "--text", str(run.text), "--epochs", "1", "--fp8-all-gather")
    run_script(SHARDED, tmp_path, str(tmp_path), str(EXAMPLES / "fsdp2.py"), *arguments)
    printed = (tmp_path / "out0").read_text()
    assert loss_in(printed) < NO_CONTEXT - 1.5
    assert "validation loss" not in (tmp_path / "out1").read_text()
    log = (tmp_path / "log0").read_text()
    assert fp8_layers_in(log) == BLOCKS_AND_HEAD
    assert log.count("9 layers are gathered in FP8") == 1
    # each process wrote its shards
    assert {file.name for file in tmp_path.rglob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
