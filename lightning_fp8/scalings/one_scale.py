"""The base of kinds with one scale for a tensor, or none: parts, transposes and groups of rows follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kernels_cuda import gemm as kernel_gemm
from lightning_fp8.ops.cuda.groups import required
from lightning_fp8.ops.cuda.layouts import needs_transposed_payload
from lightning_fp8.ops.library import on_gpu
from lightning_fp8.ops.operand import Groups
from lightning_fp8.scalings.base import Scaling, column_sums
from lightning_fp8.scalings.operand import Cast, Operand, Slot, Want


@dataclass(frozen=True)
class OneScale(Scaling):
    """Both layouts have the same codes. Each group of rows has its own scale, ``scale_inv [E]``."""

    has_blocks: ClassVar[bool] = False
    file_kind: ClassVar[str | None] = "tensor"
    takes_groups: ClassVar[bool] = True

    @property
    @override
    def layouts_share_codes(self) -> bool:
        return True

    @override
    def is_view(self, device: torch.device, shape: Sequence[int]) -> bool:
        return not needs_transposed_payload(device, shape)

    @override
    def show(self, scale: Tensor, newest: Tensor) -> None:
        # the update has computed it from the whole window, with the margin
        pass

    @override
    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return ()

    @override
    def transposed_scales(self, scale_inv: Tensor) -> Tensor:
        return scale_inv

    @override
    def part(self, operand: Operand, rows: slice, count: int, by_columns: bool) -> Operand | None:
        return operand._replace(codes=operand.codes[:, rows] if by_columns else operand.codes[rows])

    @override
    def cast_groups(self, x: Tensor, slot: Slot, groups: Groups, want: Want) -> Cast:
        x = placed(x, groups)
        if on_gpu(x):
            return self._groups_by_kernel(x, slot, groups, want)
        # one after the other
        count = len(slot.index)
        rows, scale_inv = None, torch.ones(count, dtype=torch.float32, device=x.device)
        sums = x.new_zeros(count, x.shape[1], dtype=torch.float32) if want.sums else None
        for group, part in enumerate(_each(groups)):
            if part.start == part.stop:
                continue
            cast = self.cast(x[part], slot._replace(index=slot.index[group : group + 1]), Want(dtype=want.dtype))
            if cast.rows is None:
                continue
            rows = cast.rows.codes.new_zeros(x.shape) if rows is None else rows
            rows[part], scale_inv[group] = cast.rows.codes, cast.rows.scale_inv
            if sums is not None:
                sums[group] = column_sums(x[part])
        whole = Operand(self.no_codes(x, want) if rows is None else rows, scale_inv, self)
        return self.both(whole, want)._replace(sums=sums)

    def no_codes(self, x: Tensor, want: Want) -> Tensor:
        """Codes of zeros in the shape of x."""
        return torch.zeros(x.shape, dtype=torch.uint8, device=x.device)

    def _groups_by_kernel(self, x: Tensor, slot: Slot, groups: Groups, want: Want) -> Cast:
        raise NotImplementedError

    @override
    def multiply_groups(
        self, a: Operand, b: Operand, bias: Tensor | None, groups: Groups, dtype: torch.dtype, fast: bool
    ) -> Tensor:
        if on_gpu(a.codes):
            return _by_rows(a, b, bias, groups, dtype, fast).index_select(0, groups.position)
        out = a.codes.new_zeros(len(a.codes), b.codes.shape[1], dtype=dtype)
        for group, part in enumerate(_each(groups)):
            if part.start < part.stop:
                of_a = a._replace(codes=a.codes[part], scale_inv=a.scale_inv[group])
                of_bias = None if bias is None else bias[group]
                out[part] = self.emulated_product(of_a, matrix_of(b, group), of_bias, dtype)
        return out.index_select(0, groups.position)

    @override
    def multiply_depths(self, a: Operand, b: Operand, groups: Groups, dtype: torch.dtype) -> Tensor:
        if on_gpu(a.codes):
            return _by_depth(a, b, groups, dtype)
        out = a.codes.new_zeros(len(a.scale_inv), len(a.codes), len(b.codes), dtype=dtype)
        for group, part in enumerate(_each(groups)):
            if part.start < part.stop:
                of_a, of_b = (
                    side._replace(codes=side.codes[:, part], scale_inv=side.scale_inv[group]) for side in (a, b)
                )
                out[group] = self.emulated_product(of_a, of_b, None, dtype)
        return out


def matrix_of(stack: Operand, group: int) -> Operand:
    """One of E operands in one: codes ``[E, N, K]``, scale_inv ``[E]``."""
    return stack._replace(codes=stack.codes[group], scale_inv=stack.scale_inv[group])


def placed(x: Tensor, groups: Groups) -> Tensor:
    """x ``[T, K]`` -> ``[P, K]``, zeros between."""
    return x.new_zeros(groups.padded_rows, x.shape[1]).index_copy_(0, groups.position, x)


def _each(groups: Groups) -> list[slice]:
    """The rows of each group without the zeros behind them, as a separate layer would get them."""
    edges = groups.edges.to(groups.position.dtype)
    sizes = torch.searchsorted(groups.position, edges).diff()
    return [slice(begin, begin + size) for begin, size in zip(edges.tolist(), sizes.tolist(), strict=False)]


# On a GPU, each in one launch


def _by_rows(a: Operand, b: Operand, bias: Tensor | None, groups: Groups, dtype: torch.dtype, fast: bool) -> Tensor:
    """a ``[P, K]``, b ``[E, N, K]``, bias ``[E, N]`` -> ``[P, N]``; rows without a group are arbitrary."""
    device = a.codes.device
    kernel, configuration = required(device, "rows", a.scaling.format, b.scaling.format, dtype, not fast)
    out = torch.empty(len(a.codes), b.codes.shape[1], dtype=dtype, device=device)
    bias = None if bias is None else bias.contiguous()
    kernel_gemm.gemm_by_rows(kernel, configuration, a[:2], b[:2], groups.of_tile, out, bias)
    return out


def _by_depth(a: Operand, b: Operand, groups: Groups, dtype: torch.dtype) -> Tensor:
    """a ``[M, P]``, b ``[N, P]`` -> ``[E, M, N]``, the sum over each group's part of P."""
    device = a.codes.device
    kernel, configuration = required(device, "depth", a.scaling.format, b.scaling.format, dtype, True)
    out = torch.empty(len(a.scale_inv), len(a.codes), len(b.codes), dtype=dtype, device=device)
    kernel_gemm.gemm_by_depth(kernel, configuration, a[:2], b[:2], groups.edges, out)
    return out
