"""Adapters of the real ``peft``: the layers that they adapt run in FP8, and all else works as on a plain model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import ORDERS, adapted, adapter_layers, base, base_layers, step
from counted_casts import count_input_casts
from pairwise import pairwise
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_fp8 import (
    Fp8Precision,
    convert,
    describe,
    scaling_state,
    unconvert,
)
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.conversion.rows import coverage
from lightning_fp8.modules.base import Fp8Module

CONVERTED = ORDERS[:2]
KINDS = {"lora": {}, "dora": {"use_dora": True}}
every_order = pytest.mark.parametrize("order", CONVERTED)
# each value with each other one
every_case = pytest.mark.parametrize(("name", "kind", "order"), pairwise(["llama", "gpt2"], list(KINDS), CONVERTED))


def is_fp8(layers: list[nn.Module]) -> set[bool]:
    return {isinstance(layer, Fp8Module) for layer in layers}


# --- which layers ---


@pytest.mark.parametrize(("name", "order"), [("llama", "converted first"), ("gpt2", "adapted first")])
def test_adapters_stay_out(name: str, order: str) -> None:
    model, _ = adapted(name, order)
    assert (is_fp8(base_layers(model)), is_fp8(adapter_layers(model))) == ({True}, {False})
    rows = {row.path: row for row in describe(model)}
    small = {path for path, layer in model.named_modules() if layer in adapter_layers(model)}
    assert {path for path, row in rows.items() if not row.converted} == small
    assert {rows[path].reason for path in small} == {"belongs to an adapter of PEFT, which stays as it is"}
    total = sum(p.numel() for p in model.parameters())
    share = sum(p.numel() for layer in model.modules() if isinstance(layer, Fp8Module) for p in layer.parameters())
    layers = len(rows) - len(small)
    said = coverage(conversion_plan(model))
    assert f"{layers} of {layers} linear layers run in FP8, with {share / total:.0%} of the parameters" in said
    assert f"{len(small)} layers of adapters" in said
    Fp8Precision(min_features=1).convert_module(model)
    assert (is_fp8(base_layers(model)), is_fp8(adapter_layers(model))) == ({True}, {False})
    unconvert(model)
    assert is_fp8(list(model.modules())) == {False}


# --- the numbers ---


@pytest.mark.parametrize(("name", "kind"), [("llama", "dora"), ("gpt2", "lora")])
def test_both_orders_train_alike(name: str, kind: str) -> None:
    models = [adapted(name, order, **KINDS[kind]) for order in CONVERTED]
    runs = [[step(model, batch) for _ in range(2)] for model, batch in models]
    for one, other in zip(*runs, strict=True):
        assert all(map(torch.equal, one, other))
    (one, _), (other, _) = models
    # the path at conversion time
    assert scaling_state(one).module_names != scaling_state(other).module_names
    assert torch.equal(scaling_state(one).scale, scaling_state(other).scale)
    assert torch.equal(scaling_state(one).amax_history, scaling_state(other).amax_history)
    scales = scaling_state(one).scale.clone()
    assert scaling_state(convert(one)).module_names == scaling_state(other).module_names
    assert torch.equal(scaling_state(one).scale, scales)


@every_order
def test_the_input_of_adapted_layers_is_cast_once(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    casts = count_input_casts(monkeypatch)
    model, batch = adapted("llama", order)
    step(model, batch)
    names = [name.rpartition(".layers.")[2] for name in casts]
    parts = [name.replace(".base_layer", "") for name in names if name.startswith("0.") and name.endswith(".input")]
    # of seven layers: k and v share the input cast of q, and up that of gate
    assert parts == [
        f"0.{part}.input" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    assert set(casts.values()) == {1}
    reasons = {row.path.rpartition(".layers.")[2]: row.reason for row in describe(model)}
    assert "shares its input with" in reasons["0.self_attn.v_proj.base_layer"]
    assert (
        "feed-forward not fused: a linear layer is not converted, has an adapter"
        in reasons["0.mlp.gate_proj.base_layer"]
    )


def test_an_adapter_that_changes_the_input_shares_none() -> None:
    model, _ = base("llama")
    kinds = {"target_modules": ["q_proj", "v_proj"], "feedforward_modules": ["q_proj", "v_proj"]}
    convert(get_peft_model(model, IA3Config(**kinds)))
    assert {row.path.rpartition(".")[2] for row in describe(model) if "shares its input" in row.reason} == {"up_proj"}


# --- what PEFT does to a model ---


@every_case
def test_merged_weights_are_those_of_a_plain_model(name: str, kind: str, order: str) -> None:
    model, batch = adapted(name, order, **KINDS[kind])
    plain, _ = adapted(name, "plain", **KINDS[kind])
    step(model, batch)
    merged, expected = (one.merge_and_unload(safe_merge=kind == "dora") for one in (model, plain))
    found, wanted = merged.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    before = base(name)[0].state_dict()
    assert any(not torch.equal(found[key], before[key]) for key in wanted)
    # the whole model is in FP8 again, under its original names, and with its previous scales
    scales = scaling_state(merged).scale.clone()
    convert(merged)
    assert scaling_state(merged).module_names == scaling_state(convert(expected)).module_names
    assert torch.equal(scaling_state(merged).scale, scales)
    assert [row.reason for row in describe(merged)] == [row.reason for row in describe(expected)]
    with torch.no_grad():
        assert merged(**batch).loss.isfinite()


@pytest.mark.parametrize(
    ("name", "kind", "order"), [("llama", "dora", "adapted first"), ("gpt2", "lora", "converted first")]
)
def test_training_after_a_merge_sees_the_merged_weights(name: str, kind: str, order: str) -> None:
    model, batch = adapted(name, order, **KINDS[kind])
    plain, _ = adapted(name, "plain", **KINDS[kind])
    step(model, batch)
    for change in ("merge_adapter", "unmerge_adapter"):
        # PEFT merges through `.data`, which leaves no trace: the switch drops the casts of frozen weights
        for one in (model, plain):
            getattr(one, change)()
            one.eval().train()
        loss = model(**batch).loss
        state = scaling_state(model)
        layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, Fp8Module)}
        for path, layer in layers.items():
            row = state.row_of(layer.fp8[""].module, "weight")
            assert state.scale[row] == torch.tensor(448.0) / plain.get_submodule(path).weight.abs().max()
        # a copy makes its own casts
        assert torch.equal(loss, copy.deepcopy(model)(**batch).loss)
        assert abs(loss - plain(**batch).loss) < 0.05 * loss


@every_case
def test_saved_adapters_are_those_of_a_plain_model(name: str, kind: str, order: str, tmp_path: Path) -> None:
    made = {order: adapted(name, order, **KINDS[kind])[0] for order in (order, "plain")}
    for folder, model in made.items():
        model.save_pretrained(tmp_path / folder)
    found, wanted = (load_file(tmp_path / one / "adapter_model.safetensors") for one in (order, "plain"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert len({(tmp_path / one / "adapter_config.json").read_text() for one in made}) == 1
    # into a converted model
    model, batch = base(name)
    loaded = PeftModel.from_pretrained(convert(model), tmp_path / "plain").eval()
    assert is_fp8(adapter_layers(loaded)) == {False}
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, made[order].eval()(**batch).logits)


def test_copies_of_whole_layers_join_by_themselves() -> None:
    model, batch = adapted("llama", "converted first", modules_to_save=["lm_head"])
    step(model, batch)
    assert sum("lm_head" in name for name in scaling_state(model).module_names) == 2
    heads = [row for row in describe(model) if "lm_head" in row.path]
    assert [row.converted for row in heads] == [True, True]


def test_attention_of_torch() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    results = []
    x = torch.randn(2, 5, 32)
    for order in ORDERS:
        torch.manual_seed(3)
        model: Any = Block()
        if order == "converted first":
            convert(model)
        torch.manual_seed(4)
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["attention"], init_lora_weights=False))  # type: ignore[arg-type]
        if order == "adapted first":
            convert(model)
            assert {row.path for row in describe(model) if row.converted} >= {
                "base_model.model.attention.base_layer",
                "base_model.model.attention.base_layer.out_proj.base_layer",
            }
        y = model(x)
        y.sum().backward()
        results.append([y, *(p.grad for p in model.parameters() if p.grad is not None)])
    first, second, plain = results
    assert all(map(torch.equal, first, second))
    assert all((one - other).norm() < 0.15 * other.norm() for one, other in zip(first, plain, strict=True))
