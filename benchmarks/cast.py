"""The suite ``cast``: casts of activations, gradients and weights, and the update of scales, at training sizes.

``lightning_fp8`` and the baselines run in the steady state of training, where every tensor has a history.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import baselines
from benchmarks.harness import Case
from benchmarks.timing import Variant, copies_for
from lightning_fp8.core import casts
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.ops.formats import DELAYED_ROLES, E4M3, FORMATS
from lightning_fp8.scaling.state import LAYOUT, ScalingState
from lightning_fp8.scalings import products
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.operand import Cast, Casting, Computed, Slot, Source, Want, value_of
from lightning_fp8.scalings.per_block import PerBlock
from lightning_fp8.scalings.per_tensor import DelayedScaling, PerTensor

_NAMES = ("payload", "transposed payload", "scale_inv", "column sums")
_NAMES_IN_BLOCKS = ("payload", "transposed payload", "scale_inv", "transposed scale_inv")
_OF_STATE = ("amax", "amax_history", "scale", "fp8_max", "nonfinite_steps")
# an input's standard deviation: with scales for amaxes of 1, few elements saturate
DEVIATION = 0.25
BOTH = Want(rows=True, columns=True)
# updates before the amaxes, which an update clears, are filled in again
_UPDATES = {"cuda": 384, "cpu": 8}
# the results of a case by name: one tensor, or one for each weight of a model
Results = dict[str, list[Tensor]]


class Tolerance(NamedTuple):
    """How far results may differ; by default not at all.

    Attributes:
        codes: share of FP8 codes that may be off by one.
        relative: relative tolerance of the other results, by name.
        absolute: absolute tolerance of the other results, by name.
    """

    codes: float = 0.0
    relative: Mapping[str, float] = {}
    absolute: Mapping[str, float] = {}


EXACT = Tolerance()
# a compiler's division has an error of two units in the last place
_QUOTIENTS = Tolerance(relative={"scale_inv": 5e-7, "scale": 5e-7})


def difference(got: Results, expected: Results, tolerance: Tolerance = EXACT) -> str | None:
    """None if all results agree, else the first that does not: ``"another payload"``."""
    for name, tensors in expected.items():
        for number, (mine, theirs) in enumerate(zip(got[name], tensors, strict=True)):
            if not _same(name, mine, theirs, tolerance):
                return f"another {name}" + (f" of tensor {number}" if len(tensors) > 1 else "")
    return None


def _same(name: str, got: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if got.dtype.itemsize == 1:
        return _same_codes(got, expected, tolerance.codes)
    limits = tolerance.relative.get(name, 0.0), tolerance.absolute.get(name, 0.0)
    return torch.allclose(got, expected, rtol=limits[0], atol=limits[1])


def _same_codes(got: Tensor, expected: Tensor, neighbouring: float) -> bool:
    """Whether two FP8 tensors agree, except for a share ``neighbouring`` of codes that are adjacent or near zero."""
    codes, expected_codes = got.view(torch.uint8), expected.view(torch.uint8)
    # codes without a format, and scales in E8M0
    if not neighbouring:
        return torch.equal(codes, expected_codes)
    # codes of one sign are in the order of their values; near zero an activation is the difference of large numbers
    close = (codes.int() - expected_codes.int()).abs() <= 1
    close |= (got.float() - expected.float()).abs() <= 1e-5 * torch.finfo(got.dtype).max
    different = codes != expected_codes
    return bool((close | ~different).all()) and different.float().mean().item() <= neighbouring


def cases(device: torch.device) -> list[Case]:
    """All cases of the suite; on the CPU small sizes in place of training sizes."""
    if device.type != "cuda":
        shapes = ((256, 256), (200, 136))
        weights = [cast_weights("a tiny model", ((96, 64), (64, 200)))]
        return [*_casts(shapes, shapes[1:], (200, 136)), *weights, update_scales(10, "30 tensors", 64)]
    squares = tuple((side, side) for side in (1024, 2048, 4096, 8192, 16384))
    # no multiple of 16, as in the last batch of an epoch
    ragged = (8200, 8192)
    activations = tuple((8192, width) for width in (2048, 4096, 14336))
    weights = [
        cast_weights("1B", 16 * ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192))),
        cast_weights("1/8 of 8B", 4 * ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
    ]
    gradients = (*activations, (8192, 8192))
    # 334 modules of three tensors each
    scales = update_scales(334, "1000 tensors", 1024)
    return [*_casts((*squares, ragged, *activations), gradients, (8192, 14336)), *weights, scales]


def cases_in_blocks(device: torch.device) -> list[Case]:
    """Casts with a scale for each block, for the suite ``blocks``."""
    if device.type != "cuda":
        return [cast_in_blocks(200, 136, *kind) for kind in itertools.product((False, True), repeat=2)]
    shapes = ((8192, 8192), (8192, 4096), (2048, 1024))
    in_mx = (cast_in_blocks(*shape, False, True) for shape in (shapes[0], shapes[-1]))
    weights = (cast_in_blocks(8192, 8192, True, mx) for mx in (False, True))
    return [*(cast_in_blocks(*shape) for shape in shapes), *in_mx, *weights]


def _casts(
    inputs: Sequence[tuple[int, int]], gradients: Sequence[tuple[int, int]], gelu: tuple[int, int]
) -> list[Case]:
    return [
        *(cast(*shape, "e4m3") for shape in inputs),
        *(cast(*shape, "e5m2", is_gradient=True) for shape in gradients),
        cast(*gelu, "e4m3", "gelu"),
        cast(*gelu, "e5m2", "gelu", is_gradient=True),
    ]


def steady_state(modules: int, device: torch.device, length: int = 1024) -> ScalingState:
    """A scaling state as after the first steps: every tensor has a history, and the host knows it."""
    names = [f"layer{number}" for number in range(modules)]
    state = ScalingState(names, DelayedScaling(amax_history_len=length), device)
    for _ in range(2):
        state.amax.fill_(1)
        state.update()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if not state.every_tensor_has_history:
        raise RuntimeError("The scaling state has not seen its own histories: this would time the first steps.")
    return state


def cast(rows: int, columns: int, format: str, activation: str = "none", is_gradient: bool = False) -> Case:
    """Casts a bf16 tensor to FP8 by rows and by columns, with its amax.

    Args:
        rows: of the tensor.
        columns: of the tensor.
        format: ``"e4m3"`` or ``"e5m2"``.
        activation: applied before the cast.
        is_gradient: compute the gradient of x from that of ``activation(x)`` and cast it, with column sums for a bias.
    """
    takes_h = is_gradient and activation != "none"
    work = [] if activation == "none" else [f"{activation} gradient" if is_gradient else activation]
    work += ["cast_transpose", "bias gradient"] if is_gradient else ["cast_transpose"]
    # reads bf16, writes both payloads; an activation's gradient reads two tensors, a bias gradient is in fp32
    nbytes = (6 if takes_h else 4) * rows * columns + (4 * columns if is_gradient else 0)

    def variants(device: torch.device) -> list[Variant]:
        copies = copies_for(nbytes, device)
        x = _normal(rows, columns, device, seed=1, copies=copies)
        h = _normal(rows, columns, device, seed=2, copies=copies) if takes_h else [None] * copies
        arguments = [(dy, of_dy) if is_gradient else (dy,) for dy, of_dy in zip(x, h, strict=True)]
        return cast_variants(arguments, format, activation, is_gradient, nbytes)

    def is_served(device: torch.device) -> bool:
        return kernels.cast_kernel(device, torch.bfloat16, format, activation, takes_h) is not None

    return Case(f"{rows}x{columns} bf16->{format} {' + '.join(work)}", variants, is_served, nbytes)


def cast_variants(
    arguments: Sequence[tuple[Tensor | None, ...]], format: str, activation: str, is_gradient: bool, nbytes: int
) -> list[Variant]:
    """``lightning_fp8``, ``torch``, ``torch.compile``, and a copy; ``arguments``: x, or dy and h, of each copy."""
    x = arguments[0][0]
    assert x is not None
    device, rows = x.device, len(x)
    state, scaling = steady_state(1, device), PerTensor(format, delayed=True)
    index = state.indices[LAYOUT.index("grad_output" if is_gradient else "input")]
    slot = Slot(index, state, scaling, scaling, True, Casting.HISTORY, generation=state.model.generation)
    want = BOTH._replace(sums=is_gradient)
    scale, no_amax = state.scale[index][0].clone(), torch.zeros((), device=device)
    sources = [_source(tensors, activation, is_gradient) for tensors in arguments]
    function = (baselines.cast_gradient if is_gradient else baselines.cast)(format, activation)
    compiled = baselines.compiled(function, device)

    def ours(at: int) -> Cast:
        return products.cast(sources[at], slot, want)

    def theirs(at: int) -> Cast:
        return scaling.by_reference(value_of(sources[at]), slot, want)

    def recorded(call: Callable[[int], Cast]) -> Results:
        state.amax.zero_()
        made = call(0)
        payload, payload_t, scale_inv, _ = parts(made)
        # without the padding of the payload by columns, which the compiled baseline lacks
        codes = [part.view(FORMATS[format].dtype) for part in (payload, payload_t[:, :rows])]
        sums = () if made.sums is None else (made.sums,)
        return {**by_name(_NAMES, (*codes, scale_inv, *sums)), "amax": [state.amax[index]]}

    def of_compiled() -> Results:
        payload, payload_t, scale_inv, amax, *sums = compiled(*arguments[0], scale, no_amax)
        return {**by_name(_NAMES, (payload, payload_t, scale_inv, *sums)), "amax": [amax[None]]}

    def variant(name: str, call: Callable[..., Any], results: Callable[[], Results], limits: Tolerance) -> Variant:
        return Variant(name, call, lambda: difference(results(), recorded(theirs), limits), len(arguments))

    exact, rounded = _tolerance(activation, rows, 0.01, 0.0), _tolerance(activation, rows, 0.06, 5e-7)
    return [
        variant("lightning_fp8", ours, lambda: recorded(ours), exact),
        variant("torch", theirs, lambda: recorded(theirs), EXACT),
        variant(baselines.COMPILED, lambda at: compiled(*arguments[at], scale, no_amax), of_compiled, rounded),
        baselines.copy(nbytes, device),
    ]


def _source(tensors: tuple[Tensor | None, ...], activation: str, is_gradient: bool) -> Source:
    """What a cast reads: the activation of x, or given dy and h the gradient of h."""
    first, *rest = (tensor for tensor in tensors if tensor is not None)
    if activation == "none":
        return first
    return Computed(activation, tuple(rest), first) if is_gradient else Computed(activation, (first,))


def parts(cast: Cast) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The payloads by rows and by columns, and the scale_inv of each."""
    assert cast.rows is not None
    assert cast.columns is not None
    return cast.rows.codes, cast.columns.codes, cast.rows.scale_inv, cast.columns.scale_inv


def _tolerance(activation: str, rows: int, codes: float, quotients: float) -> Tolerance:
    """Sums differ by their order; activations by the last bits of exp and erf, and by rounding to bf16 or not."""
    activated = activation != "none"
    sums = (2e-4 if activated else 2e-6) * DEVIATION * rows
    relative = {"amax": 2.0**-7 if activated else 0.0, "scale_inv": quotients}
    return Tolerance(codes if activated else 0.0, relative, {"column sums": sums})


def cast_in_blocks(rows: int, columns: int, is_weight: bool = False, mx: bool = False) -> Case:
    """Casts a bf16 tensor to E4M3 by rows and by columns: in blocks of 1 x 128, or a weight in squares of 128 x 128; or
    both in MX, with a scale of one byte for each 1 x 32."""
    # reads bf16, writes both payloads and their scales
    of_tile = 2 * 4 * 128 if mx else 4 * (1 if is_weight else 2 * 128)
    nbytes = 4 * rows * columns + of_tile * -(-rows // 128) * -(-columns // 128)

    def variants(device: torch.device) -> list[Variant]:
        x = _normal(rows, columns, device, seed=1, copies=copies_for(nbytes, device))
        scaling = MX() if mx else PerBlock(squares=is_weight)
        slot = slot_of(scaling, device)

        def ours(x: Tensor) -> Cast:
            return (products.cast_weight if is_weight else products.cast)(x, slot, BOTH)

        def theirs(x: Tensor) -> Cast:
            return scaling.quantized(x, BOTH)[0] if is_weight else scaling.by_reference(x, slot, BOTH)

        def variant(name: str, cast: Callable[[Tensor], Cast], other: Callable[[Tensor], Cast]) -> Variant:
            def check() -> str | None:
                got, expected = (by_name(_NAMES_IN_BLOCKS, parts(function(x[0]))) for function in (cast, other))
                return difference(got, expected)

            return Variant(name, lambda at: cast(x[at]), check, len(x))

        return [
            variant("lightning_fp8", ours, theirs),
            variant("torch", theirs, ours),
            baselines.copy(nbytes, device),
        ]

    def is_served(device: torch.device) -> bool:
        if is_weight:
            return kernels.weights_kernel(device, not mx, mx) is not None
        return kernels.block_cast_kernel(device, torch.bfloat16, mx) is not None

    blocks_of = f"MX{', a weight' if is_weight else ''}" if mx else "128x128" if is_weight else "1x128"
    return Case(f"cast {rows}x{columns} bf16->e4m3 in {blocks_of}", variants, is_served, nbytes)


def slot_of(scaling: Scaling, device: torch.device) -> Slot:
    """The slot of a tensor outside of any state."""
    return Slot(torch.zeros(1, dtype=torch.int64, device=device), None, scaling, scaling)


def cast_weights(model: str, shapes: Sequence[tuple[int, int]]) -> Case:
    """Casts all linear weights of a model from fp32 to E4M3 by rows and by columns, with their amaxes."""
    # reads fp32 twice, for the amax and for the cast, and writes both payloads
    nbytes = 10 * sum(rows * columns for rows, columns in shapes)

    def variants(device: torch.device) -> list[Variant]:
        generator = torch.Generator(device).manual_seed(0)
        first = [torch.randn(*shape, generator=generator, device=device).mul_(DEVIATION) for shape in shapes]
        copies = [first, *([x.clone() for x in first] for _ in range(copies_for(nbytes, device) - 1))]
        state, scaling = steady_state(len(first), device), PerTensor()
        rows = [state.row_of(number, "weight") for number in range(len(first))]
        generation = state.model.generation
        slots = [Slot(state.indices[row], state, scaling, scaling, True, generation=generation) for row in rows]

        def ours(at: int) -> list[Cast]:
            return casts.cast_weights(copies[at], slots, [None] * len(slots), BOTH)

        def theirs(at: int) -> list[Cast]:
            return [one_by_torch(x, slot) for x, slot in zip(copies[at], slots, strict=True)]

        def one_by_torch(x: Tensor, slot: Slot) -> Cast:
            cast, amax = scaling.quantized(x, BOTH)
            state.record_weight(slot.index, amax, scaling.scale(amax))
            return cast

        function = baselines.compiled(baselines.cast_weights, device)

        def recorded(call: Callable[[int], list[Cast]]) -> Results:
            state.amax.zero_()
            made = [parts(cast) for cast in call(0)]
            return _of_weights([(*one[:3], state.amax[row]) for one, row in zip(made, rows, strict=True)])

        def variant(
            name: str, call: Callable[[int], Any], results: Callable[[], Results], limits: Tolerance
        ) -> Variant:
            return Variant(name, call, lambda: difference(results(), recorded(theirs), limits), len(copies))

        def compiled(at: int) -> Any:
            return function(copies[at])

        return [
            variant("lightning_fp8", ours, lambda: recorded(ours), EXACT),
            variant("torch", theirs, lambda: recorded(theirs), EXACT),
            variant(baselines.COMPILED, compiled, lambda: _of_weights(compiled(0)), _QUOTIENTS),
            baselines.copy(nbytes, device),
        ]

    def is_served(device: torch.device) -> bool:
        return kernels.weights_kernel(device, False) is not None

    return Case(f"cast_weights fp32->e4m3, {len(shapes)} weights of {model}", variants, is_served, nbytes)


def update_scales(modules: int, size: str, length: int) -> Case:
    """Updates the scales of all tensors of a model after an optimizer step; every tensor has a new amax.

    Args:
        modules: number of modules, with three tensors each, two of them with a history.
        size: name of the number of tensors.
        length: of the history.
    """
    # reads and writes the histories, reads and zeroes amax, reads fp8_max and writes scale
    nbytes = (8 * length * len(DELAYED_ROLES) + 16 * len(LAYOUT)) * modules

    def variants(device: torch.device) -> list[Variant]:
        fresh = state_tensors(modules, device, length)
        # an update without amaxes has less to do, so each copy is updated once in a batch
        count = max(_UPDATES[device.type], copies_for(nbytes, device))
        copies = [tuple(tensor.clone() for tensor in fresh) for _ in range(count)]

        def refill() -> None:
            for recorded, *_ in copies:
                recorded.copy_(fresh[0])

        def variant(name: str, function: Callable[..., Any], limits: Tolerance) -> Variant:
            def check() -> str | None:
                return difference(updated(function, fresh), updated(baselines.update_scales, fresh), limits)

            return Variant(name, lambda at: function(*copies[at]), check, count, refill)

        return [
            variant("lightning_fp8", lambda *tensors: casts.update_scales(*tensors, False, 1.0), EXACT),
            variant("torch", baselines.update_scales, EXACT),
            variant(baselines.COMPILED, baselines.compiled(baselines.update_scales, device), _QUOTIENTS),
            baselines.copy(nbytes, device),
        ]

    def is_served(device: torch.device) -> bool:
        return kernels.update_kernel(device) is not None

    return Case(f"update_scales {size}, history {length}", variants, is_served, nbytes)


def state_tensors(modules: int, device: torch.device, length: int) -> tuple[Tensor, ...]:
    """What an update takes: the tensors of a state in which every tensor has a new amax."""
    state = steady_state(modules, device, length)
    state.amax.copy_(torch.rand(len(state.amax), generator=torch.Generator().manual_seed(0)) + 0.5)
    return tuple(getattr(state, name) for name in _OF_STATE)


def updated(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Results:
    """What an update makes of these tensors, which it leaves alone."""
    changed = tuple(tensor.clone() for tensor in tensors)
    function(*changed)
    return by_name(_OF_STATE, changed)


def _normal(rows: int, columns: int, device: torch.device, seed: int, copies: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    first = torch.randn(rows, columns, generator=generator, device=device).mul_(DEVIATION).bfloat16()
    return [first.clone() for _ in range(copies)]


def by_name(names: Sequence[str], tensors: Sequence[Tensor]) -> Results:
    """Results of one tensor each."""
    return {name: [tensor] for name, tensor in zip(names, tensors)}


def _of_weights(results: Sequence[tuple[Tensor, ...]]) -> Results:
    payloads, transposed, scale_inv, amax = zip(*results)
    return {
        "payload": [payload.view(E4M3.dtype) for payload in payloads],
        "transposed payload": [payload.view(E4M3.dtype) for payload in transposed],
        "scale_inv": list(scale_inv),
        "amax": [value.clone() for value in amax],
    }
