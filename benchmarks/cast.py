"""The suite ``cast``: casts of activations, gradients and weights, and the update of scales, at training sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import baselines
from benchmarks.case import EXACT, Case, Results, Tolerance, difference
from benchmarks.whole_model import UpdateScales, Weights, steady_state
from lightning_fp8 import ops
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda import kernels, plain
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import Slot
from lightning_fp8.scaling.state import LAYOUT
from lightning_fp8.tools.timing import Variant, copies_for

_NAMES = ("payload", "transposed payload", "scale_inv", "column sums")
# an input's standard deviation: with scales for amaxes of 1, few elements saturate
_DEVIATION = 0.25


def cases(device: torch.device) -> list[Case]:
    """All cases of the suite; on the CPU small sizes in place of training sizes."""
    if device.type != "cuda":
        shapes = ((256, 256), (200, 136))
        weights = [Weights("a tiny model", ((96, 64), (64, 200)))]
        return [*_casts(shapes, shapes[1:], (200, 136)), *weights, UpdateScales(10, "30 tensors", 64)]
    squares = tuple((side, side) for side in (1024, 2048, 4096, 8192, 16384))
    activations = tuple((8192, width) for width in (2048, 8192, 4096, 14336))
    weights = [
        Weights("1B", 16 * ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192))),
        Weights("1/8 of 8B", 4 * ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
    ]
    # 334 modules of three tensors each
    scales = UpdateScales(334, "1000 tensors", 1024)
    return [*_casts((*squares, *activations), activations, (8192, 14336)), *weights, scales]


def _casts(
    inputs: tuple[tuple[int, int], ...], gradients: tuple[tuple[int, int], ...], gelu: tuple[int, int]
) -> list[Case]:
    """The casts, without duplicates where a shape occurs twice."""
    made = [Cast(*shape, "e4m3") for shape in inputs]
    made += [Cast(*shape, "e5m2", gradient=True) for shape in gradients]
    made += [Cast(*gelu, "e4m3", "gelu"), Cast(*gelu, "e5m2", "gelu", gradient=True)]
    return list(dict.fromkeys(made))


@dataclass(frozen=True)
class Cast:
    """Casts a bf16 tensor to FP8 by rows and by columns, with its amax, in the steady state of training.

    Attributes:
        rows: of the tensor.
        columns: of the tensor.
        format: ``"e4m3"`` or ``"e5m2"``.
        activation: applied before the cast.
        gradient: compute the gradient of x from that of ``activation(x)`` and cast it, with column sums for a bias.
    """

    rows: int
    columns: int
    format: str
    activation: str = "none"
    gradient: bool = False

    flops = None

    @property
    def name(self) -> str:
        """Shape, formats, and what is done in one pass."""
        activation = f"{self.activation} gradient" if self.gradient else self.activation
        work = [] if self.activation == "none" else [activation]
        work += ["cast_transpose", "bias gradient"] if self.gradient else ["cast_transpose"]
        return f"{self.rows}x{self.columns} bf16->{self.format} {' + '.join(work)}"

    @property
    def bytes(self) -> int:
        """Reads bf16, writes both payloads; an activation's gradient reads two tensors, a bias gradient is in fp32."""
        inputs = 2 if self._takes_h else 1
        return (2 * inputs + 2) * self.rows * self.columns + (4 * self.columns if self.gradient else 0)

    @property
    def _takes_h(self) -> bool:
        return self.gradient and self.activation != "none"

    def is_served(self, device: torch.device) -> bool:
        """Whether there is a kernel, or none is expected."""
        if device.type != "cuda":
            return True
        kernel = kernels.cast_kernel(device, torch.bfloat16, self.format, self.activation, self._takes_h)
        return kernel is not None

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8``, ``torch``, ``torch.compile``, for inputs torchao's cast, and a copy."""
        copies = copies_for(self.bytes, device)
        x, h = self._inputs(copies, device, 1), self._inputs(copies if self._takes_h else 0, device, 2)
        if self.gradient:
            gradient = cuda.cast_gradient if device.type == "cuda" else plain.cast_gradient
            ours, theirs = self._on_gradients(gradient, x, h), self._on_gradients(plain.cast_gradient, x, h)
        else:
            ours, theirs = self._on_inputs(ops.cast, x), self._on_inputs(plain.cast, x)
        compiled, name = self._compiled(x, h), baselines.compiled_name(device)

        def checked(name: str, operator: _Operator, tolerance: Tolerance) -> Variant:
            def check() -> str | None:
                return difference(operator.results(), theirs.results(), tolerance)

            return Variant(name, operator.call, check, copies)

        variants = [
            checked("lightning_fp8", ours, self._tolerance(0.01)),
            checked("torch", theirs, EXACT),
            checked(name, compiled, self._tolerance(0.06, rounded_quotients=False)),
        ]
        if self.activation == "none" and not self.gradient:
            variants += baselines.torchao_cast(x)
        return [*variants, baselines.copy(self.bytes, device)]

    def _inputs(self, copies: int, device: torch.device, seed: int) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        if not copies:
            return []
        first = torch.randn(self.rows, self.columns, generator=generator, device=device).mul_(_DEVIATION)
        values = first.to(torch.bfloat16)
        return [values.clone() for _ in range(copies)]

    def _tolerance(self, codes: float, rounded_quotients: bool = True) -> Tolerance:
        """Sums differ by their order; activations by the last bits of exp and erf, and by rounding to bf16.

        The compiler does not round an activation to bf16, and its division has an error of two units in the last place.
        """
        activated = self.activation != "none"
        relative = {"amax": 2.0**-7 if activated else 0.0, "scale_inv": 0.0 if rounded_quotients else 5e-7}
        sums = (2e-4 if activated else 2e-6) * _DEVIATION * self.rows
        return Tolerance(codes if activated else 0.0, tuple(relative.items()), (("column sums", sums),))

    def _on_inputs(self, implementation: Callable[..., Any], x: list[Tensor]) -> _Operator:
        """An implementation of ``lightning_fp8::cast``."""
        state, index = steady_state(1, x[0].device), _index("input", x[0].device)
        slot = Slot(state.scale, state.amax_history, index, self.format, state, True)

        def call(at: int) -> Any:
            return implementation(x[at], slot, self.activation, "both")

        return _Operator(call, lambda: self._recorded(call(0), state.amax, index), state.amax)

    def _on_gradients(self, implementation: Callable[..., Any], dy: list[Tensor], h: list[Tensor]) -> _Operator:
        """An implementation of ``cast_gradient``."""
        state, index = steady_state(1, dy[0].device), _index("grad_output", dy[0].device)
        slot = Slot(state.scale, state.amax_history, index, self.format, state, True)

        def call(at: int) -> Any:
            return implementation(dy[at], h[at] if h else None, self.activation, slot, "both", True)

        return _Operator(call, lambda: self._recorded(call(0), state.amax, index), state.amax)

    def _compiled(self, x: list[Tensor], h: list[Tensor]) -> _Operator:
        device = x[0].device
        state, index = steady_state(1, device), _index("grad_output" if self.gradient else "input", device)
        scale, amax = state.scale[index][0].clone(), torch.zeros((), device=device)
        make = baselines.cast_gradient if self.gradient else baselines.cast
        function = baselines.compiled(make(self.format, self.activation), device)

        def call(at: int) -> Any:
            dy = (x[at], h[at] if h else None) if self.gradient else (x[at],)
            return function(*dy, scale, amax)

        def results() -> Results:
            payload, payload_t, scale_inv, recorded, *sums = call(0)
            found = dict(zip(_NAMES, ([part] for part in (payload, payload_t, scale_inv, *sums))))
            return {**found, "amax": [recorded[None]]}

        return _Operator(call, results, amax)

    def _recorded(self, parts: tuple[Tensor, ...], amax: Tensor, index: Tensor) -> Results:
        # without the padding of the payload by columns, which the compiled baseline lacks
        codes = [[part.view(FORMATS[self.format].dtype)] for part in (parts[0], parts[1][:, : self.rows])]
        rest = [[part] for part in parts[2:]]
        return {**dict(zip(_NAMES, (*codes, *rest))), "amax": [amax[index]]}


@dataclass(frozen=True)
class _Operator:
    call: Callable[[int], Any]
    read: Callable[[], Results]
    amax: Tensor

    def results(self) -> Results:
        """Results of one call on the first copy, with no amax recorded before."""
        self.amax.zero_()
        return self.read()


def _index(role: Any, device: torch.device) -> Tensor:
    return torch.tensor([LAYOUT.index(role)], device=device)
