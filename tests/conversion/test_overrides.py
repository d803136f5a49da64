"""Precisions of products by layer: which ones ``overrides`` and ``bf16_blocks`` give, and what they refuse."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lit import Regression, loader, make_trainer, seeded
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import (
    CurrentScaling,
    DelayedScaling,
    Fp8FabricPrecision,
    Fp8Precision,
    QuantizationProbe,
    ScaleFactorLogger,
    ScaleWatchdog,
    convert,
    describe,
    export,
    load_exported,
    scaling_state,
    unconvert,
)
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.ops.formats import PRODUCTS


class Blocks(nn.Module):
    """Four blocks, in each a list of experts that is longer; and a shorter list."""

    def __init__(self, blocks: int = 4, others: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.others = nn.ModuleList(nn.Linear(32, 32) for _ in range(others))
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.others):
            x = x + block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + sum(expert(x) for expert in self.experts)


def products(model: nn.Module) -> dict[str, str]:
    """Of each layer with any in bf16, their first letters; of one that is plain, ``"fdw"``."""
    found = {}
    for path, layer in model.named_modules():
        in_bf16 = layer.in_bf16 if isinstance(layer, Fp8Module) else PRODUCTS
        if isinstance(layer, nn.Linear) and in_bf16:
            found[path] = "".join(product[0] for product in in_bf16)
    return found


def experts_of(*blocks: int) -> dict[str, str]:
    return {f"blocks.{block}.experts.{at}": "fdw" for block in blocks for at in range(5)}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {}),
        ({"*.down": {"wgrad": "bf16"}}, dict.fromkeys([f"blocks.{at}.down" for at in range(4)], "w")),
        # everything inside of what a pattern matches
        ({"blocks.1": "bf16"}, {"blocks.1.up": "fdw", "blocks.1.down": "fdw", **experts_of(1)}),
        # the later one wins, product by product
        (
            {"blocks.1": {"fprop": "bf16", "wgrad": "bf16"}, "blocks.1.*": {"fprop": "fp8", "dgrad": "bf16"}},
            dict.fromkeys(("blocks.1.up", "blocks.1.down", *experts_of(1)), "dw"),
        ),
        ({"*": "bf16", "head": "fp8", "*.up": {"dgrad": "fp8"}, "blocks": "fp8", "others": "fp8"}, {}),
        ({"*.up": {"wgrad": "bf16"}, "blocks.*": "bf16", "blocks.[123].*": "fp8"}, {
            "blocks.0.up": "fdw", "blocks.0.down": "fdw", **experts_of(0),
        }),
    ],
)  # fmt: skip
def test_by_pattern(overrides: Any, expected: dict[str, str]) -> None:
    assert products(convert(Blocks(), overrides=overrides)) == expected


def test_an_override_is_of_the_recipe_too() -> None:
    model = convert(Blocks(), CurrentScaling(wgrad="bf16"), overrides={"head": {"wgrad": "fp8", "fprop": "bf16"}})
    found = products(model)
    assert found.pop("head") == "f"
    assert set(found.values()) == {"w"}
    # and one in bf16 leaves the layers that an override puts into FP8
    few = convert(Blocks(), DelayedScaling(fprop="bf16", dgrad="bf16", wgrad="bf16"), overrides={"head": "fp8"})
    assert scaling_state(few).module_names == ("head",)


@pytest.mark.parametrize(("ends", "chosen"), [((1, 0), (0,)), ((1, 2), (0, 2, 3)), ([0, 1], (3,)), ((0, 0), ())])
def test_blocks_of_the_longest_list(ends: Any, chosen: tuple[int, ...]) -> None:
    model = convert(Blocks(), bf16_blocks=ends)
    expected = {f"blocks.{at}.{name}": "fdw" for at in chosen for name in ("up", "down")}
    assert products(model) == {**expected, **experts_of(*chosen)}
    plain = [row.reason for row in describe(model) if row.path == "blocks.3.up" and not row.converted]
    asked = tuple(ends)
    said = f"all three products in bf16 by `bf16_blocks={asked}`, block 3 of 4 in 'blocks'"
    assert plain == ([said] if 3 in chosen else [])


def test_an_override_wins_over_blocks() -> None:
    model = convert(Blocks(), bf16_blocks=(1, 0), overrides={"blocks.0.down": {"wgrad": "fp8"}, "*.up": "fp8"})
    assert products(model) == {"blocks.0.down": "fd", **experts_of(0)}


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Blocks, {"overrides": {"blok.*": "bf16"}}, r"`overrides` pattern 'blok\.\*' matches no module of Blocks"),
        (Blocks, {"overrides": {"head": "fp16"}}, r"'head' must have 'fp8' or 'bf16'.*got 'fp16'"),
        (Blocks, {"overrides": {"head": {"wgrad": 16}}}, r"'head' must have 'fp8' or 'bf16'.*got \{'wgrad': 16\}"),
        (Blocks, {"overrides": {"head": {"wgrd": "bf16"}}}, r"'fprop', 'dgrad', 'wgrad'\. Did you mean 'wgrad'\?"),
        (Blocks, {"bf16_blocks": (1,)}, r"`bf16_blocks` must be two integers of at least 0.*got \(1,\)"),
        (Blocks, {"bf16_blocks": (-1, 0)}, r"must be two integers of at least 0.*got \(-1, 0\)"),
        (Blocks, {"bf16_blocks": (3, 2)}, r"`bf16_blocks=\(3, 2\)`: the longest.*'blocks', has only 4 blocks"),
        (small_mlp, {"bf16_blocks": (1, 1)}, r"Sequential has no `nn.ModuleList` of blocks\. Choose.*`overrides`"),
        (lambda: Blocks(2, 2), {"bf16_blocks": (1, 1)}, r"2 have 2 blocks: 'blocks', 'others'\. Choose.*`overrides`"),
        (Blocks, {"overrides": {"*": "bf16"}}, r"nothing to convert in Blocks.*\n.*all three products in bf16"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(make: Any, arguments: Any, message: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        convert(model, **arguments)
    assert not any(isinstance(layer, Fp8Module) for layer in model.modules())


@pytest.mark.parametrize("overrides", ["blocks.0", ["blocks.0"], {0: "bf16"}])
def test_patterns_are_keys_of_a_mapping(overrides: Any) -> None:
    with pytest.raises(TypeError, match="`overrides` must be a"):
        Fp8Precision(overrides=overrides)


def test_a_layer_is_described_with_its_products() -> None:
    model = Blocks(1, 1)
    arguments: Any = {"overrides": {"blocks.0.down": {"fprop": "bf16", "wgrad": "bf16"}, "head": "bf16"}}
    before = {row.path: row.reason for row in describe(model, **arguments)}
    assert before["blocks.0.down"] == "not converted yet: call `convert`; then fprop and wgrad in bf16"
    convert(model, **arguments)
    after = {row.path: row.reason for row in describe(model)}
    assert after["blocks.0.down"] == "converted, 48 -> 32; fprop and wgrad in bf16"
    assert after["blocks.0.up"] == "converted, 32 -> 48"
    assert after["head"] == before["head"] == "all three products in bf16 by `overrides`, 'head'"
    assert [row.path for row in describe(model) if not row.converted] == ["head"]
    # nothing else changes them, nor does a part of the model for which the patterns mean something else
    convert(model, gemm="cublaslt")
    convert(model.blocks[0])
    assert products(model) == {"blocks.0.down": "fw", "head": "fdw"}
    assert copy.deepcopy(model).blocks[0].down.in_bf16 == ("fprop", "wgrad")
    # one of the two arguments replaces both
    convert(model, bf16_blocks=(0, 0))
    assert products(model) == {}
    unconvert(model)
    assert not any(isinstance(layer, Fp8Module) for layer in model.modules())


def test_other_products_keep_the_scales_and_no_cast() -> None:
    model = convert(small_mlp(), overrides={"0": {"fprop": "bf16", "wgrad": "bf16"}})
    x, state = torch.randn(8, 32, requires_grad=True), scaling_state(model)
    model(x).sum().backward()
    state.update()
    history = state.amax_history[:, 1:].clone()
    assert state.every_tensor_has_history
    convert(model, overrides={})
    assert scaling_state(model) is state
    assert torch.equal(state.amax_history[:, 1:], history)
    # the input of the first layer has none yet, and the host waits for it
    assert not state.every_tensor_has_history
    other = convert(small_mlp())
    other.load_state_dict(model.state_dict())
    scaling_state(other).load_state_dict(state.state_dict())
    assert torch.equal(model(x), other(x))


# in a Trainer


class Deep(Regression):
    """With blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Blocks(3, 2), nn.Linear(16, 4))


CONFIG = """
trainer:
  accelerator: cpu
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    class_path: lightning_fp8.Fp8Precision
    init_args:
      recipe: {precision: fp8-current, dgrad: bf16}
      overrides:
        "*.down": {wgrad: bf16}
        net.0.head: bf16
      bf16_blocks: [1, 0]
"""
EXPECTED = {
    **{f"net.0.blocks.{at}.down": "fdw" if at == 0 else "dw" for at in range(3)},
    **{f"net.0.blocks.{at}.up": "fdw" if at == 0 else "d" for at in range(3)},
    **{f"net.0.blocks.{at}.experts.{one}": "fdw" if at == 0 else "d" for at in range(3) for one in range(5)},
    **{"net.0.others.0": "d", "net.0.others.1": "d", "net.0.head": "fdw", "net.1": "d"},
}


def test_yaml_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fp8.cli import Fp8CLI

    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

    cli = Fp8CLI(Deep, Data, save_config_callback=None, args=["fit", "--config", "config.yaml"])
    assert products(cli.model) == EXPECTED
    assert scaling_state(cli.model).recipe == CurrentScaling(dgrad="bf16")


def test_a_plugin_keeps_them_for_another_front_end_and_a_converted_model() -> None:
    plugin = Fp8Precision(overrides={"*.down": {"wgrad": "bf16"}}, bf16_blocks=(1, 0))
    other = Fp8FabricPrecision(**plugin.settings)
    model = other.convert_module(Deep())
    # without the arguments a plugin leaves a converted model as it is
    found = products(model)
    assert found["net.0.blocks.1.down"] == "w"
    Fp8Precision().convert_module(model)
    assert products(model) == found
    Fp8Precision(overrides={}).convert_module(model)
    assert products(model) == {}


def test_training_resumes_exactly(tmp_path: Path) -> None:
    def trainer(**kwargs: Any) -> pl.Trainer:
        plugin = Fp8Precision(recipe={"wgrad": "bf16"}, overrides={"net.0": {"fprop": "bf16"}})
        return make_trainer(tmp_path, plugins=plugin, **kwargs)

    whole, first, again = seeded(), seeded(), seeded()
    trainer(max_epochs=2).fit(whole, loader())
    half = trainer()
    half.fit(first, loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer(max_epochs=2).fit(again, loader(), ckpt_path=str(tmp_path / "half.ckpt"))
    assert again.net[0].in_bf16 == ("fprop", "wgrad")
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), whole.parameters(), strict=True))


def test_callbacks_see_only_what_is_cast(tmp_path: Path) -> None:
    watchdog = ScaleWatchdog("raise", every_n_steps=2, stale_steps=4)
    probe, scales = QuantizationProbe(every_n_steps=2), ScaleFactorLogger(every_n_steps=2)
    plugin = Fp8Precision(
        recipe={"dgrad": "bf16", "wgrad": "bf16"}, overrides={"net.0": {"fprop": "bf16", "wgrad": "fp8"}}
    )
    logger = CSVLogger(tmp_path)
    model = seeded()
    make_trainer(
        tmp_path, plugins=plugin, callbacks=[watchdog, probe, scales], logger=logger, log_every_n_steps=1, max_epochs=3
    ).fit(model, loader())
    assert list(probe.sqnr_db) == ["net.2"]
    logged = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    tensors = {key.removeprefix("fp8/").removesuffix("/scale") for key in logged if key.endswith("/scale")}
    assert {name for name in tensors if name.startswith("net.")} == {
        *("net.0.input", "net.0.grad_output", "net.2.input", "net.2.weight")
    }


def test_export_writes_what_is_true(tmp_path: Path) -> None:
    model = convert(small_mlp(), overrides={"0": {"fprop": "bf16"}, "2": {"wgrad": "bf16"}})
    for seed in range(2):
        model(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))).sum().backward()
        scaling_state(model).update()
    model.eval()
    x = torch.randn(8, 32)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
        loaded = load_exported(small_mlp(), export(model, tmp_path / "model"))
        assert torch.equal(loaded(x), expected)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"]["ignored_layers"] == ["0"]


def test_frozen_weights_that_bf16_multiplies_keep_their_masters() -> None:
    model = small_mlp().requires_grad_(False)
    convert(model, frozen_weights="fp8", overrides={"0": {"dgrad": "bf16"}})
    rows = {row.path: row.reason for row in describe(model)}
    assert rows["0"].endswith("weight keeps its master: it is multiplied in bf16")
    assert rows["2"].endswith("weight in FP8 only")
    x = torch.randn(8, 32, requires_grad=True)
    model(x).sum().backward()
    # one that had none is given one
    with pytest.warns(UserWarning, match="They have masters again"):
        convert(model, overrides={"2": {"fprop": "bf16"}})
    assert type(model[2].weight) is nn.Parameter
    x.grad = None
    model(x).sum().backward()
    assert x.grad is not None
