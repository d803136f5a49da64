"""``Fp8Monitor``: is this FP8 run healthy, and if not, where, and what is there to do?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.callbacks.health import (
    CONDITIONS,
    LOW,
    OF_THE_CAST,
    OF_THE_SCALE,
    Finding,
    Verdict,
    checked_thresholds,
    ordered,
)
from lightning_fp8.callbacks.loss import Loss
from lightning_fp8.callbacks.products import Products
from lightning_fp8.callbacks.run_watcher import RunWatcher, log_to_all, refuse_gather, run_folder
from lightning_fp8.callbacks.watch import Measured, Watch, over_processes
from lightning_fp8.conversion.convert import scaling_state
from lightning_fp8.conversion.plan import converted
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.every_n_steps import check_count
from lightning_fp8.runtime.run_files import HEALTH_FILE, write_json
from lightning_fp8.scaling.precision import AS_SET, BF16, Choice
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scaling.statistics import by_role

Action = Literal["warn", "raise", "fallback", "current"]
# the actions that move layers
_MOVES = ("fallback", "current")
# one number is a large share of a small tensor: fewer lost numbers than this at one check never exceed a threshold
_MIN_LOST = 10
# tensors grow in the first steps of a run: steps above the range count from so many updates on
_MIN_UPDATES = 100
Found = dict[tuple[str, str], float]


class Fp8Monitor(RunWatcher):
    """Answers whether an FP8 run is healthy; at the end of ``fit`` in one line, as
    ``FP8: healthy (24 layers, 2,000 steps)`` or ``FP8: look at 2 findings (...)`` with what, where, since when and the
    line that mends it.

    Every ``every_n_steps`` it measures, for each tensor of each converted layer: the shares of numbers that casts clip
    and turn into zero, the signal-to-noise ratio of casts and of the layer's product on a sample of 64 rows, steps with
    inf or NaN, and how amaxes stand against the window and the limits of scales. It also sees layers that do not run,
    and a loss that spikes or diverges although casts are as before. The conditions, their thresholds and sources are in
    docs/callbacks.md.

    A finding is reported once, when it is found, and again if it comes back. ``action`` says what else happens:

    - ``"warn"``: nothing.
    - ``"raise"``: a ``RuntimeError``, except for what the loss does.
    - ``"fallback"``: layers in which casts lose too much run in bf16 from then on.
    - ``"current"``: where the scale is the cause, such a layer first moves to current scaling: its inputs and gradients
      are scaled by their own values, and layers with the same input move with it. At its next finding it moves to bf16.
      Under a recipe without histories this is ``"fallback"``.

    Moves are recorded in checkpoints, also for runs that load them without the callback. If more than half of the
    layers have inf or NaN or stale scales, the layers are not the cause, and none is moved for it. With ``cooldown`` a
    layer that this callback has moved comes back so many steps later.

    A resumed run goes on exactly. A second fit begins anew; what was moved before stays.

    Without a Trainer, call :meth:`check` after each step, and :meth:`verdict` when you want the answer::

        monitor = Fp8Monitor()
        for batch in data:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            scaling_state(model).update()
            monitor.check(model, loss)
            optimizer.zero_grad()
        print(monitor.verdict())

    It logs, to all loggers, at most 40 numbers at a check, however large the model: ``fp8/health/findings``,
    ``fp8/health/fallbacks`` and ``fp8/health/current`` (numbers of findings, and of layers that have moved);
    ``fp8/health/<role>/<quantity>/<which>`` for each role, with ``saturated_fraction/max``,
    ``underflowed_fraction/max``, ``headroom_bits/min`` and ``median`` (not of weights), ``sqnr_db/min`` and ``median``;
    and ``fp8/health/product/sqnr_db/min`` and ``median``. It writes the verdict so far into ``fp8_health.json`` next to
    the logs, for ``python -m lightning_fp8 report``.

    A check takes one copy from the device, and the step before it counts lost numbers; between checks nothing waits for
    the device. With several processes all see the sums over all of them, so all act alike. Products of layers inside
    ``torch.compile``, of attentions and of experts are not measured, their tensors are. Under another precision it
    warns once and does nothing.

    Args:
        every_n_steps: optimizer steps between two checks. Under a Trainer steps are training batches divided by
            ``accumulate_grad_batches``, so that they advance even where the Trainer sees no optimizer step.
        action: see above.
        cooldown: steps until a layer comes back; None: never.
        thresholds: by condition, another one, or None not to look for it: ``{"saturated": 0.05, "unused": None}``.
        checks_in_a_row: at so many checks in a row a share or a ratio must be beyond its threshold.

    Raises:
        ValueError: for another action, a number out of its range, a condition that does not exist, ``cooldown`` with an
            action that moves no layer, or an action that may move layers to bf16 together with ``fp8_all_gather``.
        TypeError: for ``thresholds`` of another type.
        RuntimeError: in training, with ``action="raise"``.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        action: Action = "warn",
        cooldown: int | None = None,
        thresholds: Mapping[str, float | None] | None = None,
        checks_in_a_row: int = 3,
    ) -> None:
        check_choice("Fp8Monitor: `action`", action, get_args(Action))
        super().__init__(every_n_steps)
        if cooldown is not None:
            check_count("Fp8Monitor: `cooldown`", cooldown)
            if action not in _MOVES:
                raise ValueError(f"Fp8Monitor: `cooldown` is for layers that were moved, and {action!r} moves none.")
        check_count("Fp8Monitor: `checks_in_a_row`", checks_in_a_row)
        self.checks_in_a_row = checks_in_a_row
        self.action = action
        self.cooldown = cooldown
        self.thresholds = checked_thresholds(thresholds)
        self._loaded: dict[str, Any] = {}
        # of the run that has ended
        self._saved: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._watch: Watch | None = None
        self._products = Products()
        self._loss = Loss()
        self._steps = self._batches = self._layers = 0
        self._is_measuring = False
        # how often in a row a condition held at checks, and the step at which a tensor was last updated, by name
        self._in_a_row: dict[tuple[str, str], int] = {}
        self._last_update: dict[str, int] = {}
        # by tensor, of the newest checks: at how many updates it was beyond its range, and of how many
        self._beyond: dict[str, list[tuple[int, int]]] = {}
        # by tensor, what was far beyond its range since the loss was lowest, before this interval and in it
        self._bursts: dict[str, float] = {}
        self._bursts_now: dict[str, float] = {}
        self._findings: dict[tuple[str, str], Finding] = {}
        # those that have been reported and still hold
        self._said: set[tuple[str, str]] = set()
        # by layer that this callback has moved, the steps since its last move
        self._since_move: dict[str, int] = {}

    # A loop of one's own

    def check(self, model: nn.Module, loss: Tensor | float | None = None) -> None:
        """To be called in a loop without a Trainer, once the optimizer and the scales have been updated.

        Every ``every_n_steps`` calls it measures, warns and acts. Call it before ``optimizer.zero_grad()``: a layer in
        eval mode is known by its gradients.

        Args:
            model: the converted model.
            loss: of the step, on any device, if it is to be watched too.

        Raises:
            ValueError: if the model is not converted.
            RuntimeError: with ``action="raise"``.
        """
        state = scaling_state(model)
        if self._watch is None:
            self._watch = Watch(state)
        self._step_ends(model, state, loss)
        self._step_begins(model, state)

    def verdict(self) -> Verdict:
        """The answer so far."""
        return Verdict(ordered(self._findings.values()), self._layers, self._steps)

    # A run of a Trainer

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._saved if self._watch is None else self._as_saved(self._watch)

    def _as_saved(self, watch: Watch) -> dict[str, Any]:
        return {
            "watch": watch.state_dict(),
            "loss": self._loss.state_dict(),
            "steps": self._steps,
            "in_a_row": [(*key, count) for key, count in self._in_a_row.items()],
            "last_update": dict(self._last_update),
            "beyond": {name: list(counts) for name, counts in self._beyond.items()},
            "bursts": dict(self._bursts),
            "findings": [vars(finding).copy() for finding in self._findings.values()],
            "said": sorted(self._said),
            "since_move": dict(self._since_move),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # the model is not converted yet
        self._loaded = state_dict

    def _go_on(self, watch: Watch) -> None:
        loaded, self._loaded = self._loaded, {}
        if not loaded:
            return
        watch.load_state_dict(loaded["watch"])
        self._loss.load_state_dict(loaded["loss"])
        self._steps = loaded["steps"]
        self._in_a_row = {(condition, where): count for condition, where, count in loaded["in_a_row"]}
        self._last_update = dict(loaded["last_update"])
        self._beyond = {name: [*map(tuple, counts)] for name, counts in loaded["beyond"].items()}
        self._bursts = dict(loaded["bursts"])
        findings = [Finding(**fields) for fields in loaded["findings"]]
        self._findings = {(finding.condition, finding.where): finding for finding in findings}
        self._said = set(map(tuple, loaded["said"]))
        self._since_move = dict(loaded["since_move"])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # before a checkpoint is loaded
        if stage == "fit":
            self._loaded = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._starts(trainer, pl_module, "monitor"):
            return
        if self.action in _MOVES:
            refuse_gather(trainer, f"Fp8Monitor: `action={self.action!r}`", "Use `action='raise'`, or gather in bf16.")
        self._begin()
        state = scaling_state(pl_module)
        if self.action == "current" and not state.recipe.scaling("input").reads_history:
            rank_zero_warn(
                f"Fp8Monitor: under {state.recipe} all layers are scaled by their own values already:"
                " `action='current'` moves a layer in trouble to bf16, as `action='fallback'` does."
            )
        self._watch = Watch(state)
        self._go_on(self._watch)
        self._folder = run_folder(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        state = self._state
        if state is not None:
            self._step_begins(pl_module, state)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._watch is not None and self._is_measuring:
            self._watch.on_gradients(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        state = self._state
        if state is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss.add(loss)
        self._batches += 1
        # batches are counted, as another loop may make the optimizer's steps; the last one of an epoch steps, too
        if self._batches >= trainer.accumulate_grad_batches or trainer.is_last_batch:
            self._batches = 0
            metrics = self._step_ends(pl_module, state)
            if metrics:
                log_to_all(trainer, metrics)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None and self._steps >= self.every_n_steps:
            rank_zero_info(str(self.verdict()))
            self._write()
        elif self._watch is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"Fp8Monitor: the run made {self._steps} steps and `every_n_steps` is {self.every_n_steps}, so nothing"
                f" was checked. Set `every_n_steps` to {max(1, self._steps)} or less."
            )
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write()
        self._stop()

    @rank_zero_only
    def _write(self) -> None:
        if self._watch is not None and getattr(self, "_folder", None) is not None and self._steps:
            write_json(self._folder / HEALTH_FILE, self.verdict().as_dict())  # type: ignore[operator]

    @override
    def _stop(self) -> None:
        if self._watch is not None:
            self._saved = self._as_saved(self._watch)
            self._watch.state.cast_counts.stop(self)
            self._watch.close()
        self._products.stop()
        self._model = self._watch = None

    # Steps

    def _step_begins(self, model: nn.Module, state: ScalingState) -> None:
        """Before each batch; the step before a check is measured."""
        if self._watch is not None:
            self._watch.follow(state)
        if not self._is_measuring and (self._steps + 1) % self.every_n_steps == 0:
            self._is_measuring = True
            state.cast_counts.start(self)
            self._products.start(dict(converted(model)))

    def _step_ends(self, model: nn.Module, state: ScalingState, loss: Tensor | float | None = None) -> dict[str, float]:
        """After each step; returns what is to be logged."""
        watch = self._watch
        if watch is None:
            return {}
        self._loss.add(loss)
        self._loss.step_ends()
        self._steps += 1
        self._since_move = {name: steps + 1 for name, steps in self._since_move.items()}
        if not self._is_measuring:
            return {}
        watch.on_gradients(model)
        watch.follow(state)
        products = self._products.stop()
        measured = watch.check(over_processes)
        state.cast_counts.stop(self)
        self._is_measuring = False
        layers = dict(converted(model))
        self._layers = sum(layer.in_fp8 for layer in layers.values())
        sqnr = _ratios(products, list(layers), state.device)
        loss_rises = {
            name: value
            for name, value in self._loss.check(over_processes).items()
            if value > self.thresholds.get(name, math.inf)
        }
        found = self._found(state, measured, sqnr, "spikes" in loss_rises)
        of_data = any(where == state.names[0] for _, where in found)
        if self._loss.has_risen and not (self._bursts or of_data or self._has_lost()):
            # a loss that rises for another reason makes all tensors grow but those that the data are
            found = {key: value for key, value in found.items() if key[0] not in OF_THE_SCALE}
        training = [layer for layer in layers.values() if layer.training]
        run = {gemm.module for layer in training for gemm in layer.fp8.values()}
        trains = {gemm.module for layer in training for gemm, weight in layer.gemms() if weight.requires_grad}
        found |= self._silent(state, measured, run, trains)
        found |= self._of_loss(found, loss_rises)
        self._act(state, measured, found)
        self._write()
        return self._metrics(state, measured, sqnr)

    # What is found

    def _found(self, state: ScalingState, measured: Measured, products: dict[str, float], spikes: bool) -> Found:
        """The conditions that hold for tensors and layers now, each with what was measured.

        ``spikes``: whether the loss does.
        """
        limits, found = self.thresholds, Found()
        m, in_fp8, names = measured, state.rows_in_fp8.tolist(), state.names
        saturated = (m.saturated / m.numbers.clamp(min=1)).tolist()
        underflowed = (m.underflowed / m.nonzero.clamp(min=1)).tolist()
        log2_scale, log2_amax = m.scale.log2().tolist(), m.amax.log2().tolist()
        uses_history = state.recipe.scaling("input").reads_history

        def lasting(condition: str, name: str, holds: bool, was_seen: bool, value: float) -> None:
            if condition not in limits or not was_seen:
                return
            count = self._in_a_row[condition, name] = self._in_a_row.get((condition, name), 0) + 1 if holds else 0
            if count >= self.checks_in_a_row:
                found[condition, name] = value

        def above(condition: str, value: float) -> bool:
            return value > limits.get(condition, math.inf)

        for row, name in enumerate(names):
            if not in_fp8[row]:
                continue
            if m.updated[row]:
                self._last_update[name] = self._steps
            if m.nonfinite[row] >= limits.get("nonfinite", math.inf):
                found["nonfinite", name] = float(m.nonfinite[row])
            is_delayed = row < state.delayed
            current = state.precisions[state.module_of(row)].is_current or not uses_history
            age = self._steps - self._last_update.setdefault(name, 0)
            # a layer that records a gradient has recorded its input too, which may be 0
            is_recorded = bool(m.updated[len(state.module_names) + state.module_of(row)])
            is_stale = bool(m.active[row]) and is_delayed and not (current or m.nonfinite[row] or is_recorded)
            if is_stale and age >= limits.get("stale", math.inf):
                found["stale", name] = float(age)
            was_cast = bool(m.numbers[row])
            is_many = int(m.saturated[row]) >= _MIN_LOST
            lasting("saturated", name, above("saturated", saturated[row]) and is_many, was_cast, saturated[row])
            is_many = int(m.underflowed[row]) >= _MIN_LOST
            share = underflowed[row]
            lasting("underflowed", name, above("underflowed", share) and is_many, was_cast, share)
            sqnr = float(m.sqnr[row])
            lasting("imprecise", name, sqnr < limits.get("imprecise", -math.inf), sqnr == sqnr, sqnr)
            if not is_delayed or not m.updated[row]:
                continue
            extreme = max(abs(log2_scale[row]), abs(math.log2(float(m.overshoot[row]) or 1)))
            lasting("limit", name, above("limit", extreme), not current or uses_history, log2_scale[row])
            if row >= len(state.module_names) and ("limit", name) not in found:
                lasting("tiny", name, log2_amax[row] < limits.get("tiny", -math.inf), True, log2_amax[row])
            if current or ("limit", name) in found:
                continue
            counts = self._beyond.setdefault(name, [])
            counts.append((int(m.beyond[row]), m.updates))
            while len(counts) > self.checks_in_a_row and sum(of for _, of in counts[1:]) >= _MIN_UPDATES:
                counts.pop(0)
            times, of = map(sum, zip(*counts, strict=True))
            kind = "window" if state.recipe.window < 4 or state.recipe.newest_only else "growing"
            is_known = len(counts) >= self.checks_in_a_row and of >= _MIN_UPDATES
            if is_known and above(kind, times / of):
                found[kind, name] = times / of
            overshoot = float(m.overshoot[row])
            # where the loss rises, all tensors may be large because of that but those that the data are
            is_effect = row > 0 and (spikes or self._loss.has_risen)
            if above("bursts", overshoot) and not is_effect:
                if row < len(state.module_names):
                    self._bursts_now[name] = overshoot
                count = self._in_a_row["bursts", name] = self._in_a_row.get(("bursts", name), 0) + 1
                if count > 1:
                    found["bursts", name] = overshoot
            headroom = float(m.headroom[row])
            lasting("margin", name, above("margin", headroom), headroom == headroom, headroom)
        for path, ratio in products.items():
            lasting("product", path, ratio < limits.get("product", -math.inf), True, ratio)
        return found

    def _silent(self, state: ScalingState, measured: Measured, run: set[int], trains: set[int]) -> Found:
        """Layers that do not run, of those in training mode, and those that do not learn, of those with a weight to
        train; all by their positions."""
        found, count = Found(), len(state.module_names)
        updated, nonfinite, active = measured.updated, measured.nonfinite, measured.active
        if not measured.updates:
            return found
        for module, layer in enumerate(state.module_names):
            if not state.precisions[module].in_fp8:
                continue
            owner = state.input_owners.get(module, module)
            its, grad = bool(updated[owner]), bool(updated[count + module])
            is_finite = not (nonfinite[owner] or nonfinite[count + module])
            ran = its or grad or bool(active[module]) or not is_finite
            dead_input = grad and not its
            # with a gradient of its weight, the gradient of its output was lost, not zero
            dead_grad = its and not grad and module in trains and not measured.with_gradient[module]
            self._count(found, "unused", layer or "(root)", not ran and module in run)
            self._count(found, "dead", f"{layer}.input".lstrip("."), dead_input and is_finite)
            self._count(found, "dead", f"{layer}.grad_output".lstrip("."), dead_grad and is_finite)
        return found

    def _count(self, found: Found, condition: str, where: str, holds: bool) -> None:
        if condition in self.thresholds:
            count = self._in_a_row[condition, where] = self._in_a_row.get((condition, where), 0) + 1 if holds else 0
            if count >= self.thresholds[condition]:
                found[condition, where] = float(count)

    def _of_loss(self, found: Found, rises: dict[str, float]) -> Found:
        """What the loss does, where no cast explains it; where single casts of inputs may, these."""
        # in an interval in which the loss diverges, inputs grow because of that
        bursts = self._bursts if "diverges" in rises else {**self._bursts, **self._bursts_now}
        self._bursts = {**({} if self._loss.is_lowest else self._bursts), **self._bursts_now}
        self._bursts_now = {}
        if rises and bursts:
            return {("bursts", name): value for name, value in bursts.items()}
        if self._has_lost() or any(key[0] in OF_THE_CAST for key in found):
            return Found()
        return {(name, ""): value for name, value in rises.items()}

    def _has_lost(self) -> bool:
        """Whether casts lost too much at the check before."""
        lossy = {*OF_THE_CAST} - {"nonfinite"}
        return any(finding.condition in lossy and finding.holds for finding in self._findings.values())

    # What is done about it

    def _act(self, state: ScalingState, measured: Measured, found: Found) -> None:
        new = []
        for known in self._findings.values():
            known.holds = (known.condition, known.where) in found
        for (condition, where), value in found.items():
            finding = self._findings.get((condition, where))
            if (condition, where) not in self._said:
                new.append((condition, where))
            if finding is None:
                remedy = self._remedy(state, condition, where)
                finding = Finding(condition, where, self._steps, self._steps, value, remedy)
                self._findings[condition, where] = finding
            finding.value = min(finding.value, value) if condition in LOW else max(finding.value, value)
            finding.last, finding.holds = self._steps, True
        # what happens in single steps is said once
        self._said = {*found, *(key for key in self._said if key[0] in ("bursts", "spikes"))}
        returned = self._return(state) if self.cooldown is not None else []
        moved = self._move(state, measured, new) if new and self.action in _MOVES else ""
        if returned:
            rank_zero_info(
                f"Fp8Monitor, step {self._steps}: back to the precision of the run, {self.cooldown} steps after their"
                f" last move: {', '.join(returned)}."
            )
        if not new:
            return
        findings = ordered(self._findings[key] for key in new)
        message = f"Fp8Monitor, step {self._steps}: {Verdict(findings, self._layers, self._steps)}{moved}"
        if self.action == "raise" and any(finding.where for finding in findings):
            raise RuntimeError(message)
        _warn(message)

    def _remedy(self, state: ScalingState, condition: str, where: str) -> str:
        layer = where if condition in ("product", "unused") else where.rpartition(".")[0]
        fields = {"layer": layer, "margin": getattr(state.recipe, "margin", 0) + 1}
        if condition == "limit" and not where.endswith("grad_output"):
            return "scale what the layer takes in, such as `x * 2**20`, or leave the layer in bf16"
        if condition == "saturated" and state.recipe.window < 4:
            condition = "window"
        if condition == "margin" and getattr(state.recipe, "margin", 0) < 1:
            return '`precision="fp8-current"`: single steps have far larger values than the others'
        return CONDITIONS[condition].remedy.format(**fields)

    def _move(self, state: ScalingState, measured: Measured, new: Sequence[tuple[str, str]]) -> str:
        """Move the layers with new findings, and return the message about it."""
        rows = {name: row for row, name in enumerate(state.names)}
        places = {name or "(root)": module for module, name in enumerate(state.module_names)}
        active = int(measured.active.view(3, -1).any(0).sum())
        to_current: set[int] = set()
        to_bf16: set[int] = set()
        for condition in OF_THE_CAST:
            wheres = [where for name, where in new if name == condition]
            modules = {
                where: state.module_of(rows[where]) if where in rows else places[where]
                for where in wheres
                if where in rows or where in places
            }
            # inf and NaN spread, and without updates all scales stand still
            if condition in ("stale", "nonfinite") and 2 * len({*modules.values()}) > active:
                continue
            for where, module in modules.items():
                can_be_current = (
                    self.action == "current"
                    and condition in OF_THE_SCALE
                    and state.recipe.scaling("input").reads_history
                    # a weight is scaled by its own values already
                    and rows.get(where, state.delayed) < state.delayed
                    and not state.precisions[module].is_current
                )
                (to_current if can_be_current else to_bf16).add(module)
        to_current -= to_bf16
        if not to_current and not to_bf16:
            return ""
        before = set(state.current_modules)
        state.switch("move", {**dict.fromkeys(to_bf16, BF16), **dict.fromkeys(to_current, Choice(is_current=True))})
        # a layer that runs in bf16 already, and takes the same input, is not moved
        current = [name for name in state.current_modules if name not in before.union(state.fallbacks)]
        in_bf16 = [state.module_names[module] for module in sorted(to_bf16)]
        self._begin_anew(current + in_bf16)
        self._since_move |= dict.fromkeys([*current, *in_bf16], 0)
        return (f"\n  With current scaling from now on: {', '.join(current)}." if current else "") + (
            f"\n  In bf16 from now on: {', '.join(in_bf16)}." if in_bf16 else ""
        )

    def _return(self, state: ScalingState) -> list[str]:
        """Move back the layers whose cooldown is over, and return their names."""
        over = {name for name, steps in self._since_move.items() if steps >= (self.cooldown or 0)}
        self._since_move = {name: steps for name, steps in self._since_move.items() if name not in over}
        modules = [module for module, name in enumerate(state.module_names) if name in over]
        if modules:
            state.switch("move", dict.fromkeys(modules, AS_SET))
            self._begin_anew(state.module_names[module] for module in modules)
        return [state.module_names[module] for module in modules]

    def _begin_anew(self, layers: Iterable[str]) -> None:
        """Restart the counts of layers whose scaling has been changed."""
        moved = set(layers)

        def stays(key: tuple[str, str]) -> bool:
            return key[1] not in moved and key[1].rpartition(".")[0] not in moved

        self._in_a_row = {key: count for key, count in self._in_a_row.items() if stays(key)}
        self._said = set(filter(stays, self._said))

    # What is logged

    def _metrics(self, state: ScalingState, measured: Measured, products: dict[str, float]) -> dict[str, float]:
        metrics: dict[str, float] = {
            "findings": sum(finding.holds for finding in self._findings.values()),
            "fallbacks": len(state.fallbacks),
            "current": len(state.current_modules),
        }
        nan, m, in_fp8 = float("nan"), measured, state.rows_in_fp8
        was_cast = (m.numbers > 0) & in_fp8
        quantities: dict[str, tuple[Tensor, tuple[str, ...]]] = {
            "saturated_fraction": ((m.saturated / m.numbers).where(was_cast, nan), ("max",)),
            "underflowed_fraction": ((m.underflowed / m.nonzero.clamp(min=1)).where(was_cast, nan), ("max",)),
            "headroom_bits": (m.headroom.where(in_fp8, nan), ("min", "median")),
            "sqnr_db": (m.sqnr.where(was_cast, nan), ("min", "median")),
        }
        for quantity, (values, which) in quantities.items():
            for role, some in by_role(values).items():
                metrics |= {f"{role}/{quantity}/{name}": _WHICH[name](some) for name in which}
        if products:
            ratios = torch.tensor(list(products.values()), dtype=torch.float64, device="cpu")
            metrics |= {f"product/sqnr_db/{name}": _WHICH[name](ratios) for name in ("min", "median")}
        return {f"fp8/health/{name}": value for name, value in metrics.items()}


_WHICH: dict[str, Callable[[Tensor], float]] = {
    "min": lambda values: values.min().item(),
    "median": lambda values: values.quantile(0.5).item(),
    "max": lambda values: values.max().item(),
}


def _ratios(sums: dict[str, Tensor], paths: Sequence[str], device: torch.device) -> dict[str, float]:
    """The signal-to-noise ratio of each layer's product over all processes, in dB."""
    # zeros for a layer that this process has not run
    empty = torch.zeros(2, dtype=torch.float64, device=device)
    together = over_processes(torch.stack([sums.get(path, empty) for path in paths]), "sum")
    signal, noise = together.cpu().unbind(dim=1)
    ratios = (10 * torch.log10(signal / noise)).tolist()
    return {path: ratio for path, ratio in zip(paths, ratios, strict=True) if ratio == ratio}


@rank_zero_only
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
