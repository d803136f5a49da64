"""The suite of casts and GEMMs with block scales, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from copied_bytes import copied_bytes
from tensor_cores import HOPPER

from benchmarks import blocks, command
from benchmarks.blocks import Gemm
from lightning_fp8.ops.amaxes import per_row

CPU = torch.device("cpu")


def test_the_whole_suite_on_the_cpu(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command.main(["--suite", "blocks", "--device", "cpu", "--rounds", "1", "--out", str(rows)])
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["case"] for row in found} == {case.name for case in blocks.cases(CPU)}
    assert all(row["checked"] for row in found if row["variant"] in ("lightning_fp8", "torch"))


@pytest.mark.parametrize("kind", ["fprop", "wgrad"])
def test_a_wrong_product_is_seen(kind: str) -> None:
    """A single wrong number is found, and so are wrong scales of one step."""
    case = Gemm(kind, 40, 150, 300)
    a, b, a_inv, b_inv = case._operands(CPU, 0)
    (ours, *_) = case.variants(CPU)
    assert ours.check() is None
    out = ours.call(0)
    assert case._wrong(out, a, b, a_inv, b_inv) is None
    out[3, 4] += 0.1 * out.abs().max()
    assert str(case._wrong(out, a, b, a_inv, b_inv)).startswith("1 of ")
    b_inv[:, 1] *= 1.1
    assert case._wrong(ours.call(0), a, b, a_inv, b_inv) is not None


@pytest.mark.parametrize("kind", ["fprop", "wgrad"])
@pytest.mark.usefixtures("strict_products")
def test_torchs_product_is_timed_without_copies(kind: str) -> None:
    _, theirs, _ = Gemm(kind, 64, 48, 512).variants(CPU)
    assert theirs.check() is None
    with copied_bytes() as copied:
        theirs.call(0)
    assert copied == {}


@pytest.mark.parametrize("kind", ["fprop", "wgrad"])
def test_the_bound_takes_tensor_cores_sums_and_no_missing_step(kind: str) -> None:
    case = Gemm(kind, 24, 16, 4096)
    a, b, a_inv, b_inv = case._operands(CPU, 0)
    values = [one.view(torch.float8_e4m3fn).double() for one in (a, b)]
    scales = [per_row(inverse, len(one)) for one, inverse in ((a, a_inv), (b, b_inv))]
    sums = torch.zeros(24, 16)
    for step in range(32):
        assert case._wrong(sums.to(case.output), a, b, a_inv, b_inv) is not None
        its = [one[:, 128 * step :][:, :128] for one in values]
        partial = HOPPER.sums(its[0], its[1], ("e4m3", "e4m3"), promote=True).float()
        sums += partial * (scales[0][:, step, None] * scales[1][:, step])
    assert case._wrong(sums.to(case.output), a, b, a_inv, b_inv) is None
