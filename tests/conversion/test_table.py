"""What `describe` returns: a list of rows that prints as a table, with the true reason for each layer left out."""

from __future__ import annotations

import copy
import re

import pytest
from torch import nn

from lightning_fp8 import Fp8Precision, convert, describe, unconvert
from lightning_fp8.conversion import fall_back


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 4)


def stack(blocks: int = 12) -> nn.ModuleDict:
    return nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(blocks)), "head": nn.Linear(32, 32)})


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.path: row.reason for row in describe(model)}


def test_layers_of_a_stack_are_one_line() -> None:
    table = describe(convert(stack()))
    lines = str(table).splitlines()
    assert lines == [
        "layer             class   FP8  reason",
        "blocks.0-11.up    Linear  fp8  converted, 32 -> 64",
        "blocks.0-11.down  Linear  fp8  converted, 64 -> 32",
        "blocks.0-11.gate  Linear  -    fewer than 16 features: 32 -> 4; `min_features=4` converts it",
        "head              Linear  fp8  converted, 32 -> 32",
        "25 of 37 layers run in FP8",
    ]
    assert repr(table) == str(table)
    # a notebook shows the same words
    page = table._repr_html_()
    assert re.findall(r"<td[^>]*>(blocks[^<]*)", page) == [line.split()[0] for line in lines[1:4]]
    assert "32 -&gt; 64" in page
    assert lines[-1] in page


def test_it_is_a_list_of_all_rows() -> None:
    table = describe(stack())
    assert len(table) == 37
    assert table[0] == next(iter(table)) == ("blocks.0.up", "Linear", False, "not converted yet: call `convert`")
    assert table[:2] == [table[0], table[1]]
    assert table == describe(stack())
    assert str(table[0]) == "-   blocks.0.up (Linear): not converted yet: call `convert`"


def test_only_equal_rows_are_folded() -> None:
    model = convert(stack(8), ignore_modules=("blocks.3", "blocks.[56].up"))
    fall_back(model, "blocks.1.up")
    fall_back(model, "blocks.2.up")
    found = dict(re.findall(r"^(\S+) +Linear +\S+ +(.*)$", str(describe(model)), re.MULTILINE))
    assert found.pop("blocks.1-2.up").startswith("converted, 32 -> 64; fell back to bf16: blocks.*.up; ")
    assert {path: reason.split(":")[0] for path, reason in found.items()} == {
        "blocks.0,4,7.up": "converted, 32 -> 64",
        "blocks.0-2,4-7.down": "converted, 64 -> 32",
        "blocks.0-2,4-7.gate": "fewer than 16 features",
        "blocks.3.up": "matches `ignore_modules`",
        "blocks.3.down": "matches `ignore_modules`",
        "blocks.3.gate": "matches `ignore_modules`",
        "blocks.5-6.up": "matches `ignore_modules`",
        "head": "converted, 32 -> 32",
    }


def test_a_folded_line_covers_all_combinations_of_its_numbers() -> None:
    layers = [[nn.Linear(16, 16) for _ in range(count)] for count in (3, 3, 2)]
    model = nn.Sequential(*(nn.Sequential(*part) for part in layers), nn.ModuleDict({"01": nn.Linear(16, 16)}))
    paths = [line.split()[0] for line in str(describe(model)).splitlines()[1:-1]]
    # "01" is a name, not a number
    assert paths == ["0-1.0-2", "2.0-1", "3.01"]
    assert str(describe(nn.Linear(16, 16))).splitlines()[1].startswith("(root)  Linear")
    assert str(describe(nn.ReLU())).endswith("0 of 0 layers run in FP8")


@pytest.mark.parametrize("in_a_plugin", [False, True])
def test_a_layer_that_was_left_out_is_described_with_its_pattern(in_a_plugin: bool) -> None:
    model, patterns = stack(2), ["*.head", "blocks.1"]
    if in_a_plugin:
        Fp8Precision(ignore_modules=patterns).convert_module(model)
    else:
        convert(model, ignore_modules=patterns)
    found = reasons(model)
    assert found["head"] == "matches `ignore_modules`: to convert it, remove '*.head'"
    assert found["blocks.1.up"] == "matches `ignore_modules`: to convert it, remove 'blocks.1'"
    assert found["blocks.1.gate"] == found["blocks.1.up"]
    # part of the model: its paths are shorter
    assert reasons(model["blocks"])["1.up"] == found["blocks.1.up"]
    # a copy does not know the patterns of the conversion
    assert reasons(copy.deepcopy(model))["head"] == "not converted yet: call `convert`"
    convert(model, ignore_modules=["blocks.1"])
    assert reasons(model)["head"].startswith("converted")
    assert reasons(unconvert(model))["blocks.1.up"] == "not converted yet: call `convert`"


def test_keep_fp32_is_named_where_it_is_the_reason() -> None:
    model = stack(1)
    Fp8Precision(keep_fp32=["head"], ignore_modules=["*.up"]).convert_module(model)
    assert reasons(model)["head"] == "matches `keep_fp32`: to convert it, remove 'head'"
    both = stack(1)
    Fp8Precision(keep_fp32=["head"], ignore_modules=["he*"]).convert_module(both)
    assert reasons(both)["head"] == "matches `ignore_modules` and `keep_fp32`: to convert it, remove 'he*' and 'head'"


def test_the_recommended_min_features_converts_the_layer() -> None:
    model = stack(1)
    number = re.findall(r"`min_features=(\d+)`", reasons(model)["blocks.0.gate"])
    assert reasons(convert(model, min_features=int(number[0])))["blocks.0.gate"].startswith("converted")
