"""``Fp8Monitor``: is this FP8 run healthy? If not, where is the problem, and what can you do?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.callbacks.diagnosis import Diagnosis, Found
from lightning_fp8.callbacks.health import (
    LOW,
    Finding,
    Verdict,
    checked_thresholds,
    ordered,
)
from lightning_fp8.callbacks.moves import Moves
from lightning_fp8.callbacks.products import Products, ratios
from lightning_fp8.callbacks.remedies import remedy
from lightning_fp8.callbacks.run_watcher import RunWatcher, log_to_all, refuse_gather, run_folder, step_of_logs
from lightning_fp8.callbacks.watch import Measured, Watch, over_processes
from lightning_fp8.conversion.convert import scaling_state
from lightning_fp8.conversion.one_state import state_now
from lightning_fp8.conversion.plan import converted
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.every_n_steps import check_count
from lightning_fp8.runtime.run_files import HEALTH_FILE, write_json
from lightning_fp8.scaling.state import LAYOUT, ScalingState
from lightning_fp8.scaling.statistics import by_role

Action = Literal["warn", "raise", "fallback", "current"]
# the actions that move layers
_MOVES = ("fallback", "current")


class Fp8Monitor(RunWatcher):
    """Tells whether an FP8 run is healthy.

    At the end of ``fit`` it says ``FP8: healthy (24 layers, 2,000 steps)``; or ``FP8: look at 2 findings (...)`` and,
    for each finding, what it is, where, since when, and the line that fixes it.

    Every ``every_n_steps`` it measures, for each tensor of each converted layer: the shares of numbers that casts clip
    and turn into zero, the signal-to-noise ratio of casts and of the layer's product on a sample of 64 rows, steps with
    inf or NaN, and how amaxes stand against the window and the limits of scales. It also sees layers that do not run,
    and a loss that spikes or diverges although casts are as before. The conditions, their thresholds and sources are in
    docs/health.md.

    A finding is reported once, when it is found, and again if it comes back. ``action`` says what else happens:

    - ``"warn"``: nothing.
    - ``"raise"``: a ``RuntimeError``, except for findings about the loss.
    - ``"fallback"``: layers in which casts lose too much run in bf16 from then on.
    - ``"current"``: if the scale is the cause, such a layer first moves to current scaling: its inputs and gradients
      are scaled by their own values, and layers with the same input move with it. At its next finding it moves to bf16.
      Under a recipe without histories this is the same as ``"fallback"``.

    Checkpoints record moves, so they also apply in runs that load a checkpoint without the callback. If more than half
    of the layers have inf or NaN or stale scales, the layers are not the cause, and none is moved for it. With
    ``cooldown``, a layer that this callback has moved comes back that many steps later.

    A resumed run continues exactly. A second fit starts over; layers that were moved before stay moved.

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

    It logs at most 40 numbers per check to all loggers, however large the model: ``fp8/health/findings``,
    ``fp8/health/fallbacks`` and ``fp8/health/current`` (numbers of findings, and of layers that have moved);
    ``fp8/health/<role>/<quantity>/<which>`` for each role, with ``saturated_fraction/max``,
    ``underflowed_fraction/max``, ``headroom_bits/min`` and ``median`` (not of weights), ``sqnr_db/min`` and ``median``;
    and ``fp8/health/product/sqnr_db/min`` and ``median``. It writes the verdict so far into ``fp8_health.json`` next to
    the logs, for ``python -m lightning_fp8 report``, with thresholds, units, and whether the run is ``running``, has
    ``ended`` or ``failed``.

    A check takes one copy from the device, and the step before it counts lost numbers; between checks nothing waits for
    the device. With several processes, all of them see the sums over all processes, so all act alike. The products of
    layers inside ``torch.compile``, of attentions and of experts are not measured, but their tensors are. Under another
    precision it warns once and does nothing.

    Args:
        every_n_steps: optimizer steps between two checks. Under a Trainer: the steps of its logs, which a resumed
            run continues: training batches divided by ``accumulate_grad_batches``, so that they advance even if the
            Trainer sees no optimizer step.
        action: see above.
        cooldown: steps until a layer comes back; None: never.
        thresholds: other thresholds by condition; None disables a condition: ``{"saturated": 0.05, "unused": None}``.
        checks_in_a_row: the number of checks in a row at which a share or a ratio must be beyond its threshold.

    Raises:
        ValueError: for an unknown action or condition, a number out of its range, ``cooldown`` with an action that
            moves no layer, or an action that may move layers to bf16 together with ``fp8_all_gather``.
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
        self._steps = self._batches = self._layers = 0
        self._is_measuring = False
        self._diagnosis = Diagnosis(self.thresholds, self.checks_in_a_row)
        self._burst = self.thresholds.get("bursts", math.inf)
        self._moves = Moves()
        self._findings: dict[tuple[str, str], Finding] = {}
        # findings that have been reported and still hold
        self._said: set[tuple[str, str]] = set()
        self._folder: Path | None = None

    # A loop of one's own

    def check(self, model: nn.Module, loss: Tensor | float | None = None) -> None:
        """Call this in a loop without a Trainer, after the optimizer step and the update of the scales.

        Every ``every_n_steps`` calls it measures, warns and acts. Call it before ``optimizer.zero_grad()``, because it
        recognises layers in eval mode by their gradients.

        Args:
            model: the converted model.
            loss: the loss of this step, on any device; None to not watch it.

        Raises:
            ValueError: if the model is not converted.
            RuntimeError: with ``action="raise"``.
        """
        # `state_now` does not go through the model at each step; `scaling_state` raises the right error
        state = state_now(model) or scaling_state(model)
        if self._watch is None:
            self._watch = Watch(state, self._burst)
        self._diagnosis.loss.add(loss)
        self._step_ends(model, state)
        self._step_begins(model, state)

    def verdict(self) -> Verdict:
        """The answer so far."""
        return Verdict(ordered(self._findings.values()), self._layers, self._steps, self.thresholds)

    # A run of a Trainer

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._saved if self._watch is None else self._as_saved(self._watch)

    def _as_saved(self, watch: Watch) -> dict[str, Any]:
        return {
            "watch": watch.state_dict(),
            **self._diagnosis.state_dict(),
            "steps": self._steps,
            "findings": [vars(finding).copy() for finding in self._findings.values()],
            "said": sorted(self._said),
            "since_move": dict(self._moves.steps_since),
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
        self._diagnosis.load_state_dict(loaded)
        self._steps = loaded["steps"]
        findings = [Finding(**fields) for fields in loaded["findings"]]
        self._findings = {(finding.condition, finding.where): finding for finding in findings}
        self._said = set(map(tuple, loaded["said"]))
        self._moves.steps_since = dict(loaded["since_move"])

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
        self._watch = Watch(state, self._burst)
        self._go_on(self._watch)
        self._folder = run_folder(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        state = self._state
        if state is None:
            return
        if self._diagnosis.began is None:
            # a checkpoint without a state of this callback; its step is known only now
            self._steps = self._diagnosis.began = step_of_logs(trainer)
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
        self._diagnosis.loss.add(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        self._batches += 1
        # count batches, as another loop may make the optimizer's steps; the last batch of an epoch also steps
        if self._batches >= trainer.accumulate_grad_batches or trainer.is_last_batch:
            self._batches = 0
            metrics = self._step_ends(pl_module, state)
            if metrics:
                log_to_all(trainer, metrics)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        began = self._diagnosis.began or 0
        made = self._steps - began
        if self._watch is not None and self._steps // self.every_n_steps > began // self.every_n_steps:
            rank_zero_info(str(self.verdict()))
            self._write("ended")
        elif self._watch is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"Fp8Monitor: the run made {made} steps and `every_n_steps` is {self.every_n_steps}, so nothing"
                f" was checked. Set `every_n_steps` to {max(1, made)} or less."
            )
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write("failed")
        self._stop()

    @rank_zero_only
    def _write(self, run: str) -> None:
        if self._watch is not None and self._folder is not None and self._steps:
            write_json(self._folder / HEALTH_FILE, {**self.verdict().as_dict(), "run": run})

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

    def _step_ends(self, model: nn.Module, state: ScalingState) -> dict[str, float]:
        """Called after each step. Returns the metrics to log."""
        watch = self._watch
        if watch is None:
            return {}
        self._diagnosis.loss.step_ends()
        self._moves.step_ends()
        watch.step_ends()
        self._steps += 1
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
        sqnr, data = ratios(products, list(layers), state.device)
        held = [key for key, finding in self._findings.items() if finding.holds]
        found = self._diagnosis.find(state, measured, sqnr, data, layers.values(), self._steps, held)
        self._act(state, measured, found)
        self._write("running")
        return self._metrics(state, measured, sqnr)

    # What is done about it

    def _act(self, state: ScalingState, measured: Measured, found: Found) -> None:
        new = [key for key in found if key not in self._said]
        for known in self._findings.values():
            known.holds = (known.condition, known.where) in found
        rows = {name: row for row, name in enumerate(state.names)}
        for (condition, where), value in found.items():
            finding = self._findings.get((condition, where))
            if finding is None:
                # inf and NaN are followed at every step
                ago = int(measured.since_nonfinite[rows[where]]) - 1 if condition == "nonfinite" else 0
                since = self._steps - ago
                finding = self._findings[condition, where] = Finding(condition, where, since, since, value, "")
            # NaN where it holds without having been measured
            finding.value = min(finding.value, value) if condition in LOW else max(finding.value, value)
            finding.last, finding.holds = self._steps, True
        for condition in {condition for condition, _ in found}:
            together = ordered(one for key, one in self._findings.items() if key in found and key[0] == condition)
            for finding in together:
                finding.remedy = remedy([one.where for one in together], condition, found, state, self._layers)
        # report bursts and spikes once
        self._said = {*found, *(key for key in self._said if key[0] in ("bursts", "spikes"))}
        returned = self._moves.come_back(state, self.cooldown) if self.cooldown is not None else []
        current: list[str] = []
        in_bf16: list[str] = []
        if new and self.action in _MOVES:
            active = int(measured.active.view(len(LAYOUT), -1).any(0).sum())
            current, in_bf16 = self._moves.move(state, active, new, self.action)
        self._forget([*returned, *current, *in_bf16])
        for moved, to in ((current, "has current scaling"), (in_bf16, "runs in bf16")):
            for (_, where), finding in self._findings.items():
                layer = where if where in moved else where.rpartition(".")[0]
                if layer in moved and finding.holds:
                    finding.remedy = f"`action={self.action!r}`: {layer} {to} from step {self._steps:,} on"
        done = f"\n  With current scaling from now on: {', '.join(current)}." if current else ""
        done += f"\n  In bf16 from now on: {', '.join(in_bf16)}." if in_bf16 else ""
        if returned:
            rank_zero_info(
                f"Fp8Monitor, step {self._steps}: back to the precision of the run, {self.cooldown} steps after their"
                f" last move: {', '.join(returned)}."
            )
        if not new:
            return
        findings = ordered(self._findings[key] for key in new)
        verdict = Verdict(findings, self._layers, self._steps, self.thresholds)
        message = f"Fp8Monitor, step {self._steps}: {verdict}{done}"
        if self.action == "raise" and any(finding.where for finding in findings):
            raise RuntimeError(message)
        _warn(message)

    def _forget(self, layers: Sequence[str]) -> None:
        """Start over with layers whose scaling has been changed."""

        def changes(where: str) -> bool:
            return where in layers or where.rpartition(".")[0] in layers

        if layers:
            self._diagnosis.forget(changes)
            self._said = {key for key in self._said if not changes(key[1])}

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
            "saturated_fraction": (m.saturated_fraction.where(was_cast, nan), ("max",)),
            "underflowed_fraction": (m.underflowed_fraction.where(was_cast, nan), ("max",)),
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


@rank_zero_only
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
