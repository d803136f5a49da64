"""``BlockScaling(power_of_2_scales=True)``: all scales are powers of two, also of weights in FP8 only, and in files.

The reference casts in blocks with numpy, from the definition.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from exported import tensors_of
from fp8_checkpoints import HF_FP8, write
from fp8_numpy import cast_in_blocks, code_values
from in_blocks import in_fp8
from pairwise import pairwise
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, convert, export, load_exported, scaling_state

POWERS = BlockScaling(power_of_2_scales=True)
X = torch.linspace(-3, 3, 20 * 256).view(20, 256)


def plain(seed: int = 0) -> nn.Sequential:
    """Blocks of many magnitudes. The largest value of some of them has the code 448, after rounding up; of others 224,
    with which its own scale would be twice as large.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 384), nn.Linear(384, 128)).requires_grad_(False)
    for at, (block, largest) in enumerate(((0, 440.0), (1, 226.0), (2, 300.0))):
        part = model[0].weight[128 * block : 128 * block + 128]
        part.clamp_(-0.05, 0.05)[at, 3] = part[at, 200] = largest * 2.0**-12
    return model


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """The output of a layer with scales in powers of two, in fp64."""
    y = in_fp8(x, 1, POWERS) @ in_fp8(layer.weight, 128, POWERS).T
    return torch.from_numpy(y) + layer.bias.double()


def values_of(codes: Tensor, scale_inv: Tensor) -> np.ndarray:
    of_elements = scale_inv.float().numpy().repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
    return code_values("e4m3")[codes.view(torch.uint8).numpy()].astype(np.float32) * of_elements


def check(model: nn.Sequential, source: nn.Sequential) -> None:
    """Both layers give the products of the weights of ``source`` with scales in powers of two."""
    x = X
    for layer, of in zip(model, source, strict=True):
        expected = product(x, of)
        with torch.no_grad():
            y = layer(x)
        assert torch.allclose(y.double(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
        x = y.detach()


@pytest.mark.parametrize(
    ("layout", "held", "frozen", "target"),
    pairwise([None, "hf-fp8", "compressed-tensors"], ["master", "fp8"], [False, True], ["plain", "converted", "meta"]),
)
def test_an_export_keeps_them(layout: str | None, held: str, frozen: bool, target: str, tmp_path: Path) -> None:
    source = plain()
    model = convert(plain(), POWERS, frozen_weights=held).eval()  # type: ignore[arg-type]
    check(model, source)
    export(model, tmp_path, layout=layout)
    saved, suffix = tensors_of(tmp_path), "_scale" if layout == "compressed-tensors" else "_scale_inv"
    for name in ("0.weight", "1.weight"):
        codes, scale_inv = cast_in_blocks(source.get_parameter(name).numpy(), "e4m3", 128, power_of_2=True)
        assert np.array_equal(saved[name].view(torch.uint8).numpy(), codes)
        assert np.array_equal(saved[name + suffix].numpy(), scale_inv)
    with torch.device("meta" if target == "meta" else "cpu"):
        other = plain(1)
    if target == "converted":
        convert(other, POWERS)
    with warnings.catch_warnings():
        # nor is any weight said to be rounded a second time
        warnings.simplefilter("error")
        loaded = load_exported(other, tmp_path, frozen=frozen)
    assert scaling_state(loaded).recipe == POWERS
    check(loaded, source)
    with torch.no_grad():
        assert torch.equal(loaded(X), model(X))


@pytest.mark.parametrize("layout", [None, "compressed-tensors"])
def test_a_merged_base_is_rounded_to_them(layout: str | None, tmp_path: Path) -> None:
    export(convert(plain(), POWERS), tmp_path / "read", layout="hf-fp8")
    base = load_exported(plain(1), tmp_path / "read", frozen=True)
    base[0].weight.data += torch.linspace(-1e-3, 2e-3, 384)[:, None]
    merged = base[0].weight.dequantized().numpy()
    with pytest.warns(UserWarning, match="1 tensors have changed"):
        export(base, tmp_path / "written", layout=layout)
    codes, scale_inv = cast_in_blocks(merged, "e4m3", 128, power_of_2=True)
    saved = tensors_of(tmp_path / "written")
    assert np.array_equal(saved["0.weight_scale" if layout else "0.weight_scale_inv"].numpy(), scale_inv)
    assert np.array_equal(saved["0.weight"].view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize(
    ("powers", "scale_dtype", "frozen"), pairwise([False, True], [torch.float32, torch.bfloat16], [False, True])
)
def test_a_checkpoint_of_others_says_it_by_its_scales(
    powers: bool, scale_dtype: torch.dtype, frozen: bool, tmp_path: Path
) -> None:
    """As DeepSeek-V3.1, whose inputs are scaled by powers of two as its weights are."""
    source, tensors = plain(), {}
    for name, tensor in source.state_dict().items():
        tensors[name] = tensor
        if name.endswith("weight"):
            codes, scale_inv = cast_in_blocks(tensor.numpy(), "e4m3", 128, power_of_2=powers)
            tensors[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.from_numpy(scale_inv).to(scale_dtype)
    write(tmp_path, tensors, HF_FP8)
    assert "power" not in json.dumps(HF_FP8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if scale_dtype == torch.bfloat16 else "error")
        loaded = load_exported(plain(1), tmp_path, frozen=frozen)
    assert scaling_state(loaded).recipe == BlockScaling(power_of_2_scales=powers)
    for name in ("0.weight", "1.weight"):
        weight = loaded.get_parameter(name)
        found = (weight.dequantized() if frozen else weight).numpy()
        assert np.array_equal(found, values_of(tensors[name], tensors[name + "_scale_inv"]))
    if powers:
        check(loaded, source)


@pytest.mark.parametrize(("recipe", "layout"), [(BlockScaling(), None), (POWERS, "compressed-tensors")], ids=str)
def test_blocks_of_zeros_are_read_again(layout: str | None, recipe: BlockScaling, tmp_path: Path) -> None:
    source = plain()
    source[0].weight.data[128:256, :128] = 0
    source[1].weight.data.zero_()
    # nearly
    source[0].weight.data[256:, :128] *= 1e-30
    converted = convert(source.eval(), recipe)
    expected = converted(X)
    export(converted, tmp_path / "export", layout=layout)
    for frozen in (False, True):
        model = load_exported(
            nn.Sequential(nn.Linear(256, 384), nn.Linear(384, 128)), tmp_path / "export", frozen=frozen
        ).eval()
        assert torch.equal(model(X), expected)
