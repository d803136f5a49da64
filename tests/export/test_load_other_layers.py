"""FP8 tensors of files that are no matrices of linear layers: experts are read, all others refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exported import refused
from fp8_checkpoints import HF_FP8, cast, compressed_tensors, in_mxfp8, model_of, write
from pairwise import pairwise
from torch import Tensor, nn

from lightning_fp8 import convert, load_exported
from lightning_fp8.modules.fp8_parameter import Fp8Parameter

# by what a scale is for: the config, what follows a weight's name, and the shape of those of four experts
KINDS: dict[str, tuple[str, dict[str, Any], str, tuple[int, ...] | None]] = {
    "block": ("block", HF_FP8, "_scale_inv", None),
    "tensor": ("tensor", {**HF_FP8, "weight_block_size": None}, "_scale_inv", (4,)),
    "tensor, as matrices": ("tensor", {**HF_FP8, "weight_block_size": None}, "_scale_inv", (4, 1, 1)),
    "row": ("row", compressed_tensors("channel", True), "_scale", None),
    "group": ("group", in_mxfp8(), "_scale", None),
}


@pytest.mark.filterwarnings("ignore:load_exported.*rounded to FP8 a second time")
@pytest.mark.parametrize(("what", "frozen"), [(what, at % 2 == 0) for at, what in enumerate(KINDS)])
def test_experts_in_3_dimensions(what: str, frozen: bool, tmp_path: Path) -> None:
    """A file of which only the experts are in FP8, each with its own scales, under the names of the modules."""
    kind, config, suffix, shape = KINDS[what]
    model, tensors, expected = model_of("qwen3_moe"), {}, {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor.detach().clone()
        if tensor.dim() == 3:
            codes, scales, values = zip(*(cast(matrix, kind) for matrix in tensor))
            stacked = torch.stack([matrix.view(torch.uint8) for matrix in codes])
            tensors[name] = stacked.view(torch.float8_e4m3fn)
            tensors[name + suffix] = torch.stack(scales) if shape is None else torch.stack(scales).reshape(shape)
            expected[name] = torch.stack([torch.from_numpy(matrix) for matrix in values])
    write(tmp_path, tensors, config, model)
    loaded = load_exported(model_of("qwen3_moe"), tmp_path, frozen=frozen)
    assert len(expected) == 4
    for name, values in expected.items():
        weight = loaded.get_parameter(name)
        assert isinstance(weight, Fp8Parameter) == frozen
        assert torch.equal(weight.dequantized() if isinstance(weight, Fp8Parameter) else weight, values)


class Stack(nn.Module):
    """Matrices that no layer here multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 128, 128))


LAYERS = {
    "embedding": lambda: nn.Embedding(256, 128),
    "convolution": lambda: nn.Conv2d(128, 128, 3),
    "in one dimension": lambda: nn.Conv1d(128, 128, 3),
    "bilinear": lambda: nn.Bilinear(128, 128, 128),
    "stack": Stack,
    "normalisation": lambda: nn.LayerNorm(128),
}


def scales_of(weight: Tensor, kind: str) -> list[Tensor]:
    """All that a writer may mean by a scale of this kind, of a weight with any number of dimensions."""
    *first, rows, columns = (1, *weight.shape)[-weight.dim() - (weight.dim() == 1) :]
    shapes = {
        "tensor": [(), (1,), (len(weight),), (len(weight), *[1] * (weight.dim() - 1)), tuple(first), (*first, 1, 1)],
        "row": [(len(weight), *[1] * (weight.dim() - 1)), (*first, rows, 1)],
        "block": [(-(-rows // 128), -(-columns // 128)), (*first, -(-rows // 128), -(-columns // 128))],
        "group": [(*first, rows, -(-columns // 32))],
    }[kind]
    as_scale = torch.uint8 if kind == "group" else torch.float32
    return [torch.full(shape, 120 if kind == "group" else 0.01, dtype=as_scale) for shape in dict.fromkeys(shapes)]


@pytest.mark.parametrize(("other", "what"), pairwise([*LAYERS], [what for what in KINDS if "," not in what]))
def test_others_are_named_and_nothing_is_changed(other: str, what: str, tmp_path: Path) -> None:
    kind, config, suffix, _ = KINDS[what]
    model = nn.ModuleDict({"linear": nn.Linear(128, 128), "other": LAYERS[other]()})
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    tensors["linear.weight"], tensors["linear.weight" + suffix], _ = cast(tensors["linear.weight"], kind)
    weight = tensors["other.weight"]
    for scale in scales_of(weight, kind):
        codes = {"other.weight": weight.to(torch.float8_e4m3fn), "other.weight" + suffix: scale}
        write(tmp_path, {**tensors, **codes}, config)
        for frozen in (False, True):
            refused(model, tmp_path, r"other\.weight", frozen=frozen)
        converted = convert(nn.ModuleDict({"linear": nn.Linear(128, 128), "other": LAYERS[other]()}))
        refused(converted, tmp_path, r"other\.weight", frozen=True)
    write(tmp_path, tensors, config)
    assert load_exported(model, tmp_path)["linear"].fp8
