"""The product of one linear layer: its tensors' slots in the scaling state, and what is kept between forwards."""

from __future__ import annotations

import weakref
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.modules.phase import Phase, casting_of
from lightning_fp8.modules.shared_input import SharedInput
from lightning_fp8.modules.tensor_classes import kind_of
from lightning_fp8.modules.weight_cast import KeptCast, WeightCast, is_sharded
from lightning_fp8.ops.formats import ROLES, Role
from lightning_fp8.runtime.device import check_device
from lightning_fp8.scaling.config import Fp8Config
from lightning_fp8.scaling.model import Fp8Model
from lightning_fp8.scaling.plan import plan_of
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.operand import Slot

if TYPE_CHECKING:
    from lightning_fp8.modules.base import Fp8Module


class _Owner(NamedTuple):
    layer: weakref.ref[Any]
    # the layer's name for the GEMM, and its name for the parameter; None for a computed weight
    gemm: str
    parameter: str | None


class Gemm:
    """The three products of one weight: fprop, dgrad and wgrad.

    Attributes:
        state: the scaling state shared by all converted modules of the model.
        module: position of the layer among these modules.
        precision: which of the products run in FP8.
        slots: the places of its tensors in the state, by role and phase. Made again when anything in them changes; one
            tuple serves all forwards.
        weight_scaling: how the weight is scaled in FP8.
        stack_slots: the slots for the tensors of all matrices of a stack, if this GEMM is the first of the stack.
        weight_cast: the FP8 cast of the weight that is kept between forwards.
        converted_from: dtype and class of the weight at the conversion, for messages.
        bias_cast: the bias in the 16-bit dtype that torch's GEMM takes.
        shared_input: the input, if other layers take the same tensor; it is recorded in the row of the first of
            them.
        split_over: by role, the name of the process group that the tensor is split over.
    """

    def __init__(self, state: ScalingState, module: int) -> None:
        self.state = state
        self.module = module
        self.precision = state.precisions[module]
        self.weight_cast = WeightCast()
        self.converted_from = ""
        self.bias_cast: KeptCast[Tensor] = KeptCast()
        self.shared_input: SharedInput | None = None
        self.split_over: dict[Role, str] = {}
        self._owner: _Owner | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a copy belongs to the copied layer, whose `__setstate__` sets the owner
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("slots", "stack_slots", "weight_scaling")
        }
        return {**state, "_owner": None}

    def belong_to(self, layer: Fp8Module, name: str) -> None:
        """Set the layer that owns the GEMM, and the layer's name for it."""
        weight = layer.gemm_weights(layer)[name]
        parameter = next((key for key, candidate in layer._parameters.items() if candidate is weight), None)
        self._owner = _Owner(weakref.ref(layer), name, parameter)
        # a copied layer already has it
        self.converted_from = self.converted_from or kind_of(weight)
        self.weight_cast.part = int(name.rpartition(".")[2]) if layer.weights_are_stacked else None
        self.weight_cast.k_by_n = layer.weight_is_k_by_n
        self.on_sharding(weight)
        self.model.join(self)
        self.place()

    def move(self, state: ScalingState, module: int, shared: SharedInput | None) -> None:
        """Move to another place in a state, which already has the layer's scales and histories.

        The kept casts of the weight stay.
        """
        if state is not self.state:
            self.model.leave(self)
        self.state, self.module, self.precision = state, module, state.precisions[module]
        self.shared_input = shared
        self.model.join(self)
        self.place()

    @property
    def model(self) -> Fp8Model:
        """The model at run time."""
        return self.state.model

    @property
    def config(self) -> Fp8Config:
        """The settings of the model."""
        return self.state.config

    @property
    def name(self) -> str:
        """The layer's name in the state: its path in the converted model."""
        return self.state.module_names[self.module]

    @property
    def weight_name(self) -> str:
        """The parameter's name in the state. GEMMs of experts share a parameter; their names differ at the end."""
        return self.name if self.weight_cast.part is None else self.name.rpartition(".")[0]

    @property
    def layer(self) -> Fp8Module | None:
        """The layer that owns the GEMM; None if it no longer exists."""
        return self._owner.layer() if self._owner is not None else None

    @property
    def k_by_n(self) -> bool:
        """Whether the layer stores its weight as ``[K, N]``."""
        return self.weight_cast.k_by_n

    # The weight

    @property
    def weight(self) -> Tensor | None:
        """The current weight of the layer, or the parameter that holds it; None if the layer no longer exists."""
        layer = self.layer
        return None if layer is None or self._owner is None else layer.gemm_weight(self._owner.gemm)

    def weight_slot(self, phase: Phase) -> Slot:
        """The slot of the weight in FP8, whichever products run in bf16 now."""
        scaling = self.weight_scaling
        return self.slots["weight", phase]._replace(rows=scaling, columns=scaling)

    def matrix(self, weight: Tensor) -> Tensor:
        """This GEMM's weight: a part of ``weight`` if that is a tensor ``[E, ...]`` of several ones."""
        part = self.weight_cast.part
        return weight if part is None else weight[part]

    def n_by_k(self, weight: Tensor) -> Tensor:
        """A weight as the layer stores it -> ``[N, K]``."""
        return weight.t() if self.k_by_n else weight

    def on_sharding(self, weight: Tensor) -> None:
        """Keep no FP8 cast of a sharded weight, as it would hold the whole weight."""
        self.weight_cast.sharded = [weight] if is_sharded(weight) else []
        self.weight_cast.is_kept = not isinstance(weight, (DTensor, Fp8Parameter))
        if not self.weight_cast.is_kept:
            self.weight_cast.drop()

    def sources(self) -> list[Tensor]:
        """The weight's parameter, or the parameters it is computed from; the sharded parameter even while gathered."""
        owner = self._owner
        layer = None if owner is None else owner.layer()
        if layer is None or owner is None:
            return []
        is_held, weight_cast = owner.parameter in layer._parameters, self.weight_cast
        parameters = [layer._parameters[owner.parameter]] if is_held else [*layer.parameters()]
        if any(map(is_sharded, parameters)):
            weight_cast.sharded = parameters
        sources = weight_cast.sharded or parameters
        # while FSDP1 has gathered it, it is no parameter
        return cast(list[Tensor], sources) if sources and isinstance(sources[0], nn.Parameter) else []

    def on_step(self, changed: AbstractSet[int]) -> None:
        """An optimizer has changed these parameters, given by ``id``."""
        if not changed.isdisjoint(map(id, self.sources())):
            # compiled code casts it from now on, until its compiled cast is current again
            self.weight_cast.compiled_cast_is_current = False

    def drop_casts(self) -> None:
        """Drop all casts made so far."""
        self.weight_cast.compiled_cast_is_current = False
        self.weight_cast.drop()
        self.bias_cast.drop()

    # The slots

    def place(self) -> None:
        """Make the slots again, after a change of the state, its precisions or the shared input."""
        state, generation = self.state, self.model.generation
        plan = plan_of(state.recipe, self.precision.in_bf16, self.precision.is_current)
        self.weight_scaling = plan_of(state.recipe).weight[0]
        self.slots: dict[tuple[Role, Phase], Slot] = {}
        for phase in Phase:
            records = phase is Phase.TRAINING
            for role in ROLES:
                # one index tensor for all layers that share their input, so that a compiler can merge their casts
                shared = self.shared_input if role == "input" else None
                module = self.module if shared is None else shared.modules[0]
                index = state.indices[state.row_of(module, role)]
                casting, group = casting_of(phase, role), self.split_over.get(role, "")
                rows, columns = getattr(plan, role)
                self.slots[role, phase] = Slot(index, state, rows, columns, records, casting, group, generation)
        if self.weight_cast.part == 0 and (stack := self.weight) is not None:
            self.stack_slots = {
                (role, phase): slot._replace(index=self.model.index_of(state.row_of(self.module, role), len(stack)))
                for (role, phase), slot in self.slots.items()
                if role != "weight"
            }

    def split(self, over: dict[Role, str]) -> None:
        """Set the process groups that tensors are split over, by role."""
        if over != self.split_over:
            self.split_over = over
            # not by `place`, as compilers trace this
            for (role, phase), slot in self.slots.items():
                self.slots[role, phase] = slot._replace(group=over.get(role, ""))

    def to(self, device: torch.device) -> None:
        """Move the state to a device; a no-op for all but the first layer of a model."""
        if self.state.device != device:
            check_device(device)
            self.state.to(device)

    # Other layers with the same input

    def share_input(self, shared: SharedInput | None) -> None:
        """Set the input that the layer shares with others; None for an input of its own."""
        if shared is not self.shared_input:
            self.shared_input = shared
            self.place()

    @property
    def input_owner(self) -> Gemm | None:
        """The first layer that takes the same input tensor; None if it is this layer."""
        modules = () if self.shared_input is None else self.shared_input.modules
        owner = next((gemm for gemm in map(self.model.gemms.get, modules) if gemm is not None), self)
        return None if owner is self else owner

    def sharers_need_columns(self) -> bool:
        """Whether a later layer with the same input tensor has a weight to train."""
        modules = () if self.shared_input is None else self.shared_input.modules
        behind = map(self.model.gemms.get, modules[modules.index(self.module) + 1 :])
        return any(
            gemm is not None
            and (weight := gemm.weight) is not None
            and weight.requires_grad
            and "wgrad" not in gemm.precision.in_bf16
            for gemm in behind
        )
