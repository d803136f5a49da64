"""Files in which experts and projections are separate, for models that hold them together: transformers' own rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from experts import experts
from exported import refused
from fp8_checkpoints import HF_FP8, HF_PER_TENSOR, cast, compressed_tensors, model_of, published, quantized, write
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, Split, Transpose, WeightConverter, WeightRenaming

from lightning_fp8 import export, load_exported
from lightning_fp8.modules.fp8_parameter import Fp8Parameter

OF_EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


class MergedConfig(transformers.PretrainedConfig):
    model_type = "lightning_fp8_merged"


class Merged(transformers.PreTrainedModel):
    """A model with merged projections, and one that the files hold in one piece with another."""

    config_class = MergedConfig

    def __init__(self, config: MergedConfig) -> None:
        super().__init__(config)
        self.qkv_proj = nn.Linear(128, 128 + 256 + 256, bias=False)
        self.gate, self.up = nn.Linear(256, 384, bias=False), nn.Linear(256, 384, bias=False)
        wide = getattr(config, "wide", 256)
        self.wide, self.narrow = nn.Linear(128, wide, bias=False), nn.Linear(128, 384 - wide, bias=False)
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv_proj(x)


class Joined(Merged):
    """The same with the rules that transformers can apply to FP8 weights too."""


_JOIN = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
register_checkpoint_conversion_mapping(
    "Joined",
    [WeightRenaming("attention.", ""), WeightConverter([*_JOIN], "qkv_proj.weight", [Concatenate(dim=0)])],
)
register_checkpoint_conversion_mapping(
    "Merged",
    [
        WeightRenaming("attention.", ""),
        WeightConverter([*_JOIN], "qkv_proj.weight", [Concatenate(dim=0)]),
        WeightConverter("gate_up.weight", ["gate.weight", "up.weight"], [Chunk(dim=0)]),
        WeightConverter("both.weight", ["wide.weight", "narrow.weight"], [Split(dim=0)]),
    ],
)
FILE = {"attention.q_proj": (128, 128), "attention.k_proj": (256, 128), "attention.v_proj": (256, 128),
        "gate_up": (768, 256), "both": (384, 128)}  # fmt: skip


def in_file(kind: str, suffix: str = "_scale_inv", **shapes: Any) -> Any:
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape) / 8 for name, shape in {**FILE, **shapes}.items()}
    return quantized(tensors, kind, f"weight{suffix}")


def merged(wide: int = 256) -> nn.Module:
    config = MergedConfig()
    config.wide = wide
    return Merged(config).eval()


@pytest.mark.filterwarnings("ignore:.*rounded to FP8 a second time")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", ["row", "block"])
def test_projections_are_merged_and_split(kind: str, frozen: bool, tmp_path: Path) -> None:
    suffix = "_scale_inv" if kind == "block" else "_scale"
    written = in_file(kind, suffix)
    write(tmp_path, written.tensors, HF_FP8 if kind == "block" else compressed_tensors("channel", True), merged())
    model = load_exported(merged(), tmp_path, frozen=frozen)
    values = {name.removesuffix(".weight"): torch.from_numpy(value) for name, value in written.values.items()}
    expected = {
        "qkv_proj": torch.cat([values[f"attention.{of}_proj"] for of in "qkv"]),
        "gate": values["gate_up"][:384], "up": values["gate_up"][384:],
        "wide": values["both"][:256], "narrow": values["both"][256:],
    }  # fmt: skip
    for name, value in expected.items():
        weight = model.get_parameter(f"{name}.weight")
        assert isinstance(weight, Fp8Parameter) == frozen
        assert torch.equal(weight.dequantized() if frozen else weight, value)
    if frozen:
        # each piece goes back to where it was
        export(model, tmp_path / "written")
        again = load_file(tmp_path / "written" / "model.safetensors")
        assert again.keys() == written.tensors.keys()
        assert all(torch.equal(again[name].float(), one.float()) for name, one in written.tensors.items())
    if kind == "block":
        config = transformers.FineGrainedFP8Config(dequantize=True)
        theirs = Joined.from_pretrained(tmp_path, quantization_config=config)
        assert torch.equal(theirs.qkv_proj.weight, expected["qkv_proj"])


@pytest.mark.parametrize("kind", ["row", "block"])
def test_stacks_that_the_model_stores_as_k_by_n(kind: str, tmp_path: Path) -> None:
    """As in gpt-oss and Aria: kept in FP8 without rounding, where scales are not one for a row of the file."""
    stacks = {"gate_up_proj": (2, 300, 400), "down_proj": (2, 200, 300)}

    def aria() -> nn.Module:
        layer = nn.Module()
        layer.experts = experts("transposed")
        for name, shape in stacks.items():
            setattr(layer.experts, name, nn.Parameter(torch.randn(shape)))
        return layer

    plain, held, expected = aria(), {}, {}
    suffix = "_scale_inv" if kind == "block" else "_scale"
    for name in stacks:
        codes, scales, values = zip(*(cast(one.detach(), kind) for one in getattr(plain.experts, name)), strict=True)
        held[f"experts.{name}"], held[f"experts.{name}{suffix}"] = torch.stack(codes), torch.stack(scales)
        expected[name] = torch.stack([torch.from_numpy(value) for value in values])
    write(tmp_path, held, HF_FP8 if kind == "block" else compressed_tensors("channel", True))
    if kind == "row":
        refused(aria(), tmp_path, r"have scales from which no scales of the weight can be made", frozen=True)
        return
    model: Any = load_exported(aria(), tmp_path, frozen=True)
    for name, values in expected.items():
        weight = getattr(model.experts, name)
        assert isinstance(weight, Fp8Parameter)
        assert torch.equal(weight.dequantized(), values)
        assert torch.equal(weight[1].dequantized(), values[1])
    export(model, tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert all(written[key].float().equal(one.float()) for key, one in held.items())


def test_merges_that_would_round_are_refused_by_name(tmp_path: Path) -> None:
    """And are read without ``frozen``, as values."""
    of_parts = r"have scales from which no scales of the weight can be made .*\(load it without `frozen`\): "
    for kind, quantization, shapes in (
        ("tensor", {**HF_PER_TENSOR, "activation_scheme": "dynamic"}, {}),
        ("block", HF_FP8, {"attention.q_proj": (64, 128), "attention.k_proj": (320, 128)}),
    ):
        written = in_file(kind, **shapes)
        write(tmp_path, written.tensors, quantization, merged())
        refused(merged(), tmp_path, rf"{of_parts}attention\.q_proj\.weight, attention\.k_proj\.weight", frozen=True)
        with pytest.warns(UserWarning, match=r"rounded to FP8 a second time.*: qkv_proj\.weight\."):
            model = load_exported(merged(), tmp_path)
        parts = [torch.from_numpy(written.values[f"attention.{of}_proj.weight"]) for of in "qkv"]
        assert torch.equal(model.qkv_proj.weight, torch.cat(parts))
    # the border between the two is inside a block
    write(tmp_path, in_file("block").tensors, HF_FP8, merged())
    refused(merged(wide=192), tmp_path, rf"{of_parts}both\.weight, both\.weight\.$", frozen=True)
    same = {name: torch.tensor(0.01) if "scale" in name else one for name, one in in_file("tensor").tensors.items()}
    write(tmp_path, same, {**HF_PER_TENSOR, "activation_scheme": "dynamic"}, merged())
    assert load_exported(merged(), tmp_path, frozen=True).qkv_proj.weight.scale_inv.item() == pytest.approx(0.01)


def test_rules_that_slices_do_not_describe_are_refused(tmp_path: Path) -> None:
    class Turned(Merged):
        pass

    rule = WeightConverter("q_proj.weight", "qkv_proj.weight", [Transpose()])
    register_checkpoint_conversion_mapping("Turned", [rule], overwrite=True)
    tensors = in_file("block", **{"q_proj": (128, 640)}).tensors
    kept = {name: one for name, one in tensors.items() if name.startswith("q_proj")}
    rest = {f"{name}.weight": torch.randn(shape) for name, shape in
            {"gate": (384, 256), "up": (384, 256), "wide": (256, 128), "narrow": (128, 128)}.items()}  # fmt: skip
    write(tmp_path, {**kept, **rest}, HF_FP8)
    message = r"cannot be put together as transformers' rules .*: q_proj\.weight \(128, 640\) \(Transpose\)"
    refused(Turned(MergedConfig()), tmp_path, message)


def without(name: str) -> Any:
    return lambda tensors: [tensors.pop(one) for one in [*tensors] if one.startswith(name)]


FAULTS: dict[str, tuple[Any, str]] = {
    "no expert 2": (
        without("model.layers.1.mlp.experts.2.up"), r"file lacks: model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"
    ),
    "no gates": (
        lambda t: [without(OF_EXPERT.format(at, "gate"))(t) for at in range(4)],
        r"shape.*: model\.layers\.1\.mlp\.experts\.gate_up_proj \(\(4, 128, 128\) float8_e4m3fn in the file, \(4, 256",
    ),
    "a fifth expert": (
        lambda t: [t.update({OF_EXPERT.format(10**12, "up") + end: t[OF_EXPERT.format(1, "up") + end].clone()})
                   for end in ("", "_scale_inv")],
        r"the file has and the model lacks: model\.layers\.1\.mlp\.experts\.1000000000000\.up_proj\.weight",
    ),
    "an expert twice": (
        lambda t: [t.update({OF_EXPERT.format("01", "up") + end: t[OF_EXPERT.format(1, "up") + end].clone()})
                   for end in ("", "_scale_inv")],
        r"are one tensor of the model: model\.layers\.1\.mlp\.experts\.",
    ),
    "an expert of another size": (
        lambda t: t.update({OF_EXPERT.format(1, "down"): torch.zeros(128, 120).to(torch.float8_e4m3fn)}),
        r"cannot be put together .*: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight \(128, 128\) \(Merge",
    ),
    "an expert in bf16": (
        lambda t: (t.pop(OF_EXPERT.format(1, "up") + "_scale_inv"),
                   t.update({OF_EXPERT.format(1, "up"): torch.zeros(128, 128, dtype=torch.bfloat16)})),
        r"are in FP8 in part: model\.layers\.1\.mlp\.experts\.gate_up_proj",
    ),
    "both names": (
        lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}), r"one tensor of the model: norm\.weight"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_experts_that_do_not_fit(what: str, tmp_path: Path) -> None:
    change, message = FAULTS[what]
    model = model_of("qwen3_moe")
    tensors = quantized(published(model)).tensors
    change(tensors)
    write(tmp_path, tensors, HF_FP8, shards=2)
    refused(model, tmp_path, message)
    refused(model.to("meta"), tmp_path, message, frozen=True)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = model_of("llama", tie_word_embeddings=True)
    tensors = published(model)
    tensors.pop("lm_head.weight", None)
    write(tmp_path, quantized(tensors).tensors, HF_FP8, model, shards=2)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config)
    empty.lm_head.weight.tensor_model_parallel = False
    loaded = load_exported(empty, tmp_path, frozen=True)
    # attributes of a parameter stay
    assert loaded.lm_head.weight.tensor_model_parallel is False
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_buffers_that_nothing_initialises_are_named(tmp_path: Path) -> None:
    class WithBuffer(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(32, 32))
            self.register_buffer("positions", torch.arange(3), persistent=False)

    write(tmp_path, quantized(WithBuffer().state_dict()).tensors, HF_FP8)
    with torch.device("meta"):
        model = WithBuffer()
    refused_message = r"WithBuffer has buffers on the meta device .*: positions\. Build the model outside of"
    with pytest.raises(ValueError, match=refused_message):
        load_exported(model, tmp_path)
    assert model[0].weight.is_meta
    model.positions = torch.arange(3)
    assert not load_exported(model, tmp_path)[0].weight.is_meta
