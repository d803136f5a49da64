"""The base class of converted modules, and the place of their tensors in the scaling state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from lightning_fp8.modules.frozen_content import FrozenWeights
from lightning_fp8.modules.frozen_layers import free_masters, frozen_parameters_apart, save_values
from lightning_fp8.modules.frozen_weight import FrozenWeight
from lightning_fp8.modules.shared_input import SharedInput
from lightning_fp8.modules.stamp import Stamped, is_sharded, stamps
from lightning_fp8.modules.weight_cache import WeightCache
from lightning_fp8.modules.weight_group import WeightGroup
from lightning_fp8.ops.formats import ROLES, Product, Role
from lightning_fp8.ops.operand import Fp8Operand, OwnScaling, Slot, WeightSlot
from lightning_fp8.runtime.device import check_device
from lightning_fp8.scaling.state import ScalingState


class Override(NamedTuple):
    """The precisions of some products of the layers that a pattern matches.

    Attributes:
        pattern: ``fnmatch`` pattern on module paths, for what it matches and everything inside it.
        precisions: by product, ``"fp8"`` or ``"bf16"``.
        source: the argument that asked for it, in words.
    """

    pattern: str
    precisions: Mapping[str, str]
    source: str


class Settings(NamedTuple):
    """Settings that all layers of a model share. They are not part of a checkpoint.

    Attributes:
        gemm: which GEMMs they run, one of ``lightning_fp8.ops.cuda.gemm_choice.GEMMS``; it only changes the order of
            summation.
        min_features: the conversion left layers with fewer input or output features alone.
        adapters: the conversion included the adapters of PEFT.
        frozen_weights: whether frozen weights keep a master, ``"master"``, or only their FP8 cast, ``"fp8"``.
        overrides: the precisions of products that differ from those of the recipe; later ones win.
    """

    gemm: str = "auto"
    min_features: int = 16
    adapters: bool = False
    frozen_weights: FrozenWeights = "master"
    overrides: tuple[Override, ...] = ()


class Fp8Rows:
    """The place of one linear layer's tensors in the model's scaling state.

    Attributes:
        state: the scaling state shared by all converted modules of the model.
        module: position of the layer among these modules.
        index: by role, the row of the tensor in the state, ``[1] int64`` on the device of the state. A tensor, not an
            int, so that ``torch.compile`` makes one graph for all layers of a kind.
        formats: by role, the name of the FP8 format.
        weight_scaling: how the weight is scaled by its values.
        switch: which of the layer's GEMMs run in FP8.
        weight_cache: the FP8 copy of the weight.
        bias_cache: the bias in the 16-bit dtype that torch's GEMM takes.
        settings: the settings of the model.
        group: all layers that share the state; their weights are cast together if the device has a kernel for it.
        k_by_n: whether the layer stores its weight as ``[K, N]``.
        keeps_cast: whether the FP8 copy of the weight outlives a forward.
        shared_input: the input, if other layers take the same tensor; it is recorded in the row of the first of
            them.
        is_first, is_last: whether the layer is the first or the last of these layers to run.
        prepared: the weight's cast as compiled code reads it, in tensors that stay the same; None if there is none.
        is_prepared: whether ``prepared`` is from the current weight; see :mod:`lightning_fp8.modules.prepared_weights`.
        may_prepare: False after a change that came too late for compiled code.
        preparers: how many open contexts keep it prepared.
        fp8_only: whether the weight is to be kept as its FP8 cast only, for as long as it is frozen.
        frozen_seen: the scale of such a weight when a forward last used it.
        reference: the weight that the histories belong to; None until it is known.
        split_over: by role, the name of the process group that the tensor is split over.
    """

    def __init__(self, state: ScalingState, module: int, group: WeightGroup) -> None:
        self.state = state
        self.module = module
        self.formats: dict[Role, str] = {role: state.recipe.format_of(role).name for role in ROLES}
        self.weight_scaling = OwnScaling(blocks=state.recipe.own.blocks)
        self.switch = state.switches[module]
        self.weight_cache: WeightCache[Fp8Operand] = WeightCache()
        self.bias_cache: WeightCache[Tensor] = WeightCache()
        self.settings = Settings()
        self.group = group
        self._owner: tuple[weakref.ref[Fp8Module], str] | None = None
        self._parameter: str | None = None
        self._sharded: Tensor | None = None
        self.reference: Stamped | None = None
        self.k_by_n = False
        self.keeps_cast = True
        self.prepared: Fp8Operand | None = None
        self.is_prepared = False
        self.may_prepare = True
        self.preparers = 0
        self.fp8_only = False
        self.frozen_seen: Tensor | None = None
        self.split_over: dict[Role, str] = {}
        self.share_input(None)

    def __getstate__(self) -> dict[str, Any]:
        # a copy belongs to the copied layer, whose `__setstate__` sets the owner
        emptied = {"_owner": None, "_sharded": None, "prepared": None, "is_prepared": False, "preparers": 0}
        # the histories of a copy belong to its weight as they do here
        reference = None if self.reference is None or self.is_known() else Stamped()
        return {**self.__dict__, **emptied, "frozen_seen": None, "reference": reference}

    def belong_to(self, layer: Fp8Module, gemm: str) -> None:
        """Set the layer that owns these rows, and the layer's name for them."""
        self._owner = (weakref.ref(layer), gemm)
        self.k_by_n = layer.weight_is_k_by_n
        self.weight_cache.part = int(gemm.rpartition(".")[2]) if layer.weights_are_stacked else None
        weight = layer.gemm_weights(layer)[gemm]
        self._parameter = next((name for name, one in layer._parameters.items() if one is weight), None)
        self.note_sharding(weight)
        self.group.join(self)
        if self.reference is None:
            self.refer()

    def matrix(self, weight: Tensor) -> Tensor:
        """This layer's weight: a part of ``weight`` if that is a tensor ``[E, ...]`` of several layers' weights."""
        return self.weight_cache.matrix(weight)

    def note_sharding(self, weight: Tensor) -> None:
        """Keep no FP8 copy of a sharded weight, as it would hold the whole weight."""
        self.keeps_cast = not isinstance(weight, (DTensor, FrozenWeight))
        self._sharded = weight if is_sharded(weight) else None
        if not self.keeps_cast:
            self.weight_cache.drop()

    @property
    def caches(self) -> tuple[WeightCache[Fp8Operand], WeightCache[Tensor]]:
        """The caches of the weight and of the bias."""
        return self.weight_cache, self.bias_cache

    def sources(self) -> list[Tensor]:
        """The parameters that the weight is, or is computed from; a sharded one itself, even while it is gathered."""
        layer = self.layer
        if layer is None or self._parameter is None or self._parameter not in layer._parameters:
            return [] if layer is None else list(layer.parameters())
        weight = layer._parameters[self._parameter]
        if is_sharded(weight):
            self._sharded = weight
        source = weight if self._sharded is None else self._sharded
        # while FSDP1 has gathered it, it is no parameter
        return [source] if isinstance(source, nn.Parameter) else []

    def refer(self) -> None:
        """The histories belong to the weight as it is now."""
        sources = self.sources() if self.state.recipe.from_history else []
        self.reference = Stamped(*sources) if sources else None

    def is_known(self) -> bool:
        """Whether the weight is the one that the histories belong to, as far as it can be known."""
        sources = self.sources()
        return not sources or (self.reference is not None and self.reference.key == stamps(sources))

    @property
    def weight(self) -> Tensor | None:
        """The current weight of the layer, or the parameter that holds it; None if the layer no longer exists."""
        layer = self.layer
        return None if layer is None or self._owner is None else layer.gemm_weight(self._owner[1])

    @property
    def layer(self) -> Fp8Module | None:
        """The layer that owns these rows; None if it no longer exists."""
        return self._owner[0]() if self._owner is not None else None

    def n_by_k(self, weight: Tensor) -> Tensor:
        """A weight as the layer stores it -> ``[N, K]``."""
        return weight.t() if self.k_by_n else weight

    def slot(self, role: Role, record: bool) -> Slot:
        """The slot of the input or of the gradient of the output.

        A gradient that is not recorded belongs to another loss than those of training, as in saliency, attacks and
        guidance: it is scaled by its own values.
        """
        state = self.state
        from_history = record or role == "input"
        history, own = state.how_cast(self.switch, self.split_over.get(role, ""), from_history)
        return Slot(state.scale, history, self.index[role], self.formats[role], state, record, self.settings.gemm, own)

    def weight_slot(self, record: bool) -> WeightSlot:
        """The slot of the weight."""
        return WeightSlot(self.index["weight"], self.formats["weight"], self.state, record, self.weight_scaling)

    def _place_index(self) -> None:
        # one index tensor for all layers that share their input, so that a compiler can merge their casts
        of_input = self.module if self.shared_input is None else self.shared_input.modules[0]
        self.index: dict[Role, Tensor] = {
            role: self.state.indices[self.state.row_of(of_input if role == "input" else self.module, role)]
            for role in ROLES
        }

    def share_input(self, shared: SharedInput | None) -> None:
        """Set the input that the layer shares with others; None for an input of its own."""
        self.shared_input = shared
        self.is_first, self.is_last = (shared is not None and shared.modules[at] == self.module for at in (0, -1))
        self._place_index()

    @property
    def input_leader(self) -> Fp8Rows | None:
        """The first layer that takes in the same tensor; None if that is this one."""
        modules = () if self.shared_input is None else self.shared_input.modules
        leader = next((rows for rows in map(self.group.get, modules) if rows is not None), self)
        return None if leader is self else leader

    def followers_need_columns(self) -> bool:
        """Whether a layer that takes in the same tensor after this one has a weight to train."""
        modules = () if self.shared_input is None else self.shared_input.modules
        behind = map(self.group.get, modules[modules.index(self.module) + 1 :])
        return any(
            rows is not None
            and (weight := rows.weight) is not None
            and weight.requires_grad
            and "wgrad" not in rows.switch.in_bf16
            for rows in behind
        )

    def to(self, device: torch.device) -> None:
        """Move the layer's index, and the state, which only the first layer of a model has to move."""
        if self.state.device != device:
            check_device(device)
            self.state.to(device)
        if self.index["input"].device != device:
            self._place_index()

    @property
    def name(self) -> str:
        """The layer's name in the state: its path in the converted model."""
        return self.state.module_names[self.module]


class Fp8Module(nn.Module):
    """A module whose linear layers compute in FP8. Never constructed: conversion changes the class of an object.

    Attributes:
        fp8: the rows of each of its own GEMM weights, by name; the name is ``""`` where there is just one.
        plain_class: the class before the conversion, which :func:`lightning_fp8.unconvert` restores.
        weight_is_k_by_n: whether the layer stores its weight as ``[K, N]``, not as ``[N, K]``.
        weights_are_stacked: whether its weights are matrices of parameters ``[E, N, K]``: the names of their GEMMs end
            with ``.<number>``, and :meth:`gemm_weights` gives the parameters.
    """

    fp8: dict[str, Fp8Rows]
    plain_class: type[nn.Module]
    weight_is_k_by_n: ClassVar[bool] = False
    weights_are_stacked: ClassVar[bool] = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for gemm, rows in self.fp8.items():
            rows.belong_to(self, gemm)

    @staticmethod
    def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
        """The GEMM weights that a layer holds itself, converted or plain, by name."""
        return {"": cast(Tensor, layer.weight)}

    def gemm_weight(self, gemm: str) -> Tensor | None:
        """One of the layer's GEMM weights, as it is now."""
        return self.gemm_weights(self).get(gemm)

    def gemms(self) -> list[tuple[Fp8Rows, Tensor]]:
        """The rows of each of its own GEMMs, with the current weight."""
        weights = self.gemm_weights(self)
        return [(rows, weights[gemm]) for gemm, rows in self.fp8.items()]

    @property
    def scaling_state(self) -> ScalingState:
        """The state of the whole model."""
        return next(iter(self.fp8.values())).state

    @property
    def settings(self) -> Settings:
        """The settings of the whole model."""
        return next(iter(self.fp8.values())).settings

    @property
    def in_fp8(self) -> bool:
        """Whether any of its own GEMMs runs in FP8: False if all of them fell back."""
        return any(rows.switch.in_fp8 for rows in self.fp8.values())

    @property
    def in_bf16(self) -> tuple[Product, ...]:
        """Products that its GEMMs compute in bf16, unless they have fallen back."""
        return next(iter(self.fp8.values())).switch.in_bf16

    @property
    def records(self) -> bool:
        """Whether this forward, and its backward, record amaxes: exactly in training with gradients."""
        return self.training and torch.is_grad_enabled()

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation, where weights may be swapped: no copy outlives a switch."""
        if mode != self.training:
            self._drop_copies()
        return super().train(mode)

    def _drop_copies(self) -> None:
        for rows in self.fp8.values():
            rows.is_prepared = False
            for cache in rows.caches:
                cache.drop()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to()`, `.cuda()`, `.to_empty()` and friends: scales follow the weight to its device and keep their dtype.
        known = [rows for rows in self.fp8.values() if rows.is_known()]
        with frozen_parameters_apart(self) as held:
            module = super()._apply(fn, recurse)
        self._parameters.update({name: weight.applied(fn) for name, weight in held.items()})
        self._drop_copies()
        device = next(iter(self.gemm_weights(self).values())).device
        if device.type != "meta":
            for rows in self.fp8.values():
                rows.to(device)
        for rows in known:
            rows.refer()
        return module

    def __prepare_scriptable__(self) -> nn.Module:
        raise RuntimeError(
            f"torch.jit.script cannot compile the FP8 layer {next(iter(self.fp8.values())).name!r}. Call"
            " `lightning_fp8.unconvert(model)` first, or use `torch.export.export`."
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[no-untyped-call]
        self._drop_copies()
        free_masters(self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        if not keep_vars:
            save_values(self, destination, prefix)

    def extra_repr(self) -> str:
        """The text of the plain class, and the recipe."""
        plain = super().extra_repr()
        return f"{plain}{', ' if plain else ''}fp8={self.scaling_state.recipe}"
