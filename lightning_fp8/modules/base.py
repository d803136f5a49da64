"""What converted modules have in common: their rows in the scaling state, and one linear layer's GEMMs in FP8."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8 import ops
from lightning_fp8.modules.gathered_weight import GatheredWeight
from lightning_fp8.modules.weight_cache import WeightCache, can_keep_copies
from lightning_fp8.modules.weight_group import WeightGroup
from lightning_fp8.ops.formats import CASTABLE_DTYPES, ROLES, Role
from lightning_fp8.ops.library import is_k_major
from lightning_fp8.ops.operand import Fp8Operand, Slot, WeightSlot
from lightning_fp8.runtime.device import check_device
from lightning_fp8.scaling.state import ScalingState


class Settings(NamedTuple):
    """What the layers of one model have in common besides their scales. No part of any checkpoint.

    Attributes:
        gemm: which GEMMs they run, one of ``lightning_fp8.ops.cuda.gemm_choice.GEMMS``: it changes no more than the
            order in which sums are taken.
        min_features: below how many features in or out layers were left alone by the conversion.
    """

    gemm: str = "auto"
    min_features: int = 0


class Fp8Rows:
    """The place of one linear layer's tensors in the model's scaling state.

    Attributes:
        state: the scaling state shared by all converted modules of the model.
        module: position of the layer among them.
        index: by role, which tensor of the state it is, as ``[1] int64`` on the device of the state. A tensor, not an
            int, so that ``torch.compile`` makes one graph for all layers of a kind.
        formats: by role, the name of the format that it is cast to.
        switch: whether these GEMMs run in FP8.
        weight_cache: the FP8 copy of the weight.
        bias_cache: the bias in a 16-bit dtype, as torch's GEMM takes it.
        settings: those of the model.
        group: all layers that share the state, whose weights are cast together where the device can.
        k_by_n: whether the layer keeps its weight as ``[K, N]``.
        keeps_cast: whether the FP8 copy of the weight outlives a forward.
    """

    def __init__(self, state: ScalingState, module: int, group: WeightGroup) -> None:
        self.state = state
        self.module = module
        self.formats: dict[Role, str] = {role: state.recipe.format_of(role).name for role in ROLES}
        self.switch = state.switches[module]
        self.weight_cache: WeightCache[Fp8Operand] = WeightCache()
        self.bias_cache: WeightCache[Tensor] = WeightCache()
        self.settings = Settings()
        self.group = group
        self._owner: tuple[weakref.ref[Fp8Module], str] | None = None
        self._trace: tuple[int, int] | None = None
        self.k_by_n = False
        self.keeps_cast = True
        self._place_index()

    def __getstate__(self) -> dict[str, Any]:
        # a copy belongs to the copied layer, which says so in its own `__setstate__`
        return {**self.__dict__, "_owner": None, "_trace": None}

    def belong_to(self, layer: Fp8Module, gemm: str) -> None:
        """Say which layer these rows are of, and by which name it knows them."""
        self._owner = (weakref.ref(layer), gemm)
        self.k_by_n = layer.weight_is_k_by_n
        self.note_sharding(layer.gemm_weights(layer)[gemm])
        self.group.join(self)

    def note_sharding(self, weight: Tensor) -> None:
        """Keep no FP8 copy of a weight that is sharded: a copy of the whole would undo it. Nor is it compared."""
        self.keeps_cast = not isinstance(weight, DTensor)
        self.state.weight_changes.note_sharding(self.module, not self.keeps_cast)
        if not self.keeps_cast:
            self.weight_cache.drop()

    def note_trace(self, weight: Tensor) -> bool:
        """Remember what changes with a weight that is changed or replaced; whether that may be another weight."""
        before, self._trace = self._trace, (weight._version, weight.data_ptr())
        return before not in (None, self._trace) or self.module in self.state.weight_changes.different

    @property
    def weight(self) -> Tensor | None:
        """The weight as its layer holds it now; None where the layer is gone."""
        layer = self.layer
        return None if layer is None or self._owner is None else layer.gemm_weights(layer).get(self._owner[1])

    @property
    def layer(self) -> Fp8Module | None:
        """Whose rows these are; None where it is gone."""
        return self._owner[0]() if self._owner is not None else None

    def weight_operand(self, payload: Tensor, payload_t: Tensor, scale_inv: Tensor) -> Fp8Operand:
        """The cast of a weight as it is kept, by rows and by columns -> that of ``[N, K]``."""
        by_rows, by_columns = (payload_t, payload) if self.k_by_n else (payload, payload_t)
        return Fp8Operand(by_rows, by_columns, scale_inv, self.formats["weight"])

    def slot(self, role: Role, record: bool) -> Slot:
        """The place of the input or of the gradient of the output."""
        state, gemm = self.state, self.settings.gemm
        return Slot(state.scale, state.amax_history, self.index[role], self.formats[role], state, record, gemm)

    def weight_slot(self, record: bool) -> WeightSlot:
        """The place of the weight."""
        return WeightSlot(self.index["weight"], self.formats["weight"], self.state, record)

    def _place_index(self) -> None:
        with torch.inference_mode(False):
            device = self.state.device
            self.index: dict[Role, Tensor] = {
                role: torch.tensor([self.state.row_of(self.module, role)], dtype=torch.int64, device=device)
                for role in ROLES
            }

    def to(self, device: torch.device) -> None:
        """Move the state (the first layer of a model to ask does it for all) and the layer's own index."""
        if self.state.device != device:
            check_device(device)
            self.state.to(device)
        if self.index["input"].device != device:
            self._place_index()

    @property
    def name(self) -> str:
        """How the state calls the layer: its path in the model that was converted."""
        return self.state.module_names[self.module]


class Fp8Module(nn.Module):
    """A module whose linear layers compute in FP8. Never constructed: conversion gives an object another class.

    Attributes:
        fp8: the rows of each of its own GEMM weights, by name; the name is ``""`` where there is just one.
        plain_class: the class it had before, and gets back.
        weight_is_k_by_n: whether the layer keeps its weight as ``[K, N]``, not as ``[N, K]``.
    """

    fp8: dict[str, Fp8Rows]
    plain_class: type[nn.Module]
    weight_is_k_by_n: ClassVar[bool] = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for gemm, rows in self.fp8.items():
            rows.belong_to(self, gemm)

    @staticmethod
    def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
        """The GEMM weights that a layer holds itself, converted or plain, by name."""
        return {"": cast(Tensor, layer.weight)}

    def gemms(self) -> list[tuple[Fp8Rows, Tensor]]:
        """The rows of each of its own GEMMs, and the weight as the layer holds it now."""
        weights = self.gemm_weights(self)
        return [(rows, weights[gemm]) for gemm, rows in self.fp8.items()]

    @property
    def scaling_state(self) -> ScalingState:
        """The state of the whole model."""
        return next(iter(self.fp8.values())).state

    @property
    def settings(self) -> Settings:
        """Those of the whole model."""
        return next(iter(self.fp8.values())).settings

    @property
    def in_fp8(self) -> bool:
        """Whether any of its own GEMMs runs in FP8: not where all of them fell back."""
        return any(rows.switch.in_fp8 for rows in self.fp8.values())

    @property
    def records(self) -> bool:
        """Whether this forward, and its backward, record amaxes: exactly in training with gradients."""
        return self.training and torch.is_grad_enabled()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to()`, `.cuda()`, `.to_empty()` and friends: scales follow the weight to its device and keep their dtype.
        module = super()._apply(fn, recurse)
        device = next(iter(self.gemm_weights(self).values())).device
        if device.type != "meta":
            for rows in self.fp8.values():
                rows.to(device)
        return module

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[no-untyped-call]
        names = {id(parameter): f"{prefix}{name}" for name, parameter in self.named_parameters(recurse=False)}
        for rows, weight in self.gemms():
            # one that is computed, as of a pruned layer, changes with any of them
            if not ({names[id(weight)]} if id(weight) in names else {*names.values()}).isdisjoint(state_dict):
                rows.state.weights_loaded(rows.module)

    def extra_repr(self) -> str:
        """As of the plain class, and the recipe."""
        plain = super().extra_repr()
        return f"{plain}{', ' if plain else ''}fp8={self.scaling_state.recipe}"


class Fp8Weight(NamedTuple):
    """A weight ``[N, K]`` for autograd, its FP8 cast for the GEMMs, None of a layer that fell back, and whether other
    forwards will find the cast.
    """

    weight: Tensor
    operand: Fp8Operand | None
    is_kept: bool = False

    def rows(self, rows: slice) -> Fp8Weight:
        """Some of the N rows; the scale is that of the whole weight."""
        weight, operand = take_rows(self.weight, rows), self.operand
        if operand is None:
            return Fp8Weight(weight, None)
        # without gradients there may be no payload by columns
        columns = operand.columns[:, rows] if operand.columns.dim() == 2 else operand.columns
        return self._replace(
            weight=weight, operand=operand._replace(rows=take_rows(operand.rows, rows), columns=columns)
        )


def take_rows(tensor: Tensor, rows: slice) -> Tensor:
    """Some of the first dimension; the tensor itself, and no node in the graph, where that is all of it."""
    return tensor if rows.start == 0 and rows.stop == len(tensor) else tensor[rows]


def cast_weight(rows: Fp8Rows, parameter: Tensor, record: bool) -> Fp8Weight:
    """The FP8 cast of a weight ``[N, K]``, or of one kept as ``[K, N]``."""
    if not rows.switch.in_fp8:
        if not torch.compiler.is_compiling():
            rows.weight_cache.drop()
        return Fp8Weight(parameter.t() if rows.k_by_n else parameter, None)
    if isinstance(parameter, GatheredWeight):
        place, payloads = parameter.place_in_graph(), parameter.payloads(rows.k_by_n)
        operand = Fp8Operand(*payloads, parameter.scale_inv, rows.formats["weight"])
        return Fp8Weight(place.t() if rows.k_by_n else place, operand)
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"{rows.name!r}: the weight is distributed over processes, and only `nn.Linear` computes with a part of"
            " it. Leave the layer out with `ignore_modules`; or, under `fully_shard`, call it as a module, so that"
            " its hooks gather the weight."
        )
    weight = parameter.t() if rows.k_by_n else parameter
    # Only a recording forward uses the cache: in evaluation weights are swapped (EMA, averaging) in ways that leave no
    # trace.
    can_keep = rows.keeps_cast and can_keep_copies(parameter)
    is_kept = record and can_keep
    made: Fp8Operand | None = None
    if is_kept:
        made = rows.weight_cache.get(parameter)
        if made is not None:
            return Fp8Weight(weight, made, True)
        made = rows.group.cast_stale(rows, parameter)
    if made is None:
        slot = rows.weight_slot(record)
        made = ops.cast_weight_operand(weight.detach(), slot, keep=torch.is_grad_enabled())
        if is_kept:
            rows.weight_cache.put(parameter, made)
    # The CPU's operators compare each weight that they cast. A GPU would have to be waited for, so only where there is
    # a trace; what FSDP gathers is elsewhere each time.
    if can_keep and is_k_major(parameter) and rows.note_trace(parameter):
        rows.group.see_changes(rows, parameter, record)
    return Fp8Weight(weight, made, is_kept)


def cast_input(rows: Fp8Rows, x: Tensor, record: bool, keep: bool) -> Fp8Operand:
    """x ``[*, K]`` in FP8; by columns too if backward is to ``keep`` something of it."""
    return ops.cast_operand(ops.in_rows(x.detach()), rows.slot("input", record), "none", keep)


def fp8_linear(rows: Fp8Rows, x: Tensor, weight: Fp8Weight, bias: Tensor | None, record: bool) -> Tensor:
    """``x @ weight^T + bias`` in FP8: x ``[*, K]`` -> ``[*, N]`` in autocast's dtype, else in that of ``x``.

    Of a layer that fell back: in that dtype throughout.
    """
    dtype, (parameter, operand, is_kept) = output_dtype(x), weight
    if operand is None:
        return F.linear(x.to(dtype), parameter.to(dtype), None if bias is None else bias.to(dtype))
    check_bias(rows, bias, operand.rows.shape[0])
    bias_value = rounded_bias(rows, bias, dtype, is_kept)
    x_fp8 = cast_input(rows, x, record, keep=parameter.requires_grad and torch.is_grad_enabled())
    dy = rows.slot("grad_output", record)
    return ops.linear(x, parameter, bias, bias_value, x_fp8, operand, dy, dtype)  # type: ignore[no-any-return]


def rounded_bias(rows: Fp8Rows, bias: Tensor | None, dtype: torch.dtype, keep: bool) -> Tensor | None:
    """A bias as the GEMM with an output of this dtype takes it: in 16 bits kept, where the cast of the weight is."""
    if bias is None or bias.dtype == dtype or dtype == torch.float32:
        return None if bias is None else bias.detach()
    if not keep:
        return bias.detach().to(dtype)
    kept = rows.bias_cache.get(bias)
    if kept is None or kept.dtype != dtype:
        kept = bias.detach().to(dtype)
        rows.bias_cache.put(bias, kept)
    return kept


def check_input(module: Fp8Module, what: str, x: Tensor, weight: Tensor) -> None:
    """Refuse an input that an FP8 layer cannot take.

    As in a plain layer, the weight that the layer holds now decides, not ``in_features`` and the like: a weight of
    another shape may have taken the place of the first one.

    Raises:
        TypeError: if it is not fp32, bf16 or fp16.
        ValueError: if its last dimension is not that of the weight, or the weight is not ``[N, K]`` with a K above 0.
    """
    if x.dtype not in CASTABLE_DTYPES:
        raise TypeError(
            f"{_called(module)}: the {what} must be float32, bfloat16 or float16, got {x.dtype}."
            " Convert it before this layer, or leave the layer unconverted with `ignore_modules`."
        )
    shape, given = weight.shape, x.shape
    features = shape[0 if module.weight_is_k_by_n else 1] if len(shape) == 2 else 0
    if not features:
        raise ValueError(
            f"{_called(module)}: the weight must have two dimensions and take in at least one feature, got the shape"
            f" {tuple(shape)}."
        )
    if not given or given[-1] != features:
        raise ValueError(
            f"{_called(module)}: the last dimension of the {what} must be {features}, the features that its weight"
            f" takes in, got the shape {tuple(given)}."
        )


def check_bias(rows: Fp8Rows, bias: Tensor | None, outputs: int) -> None:
    """ValueError for a bias without one element for each output: a kernel would read past its end."""
    if bias is not None and (bias.dim() != 1 or bias.numel() != outputs):
        raise ValueError(
            f"The bias of {rows.name!r} must have the shape ({outputs},), one element for each output of the weight,"
            f" got {tuple(bias.shape)}."
        )


def _called(module: Fp8Module) -> str:
    # asked for in errors only: a compiled graph that knew its layer's name would serve no other layer
    return f"{type(module).__name__} {next(iter(module.fp8.values())).name!r}"


def output_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where autocast is on, else that of ``x``."""
    device = x.device.type
    # autocast does not know the meta device, where shapes are followed and FLOPs counted
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else x.dtype
