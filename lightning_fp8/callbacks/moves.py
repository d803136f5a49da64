"""Moves layers in trouble to current scaling or bf16, and back."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fp8.callbacks.health import OF_THE_CAST, OF_THE_SCALE
from lightning_fp8.scaling.precision import AS_SET, BF16, Choice
from lightning_fp8.scaling.state import ScalingState


class Moves:
    """The moves of one run.

    Attributes:
        steps_since: for each layer that has moved, the steps since its last move.
    """

    def __init__(self) -> None:
        self.steps_since: dict[str, int] = {}

    def step_ends(self) -> None:
        """Count a step."""
        self.steps_since = {name: steps + 1 for name, steps in self.steps_since.items()}

    def move(
        self, state: ScalingState, active: int, new: Sequence[tuple[str, str]], to: str
    ) -> tuple[list[str], list[str]]:
        """Move the layers with new findings.

        Args:
            state: of the model.
            active: how many layers are in use.
            new: condition, and tensor or layer, of each finding.
            to: ``"fallback"``; or ``"current"``, which moves to current scaling first if that can help.

        Returns:
            Names of the layers that have moved to current scaling, and to bf16.
        """
        rows = {name: row for row, name in enumerate(state.names)}
        module_of = {name or "(root)": module for module, name in enumerate(state.module_names)}
        module_of |= {name: state.module_of(row) for name, row in rows.items()}
        precisions = state.recipe.precisions
        to_current: set[int] = set()
        to_bf16: set[int] = set()
        for condition in OF_THE_CAST:
            modules = {where: module_of[where] for name, where in new if name == condition}
            # inf and NaN spread, and without updates all scales stand still
            if condition in ("stale", "nonfinite") and 2 * len({*modules.values()}) > active:
                continue
            for where, module in modules.items():
                can_be_current = (
                    to == "current"
                    and condition in OF_THE_SCALE
                    and any(precisions.values())
                    # a weight is scaled by its own values already
                    and rows.get(where, state.delayed) < state.delayed
                    and not state.precisions[module].is_current
                )
                (to_current if can_be_current else to_bf16).add(module)
        to_current -= to_bf16
        if not to_current and not to_bf16:
            return [], []
        before = set(state.current_modules)
        state.switch("move", {**dict.fromkeys(to_bf16, BF16), **dict.fromkeys(to_current, Choice(is_current=True))})
        # do not move a layer with the same input that already runs in bf16
        current = [name for name in state.current_modules if name not in before.union(state.fallbacks)]
        in_bf16 = [state.module_names[module] for module in sorted(to_bf16)]
        self.steps_since |= dict.fromkeys([*current, *in_bf16], 0)
        return current, in_bf16

    def come_back(self, state: ScalingState, cooldown: int) -> list[str]:
        """Move back the layers whose last move was ``cooldown`` steps ago, and return their names."""
        over = {name for name, steps in self.steps_since.items() if steps >= cooldown}
        self.steps_since = {name: steps for name, steps in self.steps_since.items() if name not in over}
        modules = [module for module, name in enumerate(state.module_names) if name in over]
        if modules:
            state.switch("move", dict.fromkeys(modules, AS_SET))
        return [state.module_names[module] for module in modules]
