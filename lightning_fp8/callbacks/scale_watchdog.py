"""Reports by name the layers that FP8 does not suit, and moves them to bf16 on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.callbacks.input_statistics import NOT_SEEN, InputStatistics
from lightning_fp8.callbacks.run_watcher import RunWatcher, log_to_all, refuse_gather
from lightning_fp8.callbacks.watch import CONDITIONS, Findings, Limits, Watch
from lightning_fp8.conversion.convert import scaling_state
from lightning_fp8.conversion.plan import converted
from lightning_fp8.modules.paths import as_patterns, matching_tensors
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.every_n_steps import check_count
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.precision import AS_SET, BF16, Choice
from lightning_fp8.scaling.state import ScalingState

Action = Literal["warn", "raise", "fallback", "current"]
# the actions that move layers
_MOVES = ("fallback", "current")
# what current scaling may end
_OF_THE_SCALE = ("stale", "saturated", "underflowed")


class ScaleWatchdog(RunWatcher):
    """Watches the scales of an FP8 run and reports, by name, the tensors that have problems.

    - *stale*: an active tensor's scale has not been updated for ``stale_steps``. A tensor is active if its layer's
      weight gets gradients, if its layer has other tensors that are updated, or if it records amaxes that no update
      uses. This finds a training loop that steps its optimizer without the Trainer, and a layer that trains in eval
      mode.
    - *nonfinite*: the tensor held inf or NaN in ``nonfinite_steps`` optimizer steps in a row.
    - *saturated*, *underflowed*: at ``checks_in_a_row`` checks in a row, the share of all numbers that the tensor's
      casts clipped, or of the nonzero numbers that they turned into zero, was above the threshold. Fewer than ten such
      numbers at a check never count: one number of 64 does not show that a scale is wrong.
    - *kurtosis*, *outliers*: at ``checks_in_a_row`` checks in a row, the kurtosis of a layer's input, or the share of
      outliers in the input behind a SwiGLU, was above the limit. :class:`QuantizationProbe` defines and logs both: set
      limits from a healthy run. Layers inside ``torch.compile`` are not seen.

    Each problem is reported once, and again if it returns. With ``action="fallback"`` each affected layer runs in bf16
    from then on. Checkpoints record this, also for runs that load them without the callback, and
    ``lightning_fp8.describe`` shows it. If tensors are stale or non-finite in more than half of the layers that run,
    the layers are not the cause: the problem is reported, but no layer is moved because of it.

    With ``action="current"`` such a layer first moves to current scaling: its inputs and gradients are scaled by their
    own values, as under :class:`~lightning_fp8.CurrentScaling`, and layers with the same input move with it. At its
    next problem it moves to bf16; for inf or NaN, or a problem of its weight, at once, because current scaling does not
    help there. Checkpoints record this and ``describe`` shows it too. Under a recipe without histories the action is
    ``"fallback"``, and a warning says so.

    With ``cooldown``, a layer that this callback moved in the run returns to what the run has for it, at the first
    check so many steps after its last move. Checkpoints hold the steps since then. A fit without a checkpoint begins
    anew: what was moved before stays.

    At each check it logs, to all loggers:

    - ``fp8/watchdog/stale``, ``fp8/watchdog/nonfinite``, ``fp8/watchdog/saturated``, ``fp8/watchdog/underflowed``,
      ``fp8/watchdog/kurtosis``, ``fp8/watchdog/outliers``: number of tensors in that condition.
    - ``fp8/watchdog/fallbacks``: number of layers that have fallen back to bf16 (each projection of an attention with
      its own weight counts as one).
    - ``fp8/watchdog/current``: number of layers that have moved to current scaling, and have not fallen back.

    A check takes one device-to-host copy, and the optimizer step before it counts the lost numbers; between checks
    nothing synchronises with the device. With several processes, each sees the sums over all of them, so all act alike.
    Under another precision it warns once and does nothing.

    Args:
        action: ``"warn"``, ``"raise"`` for a ``RuntimeError``, ``"fallback"`` or ``"current"``.
        every_n_steps: steps between two checks. Steps are training batches divided by ``accumulate_grad_batches``, so
            they advance even where the Trainer sees no optimizer step.
        stale_steps: see above, in the same steps; None: never.
        nonfinite_steps: see above, in optimizer steps; None: never.
        saturated_above: a share, 0 to 1; None: never.
        underflowed_above: a share, 0 to 1; None: never.
        checks_in_a_row: number of checks.
        patterns: ``fnmatch`` patterns on tensor names, ``<module path>.<role>``; tensors that match none are not
            watched.
        kurtosis_above: at least 1; None: never.
        outliers_above: a share, 0 to 1; None: never.
        cooldown: steps until a layer returns; None: never.

    Raises:
        ValueError: for another action, a number out of its range, a pattern that matches no tensor of the model,
            ``cooldown`` with an action that moves no layer, or ``"fallback"`` or ``"current"``, which may move layers
            to bf16, together with ``fp8_all_gather``.
        TypeError: if ``patterns`` is a single string.
        RuntimeError: in training, with ``action="raise"``.
    """

    def __init__(
        self,
        action: Action = "warn",
        every_n_steps: int = 50,
        stale_steps: int | None = 100,
        nonfinite_steps: int | None = 3,
        saturated_above: float | None = 0.01,
        underflowed_above: float | None = 0.1,
        checks_in_a_row: int = 3,
        patterns: Sequence[str] = ("*",),
        kurtosis_above: float | None = None,
        outliers_above: float | None = None,
        cooldown: int | None = None,
    ) -> None:
        check_choice("ScaleWatchdog: `action`", action, get_args(Action))
        super().__init__(every_n_steps)
        counts = {"checks_in_a_row": checks_in_a_row, "stale_steps": stale_steps, "nonfinite_steps": nonfinite_steps}
        counts["cooldown"] = cooldown
        for name, count in counts.items():
            if count is not None:
                check_count(f"ScaleWatchdog: `{name}`", count)
        self.limits = Limits(
            stale_steps=stale_steps,
            nonfinite_steps=nonfinite_steps,
            saturated_above=saturated_above,
            underflowed_above=underflowed_above,
            checks_in_a_row=checks_in_a_row,
            kurtosis_above=kurtosis_above,
            outliers_above=outliers_above,
        )
        for name in ("saturated_above", "underflowed_above", "outliers_above"):
            share = getattr(self.limits, name)
            if share is not None and not 0 <= share < 1:
                raise ValueError(f"ScaleWatchdog: `{name}` must be a share from 0 to below 1, got {share}.")
        if kurtosis_above is not None and not kurtosis_above >= 1:
            raise ValueError(f"ScaleWatchdog: `kurtosis_above` must be at least 1, got {kurtosis_above}.")
        if cooldown is not None and action not in _MOVES:
            raise ValueError(f"ScaleWatchdog: `cooldown` is for layers that were moved, and {action!r} moves none.")
        self.action = action
        self.cooldown = cooldown
        self.patterns = as_patterns(patterns, "patterns")
        self._watch: Watch | None = None
        self._inputs: InputStatistics | None = None
        # by layer that this callback moved, the steps since its last move
        self._since_move: dict[str, int] = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lightning asks for callbacks that have one when it resumes a run
        return {} if self.cooldown is None else {"since_move": dict(self._since_move)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._since_move = dict(state_dict.get("since_move", {}))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # before a checkpoint is loaded: layers that an earlier fit moved stay, as those that the user moved
        if stage == "fit":
            self._since_move = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._starts(trainer, pl_module, "watch"):
            return
        # batches are counted, as another loop may make the optimizer's steps
        self._when.start(0)
        if self.action in _MOVES:
            refuse_gather(
                trainer, f"ScaleWatchdog: `action={self.action!r}`", "Use `action='raise'`, or gather in bf16."
            )
        state = scaling_state(pl_module)
        if self.action == "current" and not state.recipe.from_history:
            rank_zero_warn(
                f"ScaleWatchdog: under {state.recipe} all layers are scaled by their own values already:"
                " `action='current'` moves a layer in trouble to bf16, as `action='fallback'` does."
            )
        matching_tensors(state.names, self.patterns, "ScaleWatchdog")
        self._watch = Watch(state, self.limits)
        if self.limits.kurtosis_above is not None or self.limits.outliers_above is not None:
            self._inputs = InputStatistics(dict(converted(pl_module)), pl_module)
        self._said: set[tuple[str, str]] = set()
        # training batches, and those divided by ``accumulate_grad_batches``
        self._batches = self._steps = 0
        self._is_before_check = False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        state = self._state
        if state is not None and self._watch is not None:
            self._watch.follow(state)
        if state is not None and self._when.begins():
            self._is_before_check = True
            state.cast_counts.start(self)
            if self._inputs is not None:
                self._inputs.start()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._watch is not None and self._is_before_check:
            self._watch.on_gradients(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        state = self._state
        if state is None or self._watch is None:
            return
        self._batches += 1
        if self._batches >= trainer.accumulate_grad_batches:
            self._batches, self._steps = 0, self._steps + 1
            self._since_move = {name: steps + 1 for name, steps in self._since_move.items()}
        if not self._when.ends(self._steps):
            return
        self._is_before_check = False
        reduce = partial(trainer.strategy.reduce, reduce_op="sum")
        self._watch.follow(state)
        findings = self._watch.check(self._steps, reduce, self._outliers(state, reduce))
        state.cast_counts.stop(self)
        findings.keep(set(matching_tensors(state.names, self.patterns, "ScaleWatchdog")))
        self._act(trainer, state, findings)

    def _outliers(self, state: ScalingState, reduce: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Kurtosis and share of outliers by tensor, ``[2, R] float64``; None if they are not watched."""
        inputs = self._inputs
        if inputs is None:
            return None
        inputs.stop()
        if not inputs.has_seen:
            warn_once(f"ScaleWatchdog: {NOT_SEEN} for outliers.")
        statistics = torch.stack([*inputs.values(reduce, state.device).values()])
        # of a layer with several GEMMs, the first one's input
        firsts = [next(iter(layer.fp8.values())).module for layer in inputs.layers.values()]
        by_row = statistics.new_full((len(statistics), len(state.names)), torch.nan)
        for column, module in enumerate(firsts):
            by_row[:, state.row_of(module, "input")] = statistics[:, column]
        return by_row

    def _act(self, trainer: Trainer, state: ScalingState, findings: Findings) -> None:
        now = {(condition, row) for condition, rows in findings.tensors.items() for row in rows}
        new = {(condition, row) for condition, row in now if (condition, state.names[row]) not in self._said}
        self._said = {(condition, state.names[row]) for condition, row in now}
        message = f"ScaleWatchdog, step {trainer.global_step}: {self._described(state, findings, new)}" if new else ""
        returned = self._return(state) if self.cooldown is not None else []
        if new and self.action in _MOVES:
            message += self._move(state, self._to_move(state, findings, new))
        self._log(trainer, state, findings)
        if returned:
            rank_zero_info(
                f"ScaleWatchdog, step {trainer.global_step}: back to the precision of the run, {self.cooldown} steps"
                f" after their last move: {', '.join(returned)}."
            )
        if new and self.action == "raise":
            raise RuntimeError(message)
        if new:
            rank_zero_warn(message)

    def _move(self, state: ScalingState, in_trouble: set[tuple[str, int]]) -> str:
        """Move the layers of these tensors, and return the message about it."""
        to_current = {
            state.module_of(row)
            for condition, row in in_trouble
            if self.action == "current" and state.recipe.from_history and condition in _OF_THE_SCALE
            # a weight is scaled by its own values already
            if row < state.delayed and not state.precisions[state.module_of(row)].is_current
        }
        to_bf16 = {state.module_of(row) for _, row in in_trouble} - to_current
        before = set(state.current_modules)
        state.switch("move", {**dict.fromkeys(to_bf16, BF16), **dict.fromkeys(to_current, Choice(is_current=True))})
        # a layer that runs in bf16 already, and takes the same input, is not moved
        moved = [name for name in state.current_modules if name not in before.union(state.fallbacks)]
        modules = [state.module_names.index(name) for name in moved]
        self._begin_anew(state, modules)
        names = [state.module_names[module] for module in sorted(to_bf16)]
        self._since_move |= dict.fromkeys([*moved, *names], 0)
        return (f"\n  With current scaling from now on: {', '.join(moved)}." if moved else "") + (
            f"\n  In bf16 from now on: {', '.join(names)}." if names else ""
        )

    def _return(self, state: ScalingState) -> list[str]:
        """Move back the layers whose cooldown is over, and return their names."""
        over = {name for name, steps in self._since_move.items() if steps >= (self.cooldown or 0)}
        self._since_move = {name: steps for name, steps in self._since_move.items() if name not in over}
        modules = [module for module, name in enumerate(state.module_names) if name in over]
        if modules:
            state.switch("move", dict.fromkeys(modules, AS_SET))
            self._begin_anew(state, modules)
        return [state.module_names[module] for module in modules]

    def _begin_anew(self, state: ScalingState, modules: Sequence[int]) -> None:
        """Forget what was found in modules, whose scaling has been changed."""
        if self._watch is not None:
            self._watch.forgive(modules)
        names = {name for row, name in enumerate(state.names) if state.module_of(row) in modules}
        self._said = {(condition, name) for condition, name in self._said if name not in names}

    def _to_move(self, state: ScalingState, findings: Findings, new: set[tuple[str, int]]) -> set[tuple[str, int]]:
        chosen: set[tuple[str, int]] = set()
        for condition in CONDITIONS:
            modules = {state.module_of(row) for row in findings.tensors[condition]}
            # inf and NaN spread, and without updates all scales stand still
            if condition in ("stale", "nonfinite") and 2 * len(modules) > findings.active:
                continue
            chosen |= {(name, row) for name, row in new if name == condition}
        return chosen

    def _described(self, state: ScalingState, findings: Findings, new: set[tuple[str, int]]) -> str:
        limits, lines = self.limits, []
        texts = {
            "stale": f"scales not updated for {limits.stale_steps} steps or more, although in use",
            "nonfinite": f"inf or NaN in {limits.nonfinite_steps} optimizer steps in a row or more",
            "saturated": f"more than {_percent(limits.saturated_above)} of the numbers clipped, at"
            f" {limits.checks_in_a_row} checks in a row",
            "underflowed": f"more than {_percent(limits.underflowed_above)} of the numbers turned into zero, at"
            f" {limits.checks_in_a_row} checks in a row",
            "kurtosis": f"kurtosis above {limits.kurtosis_above}, at {limits.checks_in_a_row} checks in a row",
            "outliers": f"more than {_percent(limits.outliers_above)} outliers behind a SwiGLU, at"
            f" {limits.checks_in_a_row} checks in a row",
        }
        for condition in CONDITIONS:
            numbers = {row: number for row, number in findings.tensors[condition].items() if (condition, row) in new}
            if not numbers:
                continue
            largest = sorted(numbers, key=lambda row: -numbers[row])[:10]
            shown = [f"{state.names[row]} {_extent(findings, condition, row)}" for row in largest]
            more = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
            lines.append(f"{texts[condition]}: {', '.join(shown)}{more}.")
            if condition == "stale":
                lines.append(
                    "A layer in eval mode records nothing."
                    if findings.any_update
                    else "No scale has been updated at all: does the loop step its optimizer without the Trainer?"
                )
        return "\n  ".join(lines)

    def _log(self, trainer: Trainer, state: ScalingState, findings: Findings) -> None:
        metrics: dict[str, float] = {f"fp8/watchdog/{name}": len(rows) for name, rows in findings.tensors.items()}
        metrics["fp8/watchdog/fallbacks"] = len(state.fallbacks)
        metrics["fp8/watchdog/current"] = len(state.current_modules)
        log_to_all(trainer, metrics)

    @override
    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.state.cast_counts.stop(self)
            self._watch.close()
        if self._inputs is not None:
            self._inputs.stop()
        self._model = self._watch = self._inputs = None


def _extent(findings: Findings, condition: str, row: int) -> str:
    number = findings.tensors[condition][row]
    if condition == "outliers":
        return f"({_percent(number)})"
    if condition not in findings.lost:
        return f"({number:.4g})" if condition == "kurtosis" else f"({int(number)})"
    lost, of = findings.lost[condition][row]
    return f"{lost} of {of} ({_percent(number)})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g}%"
