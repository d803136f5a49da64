"""The page on bf16 modes: its bytes, dtypes and measured numbers match the rows and the plugins."""

from __future__ import annotations

import pytest
import torch
from documented import measured, table_of

from lightning_fp8.plugins import fsdp2_policy
from lightning_fp8.plugins.trainer import PLUGINS

PAGE = "docs/which-bf16.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "as they are": None}
# the demo's model
PARAMETERS = 1_743_872
MIB = 2**20
ROWS = measured("precisions-cpu.jsonl")


def test_bytes_per_parameter_are_those_measured() -> None:
    lines = table_of(PAGE, "precision", "weights", "gradients", "AdamW")
    assert sorted(line["precision"] for line in lines) == sorted(ROWS)
    for line in lines:
        row = ROWS[line["precision"]]
        for column, name in {"weights": "parameter", "gradients": "gradient", "AdamW": "optimizer"}.items():
            # AdamW also stores each tensor's step count
            assert int(line[column]) == row[f"{name}_bytes"] // PARAMETERS, (line, column)


@pytest.mark.parametrize("line", table_of(PAGE, "stored", "gathered in"), ids=lambda line: line["precision"])
def test_dtypes_under_fsdp_are_those_of_the_plugins(line: dict[str, str]) -> None:
    plugin = PLUGINS[line["precision"]]()
    config, policy = plugin.mixed_precision_config, fsdp2_policy(line["precision"])
    assert plugin.param_dtype == DTYPES[line["stored"]]
    assert config.param_dtype == policy.param_dtype == DTYPES[line["gathered in"]]
    assert config.reduce_dtype == policy.reduce_dtype == DTYPES[line["gradients summed in"]]
    assert config.buffer_dtype == DTYPES[line["buffers"]]


def test_measured_bytes_times_and_updates() -> None:
    lines = table_of(PAGE, "saved for backward", "updates lost")
    assert sorted(line["precision"] for line in lines) == sorted(ROWS)
    for line in lines:
        row = ROWS[line["precision"]]
        sizes = {name: row[f"{name}_bytes"] / MIB for name in ("parameter", "gradient", "optimizer", "weight_copy")}
        for column, size in zip(("parameters", "gradients", "optimizer", "weight copies"), sizes.values()):
            assert line[column] == (f"{size:.1f} MiB" if size else "0")
        assert line["saved for backward"] == f"{row['saved_bytes'] / MIB:.0f} MiB"
        assert line["step"] == f"{row['p50_ms']:.0f} ms"
        lost = line["updates lost"].removesuffix("%")
        assert lost == f"{100 * row['unchanged_fraction']:.{len(lost.partition('.')[2])}f}"
