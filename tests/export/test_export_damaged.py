"""Damaged and hostile files: ``load_exported`` refuses them by name, and the model is unchanged."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import KEY, Before, Shared, metadata_of, on, refused, rewrite, tensors_of, trained
from mutations import as_json, damaged_bytes, texts, trees
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import export, load_exported, scaling_state


@pytest.fixture
def model() -> nn.Module:
    return trained(small_mlp(), on(8, 32), 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export(trained(small_mlp(), on(8, 32), 1), tmp_path / "out")


def loaded_or_refused(model: nn.Module, folder: Path) -> bool:
    """Whether it was loaded, with finite values only. Any error other than the documented ones fails the test."""
    loading = copy.deepcopy(model)
    before = Before(loading)
    message: str | None = None
    try:
        load_exported(loading, folder)
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
    if message is not None:
        assert str(folder) in message
        before.check(loading)
        return False
    state = scaling_state(loading)
    assert bool((state.scale > 0).all() and state.scale.isfinite().all())
    return True


# --- the fault is named ---


def quantized(**change: Any) -> str:
    method = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return json.dumps({"quantization_config": {**method, **change}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"config\.json is not valid JSON"),
        ("{}", "no `quantization_config`"),
        (
            quantized(quant_method="gptq"),
            r"must have quant_method='fp8' or 'compressed-tensors' or 'mo.*, got 'gptq'",
        ),
        (quantized(activation_scheme="both"), r"must have activation_scheme='static' or 'dynamic', got 'both'"),
        (quantized(activation_scheme="dynamic"), r"static scales, where the config has dynamic ones: 0\.input"),
        (
            quantized(weight_block_size=[128, 128]),
            r"lack scales in the form of a matrix with a number .* 128 x 128: 0\.weight_scale_inv",
        ),
        (quantized(weight_block_size=[64, 64]), r"must have weight_block_size=None or \[128, 128\], got \[64, 64\]"),
    ],
)
def test_config(model: nn.Module, folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    refused(model, folder, message)


def test_missing_files(folder: Path) -> None:
    refused(small_mlp(), folder / "nowhere", "no exported model in", FileNotFoundError)
    (folder / "model.safetensors").unlink()
    refused(small_mlp(), folder, r"no model\.safetensors in", FileNotFoundError)


RULE = r"must be a number from 2\*\*-118 to 2\*\*118"
ONE = "0x1p0"
SCALES: list[tuple[Any, str]] = [
    ("[" * 100_000, r"is not valid JSON"),
    ({"0.weight": {"weight": ONE}}, r"'0\.weight' must be null or have 'weight' and 'input', got \{'weight'"),
    ({"0.weight": {"weight": 1.5, "input": ONE}}, r"'weight' of '0\.weight' must be a number in hex.*, got 1\.5"),
    ({"0.weight": {"weight": "0x1p99999", "input": ONE}}, r"must be a number in hexadecimal, got '0x1p99999'"),
    *(
        ({"0.weight": {"weight": ONE, "input": scale}}, rf"'input' of '0\.weight' {RULE}, got {scale}$")
        for scale in ("nan", "-0x1p0", "0x0p0", "0x1p119", "0x1p-119")
    ),
    ({"0.bias": {"weight": ONE, "input": ONE}}, r"other than those in the file's metadata: 0\.weight, 2\.weigh"),
]


@pytest.mark.parametrize(("scales", "message"), SCALES)
def test_metadata(folder: Path, scales: Any, message: str) -> None:
    rewrite(folder, tensors_of(folder), {KEY: scales if isinstance(scales, str) else json.dumps(scales)})
    refused(small_mlp(), folder, message)


def test_metadata_with_gemms_that_the_model_lacks(model: nn.Module, folder: Path) -> None:
    tensors, metadata = tensors_of(folder), metadata_of(folder)
    for name in ("9.weight", "0.bias"):
        rewrite(folder, tensors, {KEY: json.dumps({**json.loads(metadata[KEY]), name: None})})
        refused(model, folder, rf"ran in FP8 and cannot here, see `describe\(model\)`: {name}\.$")


BAD_SCALES = {
    "nan": torch.tensor(float("nan")),
    "too large for fp32": torch.tensor(1e300, dtype=torch.float64),
    "a reciprocal that is infinite": torch.tensor(1e-45),
    "a reciprocal that overflows with a code": torch.tensor(1e-37),
    "one that overflows with a code": torch.tensor(1e38),
}


@pytest.mark.parametrize("kind", BAD_SCALES)
def test_scales(folder: Path, kind: str) -> None:
    tensors, metadata = tensors_of(folder), metadata_of(folder)
    for name, kept in (("0.weight_scale", metadata), ("2.input_scale", None)):
        rewrite(folder, {**tensors, name: BAD_SCALES[kind]}, kept)
        refused(small_mlp(), folder, rf"are invalid scales; each {RULE}: {name.replace('.', '[.]')} ")


@pytest.mark.parametrize("scale", [2.0**-118, 2.0**118])
def test_outputs_are_finite_with_any_scale_that_is_accepted(folder: Path, scale: float) -> None:
    rewrite(folder, {**tensors_of(folder), "0.input_scale": torch.tensor(scale)})
    assert load_exported(small_mlp(), folder)(torch.randn(8, 32)).isfinite().all()


NO_SCALE = r"lack scales in the form of single numbers: 0\."
CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no input scale": (lambda t: t.pop("0.input_scale"), NO_SCALE),
    "64 scales": (lambda t: t.update({"0.weight_scale": torch.ones(64)}), NO_SCALE),
    "a complex scale": (lambda t: t.update({"0.weight_scale": torch.tensor(1j)}), NO_SCALE),
    "E5M2 codes": (
        lambda t: t.update({"0.weight": t["0.weight"].float().to(torch.float8_e5m2)}),
        r"codes of another format than float8_e4m3fn: 0\.weight \(float8_e5m2\)",
    ),
    "no codes": (lambda t: t.update({n: x.float() for n, x in t.items()}), r"has no torch\.float8_e4m3fn weights"),
    "a bias of FP8": (lambda t: t.update({"0.bias": t["0.bias"].to(torch.float8_e4m3fn)}), NO_SCALE + "bias_"),
    "transposed": (
        lambda t: t.update({"0.weight": t["0.weight"].t()}), r"0\.weight \(\(32, 64\) float8_e4m3fn in the file, \(64"
    ),
    "an integer bias": (
        lambda t: t.update({"2.bias": torch.ones(16, dtype=torch.int32)}), r"2\.bias \(\(16,\) int32 in the file"
    ),
    "scales whose product is infinite": (
        lambda t: t.update({f"2.{of}_scale": torch.tensor(3e35) for of in ("weight", "input")}),
        r"have scales whose product with those of their inputs is not finite in float32: 2\.weight\.$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_tensors(model: nn.Module, folder: Path, kind: str) -> None:
    change, message = CHANGES[kind]
    tensors = tensors_of(folder)
    change(tensors)
    rewrite(folder, tensors)
    refused(model, folder, message)


def test_a_scale_other_than_in_the_metadata(folder: Path) -> None:
    tensors = tensors_of(folder)
    tensors["0.weight_scale"] *= 2
    rewrite(folder, tensors, metadata_of(folder))
    refused(small_mlp(), folder, r"other than those in the file's metadata: 0\.w")


@pytest.mark.parametrize("value", [torch.ones(3, dtype=torch.bool), torch.ones(3) * 1j], ids=["bool", "complex64"])
def test_a_buffer_of_another_kind(folder: Path, value: Tensor) -> None:
    """Copying would silently change these."""
    tensors, metadata = tensors_of(folder), metadata_of(folder)
    rewrite(folder, {**tensors, "positions": value}, metadata)
    model = small_mlp()
    model.register_buffer("positions", torch.arange(3))
    refused(model, folder, rf"positions \(\(3,\) {str(value.dtype).removeprefix('torch.')} in the file")
    rewrite(folder, {**tensors, "positions": torch.tensor([7, 8, 9], dtype=torch.int32)}, metadata)
    assert load_exported(model, folder).positions.tolist() == [7, 8, 9]


def test_models_that_do_not_fit(folder: Path) -> None:
    class Special(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    other = small_mlp()
    other[2] = Special(64, 16)
    refused(other, folder, r"ran in FP8 and cannot here.*2\.weight")
    refused(small_mlp().double(), folder, r"0\.weight is torch\.float64, and FP8 layers take float32", TypeError)
    rewrite(folder, {**tensors_of(folder), "0.weight_scale": torch.tensor(1e4)})
    refused(small_mlp().half(), folder, r"do not keep the values of the file.*0\.weight \(float16\)")


def test_one_tensor_of_two_values_and_one_layer_of_two_scales(tmp_path: Path) -> None:
    export(trained(Shared(), on(4, 16), 1), tmp_path)
    tensors, metadata = tensors_of(tmp_path), metadata_of(tmp_path)
    scales = json.loads(metadata[KEY])
    both = {f"b.{name}": tensors[f"a.{name}"].clone() for name in ("weight", "weight_scale", "input_scale")}
    both["b.input_scale"] = tensors["b.input_scale"]
    rewrite(tmp_path, {**tensors, **both}, metadata)
    load_exported(Shared(), tmp_path)
    both["b.weight"] = (-both["b.weight"].float()).to(torch.float8_e4m3fn)
    rewrite(tmp_path, {**tensors, **both}, metadata)
    refused(Shared(), tmp_path, r"are one tensor in the model and differ in the file: b\.weight and a\.weight")
    scales["again.weight"] = {**scales["a.weight"], "input": "0x1p3"}
    rewrite(tmp_path, tensors, {KEY: json.dumps(scales)})
    refused(Shared(), tmp_path, r"have different scales for one layer: again\.weight")


@pytest.mark.parametrize("where", ["tensors", "metadata"])
def test_names_do_not_reach_the_terminal_as_they_are(folder: Path, where: str) -> None:
    tensors, metadata = tensors_of(folder), metadata_of(folder)
    name = "\x1b]0;title\x07\x1b[2J\u202e.weight"
    if where == "tensors":
        tensors[name] = torch.ones(1)
    else:
        metadata[KEY] = json.dumps({**json.loads(metadata[KEY]), name: None})
    rewrite(folder, tensors, metadata)
    refused(small_mlp(), folder, r": \\x1b\]0;title\\x07\\x1b\[2J\\u202e\.weight\.$")


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The JSON header of a safetensors file, which starts with the header's length; and the data."""
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(folder: Path, text: bytes, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_names_in_a_damaged_header_do_not_either(folder: Path) -> None:
    header, data = header_of(folder)
    header["\x1b[2J"] = {**header["0.weight"], "data_offsets": [1, 2]}
    with_header(folder, json.dumps(header).encode(), data)
    with pytest.raises(ValueError, match=r"is damaged") as caught:
        load_exported(small_mlp(), folder)
    assert "\x1b" not in str(caught.value)


# --- any other damage ---


def test_any_config(model: nn.Module, folder: Path) -> None:
    file = folder / "config.json"
    whole = file.read_text()
    results = []
    for content in (*texts(whole), *(as_json(tree).encode() for tree in trees(json.loads(whole), 60))):
        file.write_bytes(content)
        results.append(loaded_or_refused(model, folder))
    # entries that are not read may be anything
    assert {True, False} == set(results)


def test_any_metadata(model: nn.Module, folder: Path) -> None:
    tensors, whole = tensors_of(folder), metadata_of(folder)[KEY]
    changed = [as_json(tree) for tree in trees(json.loads(whole), 60)]
    for text in (*(content.decode("latin-1") for content in texts(whole)), *changed):
        rewrite(folder, tensors, {KEY: text})
        loaded_or_refused(model, folder)


def test_any_header(model: nn.Module, folder: Path) -> None:
    header, data = header_of(folder)
    changed = [as_json(tree).encode() for tree in trees(header, 60)]
    dtypes = ("F4", "F6_E2M3", "F8_E8M0", "F8_E5M2", "U8", "I64", "F64", "BOOL", "C64", "BF16", "nothing")
    changed += [json.dumps({**header, "0.weight": {**header["0.weight"], "dtype": one}}).encode() for one in dtypes]
    for text in (*texts(json.dumps(header)), *changed):
        with_header(folder, text, data)
        loaded_or_refused(model, folder)


def test_any_bytes(model: nn.Module, folder: Path) -> None:
    file = folder / "model.safetensors"
    for content in damaged_bytes(file.read_bytes(), 60):
        file.write_bytes(content)
        loaded_or_refused(model, folder)
