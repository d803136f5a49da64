"""``nn.MultiheadAttention`` with replaceable projections, and ``scaled_dot_product_attention`` as its core.

torch's module never calls the ``forward`` of its ``out_proj`` and multiplies with ``in_proj_weight`` itself, so a swap
of linear layers does not reach it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.family import of_class
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.modules.functional import Fp8Weight, cast_weight, check_input, fp8_linear, take_rows


class SdpaMultiheadAttention(nn.MultiheadAttention):
    """The forward of ``nn.MultiheadAttention``; subclasses define the projections.

    Shapes, arguments and results are those of ``nn.MultiheadAttention``. Masks come in any floating dtype or as bool.
    """

    def _is_plain(self, query: Tensor) -> bool:
        """Whether torch's own forward computes the same products."""
        return False

    def _in_operand(self, gemm: str) -> Any:
        """The weight of an input projection as the operand for :meth:`_project`, made once per forward."""
        raise NotImplementedError

    def _project(self, gemm: str, x: Tensor, operand: Any, rows: slice, bias: Tensor | None) -> Tensor:
        """x ``[*, features]`` times a slice of the operand's rows, plus bias."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query ``[L, E]``, ``[L, B, E]`` or, with ``batch_first``, ``[B, L, E]`` -> output of that shape, weights."""
        # torch's own numbers if the layer is plain again (a user's forward still calls this one), or all in bf16
        if not isinstance(self, SdpaMultiheadAttention) or self._is_plain(query):
            return nn.MultiheadAttention.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._check(query, key, value, attn_mask, is_causal)
        is_batched, batch_first = query.dim() == 3, self.batch_first
        q, k, v = (self._heads(x, is_batched, batch_first) for x in self._in_projections(query, key, value))
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None  # the hint says that attn_mask is the causal mask
        else:
            mask, is_causal = self._merged_mask(q, k, attn_mask, key_padding_mask), False
        k, v, mask = self._extended(k, v, mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            attended, weights = _attend_with_weights(q, k, v, mask, dropout)
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if is_batched else weights.squeeze(0)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        # [B, H, L, D] -> the layout of the query
        order = (0, 2, 1, 3) if batch_first or not is_batched else (2, 0, 1, 3)
        attended = attended.permute(order).flatten(2)
        return self.out_proj(attended if is_batched else attended.squeeze(0)), weights

    def _in_projections(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v, each ``[*, embed_dim]``: neighbours with the same input share a GEMM."""
        inputs, width, names = (query, key, value), self.embed_dim, in_gemms(self)
        operands = {gemm: self._in_operand(gemm) for gemm in names}
        is_packed = len(names) == 1
        starts = [0, *(at for at in (1, 2) if not is_packed or inputs[at] is not inputs[at - 1])]
        projected: list[Tensor] = []
        for start, end in zip(starts, [*starts[1:], 3], strict=True):
            gemm, rows = names[0 if is_packed else start], slice(start * width, end * width)
            bias = None if self.in_proj_bias is None else take_rows(self.in_proj_bias, rows)
            weight_rows = rows if is_packed else slice(0, width)
            y = self._project(gemm, inputs[start], operands[gemm], weight_rows, bias)
            projected.extend(y.chunk(end - start, dim=-1))
        return projected

    def _heads(self, x: Tensor, is_batched: bool, batch_first: bool) -> Tensor:
        """``[L, E]``, ``[L, B, E]`` or ``[B, L, E]`` -> ``[B, H, L, D]``."""
        x = x if is_batched else x[None]
        split = x.unflatten(-1, (self.num_heads, self.head_dim))
        return split.permute((0, 2, 1, 3) if batch_first or not is_batched else (1, 2, 0, 3))

    def _merged_mask(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """Both masks as one additive mask, broadcastable to ``[B, H, L, S]``, in the dtype of q."""
        mask = None
        (batch, heads, length, _), source = q.shape, k.shape[2]
        if attn_mask is not None:
            self._check_mask("attn_mask", attn_mask, (length, source), (batch * heads, length, source))
            mask = _additive(attn_mask, q.dtype)
            mask = mask.view(batch, heads, length, source) if mask.dim() == 3 else mask[None, None]
        if key_padding_mask is not None:
            self._check_mask("key_padding_mask", key_padding_mask, (batch, source), (source,) if batch == 1 else ())
            padding = _additive(key_padding_mask, q.dtype).view(batch, 1, 1, source)
            mask = padding if mask is None else mask + padding
        return mask

    def _check_mask(self, name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
        if tuple(mask.shape) not in shapes:
            allowed = " or ".join(str(shape) for shape in shapes if shape)
            raise ValueError(f"{type(self).__name__}: `{name}` must have shape {allowed}, got {tuple(mask.shape)}.")

    def _extended(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """k, v and mask, with the entries of ``bias_k``, ``bias_v`` and ``add_zero_attn`` appended."""
        pairs = [] if self.bias_k is None or self.bias_v is None else [(self.bias_k, self.bias_v)]
        if self.add_zero_attn:
            zeros = k.new_zeros(self.embed_dim)
            pairs.append((zeros, zeros))
        for pair in pairs:
            rows = [vector.view(1, self.num_heads, 1, self.head_dim).expand(len(k), -1, -1, -1) for vector in pair]
            k, v = (torch.cat([x, row.to(x.dtype)], dim=2) for x, row in zip((k, v), rows, strict=True))
            mask = None if mask is None else F.pad(mask, (0, 1))
        return k, v, mask

    def _check(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        self._check_rows()
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError(
                f"{type(self).__name__} takes padded tensors with a `key_padding_mask`, not nested tensors."
            )
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(
                f"{type(self).__name__}: query, key and value must all have 2 dimensions (one sequence) or 3 (a batch),"
                f" got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
            )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"{type(self).__name__}: key and value must have the same length and batch size, got"
                f" {tuple(key.shape)} and {tuple(value.shape)}."
            )
        if is_causal and attn_mask is None:
            raise ValueError(
                f"{type(self).__name__}: `is_causal` is a hint about `attn_mask`, which must be given too."
            )

    def _check_rows(self) -> None:
        # rows are split among query, key and value: surplus rows would be ignored silently
        parts = 3 if self.in_proj_weight is not None else 1
        rows = {f"{gemm}_weight": parts * self.embed_dim for gemm in in_gemms(self)}
        if self.in_proj_bias is not None:
            rows["in_proj_bias"] = 3 * self.embed_dim
        for name, expected in rows.items():
            shape = tuple(getattr(self, name).shape)
            if shape[:1] != (expected,):
                raise ValueError(
                    f"{type(self).__name__}: `{name}` must have {expected} rows with"
                    f" embed_dim={self.embed_dim}, got the shape {shape}."
                )


class Fp8MultiheadAttention(Fp8Module, SdpaMultiheadAttention):
    """``nn.MultiheadAttention`` with all its projections in FP8.

    Never constructed: :func:`lightning_fp8.convert` turns an ``nn.MultiheadAttention`` into it by class, on the same
    object, with the same parameters and ``state_dict`` keys. Its tensors are called ``<path>.in_proj.<role>``, or
    ``<path>.q_proj.<role>``, ``k_proj`` and ``v_proj`` where ``kdim`` or ``vdim`` makes them separate; ``out_proj``
    becomes an :class:`~lightning_fp8.Fp8Linear`. A packed weight has one scale, even if query and key differ.

    Shape, arguments and results: those of ``nn.MultiheadAttention``; inputs fp32, bf16 or fp16, outputs in autocast's
    dtype where autocast is on. The core is ``scaled_dot_product_attention`` in the dtype of the projections. With all
    projections in bf16, as after :func:`lightning_fp8.conversion.fall_back`, torch's own forward runs, with its
    numbers.

    Raises:
        TypeError: for an input that is not fp32, bf16 or fp16, or is nested.
        ValueError: for shapes that do not fit, or ``is_causal`` without ``attn_mask``.
    """

    @staticmethod
    def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
        """The weights of ``in_proj``, or of ``q_proj``, ``k_proj`` and ``v_proj``; ``out_proj`` is a separate layer."""
        return {gemm: getattr(layer, f"{gemm}_weight") for gemm in in_gemms(layer)}

    def _is_plain(self, query: Tensor) -> bool:
        out_proj = self.out_proj
        # torch's forward would not call an adapter, or a forward that the user has replaced
        if not isinstance(out_proj, nn.Linear) or "forward" in vars(out_proj):
            return False
        parts = [part for part in (self, out_proj) if isinstance(part, Fp8Module)]
        if any(part.in_fp8 for part in parts):
            return False
        weights = [*self.gemm_weights(self).values(), out_proj.weight]
        agree = torch.is_autocast_enabled("cuda" if query.is_cuda else "cpu") or all(
            weight.dtype == query.dtype for weight in weights
        )
        if not agree or any(isinstance(weight, DTensor | Fp8Parameter) for weight in weights):
            return False
        for gemm in () if torch.compiler.is_compiling() else [gemm for part in parts for gemm in part.fp8.values()]:
            gemm.weight_cast.drop()
        return True

    def _in_operand(self, gemm: str) -> Fp8Weight:
        return cast_weight(self.fp8[gemm], getattr(self, f"{gemm}_weight"), self.phase)

    def _project(self, gemm: str, x: Tensor, operand: Fp8Weight, rows: slice, bias: Tensor | None) -> Tensor:
        of = self.fp8[gemm]
        return fp8_linear(of, x, operand.rows(rows, of), bias, self.phase)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        super()._check(query, key, value, attn_mask, is_causal)
        gemms = in_gemms(self) if self.in_proj_weight is None else ("in_proj",) * 3
        for gemm, name, x in zip(gemms, ("query", "key", "value"), (query, key, value), strict=True):
            check_input(self, name, x, getattr(self, f"{gemm}_weight"))


def in_gemms(layer: nn.Module) -> tuple[str, ...]:
    """Names of an attention's input projections; the weight of each is called ``<name>_weight``."""
    return ("q_proj", "k_proj", "v_proj") if layer.in_proj_weight is None else ("in_proj",)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to attention scores: ``-inf`` where a bool mask says True."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise TypeError(f"Attention masks must be bool or floating point, got {mask.dtype}.")
    return mask.to(dtype)


def _attend_with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Attention written out: result ``[B, H, L, D]`` and weights ``[B, H, L, S]``, which fused kernels do not give."""
    scores = torch.matmul(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1))
    scores = scores if mask is None else scores + mask
    weights = F.dropout(torch.softmax(scores, dim=-1), dropout)
    return torch.matmul(weights, v), weights


FAMILY = of_class(nn.MultiheadAttention, Fp8MultiheadAttention, "nn.MultiheadAttention")
