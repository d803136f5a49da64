"""The page on bf16 modes: its bytes, dtypes and measured numbers match the rows, the plugins and Lightning."""

from __future__ import annotations

import pytest
import torch
from documented import measured, table_of
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy

from lightning_fp8 import fsdp2_policy
from lightning_fp8.examples import ByteGPT
from lightning_fp8.plugins.trainer import PLUGINS
from lightning_fp8.tools.compare.variants import by_default

PAGE = "docs/which-bf16.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "as they are": None}
# the demo's model
PARAMETERS = 1_743_872
GEMM_WEIGHTS = 2 * 12 * 256**2 + 256 * 256
MIB = 2**20


def test_bytes_per_parameter_are_those_measured() -> None:
    rows = measured("precisions-cpu.jsonl")
    said = table_of(PAGE, "precision", "weights", "gradients", "AdamW")
    assert sorted(line["precision"] for line in said) == sorted(rows)
    for line in said:
        row = rows[line["precision"]]
        # AdamW also stores each tensor's step count, in fp32
        moments = row["optimizer_bytes"] - 4 * len(list(demo().parameters()))
        for column, size in {
            "weights": row["parameter_bytes"],
            "gradients": row["gradient_bytes"],
            "AdamW": moments,
        }.items():
            assert int(line[column]) == size / PARAMETERS, (line, column)
    copies = {name: row["weight_copy_bytes"] // GEMM_WEIGHTS for name, row in rows.items()}
    assert copies == {"32-true": 0, "bf16-true": 0, "bf16-mixed": 0, "fp8-delayed": 1}
    kept = {line["precision"]: line["copies for matrix products"] for line in said}
    assert kept["fp8-delayed"].endswith("1 on a CPU")


def demo() -> ByteGPT:
    with torch.device("meta"):
        return ByteGPT(layers=2, width=256, heads=2, context=128)


def test_sums_of_the_decision_are_those_of_the_table() -> None:
    sums = {
        line["precision"]: sum(int(line[column]) for column in ("weights", "gradients", "AdamW"))
        for line in table_of(PAGE, "precision", "weights", "gradients", "AdamW")
    }
    chosen = {line["use"]: line["bytes per parameter"] for line in table_of(PAGE, "your case")}
    assert int(chosen["bf16-mixed"]) == sums["bf16-mixed"] == sums["fp8-delayed"]
    assert int(chosen["fp8-delayed, compared with bf16-mixed"].split()[0]) == sums["fp8-delayed"] + 2
    assert int(chosen['Bf16TruePrecision(keep_fp32=["*.norm*"])']) == sums["bf16-true"]
    for line in table_of(PAGE, "parameters", "7 billion"):
        bytes_each = sums[line["parameters"].partition(",")[0]]
        for size, gigabytes in line.items():
            if size != "parameters":
                number, unit = size.split()
                exact = bytes_each * float(number) * {"million": 1e-3, "billion": 1}[unit]
                assert float(gigabytes.removesuffix(" GB").replace(",", "")) == pytest.approx(exact, abs=0.5)


@pytest.mark.parametrize("line", table_of(PAGE, "stored", "gathered in"), ids=lambda line: line["precision"])
def test_dtypes_under_fsdp_are_those_of_the_plugins(line: dict[str, str]) -> None:
    plugin = PLUGINS[line["precision"]]()
    config, policy = plugin.mixed_precision_config, fsdp2_policy(line["precision"])
    assert plugin.param_dtype == DTYPES[line["stored"]]
    assert config.param_dtype == policy.param_dtype == DTYPES[line["gathered in"]]
    assert config.reduce_dtype == policy.reduce_dtype == DTYPES[line["gradients summed in"]]
    assert config.buffer_dtype == DTYPES[line["buffers"]]


@pytest.mark.filterwarnings("ignore:FSDP with `bf16-true`")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lightnings_own_dtypes_under_fsdp(precision: str) -> None:
    config = FSDPPrecision(precision).mixed_precision_config  # type: ignore[arg-type]
    said = {line[""]: line["Lightning's own plugin"] for line in table_of(PAGE, "Lightning's own plugin")}
    summed, buffers = (
        next(said[row] for row in said if part in row) for part in ("FSDP1: gradients", "the same: buffers")
    )
    assert (summed, buffers) == ("bf16", "cast to bf16")
    assert config.reduce_dtype == config.buffer_dtype == torch.bfloat16
    # the strategy's own setting takes precedence over any plugin
    strategy = FSDPStrategy(mixed_precision=torch.distributed.fsdp.MixedPrecision(reduce_dtype=torch.float16))
    assert strategy.mixed_precision_config.reduce_dtype == torch.float16


def test_measured_bytes_times_and_updates() -> None:
    rows = measured("precisions-cpu.jsonl")
    said = table_of(PAGE, "saved for backward", "updates lost")
    assert sorted(line["precision"] for line in said) == sorted(rows)
    for line in said:
        row = rows[line["precision"]]
        sizes = {
            key.removesuffix("_bytes"): f"{size / MIB:.1f} MiB" for key, size in row.items() if "bytes" in key and size
        }
        assert line["step"] == f"{row['p50_ms']:.0f} ms"
        assert line["parameters"] == sizes["parameter"]
        assert line["gradients"] == sizes["gradient"]
        assert line["optimizer"] == sizes["optimizer"]
        assert line["weight copies"] == sizes.get("weight_copy", "0")
        assert line["saved for backward"] == f"{row['saved_bytes'] / MIB:.0f} MiB"
        lost = line["updates lost"].removesuffix("%")
        assert lost == f"{100 * row['unchanged_fraction']:.{len(lost.partition('.')[2])}f}"
        assert row["learning_rate"] == 1e-3


def test_measured_losses() -> None:
    rows = measured("compare-tiny-gpt-cpu.jsonl")
    said = table_of(PAGE, "precision", "training loss", "validation loss")
    names = [line["precision"] for line in said]
    assert names == by_default(emulated=False)
    for line, row in zip(said, map(rows.__getitem__, names), strict=True):
        assert (line["training loss"], line["validation loss"]) == (f"{row['loss']:.4f}", f"{row['val_loss']:.4f}")
