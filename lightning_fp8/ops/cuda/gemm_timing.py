"""Times the ways to compute one GEMM on this GPU, which takes some milliseconds and waits for the GPU."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_fp8.ops.cuda.gemm_table import Choice, Product
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import Fp8Tensor
from lightning_fp8.runtime.switch import as_torch_starts

# `lightning_fp8.ops.cuda.gemm.run_choice`
Run = Callable[..., Tensor]
_ROUNDS = 5
# a batch takes about this long at 1000 TFLOP/s, long compared with the resolution of events
_BATCH_US, _MOST_CALLS, _FLOP_PER_US = 300, 20, 1e9
# the device starts when all calls of a batch are queued: cycles of its clock that the host takes for a call, at most
_CYCLES = 100_000


@as_torch_starts()
def times(product: Product, choices: Sequence[Choice], device: torch.device, run: Run) -> dict[Choice, float]:
    """Median microseconds of cuBLASLt and of each choice, in turns. No entry for cuBLASLt if it refuses the product.

    The operands are ones with random signs, whose sums are exact in any order: a choice that gives another result than
    cuBLASLt is left out, with a warning.

    Args:
        product: what is computed.
        choices: ours.
        device: the GPU.
        run: computes a choice.
    """
    calls = min(_MOST_CALLS, math.ceil(_BATCH_US * _FLOP_PER_US / (2 * product.m * product.n * product.k)))
    operands = _operands(product, calls, device)

    def compute(choice: Choice, call: int) -> Tensor:
        a, b = operands[call % len(operands)]
        return run(choice, a, b, None, product.output, product.promote)

    expected, right = _cublaslt(compute), []
    for choice in choices:
        if expected is not None and not torch.equal(compute(choice, 0), expected):
            warnings.warn(
                f"{choice.name} is not used for {product.name}: its result differs from cuBLASLt's.", stacklevel=2
            )
            continue
        right.append(choice)
    in_turn = [*([] if expected is None else [Choice(None)]), *right]
    timings: dict[Choice, list[float]] = {choice: [] for choice in in_turn}
    for _ in range(_ROUNDS):
        for choice in in_turn:
            timings[choice].append(_batch_us(partial(compute, choice), calls, device))
    return {choice: statistics.median(batches) for choice, batches in timings.items()}


def formats(product: Product) -> tuple[str, str]:
    """The formats of a and b: promoted sums are those of gradients."""
    return ("e5m2" if product.promote else "e4m3"), "e4m3"


def _cublaslt(compute: Callable[[Choice, int], Tensor]) -> Tensor | None:
    """The result of ``torch._scaled_mm``; None if it refuses the product."""
    try:
        return compute(Choice(None), 0)
    except torch.OutOfMemoryError:
        raise
    # "not supported", as torch or cuBLASLt reports it
    except RuntimeError:
        return None


def _operands(product: Product, calls: int, device: torch.device) -> list[tuple[Fp8Tensor, Fp8Tensor]]:
    """As many copies of a and b as exceed twice the L2 cache, and no more than calls."""
    m, n, k, *_ = product
    size = m * k + n * k + m * n * product.output.itemsize
    copies = min(calls, 2 * torch.cuda.get_device_properties(device).L2_cache_size // size + 1)
    # not torch's own generator, on which training depends
    generator = torch.Generator(device).manual_seed(0)
    a_format, b_format = formats(product)
    return [(_signs(m, k, a_format, generator), _signs(n, k, b_format, generator)) for _ in range(copies)]


def _signs(rows: int, columns: int, format: str, generator: torch.Generator) -> Fp8Tensor:
    code_of_one = torch.ones(1).to(FORMATS[format].dtype).view(torch.uint8).item()
    signs = torch.randint(2, (rows, columns), dtype=torch.uint8, device=generator.device, generator=generator)
    return Fp8Tensor(signs.mul_(0x80).add_(code_of_one), torch.ones((), device=generator.device), format)


def _batch_us(call: Callable[[int], object], calls: int, device: torch.device) -> float:
    """Microseconds per call, between two CUDA events."""
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_CYCLES * calls)
        start.record()
        for number in range(calls):
            call(number)
        end.record()
        end.synchronize()
    return 1e3 * start.elapsed_time(end) / calls
