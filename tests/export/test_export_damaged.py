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
from mutations import as_json, damaged_bytes, nested, texts, trees
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, convert, export, load_exported, scaling_state
from lightning_fp8.conversion.convert import is_converted

KEY = "lightning_fp8.scales"


def trained() -> nn.Module:
    model = convert(small_mlp(), DelayedScaling(amax_history_len=4))
    model(torch.randn(8, 32)).square().mean().backward()
    scaling_state(model).update()
    return model


@pytest.fixture(params=["plain", "converted"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return small_mlp() if request.param == "plain" else trained()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export(trained(), tmp_path / "out")


class Before:
    """The complete state of a model that loading can change."""

    def __init__(self, model: nn.Module) -> None:
        self.classes = [type(layer) for layer in model.modules()]
        self.training = [layer.training for layer in model.modules()]
        self.tensors = copy.deepcopy(model.state_dict())
        self.state = scaling_state(model) if is_converted(model) else None
        self.entries = self.state.state_dict() if self.state else {}

    def check(self, model: nn.Module) -> None:
        assert [type(layer) for layer in model.modules()] == self.classes
        assert [layer.training for layer in model.modules()] == self.training
        tensors = model.state_dict()
        assert tensors.keys() == self.tensors.keys()
        assert all(torch.equal(tensor, self.tensors[name]) for name, tensor in tensors.items())
        assert is_converted(model) is (self.state is not None)
        if self.state is not None:
            assert scaling_state(model) is self.state
            now = self.state.state_dict()
            assert now.keys() == self.entries.keys()
            assert all(torch.equal(now[name][field], value)
                       for name, entry in self.entries.items() for field, value in entry.items())  # fmt: skip


def refused(model: nn.Module, folder: Path, message: str) -> None:
    before = Before(model)
    with pytest.raises(ValueError, match=message) as caught:
        load_exported(model, folder)
    assert str(folder) in str(caught.value)
    before.check(model)


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


def parts(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return load_file(folder / "model.safetensors"), file.metadata()


def rewrite(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata)


# --- the fault is named ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, r"config\.json is not valid JSON"),
        ('{"quantization_config": [1]}', "no `quantization_config`"),
        ('{"quantization_config": null}', "no `quantization_config`"),
        ("null", "no `quantization_config`"),
        (json.dumps({"quantization_config": {"quant_method": nested(200)}}), r"must have quant_method='fp8', got \[\["),
    ],
)
def test_config(model: nn.Module, folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    refused(model, folder, message)


RULE = r"must be a number from 2\*\*-118 to 2\*\*118"
SCALES: list[tuple[Any, str]] = [
    ("[", r"is not valid JSON"),
    ("[" * 100_000, r"is not valid JSON"),
    ([], r"must be an object, got \[\]"),
    ({"0.weight": []}, r"'0\.weight' must be null or have 'weight' and 'input', got \[\]"),
    ({"0.weight": {"weight": "0x1p0"}}, r"'0\.weight' must be null or have 'weight' and 'input', got \{'weight'"),
    ({"0.weight": {"weight": 1.5, "input": "0x1p0"}}, r"'weight' of '0\.weight' must be a number in hex.*, got 1\.5"),
    (
        {"0.weight": {"weight": "one", "input": "0x1p0"}},
        r"'weight' of '0\.weight' must be a number in hex.*, got 'one'",
    ),
    ({"0.weight": {"weight": "0x1p99999", "input": "0x1p0"}}, r"must be a number in hexadecimal, got '0x1p99999'"),
    *(
        ({"0.weight": {"weight": "0x1p0", "input": scale}}, rf"'input' of '0\.weight' {RULE}, got {scale}$")
        for scale in ("nan", "inf", "-0x1p0", "0x0p0", "0x1p200", "0x1p-200", "0x1p-149", "0x1p119", "0x1p-119")
    ),
    ({"0.weight": {"weight": "0x1p0", "input": "\x0b0x0p0"}}, rf"'input' of '0\.weight' {RULE}, got \\x0b0x0p0$"),
    (
        {"0.bias": {"weight": "0x1p0", "input": "0x1p0"}},
        r"other than those in the file's metadata: 0\.weight, 2\.weigh",
    ),
    ({}, r"other than those in the file's metadata: 0\.weight, 2\.weigh"),
]


@pytest.mark.parametrize(("scales", "message"), SCALES)
def test_metadata(model: nn.Module, folder: Path, scales: Any, message: str) -> None:
    tensors, _ = parts(folder)
    rewrite(folder, tensors, {"format": "pt", KEY: scales if isinstance(scales, str) else json.dumps(scales)})
    refused(model, folder, message)


def test_metadata_with_gemms_that_the_model_lacks(model: nn.Module, folder: Path) -> None:
    tensors, metadata = parts(folder)
    for name in ("9.weight", "0.bias", ""):
        scales = {**json.loads(metadata[KEY]), name: None}
        rewrite(folder, tensors, {KEY: json.dumps(scales)})
        refused(model, folder, rf"ran in FP8 and cannot here, see `describe\(model\)`: {name}\.$")


BAD_SCALES = {
    "nan": torch.tensor(float("nan")),
    "inf": torch.tensor(float("inf")),
    "zero": torch.tensor(0.0),
    "negative": torch.tensor(-1.0),
    "too large for fp32": torch.tensor(1e300, dtype=torch.float64),
    "too small for fp32": torch.tensor(1e-300, dtype=torch.float64),
    "a reciprocal that is infinite": torch.tensor(1e-45),
    "subnormal": torch.tensor(1e-39),
    "a reciprocal that overflows with a code": torch.tensor(1e-37),
    "one that overflows with a code": torch.tensor(1e38),
}


@pytest.mark.parametrize("with_metadata", [False, True])
@pytest.mark.parametrize("name", ["0.weight_scale", "2.input_scale"])
@pytest.mark.parametrize("kind", BAD_SCALES)
def test_scales(model: nn.Module, folder: Path, name: str, kind: str, with_metadata: bool) -> None:
    tensors, metadata = parts(folder)
    rewrite(folder, {**tensors, name: BAD_SCALES[kind]}, metadata if with_metadata else {})
    refused(model, folder, rf"are scales, each of which {RULE}: {name.replace('.', '[.]')} ")


@pytest.mark.parametrize("scale", [2.0**-118, 2.0**118])
def test_outputs_are_finite_with_any_scale_that_is_accepted(folder: Path, scale: float) -> None:
    tensors, _ = parts(folder)
    rewrite(folder, {**tensors, "0.input_scale": torch.tensor(scale)}, {})
    assert load_exported(small_mlp(), folder)(torch.randn(8, 32)).isfinite().all()


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "an integer scale": (lambda t: t.update({"0.weight_scale": torch.tensor(1)}), "lack their scales as single"),
    "a complex scale": (lambda t: t.update({"0.weight_scale": torch.tensor(1j)}), "lack their scales as single"),
    "no scale": (lambda t: t.update({"0.weight_scale": torch.ones(0)}), "lack their scales as single"),
    "a scale of FP8": (
        lambda t: t.update({"0.weight_scale": torch.ones(()).to(torch.float8_e4m3fn)}), "lack their scales as single"
    ),
    "E5M2 codes": (
        lambda t: t.update({"0.weight": t["0.weight"].float().to(torch.float8_e5m2)}),
        r"codes of another format than float8_e4m3fn: 0\.weight \(float8_e5m2\)",
    ),
    "a bias of FP8": (
        lambda t: t.update({"0.bias": t["0.bias"].to(torch.float8_e4m3fn)}), r"lack their scales as single .*: 0\.bias_"
    ),
    "a complex bias": (lambda t: t.update({"0.bias": t["0.bias"] * 1j}), r"differ between .* 0\.bias .*complex64"),
    "a bias of booleans": (lambda t: t.update({"0.bias": t["0.bias"] > 0}), r"differ between .* 0\.bias \(.* bool"),
    "a code that is NaN": (
        lambda t: t["0.weight"].view(torch.uint8)[3].fill_(0x7F), r"do not keep the values of the file.*0\.weight"
    ),
    "scales whose product is infinite": (
        lambda t: t.update({f"2.{of}_scale": torch.tensor(3e35) for of in ("weight", "input")}),
        r"have scales whose product with those of their inputs is not finite in float32: 2\.weight\.$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_tensors(model: nn.Module, folder: Path, kind: str) -> None:
    change, message = CHANGES[kind]
    tensors, _ = parts(folder)
    change(tensors)
    rewrite(folder, tensors, {})
    refused(model, folder, message)


@pytest.mark.parametrize("value", [torch.ones(3, dtype=torch.bool), torch.ones(3) * 1j], ids=["bool", "complex64"])
def test_a_buffer_of_another_kind(folder: Path, value: Tensor) -> None:
    """Copying would silently change these."""
    tensors, metadata = parts(folder)
    rewrite(folder, {**tensors, "positions": value}, metadata)
    model = small_mlp()
    model.register_buffer("positions", torch.arange(3))
    refused(
        model, folder, rf"differ between .* positions \(\(3,\) {str(value.dtype).removeprefix('torch.')} in the file"
    )
    rewrite(folder, {**tensors, "positions": torch.tensor([7, 8, 9], dtype=torch.int32)}, metadata)
    assert load_exported(model, folder).positions.tolist() == [7, 8, 9]


def test_layers_that_cannot_be_converted(folder: Path) -> None:
    class Special(nn.Linear):
        pass

    other = small_mlp()
    other[2] = Special(64, 16)
    refused(other, folder, r"ran in FP8 and cannot here.*2\.weight")


def test_a_dtype_that_does_not_keep_the_values(folder: Path) -> None:
    tensors, _ = parts(folder)
    rewrite(folder, {**tensors, "0.weight_scale": torch.tensor(1e4)}, {})
    refused(small_mlp().half(), folder, r"do not keep the values of the file.*0\.weight \(float16\)")
    model = small_mlp().double()
    before = Before(model)
    with pytest.raises(TypeError, match=r"0\.weight is torch\.float64, and FP8 layers take float32"):
        load_exported(model, folder)
    before.check(model)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again, self.b.weight = self.a, self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.again(self.a(x).relu()).relu())


def test_one_tensor_of_two_values_and_one_layer_of_two_scales(tmp_path: Path) -> None:
    model = convert(Shared())
    model(torch.randn(4, 16)).sum().backward()
    scaling_state(model).update()
    export(model, tmp_path)
    tensors, metadata = parts(tmp_path)
    scales = json.loads(metadata[KEY])
    both = {f"b.{name}": tensors[f"a.{name}"].clone() for name in ("weight", "weight_scale", "input_scale")}
    both["b.input_scale"] = tensors["b.input_scale"]
    rewrite(tmp_path, {**tensors, **both}, metadata)
    load_exported(Shared(), tmp_path)
    both["b.weight"] = -both["b.weight"].float()
    both["b.weight"] = both["b.weight"].to(torch.float8_e4m3fn)
    rewrite(tmp_path, {**tensors, **both}, metadata)
    refused(Shared(), tmp_path, r"are one tensor in the model and differ in the file: b\.weight and a\.weight")
    scales["again.weight"] = {**scales["a.weight"], "input": "0x1p3"}
    rewrite(tmp_path, tensors, {KEY: json.dumps(scales)})
    refused(Shared(), tmp_path, r"have different scales for one layer: again\.weight")


@pytest.mark.parametrize("where", ["tensors", "metadata", "both"])
def test_names_do_not_reach_the_terminal_as_they_are(folder: Path, where: str) -> None:
    tensors, metadata = parts(folder)
    name = "\x1b]0;title\x07\x1b[2J\u202e.weight"
    if where != "metadata":
        tensors[name] = torch.ones(1)
    if where != "tensors":
        metadata[KEY] = json.dumps({**json.loads(metadata[KEY]), name: None})
    rewrite(folder, tensors, metadata)
    refused(small_mlp(), folder, r": \\x1b\]0;title\\x07\\x1b\[2J\\u202e\.weight\.$")


def test_names_in_a_damaged_header_do_not_either(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header["\x1b[2J"] = {**header["0.weight"], "data_offsets": [1, 2]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(ValueError, match=r"is damaged") as caught:
        load_exported(small_mlp(), folder)
    assert "\x1b" not in str(caught.value)


# --- any other damage ---


def test_any_config(model: nn.Module, folder: Path) -> None:
    file = folder / "config.json"
    whole = file.read_text()
    changed = [as_json(tree).encode() for tree in trees(json.loads(whole), 300)]
    results = []
    for content in (*texts(whole), *changed):
        file.write_bytes(content)
        results.append(loaded_or_refused(model, folder))
    # entries that are not read may be anything
    assert {True, False} == set(results)


def test_any_metadata(model: nn.Module, folder: Path) -> None:
    tensors, metadata = parts(folder)
    whole = metadata[KEY]
    changed = [as_json(tree) for tree in trees(json.loads(whole), 300)]
    for text in (*(content.decode("latin-1") for content in texts(whole)), *changed):
        rewrite(folder, tensors, {KEY: text})
        loaded_or_refused(model, folder)


def test_any_header(model: nn.Module, folder: Path) -> None:
    """The JSON header of a safetensors file, which starts with the header's length."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    changed = [as_json(tree).encode() for tree in trees(header, 300)]
    dtypes = ("F4", "F6_E2M3", "F8_E8M0", "F8_E5M2", "U8", "I64", "F64", "BOOL", "C64", "BF16", "nothing")
    changed += [json.dumps({**header, "0.weight": {**header["0.weight"], "dtype": one}}).encode() for one in dtypes]
    for text in (*texts(json.dumps(header)), *changed):
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        loaded_or_refused(model, folder)


def test_any_bytes(model: nn.Module, folder: Path) -> None:
    file = folder / "model.safetensors"
    for content in damaged_bytes(file.read_bytes(), 200):
        file.write_bytes(content)
        loaded_or_refused(model, folder)


def test_any_tensor(model: nn.Module, folder: Path) -> None:
    """Each tensor replaced by each of these, with and without metadata."""
    tensors, metadata = parts(folder)
    odd = [torch.ones(()), torch.zeros(0), torch.ones(2, 3, dtype=torch.int8), torch.full((1,), float("nan")),
           torch.ones(64, 32, dtype=torch.float8_e5m2), torch.ones(64, 32).to(torch.float8_e4m3fn),
           torch.full((64, 32), float("inf")), torch.ones((), dtype=torch.bool), torch.tensor(2.0**-149)]  # fmt: skip
    for name in tensors:
        for value in odd:
            for kept in ({}, metadata):
                rewrite(folder, {**tensors, name: value}, kept)
                loaded_or_refused(model, folder)
