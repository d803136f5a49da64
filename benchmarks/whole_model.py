"""Cases over all weights or all scales of a model at once, and the scaling state in which casts are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import baselines
from benchmarks.case import EXACT, Results, Tolerance, difference
from lightning_fp8 import ops
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda import kernels, plain
from lightning_fp8.ops.formats import DELAYED_ROLES, E4M3
from lightning_fp8.ops.operand import WeightSlot
from lightning_fp8.scaling.recipe import DelayedScaling
from lightning_fp8.scaling.state import LAYOUT, ScalingState
from lightning_fp8.tools.timing import Variant, copies_for

_UPDATES = {"cuda": 384, "cpu": 8}
_QUOTIENTS = Tolerance(relative=(("scale_inv", 5e-7), ("scale", 5e-7)))


def steady_state(modules: int, device: torch.device, length: int = 1024) -> ScalingState:
    """A scaling state as after the first steps: every tensor has a history, and the host knows it."""
    state = ScalingState(
        [f"layer{number}" for number in range(modules)], DelayedScaling(amax_history_len=length), device
    )
    for _ in range(2):
        state.amax.fill_(1)
        state.update()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if not state.every_tensor_has_history:
        raise RuntimeError("The scaling state has not seen its own histories: this would time the first steps.")
    return state


@dataclass(frozen=True)
class Weights:
    """Casts all linear weights of a model from fp32 to E4M3 by rows and by columns, with their amaxes.

    Attributes:
        model: its name.
        shapes: of the weights.
    """

    model: str
    shapes: tuple[tuple[int, int], ...]

    flops = None

    @property
    def name(self) -> str:
        """Model and number of weights."""
        return f"cast_weights fp32->e4m3, {len(self.shapes)} weights of {self.model}"

    @property
    def bytes(self) -> int:
        """Reads fp32 twice, for the amax and for the cast, and writes both payloads."""
        return 10 * sum(rows * columns for rows, columns in self.shapes)

    def is_served(self, device: torch.device) -> bool:
        """Whether there is a kernel, or none is expected."""
        return device.type != "cuda" or kernels.weights_kernel(device, False) is not None

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8``, ``torch``, ``torch.compile`` and a copy; ours casts weight by weight on the CPU."""
        generator = torch.Generator(device).manual_seed(0)
        first = [torch.randn(*shape, generator=generator, device=device).mul_(0.25) for shape in self.shapes]
        copies = [first, *([x.clone() for x in first] for _ in range(copies_for(self.bytes, device) - 1))]
        state = steady_state(len(first), device)
        rows = [state.row_of(number, "weight") for number in range(len(first))]
        slots = [WeightSlot(torch.tensor([row], device=device), "e4m3", state, True) for row in rows]

        def one_by_one(implementation: Callable[..., Any], weights: Sequence[Tensor]) -> list[Any]:
            return [implementation(x, slot, "both") for x, slot in zip(weights, slots)]

        def ours(at: int) -> list[Any]:
            if device.type == "cuda":
                return [made[:3] for made in cuda.cast_weights(copies[at], slots, [None] * len(slots))]
            return one_by_one(ops.cast_weight, copies[at])

        def theirs(at: int) -> list[Any]:
            return one_by_one(plain.cast_weight, copies[at])

        function = baselines.compiled(baselines.cast_weights, device)

        def compiled(at: int) -> list[Any]:
            return function(copies[at])

        def recorded(call: Callable[[int], list[Any]]) -> Results:
            state.amax.zero_()
            made = call(0)
            return _of_weights([(*parts, state.amax[row]) for parts, row in zip(made, rows, strict=True)])

        def variant(
            name: str, call: Callable[[int], list[Any]], results: Callable[[], Results], limit: Tolerance
        ) -> Variant:
            return Variant(name, call, lambda: difference(results(), recorded(theirs), limit), len(copies))

        return [
            variant("lightning_fp8", ours, lambda: recorded(ours), EXACT),
            variant("torch", theirs, lambda: recorded(theirs), EXACT),
            variant(baselines.compiled_name(device), compiled, lambda: _of_weights(compiled(0)), _QUOTIENTS),
            baselines.copy(self.bytes, device),
        ]


def _of_weights(made: Sequence[tuple[Tensor, ...]]) -> Results:
    payloads, transposed, scale_inv, amax = zip(*made)
    return {
        "payload": [payload.view(E4M3.dtype) for payload in payloads],
        "transposed payload": [payload.view(E4M3.dtype) for payload in transposed],
        "scale_inv": list(scale_inv),
        "amax": [value.clone() for value in amax],
    }


@dataclass(frozen=True)
class UpdateScales:
    """Updates the scales of all tensors of a model after an optimizer step; every tensor has a new amax.

    Attributes:
        modules: number of modules, with three tensors each, two of them with a history.
        size: name of the number of tensors.
        length: of the history.
    """

    modules: int
    size: str
    length: int

    flops = None

    @property
    def name(self) -> str:
        """Tensors and history."""
        return f"update_scales {self.size}, history {self.length}"

    @property
    def bytes(self) -> int:
        """Reads and writes the histories, reads and zeroes amax, reads fp8_max and writes scale."""
        return (8 * self.length * len(DELAYED_ROLES) + 16 * len(LAYOUT)) * self.modules

    def is_served(self, device: torch.device) -> bool:
        """Whether there is a kernel, or none is expected."""
        return device.type != "cuda" or kernels.update_kernel(device) is not None

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8``, ``torch``, ``torch.compile`` and a copy.

        An update clears the amaxes, and one without amaxes has less to do. So each copy is updated once per batch.
        """
        state = steady_state(self.modules, device, self.length)
        generator = torch.Generator(device).manual_seed(0)
        amax = torch.rand(len(state.amax), generator=generator, device=device) + 0.5
        fresh = (amax, state.amax_history, state.scale, state.fp8_max, state.nonfinite_steps)
        count = max(_UPDATES[device.type], copies_for(self.bytes, device))
        copies = [tuple(tensor.clone() for tensor in fresh) for _ in range(count)]

        def refill() -> None:
            for recorded, *_ in copies:
                recorded.copy_(amax)

        def variant(name: str, function: Callable[..., Any], tolerance: Tolerance) -> Variant:
            def results(function: Callable[..., Any]) -> Results:
                tensors = tuple(tensor.clone() for tensor in fresh)
                function(*tensors)
                return dict(
                    zip(("amax", "amax_history", "scale", "fp8_max", "nonfinite_steps"), ([x] for x in tensors))
                )

            def check() -> str | None:
                return difference(results(function), results(baselines.update_scales), tolerance)

            return Variant(name, lambda at: function(*copies[at]), check, count, refill)

        return [
            variant("lightning_fp8", lambda *tensors: ops.update_scales(*tensors, False, 1.0), EXACT),
            variant("torch", baselines.update_scales, EXACT),
            variant(baselines.compiled_name(device), baselines.compiled(baselines.update_scales, device), _QUOTIENTS),
            baselines.copy(self.bytes, device),
        ]
