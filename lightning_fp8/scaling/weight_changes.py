"""Detects weights that something other than an optimizer has changed: the amax histories are not valid for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

# a weight counts as different if its amax is larger or smaller than the reference by more than this factor
_OTHER_WEIGHT = 2**0.5


class WeightChanges:
    """The weights that a model's histories were recorded with, known by their amaxes.

    If something other than an optimizer step has made a weight much larger or smaller, the layers after it get
    different inputs. A training forward that finds such a weight empties the histories; an evaluation does not use them
    while such a weight is in place.

    Attributes:
        reference_amax: ``[R / 3] float32``, for each module the amax of the weight that the histories belong to; 0
            where it is not known.
        loaded: for each module whose weights or scales were loaded since the last cast, which of the two came last.
        different: modules whose weight is not the one that the histories belong to, as last seen by an evaluation.
    """

    def __init__(self, modules: int, device: torch.device | str) -> None:
        self.reference_amax = torch.zeros(modules, dtype=torch.float32, device=device)
        self.loaded: dict[int, Literal["weights", "scales"]] = {}
        self.different: set[int] = set()
        # modules whose reference follows the optimizer steps, and those that are never compared
        self._stepped: set[int] = set()
        self._sharded: set[int] = set()
        self._cast_in_this_forward: set[int] = set()
        # modules whose weight was different when it was last cast
        self._cast_different: set[int] = set()
        # amaxes at the last cast by a training forward, and of those the ones from before scales were loaded: a forward
        # may use such a cast again without measuring
        self._amax_in_training: dict[int, float] = {}
        self._amax_if_reused: dict[int, float] = {}
        self._emptied_since_update = False

    def to(self, device: torch.device | str) -> None:
        """Move to ``device``."""
        self.reference_amax = self.reference_amax.to(device)
        # only weights on a CPU are measured at each step and at each cast
        self._stepped.clear()
        self._cast_in_this_forward.clear()
        self._cast_different.clear()
        self._amax_in_training.clear()
        self._amax_if_reused.clear()

    def note_sharding(self, module: int, is_sharded: bool) -> None:
        """Never compare a sharded weight: processes hold different parts, and would decide differently."""
        (self._sharded.add if is_sharded else self._sharded.discard)(module)

    def compares(self, module: int) -> bool:
        """Whether the weight of this module is ever compared."""
        return module not in self._sharded

    def see_optimizer_step(self, modules: Sequence[int], amax: Tensor) -> None:
        """An optimizer has changed these weights, whose ``amax`` is now ``[len(modules)] float32``."""
        self._stepped.update(modules)
        self.reference_amax[modules] = amax

    def see_update(self, amax: Tensor) -> None:
        """The scales have been updated; ``amax`` ``[R / 3] float32`` is that of each weight's last cast.

        A weight that an evaluation has swapped in is not the one that the histories belong to.
        """
        keep = self._stepped | self._cast_different
        if not keep:
            # always so on a GPU, where indexing with a list would wait for the device
            self.reference_amax.copy_(amax)
        else:
            others = [module for module in range(len(amax)) if module not in keep]
            self.reference_amax[others] = amax[others]
        self.loaded.clear()
        self._emptied_since_update = False

    def see_weights_loaded(self, module: int) -> bool:
        """The weights of one module have been loaded.

        Returns:
            Whether its histories must be emptied: not if its scales were loaded just before, with the same weights.
        """
        self.reference_amax[module] = 0
        self.different.discard(module)
        self._cast_different.discard(module)
        if self.loaded.get(module) == "scales":
            del self.loaded[module]
            return False
        self.loaded[module] = "weights"
        return True

    def see_scales_loaded(self) -> None:
        """The scales of all modules have been loaded, with histories that belong to unknown weights."""
        with_weights = {module for module, part in self.loaded.items() if part == "weights"}
        self.loaded = {module: "scales" for module in range(len(self.reference_amax)) if module not in with_weights}
        self.reference_amax.zero_()
        self._amax_if_reused = dict(self._amax_in_training)
        self.different.clear()
        self._cast_different.clear()
        self._emptied_since_update = False

    def see_weights(self, amaxes: Mapping[int, float], record: bool) -> bool:
        """Compare the amaxes of weights, by module, with the references.

        Returns:
            Whether all histories must be emptied: if a weight differs in a forward that records, once per update.
        """
        found = False
        modules = [*filter(self.compares, amaxes)]
        for module, reference in zip(modules, self.reference_amax[modules].tolist()):
            amax = amaxes[module]
            self.different.discard(module)
            self._cast_different.discard(module)
            self._amax_if_reused.pop(module, None)
            if record:
                self._amax_in_training[module] = amax
            if reference == 0:
                self.reference_amax[module] = amax
            elif amax * _OTHER_WEIGHT < reference or reference * _OTHER_WEIGHT < amax < math.inf:
                if record:
                    self.reference_amax[module] = amax
                    found = True
                else:
                    self.different.add(module)
                    self._cast_different.add(module)
        # a second time would lose what this step has recorded so far
        must_empty = found and not self._emptied_since_update
        self._emptied_since_update |= found
        return must_empty

    def see_cast(self, module: int) -> None:
        """A single weight is cast: the second cast of the same weight begins another forward of the model."""
        if module in self._cast_in_this_forward:
            self._cast_in_this_forward.clear()
            self.different.clear()
        self._cast_in_this_forward.add(module)

    def see_reuse(self, module: int, record: bool) -> None:
        """A forward uses the last cast of a weight again: the same as :meth:`see_cast` and :meth:`see_weights`."""
        # empty where weights are not measured at each cast, as on a GPU
        if self._cast_in_this_forward:
            self.see_cast(module)
            if record:
                # kept from a training forward
                self._cast_different.discard(module)
                self.different.discard(module)
                if module in self._amax_if_reused:
                    self.reference_amax[module] = self._amax_if_reused.pop(module)
            elif module in self._cast_different:
                self.different.add(module)

    def copy_module(self, module: int, other: WeightChanges, other_module: int) -> None:
        """Take over one module's reference."""
        self.reference_amax[module] = other.reference_amax[other_module].to(self.reference_amax.device)
