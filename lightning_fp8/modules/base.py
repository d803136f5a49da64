"""The base class of converted modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_fp8.modules.class_swap import Swapped
from lightning_fp8.modules.computed_weight import held_weight
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.modules.frozen_layers import applied, free_masters, save_values
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.phase import Phase
from lightning_fp8.ops.formats import Product
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.state import ScalingState


class Fp8Module(Swapped):
    """A module whose linear layers compute in FP8. Never constructed: conversion changes the class of an object.

    Attributes:
        fp8: a GEMM for each weight that the module itself holds, by name; a single weight has the name ``""``.
        weight_is_k_by_n: whether the layer stores its weight as ``[K, N]``, not as ``[N, K]``.
        family: the classes that share one forward; :func:`fp8_class` adds to it.
        weights_are_stacked: whether parameters ``[E, N, K]`` stack E weights each. The names of their GEMMs then end
            with ``.<number>``, and :meth:`gemm_weights` returns the whole parameters.
    """

    fp8: dict[str, Gemm]
    weight_is_k_by_n: ClassVar[bool] = False
    weights_are_stacked: ClassVar[bool] = False
    family: ClassVar[set[type[Fp8Module]]] = set()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # don't trigger the `__init_subclass__` of the user's class
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the copy is converted too, even if the plain class has a `__deepcopy__`
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, gemm in self.fp8.items():
            gemm.belong_to(self, name)

    @staticmethod
    def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
        """The GEMM weights that a layer holds itself, converted or plain, by name."""
        return {"": held_weight(layer)}

    def gemm_weight(self, gemm: str) -> Tensor | None:
        """The current value of one of the layer's GEMM weights; for a computed weight, see :func:`held_weight`."""
        return self.gemm_weights(self).get(gemm)

    def gemms(self) -> list[tuple[Gemm, Tensor]]:
        """The layer's own GEMMs with their current weights; for a computed weight, see :func:`held_weight`."""
        weights = self.gemm_weights(self)
        return [(gemm, weights[name]) for name, gemm in self.fp8.items()]

    @property
    def scaling_state(self) -> ScalingState:
        """The state of the whole model."""
        return next(iter(self.fp8.values())).state

    @property
    def in_fp8(self) -> bool:
        """Whether any of the layer's own GEMMs has a product in FP8 now."""
        return any(gemm.precision.in_fp8 for gemm in self.fp8.values())

    @property
    def in_bf16(self) -> tuple[Product, ...]:
        """Products that the settings of the conversion put in bf16."""
        return next(iter(self.fp8.values())).precision.of("settings").in_bf16

    @property
    def has_fp8_only(self) -> bool:
        """Whether a weight exists in FP8 only, or will once it is frozen and loaded."""
        return any(gemm.weight_cast.fp8_only for gemm in self.fp8.values()) or any(
            isinstance(parameter, Fp8Parameter) for parameter in self._parameters.values()
        )

    @property
    def phase(self) -> Phase:
        """The phase that a forward would belong to now."""
        if not self.training:
            return Phase.EVALUATION
        return Phase.TRAINING if torch.is_grad_enabled() else Phase.REPLAY

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation. A switch drops all casts, as evaluation may swap the weights."""
        if mode != self.training:
            self._drop_casts()
        return super().train(mode)

    def _drop_casts(self) -> None:
        for gemm in self.fp8.values():
            gemm.drop_casts()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to()`, `.cuda()`, `.to_empty()` and friends: scales follow the weight to its device and keep their dtype.
        apply = super()._apply
        module = applied(self, apply, fn, recurse) if self.has_fp8_only else apply(fn, recurse)
        self._drop_casts()
        device = next(iter(self.gemm_weights(self).values())).device
        if device.type != "meta":
            for gemm in self.fp8.values():
                gemm.to(device)
        return module

    def __prepare_scriptable__(self) -> nn.Module:
        raise RuntimeError(
            f"torch.jit.script cannot compile the FP8 layer {next(iter(self.fp8.values())).name!r}. Call"
            " `lightning_fp8.unconvert(model)` first, or use `torch.export.export`."
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[no-untyped-call]
        self._drop_casts()
        if self.has_fp8_only:
            free_masters(self)
        state = self.scaling_state
        # histories loaded since the last update belong to the weights being loaded now
        if not state.has_loaded and self._is_in(state_dict, prefix):
            state.empty_histories([gemm.module for gemm in self.fp8.values()])

    def _is_in(self, state_dict: Mapping[str, Any], prefix: str) -> bool:
        """Whether a ``state_dict`` has any of the layer's own parameters, which may be computed from others."""
        if any(f"{prefix}{name}" in state_dict for name in self._parameters):
            return True
        return "parametrizations" in self._modules and any(
            name.startswith(f"{prefix}parametrizations.") for name in state_dict
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        if self.has_fp8_only and not keep_vars:
            save_values(self, destination, prefix)

    def extra_repr(self) -> str:
        """The text of the plain class, and the recipe."""
        plain = super().extra_repr()
        return f"{plain}{', ' if plain else ''}fp8={self.scaling_state.recipe}"


def on_sharded_weights(model: nn.Module) -> None:
    """Call :meth:`Gemm.on_sharding` for layers that were sharded after their conversion."""
    for layer in model.modules():
        for gemm, weight in layer.gemms() if isinstance(layer, Fp8Module) else ():
            gemm.on_sharding(weight)


_classes: dict[tuple[type[Fp8Module], type[nn.Module]], type[Fp8Module]] = {}


def fp8_class(base: type[Fp8Module], plain: type[nn.Module]) -> type[Fp8Module]:
    """The FP8 class for ``plain``, which has none predefined; made once. ``base`` computes, the rest is ``plain``'s."""
    if (base, plain) not in _classes:
        attributes = {"__doc__": plain.__doc__, "__module__": plain.__module__, "__reduce_ex__": _reduce}
        new_class = _classes[base, plain] = type(f"Fp8{plain.__name__}", (base, plain), attributes)
        base.family.add(new_class)
    return _classes[base, plain]


def _reduce(self: Fp8Module, protocol: Any) -> Any:
    # pickle finds classes by name: the plain class, but not the class made here
    plain: Any = self.plain_class
    make, arguments, *state = plain.__reduce_ex__(self, protocol)
    make, *arguments = (plain if value is type(self) else value for value in (make, *arguments))
    if state and "fp8" in state[0]:
        return _new, (type(self).__mro__[1], make, *arguments), *state
    warn_once(f"A pickled {plain.__name__} is plain, not in FP8: its class has a `__reduce__` without its attributes.")
    return make, tuple(arguments), *state


def _new(base: type[Fp8Module], make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    layer = make(*arguments)
    layer.__class__ = fp8_class(base, type(layer))
    return layer
