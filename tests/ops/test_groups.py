"""Linear layers of groups of rows: where rows go, and the casts and products of many routings."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from repository import ROOT
from slots import slot_of
from torch import Tensor

from lightning_fp8 import DelayedScaling
from lightning_fp8.core import groups as ops
from lightning_fp8.core.groups import groups_of
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import Groups
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.operand import Cast, Operand, Slot, Want
from lightning_fp8.scalings.per_tensor import PerTensor

MOST = 6
BOTH = Want(True, True)
K, N = 64, 192


def routing(number: int) -> tuple[Tensor, int]:
    """The sorted group of each row, and the number of groups. Some groups have no rows, some have all."""
    generator = torch.Generator().manual_seed(number)
    count, rows = (int(torch.randint(1, most, (), generator=generator)) for most in (MOST + 1, 200))
    chances = torch.rand(count, generator=generator) ** (4 * (number % 3)) + 1e-6
    if number % 5 == 0:
        chances[1:] = 0
    return torch.multinomial(chances, rows, True, generator=generator).sort().values, count


def test_places_of_rows() -> None:
    for number in range(200):
        chosen, count = routing(number)
        groups, sizes = groups_of(chosen, count), np.bincount(chosen.numpy(), minlength=count)
        starts = np.concatenate([[0], np.cumsum(-(-sizes // 128) * 128)])
        assert groups.edges.tolist() == starts.tolist()
        assert groups.position.tolist() == [start + i for start, size in zip(starts, sizes) for i in range(size)]
        expected = np.full(len(groups.of_tile), -1)
        for group in range(count):
            expected[starts[group] // 128 : starts[group + 1] // 128] = group
        assert groups.of_tile.tolist() == expected.tolist()
        # padding: at most 127 rows for each group that can have a row
        assert starts[-1] <= groups.padded_rows <= len(chosen) + 127 * min(count, len(chosen))


def test_the_docs_say_what_padding_costs() -> None:
    """For 8192 tokens with random routing: the zeros between groups, and the memory for the worst case."""
    page = (ROOT / "docs/experts.md").read_text()
    lines = re.findall(r"^\| [\w.-]+(?: \w+)?, (\d+) experts, (\d+) a token \| (.*) \|$", page, re.MULTILINE)
    assert len(lines) == 3
    for count, chosen, said in lines:
        chances = torch.rand(8192, int(count), generator=torch.Generator().manual_seed(0))
        rows = chances.topk(int(chosen)).indices.flatten().sort().values
        groups = groups_of(rows, int(count))
        zeros, memory = (100 * (size / len(rows) - 1) for size in (int(groups.edges[-1]), groups.padded_rows))
        assert said == f"{len(rows)} | {zeros:.1f}% | {memory:.1f}% more"


@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_group_that_does_not_exist(wrong: int) -> None:
    with pytest.raises(RuntimeError, match="names an expert that does not exist: there are 4"):
        groups_of(torch.tensor([0, 1, 3, wrong]).sort().values, 4)


def state_of(count: int) -> ScalingState:
    """The state of groups with different scales; the last groups have no history."""
    state = ScalingState([f"experts.{number}" for number in range(count)], DelayedScaling())
    known = torch.arange(2 * count) % count < max(1, count - 2)
    state.amax_history[0, : 2 * count] = torch.where(known, 2.0 ** (torch.arange(2 * count) % 5), 0.0)
    state.scale[: 2 * count] = torch.where(known, 2.0 ** (4 - torch.arange(2 * count) % 7), 1.0)
    return state


def stack_slot(state: ScalingState, role: str, format: str, count: int) -> Slot:
    first = state.row_of(0, role)  # type: ignore[arg-type]
    return slot_of(state, first, format, record=True)._replace(index=state.model.index_of(first, count))


def problem(number: int) -> tuple[dict[str, Any], int]:
    chosen, count = routing(number)
    generator = torch.Generator().manual_seed(1000 + number)

    def codes(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(16).to(FORMATS["e4m3"].dtype).view(torch.uint8)

    weight = codes(count, N, K)
    scale_inv = 2.0 ** -torch.arange(float(count))
    x, dy = (torch.randn(len(chosen), size, generator=generator) for size in (K, N))
    # rows of different sizes, so that the amaxes of groups differ
    x, dy = (one * 2.0 ** (chosen[:, None] % 3) for one in (x, dy))
    return {
        "x": x,
        "dy": dy,
        "w": Cast(*(Operand(one, scale_inv, PerTensor()) for one in (weight, weight.mT.contiguous()))),
        "bias": torch.randn(count, N, generator=generator) if number % 2 else None,
        "groups": groups_of(chosen, count),
        "k_by_n": number % 4 == 1,
    }, count


def results(given: dict[str, Any], count: int) -> tuple[list[Tensor], ScalingState]:
    """Output, gradients, scale_inv of the input, and the state afterwards."""
    state, groups, w = state_of(count), given["groups"], given["w"]
    x = ops.cast_groups(given["x"], stack_slot(state, "input", "e4m3", count), groups, BOTH)
    slot = stack_slot(state, "grad_output", "e5m2", count)
    shape = (count, K, N) if given["k_by_n"] else (count, N, K)
    rest = groups, slot, torch.float32, given["k_by_n"]
    y = ops.linear_groups(given["x"], torch.empty(shape), given["bias"], *x[:2], *w[:2], *rest)
    dtypes = torch.float32, torch.float32
    columns = x.columns, w.columns
    gradients = ops.linear_groups_backward(given["dy"], *columns, groups, slot, *dtypes, True, given["k_by_n"])
    return [y, *gradients, x.rows.scale_inv], state


def test_kernels_equal_one_by_one_for_60_routings(grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are equal, so sums differ only by the order of their terms."""
    for number in range(60):
        given, count = problem(number)
        found, state = results(given, count)
        with monkeypatch.context() as patch:
            patch.setattr("lightning_fp8.ops.library.cuda_on_cpu", False)
            expected, reference = results(given, count)
        assert torch.equal(state.amax, reference.amax)
        for name, one, other in zip(("y", "dx", "dw", "db", "scale_inv"), found, expected, strict=True):
            # like Hopper's tensor cores, the kernels here truncate sums 13 bits below the largest product
            bound = 2.0**-10 if name in ("y", "dx", "dw") else 2.0**-20
            torch.testing.assert_close(one, other, rtol=0, atol=bound * max(1e-30, other.abs().max().item()))


def test_reference_equals_fp64_products() -> None:
    """Values are exact in FP8, so the reference must equal each group's products in fp64."""
    for number in range(20):
        given, count = problem(number)
        x, dy = (torch.round(given[name].clamp(-2, 2)) for name in ("x", "dy"))
        given |= {"x": x, "dy": dy}
        (y, dx, dw, db, _), _ = results(given, count)
        codes, scale_inv, _ = given["w"].rows
        w = codes.view(FORMATS["e4m3"].dtype).double() * scale_inv.double()[:, None, None]
        groups: Groups = given["groups"]
        group = torch.searchsorted(groups.edges, groups.position.int(), right=True) - 1
        expected = torch.einsum("tk,tnk->tn", x.double(), w[group])
        if given["bias"] is not None:
            expected += given["bias"].double()[group]
        one_hot = torch.nn.functional.one_hot(group, count).double()
        of_w = torch.einsum("te,tn,tk->enk", one_hot, dy.double(), x.double())
        pairs = [
            (y, expected),
            (dx, torch.einsum("tn,tnk->tk", dy.double(), w[group])),
            (dw, of_w.mT if given["k_by_n"] else of_w),
            (db, one_hot.t() @ dy.double()),
        ]
        for one, other in pairs:
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * max(1.0, other.abs().max().item()))


def test_products_equal_torchao_emulation() -> None:
    """A second reference: torchao's grouped MX products of our codes, with each group's scale in all of its blocks."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao

    for number in range(10):
        given, count = problem(number)
        groups, w = given["groups"], given["w"]
        state = state_of(count)
        # powers of two, as scales in MX are
        state.amax_history[0] = 1.0
        state.scale = 2.0 ** (torch.arange(len(state.scale)) % 5).float()
        x = ops.cast_groups(given["x"], stack_slot(state, "input", "e4m3", count), groups, BOTH)
        by_rows = x.rows.scaling.multiply_groups(x.rows, w.rows, None, groups, torch.float32, False)
        by_depth = x.columns.scaling.multiply_depths(x.columns, x.columns, groups, torch.float32)
        of_rows, last = groups.of_tile.clamp(min=0).repeat_interleave(128), int(groups.edges[-1])
        scales = x.rows.scale_inv[of_rows]
        dtype = FORMATS["e4m3"].dtype
        found = torchao._emulated_mxfp8_scaled_grouped_mm_2d_3d(
            x.rows.codes.view(dtype)[:last],
            scales[:last, None].expand(-1, K // 32),
            w.rows.codes.view(dtype).mT,
            w.rows.scale_inv[:, None, None].expand(-1, K // 32, N),
            groups.edges[1:],
            torch.bfloat16,
        )
        expected = by_rows.to(torch.bfloat16).float()
        found = found.index_select(0, groups.position)
        torch.testing.assert_close(found.float(), expected, rtol=2.0**-7, atol=2.0**-7 * expected.abs().max().item())
        of_columns = scales.view(-1, 32)[:, 0].expand(K, -1)[:, : last // 32]
        operand = x.columns.codes.view(dtype)[:, :last], of_columns
        found = torchao._emulated_mxfp8_scaled_grouped_mm_2d_2d(*operand, *operand, groups.edges[1:], torch.bfloat16)
        torch.testing.assert_close(
            found.float(), by_depth, rtol=2.0**-7, atol=2.0**-7 * max(1.0, by_depth.abs().max().item())
        )


@pytest.mark.parametrize("half", ["reference", "kernels"])
def test_operators_and_their_fakes(half: str, request: pytest.FixtureRequest) -> None:
    if half == "kernels":
        request.getfixturevalue("grouped_half")
    given, count = problem(3)
    state, groups, w = state_of(count), given["groups"], given["w"]
    slots = [stack_slot(state, role, fmt, count) for role, fmt in (("input", "e4m3"), ("grad_output", "e5m2"))]
    checks = ("test_schema", "test_faketensor")
    for layout in ((True, False), (False, True), (True, True)):
        flat = ops._cast_op.signature.flattened((given["x"], slots[0], groups, *layout))
        torch.library.opcheck(ops._cast_op.op, tuple(flat), test_utils=checks)
    x = ops.cast_groups(given["x"], slots[0], groups, BOTH)
    weight = torch.randn(count, N, K, requires_grad=True)
    arguments = given["x"].requires_grad_(), weight, given["bias"].requires_grad_(), *x[:2], *w[:2], groups
    flat = ops.linear_groups.signature.flattened((*arguments, slots[1], torch.float32, False))
    torch.library.opcheck(ops.linear_groups.op, tuple(flat), test_utils=(*checks, "test_aot_dispatch_static"))
    for k_by_n, bias in ((True, True), (False, False)):
        rest = groups, slots[1], torch.bfloat16, torch.float32, bias, k_by_n
        flat = ops.linear_groups_backward.signature.flattened((given["dy"], x.columns, w.columns, *rest))
        torch.library.opcheck(ops.linear_groups_backward.op, tuple(flat), test_utils=checks)


def test_flops_exclude_padding() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    given, count = problem(3)
    state = state_of(count)
    slot = stack_slot(state, "input", "e4m3", count)
    made, w = ops.cast_groups(given["x"], slot, given["groups"], BOTH), given["w"]
    x, weight = given["x"].requires_grad_(), torch.randn(count, N, K, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = ops.linear_groups(x, weight, None, *made[:2], *w[:2], given["groups"], slot, torch.float32, False)
        assert counter.get_total_flops() == 2 * math.prod((len(x), N, K))
        y.sum().backward()
    assert counter.get_total_flops() == 6 * math.prod((len(x), N, K))
