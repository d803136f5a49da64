"""The base class of converted modules, and the place of their tensors in the scaling state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.weight_cache import WeightCache
from lightning_fp8.modules.weight_group import WeightGroup
from lightning_fp8.ops.formats import ROLES, Role
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
