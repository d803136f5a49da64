"""Keeps one scaling state for a model through further conversions, copies of parts and joined parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lightning_fp8.conversion.shared_inputs import share_inputs
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.paths import named_modules
from lightning_fp8.modules.shared_input import SharedInput
from lightning_fp8.ops.operand import live_states
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.recipe import Recipe


class Member(NamedTuple):
    """A GEMM of a model.

    Attributes:
        path: the path of its layer in the model, followed by the layer's name for the GEMM.
        gemm: the GEMM; None for a layer that is being converted.
    """

    path: str
    gemm: Gemm | None


def path_of_gemm(layer: str, name: str) -> str:
    """The path of a GEMM in a model, from its layer's path and the layer's name for it."""
    return ".".join(filter(None, (layer, name)))


def arrange(
    members: Sequence[Member], recipe: Recipe, device: torch.device, rename: bool
) -> tuple[ScalingState, range]:
    """Give all members one state: the state that most of them have under their paths, extended in place, or a new one.

    Layers of that state that are not members stay in it if the members are part of their model. Otherwise they get
    their own state.

    Args:
        members: the GEMMs of a model, or of a part of one.
        recipe: the recipe of a new state.
        device: the device of a new state.
        rename: whether the layers of a part get their names in the larger model, if no other part of it is converted.

    Returns:
        The state, and the positions of the members. The caller still has to make the missing GEMMs.
    """
    states = [*dict.fromkeys(gemm.state for _, gemm in members if gemm is not None)]
    if not states:
        return ScalingState([path for path, _ in members], recipe, device), range(len(members))
    state = max(states, key=lambda known: sum(_is_named(member, known) for member in members))
    prefix, outer = _position_in(members, state)
    if not outer or rename or not all(path.startswith(outer) for path, _ in members):
        outer = ""
    mine = {gemm for _, gemm in members}
    outside = [gemm for gemm in _gemms(state) if gemm not in mine]
    if outside and not prefix:
        _move(outside, ScalingState([gemm.name for gemm in outside], recipe, state.device))
        outside = []
    names = [*(gemm.name for gemm in outside), *(prefix + path.removeprefix(outer) for path, _ in members)]
    names = [name.removesuffix(".") for name in names]
    gemms: list[Gemm | None] = [*outside, *(gemm for _, gemm in members)]
    positions = range(len(outside), len(gemms))
    if tuple(names) != state.module_names or any(
        gemm is None or gemm.state is not state or gemm.module != at for at, gemm in enumerate(gemms)
    ):
        _move(gemms, state, names)
    return state, positions


def _is_named(member: Member, state: ScalingState) -> bool:
    return member.gemm is not None and member.gemm.state is state and member.gemm.name == member.path


def _position_in(members: Sequence[Member], state: ScalingState) -> tuple[str, str]:
    """The prefix of a state's names before its members' paths, and the prefix of these paths before the names."""
    known = [(path, gemm.name) for path, gemm in members if gemm is not None and gemm.state is state]
    found = {(_in_front(path, of=name), _in_front(name, of=path)) for path, name in known}
    prefix, outer = found.pop() if len(found) == 1 else (None, None)
    return prefix or "", outer or ""


def _in_front(end: str, of: str) -> str | None:
    """``of`` without its ``end``; None if it does not end with ``end``."""
    if not end:
        return f"{of}." if of else ""
    return of.removesuffix(end) if of == end or of.endswith(f".{end}") else None


def _gemms(state: ScalingState) -> Iterator[Gemm]:
    """The GEMMs of the layers that are in this state now."""
    for position in range(len(state.module_names)):
        gemm = state.model.gemms.get(position)
        if isinstance(gemm, Gemm) and gemm.layer is not None and gemm in getattr(gemm.layer, "fp8", {}).values():
            yield gemm


def _move(gemms: Sequence[Gemm | None], state: ScalingState, names: Sequence[str] | None = None) -> None:
    """Move GEMMs, with their scales and histories, to these places in a state; None is a GEMM still to be made."""
    sources = {at: (gemm.state, gemm.module) for at, gemm in enumerate(gemms) if gemm is not None}
    state.arrange(state.module_names if names is None else names, sources)
    place_of = {source: at for at, source in sources.items()}
    groups: dict[int, SharedInput] = {}
    for at, gemm in enumerate(gemms):
        if gemm is None:
            continue
        group = gemm.shared_input
        if group is not None and id(group) not in groups:
            places = [place_of.get((gemm.state, position)) for position in group.modules]
            groups[id(group)] = SharedInput([place for place in places if place is not None])
        gemm.move(state, at, None if group is None else groups[id(group)])


def state_of(module: nn.Module, layers: Iterable[Fp8Module]) -> ScalingState:
    """The scaling state that a model's converted layers share; see :func:`lightning_fp8.scaling_state`."""
    states = {id(layer.scaling_state): layer.scaling_state for layer in layers}
    if not states:
        raise ValueError(f"{type(module).__name__} has no FP8 layers: call `lightning_fp8.convert` on it first.")
    state = next(iter(states.values())) if len(states) == 1 else _join(module, list(states.values()))
    _asked[module] = weakref.ref(state)
    return state


def _join(module: nn.Module, states: Sequence[ScalingState]) -> ScalingState:
    """Give the parts of a model, converted separately or copied, one scaling state.

    Raises:
        ValueError: if they have different recipes, or are on different devices.
    """
    for what in ("recipe", "device"):
        one, *others = dict.fromkeys(getattr(state, what) for state in states)
        if others:
            raise ValueError(
                f"{type(module).__name__} consists of parts with different {what}s, {one} and {others[0]}, which"
                " cannot have one scaling state. Ask for that of each part: `lightning_fp8.scaling_state(part)`."
            )
    modules = list(named_modules(module))
    layers = [(path, layer) for path, layer in modules if isinstance(layer, Fp8Module)]
    members = [Member(path_of_gemm(path, name), gemm) for path, layer in layers for name, gemm in layer.fp8.items()]
    state, _ = arrange(members, states[0].recipe, states[0].device, rename=False)
    share_inputs([layer for _, layer in modules])
    return state


# by model: its state when it was last asked for
_asked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ScalingState]] = weakref.WeakKeyDictionary()


def state_now(module: nn.Module) -> ScalingState | None:
    """The scaling state of a model at a step of its run; None while it is not converted.

    This goes through the model's layers only if the process has layers in another state, as these may have become part
    of the model. Every process of a distributed run then notices this at the same step.
    """
    reference = _asked.get(module)
    state = None if reference is None else reference()
    is_alone = not any(other is not state and other.model.gemms for other in live_states())
    if state is not None and not state.model.has_ended and is_alone:
        return state
    layers = [layer for layer in module.modules() if isinstance(layer, Fp8Module)]
    return state_of(module, layers) if layers else None
