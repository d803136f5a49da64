"""The specification of a model's scales, in numpy's fp32 and without torch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from fp8_numpy import DEFINITIONS, code_values, saturating_cast

from lightning_fp8 import DelayedScaling

FP32_MAX = np.finfo(np.float32).max
# the notices that a model gives once, by words in them
NOTICES = {
    "evaluation": "is evaluated without scales",
    "no update": "nothing has updated its scales",
    "nonfinite": "inf or NaN in",
}


def scale_of(amax: np.float32, fmt: str, margin: int = 0) -> np.float32:
    """``FP8_MAX / (amax * 2**margin)``, at most the largest finite fp32."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.minimum(np.float32(DEFINITIONS[fmt][3]) / (amax * np.float32(2**margin)), FP32_MAX)


def scale_of_current(amax: np.float32, fmt: str) -> np.float32:
    return scale_of(amax, fmt) if np.isfinite(amax) else np.float32(1)


def largest(x: np.ndarray) -> np.float32:
    return np.abs(x).max()


def quantized(x: np.ndarray, scale: np.float32, fmt: str) -> np.ndarray:
    """``x`` quantized to FP8, in fp64."""
    return code_values(fmt)[saturating_cast(x, scale, fmt)] / np.float64(scale)


class Delayed:
    """An input or a gradient, whose scale follows a history, newest first."""

    def __init__(self, fmt: str) -> None:
        self.fmt = fmt
        self.nonfinite_steps = 0
        self.forget()

    def forget(self) -> None:
        self.history: list[np.float32] = []
        self.scale, self.amax = np.float32(1), np.float32(0)

    def cast(self, x: np.ndarray, record: bool, use_history: bool) -> np.ndarray:
        if record:
            self.amax = np.maximum(self.amax, largest(x))
        delayed = use_history and self.history
        return quantized(x, self.scale if delayed else scale_of_current(largest(x), self.fmt), self.fmt)

    def update(self, recipe: DelayedScaling) -> None:
        if not np.isfinite(self.amax):
            self.nonfinite_steps += 1
        elif self.amax > 0:
            self.history = [self.amax, *self.history][: recipe.amax_history_len]
            chosen = self.history[0] if recipe.amax_compute_algo == "most_recent" else max(self.history)
            self.scale = scale_of(chosen, self.fmt, recipe.margin)
        self.amax = np.float32(0)

    def load(self, other: Delayed, window: int) -> None:
        self.history = other.history[:window]
        self.scale, self.amax, self.nonfinite_steps = other.scale, other.amax, other.nonfinite_steps

    def shown(self) -> list[tuple[np.float32, np.float32]]:
        """The amaxes and scales that the state may show: only these."""
        return [(self.amax, self.scale)]


class Weight:
    """A weight is cast with the scale of its current values; the state shows those of the last cast."""

    def __init__(self) -> None:
        self.nonfinite_steps = 0
        self.kept = np.float32(-1)
        # the amax that the histories belong to, 0 if unknown; whether an optimizer's steps are tracked; whether the
        # last cast was of another weight
        self.held = np.float32(0)
        self.followed = self.is_another = self.cast_is_another = False
        self._shown = [(np.float32(0), np.float32(1))]

    def cast(self, weight: np.ndarray, record: bool) -> np.ndarray:
        amax = largest(weight)
        scale = scale_of_current(amax, "e4m3")
        # One cast may serve several forwards that record, with evaluations of other weights in between.
        before = self._shown if record and np.array_equal(self.kept, amax, equal_nan=True) else []
        self._shown = [(amax, scale), *before[-1:]]
        if record:
            self.kept = amax
        return quantized(weight, scale, "e4m3")

    def update(self) -> None:
        self.nonfinite_steps += not np.isfinite(self._shown[0][0])
        if not (self.followed or self.cast_is_another):
            self.held = self._shown[0][0]

    def forget(self) -> None:
        self.held = np.float32(0)
        self.is_another = self.cast_is_another = False

    def is_changed(self, weight: np.ndarray) -> bool:
        """By more than a factor of the square root of 2."""
        amax = np.float64(largest(weight))
        if self.held == 0:
            self.held = np.float32(amax)
        ratio = amax / self.held if self.held else 1
        return bool(np.isfinite(amax) and not np.isnan(ratio) and not 2**-0.5 <= ratio <= 2**0.5)

    def shown(self) -> list[tuple[np.float32, np.float32]]:
        return self._shown


class ScaledLayer:
    """The three tensors of one layer."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.input, self.weight = Delayed("e4m3"), Weight()
        self.grad_output = Delayed("e5m2" if recipe.fp8_format == "HYBRID" else "e4m3")
        self.in_fp8 = True


class ModelScales:
    """The scales of all layers of a model, with the notices given and the notices due."""

    def __init__(self, recipe: DelayedScaling, names: Iterable[str]) -> None:
        self.recipe = recipe
        self.layers = {name: ScaledLayer(recipe) for name in names}
        # by layer: the weights or the scales, if they were loaded last and nothing has run since
        self.loaded: dict[str, str] = {}
        self.emptied = False
        self.cast: set[str] = set()
        # whether anything has been recorded since the last update, and whether any was recorded before it
        self.recorded = self.may_have_scales = False
        self.steps = 0
        self.new_state()

    def new_state(self) -> None:
        """A copied or loaded state, which gives all notices anew."""
        self.said: set[str] = set()
        self.due: set[str] = set()
        self.may_say: set[str] = set()
        self.steps = 0
        # by layer: forwards without gradients since the last update
        self.forwards: Counter[str] = Counter()

    def in_fp8(self, name: str) -> ScaledLayer | None:
        layer = self.layers.get(name)
        return layer if layer is not None and layer.in_fp8 else None

    def delayed(self) -> list[Delayed]:
        return [tensor for layer in self.layers.values() for tensor in (layer.input, layer.grad_output)]

    def see_weight(self, name: str, weight: np.ndarray, record: bool) -> None:
        """If a weight is much larger or smaller than the one of the histories, they are emptied, or not used."""
        if name in self.cast:
            # another pass through the model
            self.cast.clear()
            for layer in self.layers.values():
                layer.weight.is_another = False
        self.cast.add(name)
        held = self.layers[name].weight
        held.is_another = held.is_changed(weight)
        held.cast_is_another = held.is_another and not record
        if held.is_another and record:
            held.is_another, held.held = False, largest(weight)
            if not self.emptied:
                self.emptied = True
                for tensor in self.delayed():
                    tensor.forget()
                self.may_have_scales = False

    def uses_histories(self, record: bool) -> bool:
        return record or not any(layer.weight.is_another for layer in self.layers.values())

    def see_weights_stepped(self, weights: Mapping[str, np.ndarray]) -> None:
        for name in set(weights) & set(self.layers):
            self.layers[name].weight.held, self.layers[name].weight.followed = largest(weights[name]), True

    def see_cast(self, record: bool, evaluated: str | None) -> None:
        self.loaded.clear()
        if record:
            self.recorded = True
        elif evaluated and not all(layer.input.history for layer in self.layers.values()):
            self.forwards[evaluated] += 1
            if self.forwards[evaluated] > 2:
                (self.may_say if self.may_have_scales else self.due).add("evaluation")

    def update(self) -> None:
        before = self._nonfinite_steps()
        for tensor in self.delayed():
            tensor.update(self.recipe)
        for layer in self.layers.values():
            layer.weight.update()
        if self._nonfinite_steps() > before:
            self.due.add("nonfinite")
        self.may_have_scales |= self.recorded
        self.recorded, self.emptied, self.steps = False, False, 0
        self.forwards.clear()
        self.loaded.clear()

    def _nonfinite_steps(self) -> int:
        weights = [layer.weight for layer in self.layers.values()]
        return sum(tensor.nonfinite_steps for tensor in (*self.delayed(), *weights))

    def discard(self) -> None:
        for tensor in self.delayed():
            tensor.amax = np.float32(0)

    def see_optimizer_step(self) -> None:
        self.steps += self.recorded
        if self.steps >= 3:
            self.due.add("no update")

    def see_weights_loaded(self, names: Collection[str]) -> None:
        for name in set(names) & set(self.layers):
            layer = self.layers[name]
            layer.weight.forget()
            if self.loaded.pop(name, None) != "scales":
                layer.input.forget()
                layer.grad_output.forget()
                self.loaded[name] = "weights"
                self.may_have_scales = any(tensor.history for tensor in self.delayed())

    def load(self, saved: ModelScales) -> None:
        for name, layer in self.layers.items():
            layer.input.load(saved.layers[name].input, self.recipe.amax_history_len)
            layer.grad_output.load(saved.layers[name].grad_output, self.recipe.amax_history_len)
            layer.in_fp8 = saved.layers[name].in_fp8
        self.may_have_scales = any(tensor.history for tensor in self.delayed())
        self.recorded = any(tensor.amax != 0 for tensor in self.delayed())
        self.said.discard("nonfinite")
        self.loaded = {name: "scales" for name in self.layers if self.loaded.get(name) != "weights"}
        self.emptied = False
        for layer in self.layers.values():
            layer.weight.forget()

    def convert_again(self, names: Sequence[str]) -> None:
        """Layers that stay converted keep their scales."""
        if list(names) != list(self.layers):
            before = copy.copy(self.layers)
            self.layers = {name: before.get(name, ScaledLayer(self.recipe)) for name in names}
            self.loaded, self.emptied, self.cast = {}, False, set()
            for layer in self.layers.values():
                layer.weight.is_another = layer.weight.followed = False
            self.new_state()

    def check_said(self, said: Sequence[str]) -> None:
        """The due notices, once each, and no others."""
        assert len(said) == len(set(said)), said
        assert self.due - self.said <= set(said) <= (self.due | self.may_say) - self.said
        self.said |= set(said)
        self.due, self.may_say = set(), set()
