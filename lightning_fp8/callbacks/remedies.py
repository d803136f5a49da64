"""Remedies for findings of ``Fp8Monitor``, under the recipe of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_fp8.callbacks.health import CAUSES, CONDITIONS, EFFECTS, tensor_of
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.per_tensor import DelayedScaling

_MOST_NAMED = 3


def remedy(
    places: Sequence[str], condition: str, found: Mapping[tuple[str, str], float], state: ScalingState, layers: int
) -> str:
    """What to do.

    Args:
        places: where a condition holds, in order.
        condition: the name of the condition.
        found: all findings of this check.
        state: of the model.
        layers: how many layers run in FP8.
    """
    recipe = state.recipe
    margin = getattr(recipe, "margin", 0)
    named = [where if condition in ("product", "unused") else where.rpartition(".")[0] for where in places]
    named = [*dict.fromkeys(named)]
    has_most = len(named) > max(1, layers // 2)
    if condition == "nonfinite" and places[0].endswith("weight"):
        return (
            "the weights held inf or NaN before any other tensor: go back to an earlier checkpoint; if they are finite"
            " there, look at the optimizer and its learning rate"
        )
    tensors = [tensor_of(condition, where) for where in places]
    causes = [cause for cause in CAUSES if any((cause, tensor) in found for tensor in tensors)]
    if condition == "saturated":
        # a margin prevents it
        condition = "window" if recipe.window < 4 or "window" in causes else condition
    elif condition in EFFECTS:
        condition = (causes or ["margin" if has_most and margin else condition])[0]
    if condition == "margin" and margin < 1:
        return '`precision="fp8-current"`: single steps have far larger values than the others'
    if condition == "limit" and not places[0].endswith("grad_output"):
        return "scale what the layer takes in, such as `x * 2**20`, or leave the layer in bf16"
    text = CONDITIONS[condition].remedy
    if condition == "underflowed" and recipe.scaling("input").kind == "per_tensor":
        text += ', or `precision="fp8-block"` if the large numbers share no block of 128 with those that vanish'
    names = ", ".join(f'"{layer}"' for layer in named[:_MOST_NAMED])
    bf16 = _in_bf16(named, has_most, state)
    return text.format(recipe=type(recipe).__name__, margin=margin + 1, layers=names, bf16=bf16)


def _in_bf16(layers: Sequence[str], are_most: bool, state: ScalingState) -> str:
    """The line that runs these layers in bf16."""
    if are_most and len(layers) > _MOST_NAMED:
        return '`precision="bf16-mixed"`, as it is in most layers'
    recipe = "" if state.recipe == DelayedScaling() else f"recipe={state.recipe!r}, "
    overrides = ", ".join(f'"{layer}": "bf16"' for layer in layers[:_MOST_NAMED])
    more = f", and so for {len(layers) - _MOST_NAMED} more" if len(layers) > _MOST_NAMED else ""
    return f"`Fp8Precision({recipe}overrides={{{overrides}}})`{more}"
