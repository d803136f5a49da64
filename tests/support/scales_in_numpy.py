"""The specification of a model's scales, in numpy's fp32 and without torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from fp8_numpy import DEFINITIONS, code_values, power_of_two_below, saturating_cast

from lightning_fp8 import DelayedScaling

FP32_MAX = np.finfo(np.float32).max
# the notices of a model, by words in them
NOTICES = {
    "no update": "nothing has updated its scales",
    "nonfinite": "inf or NaN in",
    "in part": "has been loaded for the layers that are in both",
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


_versions = itertools.count()


class Delayed:
    """An input or a gradient, whose scale follows a history, newest first."""

    def __init__(self, fmt: str) -> None:
        self.fmt = fmt
        self.nonfinite_steps = 0
        self.forget()

    def forget(self) -> None:
        self.history: list[np.float32] = []
        self.scale, self.amax = np.float32(1), np.float32(0)

    def cast(self, x: np.ndarray, record: bool, in_training: bool) -> np.ndarray:
        """In training by the history, or where it is empty by the tensor's own values; else by these, rounded down."""
        amax = largest(x)
        if record:
            self.amax = np.maximum(self.amax, amax)
        if not in_training:
            return quantized(x, np.float32(power_of_two_below(float(amax), self.fmt)), self.fmt)
        return quantized(x, self.scale if self.history else scale_of_current(amax, self.fmt), self.fmt)

    def update(self, recipe: DelayedScaling) -> None:
        if not np.isfinite(self.amax):
            self.nonfinite_steps += 1
        elif self.amax > 0:
            self.history = [self.amax, *self.history][: recipe.amax_history_len]
            self.rescale(recipe)
        self.amax = np.float32(0)

    def rescale(self, recipe: DelayedScaling) -> None:
        chosen = self.history[:1] if recipe.amax_compute_algo == "most_recent" else self.history
        self.scale = scale_of(max(chosen), self.fmt, recipe.margin) if chosen else np.float32(1)

    def load(self, other: Delayed | None, recipe: DelayedScaling) -> None:
        """A tensor that the file does not have begins empty."""
        self.forget()
        self.nonfinite_steps = 0 if other is None else other.nonfinite_steps
        self.history = [] if other is None else other.history[: recipe.amax_history_len]
        self.rescale(recipe)


class Weight:
    """A weight is cast with the scale of its current values; the state shows those of the last cast."""

    def __init__(self) -> None:
        self.nonfinite_steps = 0
        self.version = next(_versions)
        self.amax, self.scale = np.float32(0), np.float32(1)
        self.forget_casts()

    def forget_casts(self) -> None:
        """For another parameter, or another layer."""
        # what the kept cast was made of, and whether a forward has used the last one
        self.kept: tuple[int, int] | None = None
        self.is_used = False

    def changed(self) -> None:
        """A change that leaves a trace."""
        self.version = next(_versions)

    def is_kept(self) -> bool:
        return self.kept == (self.version, Steps.made)

    def cast(self, weight: np.ndarray) -> None:
        self.amax = largest(weight)
        self.scale = scale_of_current(self.amax, "e4m3")

    def keep(self, is_used: bool) -> None:
        self.kept, self.is_used = (self.version, Steps.made), is_used

    def update(self) -> None:
        self.nonfinite_steps += not np.isfinite(self.amax)


class Steps:
    """All optimizer steps and updates of the process: each ends all kept casts."""

    made = 0


class ScaledLayer:
    """The three tensors of one layer."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.input, self.weight = Delayed("e4m3"), Weight()
        self.grad_output = Delayed("e5m2" if recipe.fp8_format == "HYBRID" else "e4m3")
        self.has_fallen = self.is_scheduled = False

    @property
    def in_fp8(self) -> bool:
        return not (self.has_fallen or self.is_scheduled)

    def move(self, has_fallen: bool | None = None, is_scheduled: bool | None = None) -> None:
        """A tensor that is not cast any more has no history."""
        was_in_fp8 = self.in_fp8
        self.has_fallen = self.has_fallen if has_fallen is None else has_fallen
        self.is_scheduled = self.is_scheduled if is_scheduled is None else is_scheduled
        for tensor in (self.input, self.grad_output) if was_in_fp8 and not self.in_fp8 else ():
            tensor.forget()


class ModelScales:
    """The scales of all layers of a model, with the notices given and the notices due."""

    def __init__(self, recipe: DelayedScaling, names: Iterable[str]) -> None:
        self.recipe = recipe
        self.layers = {name: ScaledLayer(recipe) for name in names}
        # layers of a loaded file that the model does not have yet
        self.waiting: dict[str, ScaledLayer] = {}
        # whether anything has been recorded, and whether histories have been loaded, since the last update
        self.recorded = self.has_loaded = False
        self.new_notices()

    def new_notices(self) -> None:
        """A copy gives all notices anew."""
        self.said: set[str] = set()
        self.due: set[str] = set()
        self.loads_in_part = 0
        # optimizer steps since the last update
        self.steps = 0

    def in_fp8(self, name: str) -> ScaledLayer | None:
        layer = self.layers.get(name)
        return layer if layer is not None and layer.in_fp8 else None

    def delayed(self) -> list[Delayed]:
        return [tensor for layer in self.layers.values() for tensor in (layer.input, layer.grad_output)]

    def cast_weight(self, name: str, weights: Mapping[str, np.ndarray], records: Collection[str]) -> np.ndarray:
        """The weight of a layer as it is now used, of all weights. A forward that records keeps its cast for the rest
        of the step, and makes at once those that are due of the layers that record and that ran when they last did.
        """
        weight = self.layers[name].weight
        if name not in records:
            weight.cast(weights[name])
        elif weight.is_kept():
            weight.is_used = True
        else:
            for other, layer in self.layers.items():
                if other in records and layer.in_fp8 and layer.weight.is_used and not layer.weight.is_kept():
                    layer.weight.cast(weights[other])
                    layer.weight.keep(is_used=False)
            weight.cast(weights[name])
            weight.keep(is_used=True)
        return quantized(weights[name], scale_of_current(largest(weights[name]), "e4m3"), "e4m3")

    def switch(self, name: str) -> None:
        """Between training and evaluation, or a load: no cast outlives it."""
        if name in self.layers:
            self.layers[name].weight.kept = None

    def update(self) -> None:
        before = self._nonfinite_steps()
        for tensor in self.delayed():
            tensor.update(self.recipe)
        for layer in self.layers.values():
            layer.weight.update()
        Steps.made += 1
        if self._nonfinite_steps() > before:
            self.due.add("nonfinite")
        self.recorded = self.has_loaded = False
        self.steps = 0

    def _nonfinite_steps(self) -> int:
        weights = [layer.weight for layer in self.layers.values()]
        return sum(tensor.nonfinite_steps for tensor in (*self.delayed(), *weights))

    def discard(self) -> None:
        for tensor in self.delayed():
            tensor.amax = np.float32(0)

    def on_optimizer_step(self) -> None:
        Steps.made += 1
        self.steps += self.recorded
        if self.steps >= 3:
            self.due.add("no update")

    def on_weights_changed(self, names: Collection[str]) -> None:
        """These weights have changed, and left a trace."""
        for name in set(names) & set(self.layers):
            self.layers[name].weight.changed()

    def on_weights_loaded(self, names: Collection[str]) -> None:
        """``load_state_dict`` empties the histories of the layers that it loads, unless theirs came just before."""
        self.on_weights_changed(names)
        for name in set(names) & set(self.layers) if not self.has_loaded else ():
            for tensor in (self.layers[name].input, self.layers[name].grad_output):
                tensor.forget()

    def reset(self) -> None:
        for tensor in self.delayed():
            tensor.forget()

    def load(self, saved: ModelScales) -> None:
        for name, layer in self.layers.items():
            self._load(layer, saved.layers.get(name))
        self.waiting = {name: layer for name, layer in saved.layers.items() if name not in self.layers}
        self.loads_in_part += set(saved.layers) != set(self.layers)
        self.said.discard("nonfinite")
        self.recorded, self.has_loaded = False, True

    def _load(self, layer: ScaledLayer, saved: ScaledLayer | None) -> None:
        if saved is not None:
            # a checkpoint holds moves, and no schedule
            layer.has_fallen = saved.has_fallen
        layer.input.load(None if saved is None else saved.input, self.recipe)
        layer.grad_output.load(None if saved is None else saved.grad_output, self.recipe)

    def copy(self) -> ModelScales:
        """Of a copied model, whose weights are new ones."""
        other = copy.deepcopy(self)
        for layer in other.layers.values():
            layer.weight.changed()
            layer.weight.forget_casts()
        other.recorded = other.has_amaxes()
        other.new_notices()
        return other

    def has_amaxes(self) -> bool:
        return any(tensor.amax != 0 for tensor in self.delayed())

    def convert_again(self, names: Sequence[str]) -> None:
        """Layers that stay converted keep their scales; others begin empty, or with what a file had for them."""
        if list(names) == list(self.layers):
            return
        before = self.layers
        self.layers = {name: before.get(name, ScaledLayer(self.recipe)) for name in names}
        for name in self.layers.keys() - before.keys() & self.waiting.keys():
            self._load(self.layers[name], self.waiting[name])
        for name in names:
            self.waiting.pop(name, None)
        self.said.discard("nonfinite")
        self.recorded = self.has_amaxes()

    def check_said(self, said: Sequence[str]) -> None:
        """The due notices, once each, and no others; of files for other layers, each load has one."""
        assert sorted(said) == sorted([*(self.due - self.said), *self.loads_in_part * ["in part"]])
        self.said |= self.due
        self.due, self.loads_in_part = set(), 0
