"""Compares the dtypes of a model's tensors with the expected ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_fp8.dtypes.buffers import buffer_dtypes as stored_buffers
from lightning_fp8.dtypes.storage import kept_parameters, running_statistics
from lightning_fp8.modules.paths import check_patterns, plain_path
from lightning_fp8.ops.formats import dtype_name


class DtypeRow(NamedTuple):
    """One tensor of a model.

    Attributes:
        kind: ``"parameter"``, ``"gradient"``, ``"buffer"`` or ``"optimizer state"``.
        name: its path; for optimizer state, the parameter's path and then the name in the state.
        actual: the dtype it has.
        expected: the dtype it should have; None if any dtype is allowed.
        elements: how many elements it has.
    """

    kind: str
    name: str
    actual: torch.dtype
    expected: torch.dtype | None
    elements: int

    @property
    def matches(self) -> bool:
        """Whether the dtype is the expected one. Optimizer state may also have a wider one."""
        if self.expected is None or self.actual == self.expected:
            return True
        wider = self.actual.is_floating_point and self.actual.itemsize > self.expected.itemsize
        return self.kind == "optimizer state" and wider


class DtypeReport(NamedTuple):
    """What :func:`audit` found; ``str(report)`` is a table by kind and dtype.

    Attributes:
        rows: one for each tensor.
    """

    rows: tuple[DtypeRow, ...]

    @property
    def violations(self) -> tuple[DtypeRow, ...]:
        """The rows whose dtype is not the expected one."""
        return tuple(row for row in self.rows if not row.matches)

    def __str__(self) -> str:
        groups: dict[tuple[str, torch.dtype, torch.dtype | None], list[DtypeRow]] = {}
        for row in self.rows:
            groups.setdefault((row.kind, row.actual, row.expected), []).append(row)
        lines = [_line("what", "actual", "expected", "tensors", "elements", "bytes", "")]
        for (kind, actual, expected), rows in groups.items():
            elements = sum(row.elements for row in rows)
            verdict = "" if expected is None else "ok" if rows[0].matches else "MISMATCH"
            counts = (f"{len(rows):,}", f"{elements:,}", f"{elements * actual.itemsize:,}")
            lines.append(
                _line(kind, dtype_name(actual), "-" if expected is None else dtype_name(expected), *counts, verdict)
            )
        for row in self.violations[:10]:
            expected_name = dtype_name(row.expected) if row.expected else ""
            lines.append(f"  {row.kind} {row.name}: expected {expected_name}, actual {dtype_name(row.actual)}")
        if len(self.violations) > 10:
            lines.append(f"  and {len(self.violations) - 10} more")
        return "\n".join(lines)


def audit(
    model: nn.Module,
    param_dtype: torch.dtype | None = None,
    keep_fp32: Sequence[str] = (),
    optimizers: Iterable[Optimizer] = (),
    buffer_dtypes: Mapping[str, torch.dtype] | None = None,
) -> DtypeReport:
    """Compare the dtypes of a model's tensors with what they should be.

    Floating point parameters should have ``param_dtype``, or fp32 inside modules that ``keep_fp32`` matches; gradients
    the dtype of their parameter; optimizer state that dtype or a wider one; running statistics of a normalisation the
    dtype of its weight. Beside parameters in bf16 other buffers follow them, or stay in fp32 as
    :func:`~lightning_fp8.dtypes.buffers.buffer_dtypes` says; else they have the dtype they had before.

    Args:
        model: the model, plain or converted.
        param_dtype: dtype expected of parameters; without it they are only listed.
        keep_fp32: patterns on module paths, as in :class:`~lightning_fp8.Fp8Precision`.
        optimizers: optimizers whose state is checked; scalars, such as step counts, are left out.
        buffer_dtypes: the earlier dtype of each buffer, by name, see :func:`buffer_dtypes_of`.

    Raises:
        ValueError: if a pattern matches no module.

    >>> print(audit(nn.Linear(2, 2), param_dtype=torch.bfloat16).violations[0].name)
    weight
    """
    check_patterns(model, keep_fp32, "keep_fp32")
    kept_ids = kept_parameters(model, keep_fp32)
    rows: list[DtypeRow] = []
    for name, parameter in model.named_parameters():
        expected = torch.float32 if id(parameter) in kept_ids else param_dtype
        rows.append(_row("parameter", plain_path(name), parameter, expected))
        if parameter.grad is not None:
            rows.append(_row("gradient", plain_path(name), parameter.grad, parameter.dtype))
    following = {} if param_dtype is None else stored_buffers(model, param_dtype, keep_fp32)
    rows.extend(_buffer_rows(model, following, buffer_dtypes or {}))
    rows.extend(_state_rows(model, optimizers))
    return DtypeReport(tuple(rows))


def buffer_dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtype of each buffer, by name, to compare with later."""
    return {plain_path(name): buffer.dtype for name, buffer in model.named_buffers()}


def _buffer_rows(
    model: nn.Module, following: Mapping[int, torch.dtype], before: Mapping[str, torch.dtype]
) -> Iterator[DtypeRow]:
    expected = {**following, **{id(buffer): weight.dtype for buffer, weight in running_statistics(model)}}
    for name, buffer in model.named_buffers():
        path = plain_path(name)
        yield _row("buffer", path, buffer, expected.get(id(buffer), before.get(path)))


def _state_rows(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[DtypeRow]:
    names = {id(parameter): plain_path(name) for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "a parameter that is not the model's")
            for field, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield _row("optimizer state", f"{name}: {field}", value, parameter.dtype)


def _row(kind: str, name: str, tensor: Tensor, expected: torch.dtype | None) -> DtypeRow:
    # only buffers are expected to keep a dtype that is not floating point
    floating = tensor.is_floating_point() or kind == "buffer"
    return DtypeRow(kind, name, tensor.dtype, expected if floating else None, 0 if is_lazy(tensor) else tensor.numel())


def _line(*cells: Any) -> str:
    kind, actual, expected, tensors, elements, size, verdict = cells
    return f"{kind:16} {actual:10} {expected:10} {tensors:>8} {elements:>16} {size:>18}  {verdict}".rstrip()
