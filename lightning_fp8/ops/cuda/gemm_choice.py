"""Chooses the GEMM for a product, cuBLASLt or one of our kernels: by measurement on this GPU, or by a rule."""

from __future__ import annotations

import functools
import math
import threading

import torch
from torch import distributed

from kernels_cuda.gemm_variants import Configuration, configurations, mx_configurations
from lightning_fp8.ops.cuda import gemm_table, gemm_timing, kernels
from lightning_fp8.ops.cuda.gemm_table import Choice, Product, Row
from lightning_fp8.ops.cuda.gemm_timing import Run
from lightning_fp8.ops.cuda.kernels import backend
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.device import is_capturing
from lightning_fp8.runtime.warn_once import warn_once

GEMMS = ("auto", "rawkernel", "cublaslt")
MOST_SPLITS = 16
# of our configurations, by their estimates
_MOST_MEASURED = 3
# elements of K in a step, and steps in a part: a shorter one spends most of its time filling and draining the pipeline
_STEP, _LEAST_STEPS = 128, 8
# overhead of a tile beyond its products, in elements of K
_FILL = 256
# per clock and multiprocessor: bytes from the L2 cache, and FP8 multiply-adds
_L2_BYTES, _MULTIPLY_ADDS = 47, 4096

# What "auto" first went by for a size class, a measurement or the rule (None), stays in this process: backward
# recomputes a forward to the last bit. By GPU and size class.
_first_choices: dict[tuple[object, ...], Row | None] = {}
_lock = threading.Lock()


def check_gemm(value: str) -> None:
    """ValueError unless ``gemm`` is one of ``"auto"``, ``"rawkernel"`` and ``"cublaslt"``."""
    check_choice("`gemm`", value, GEMMS)


# more shapes than a model has, but bounded, for models in which the number of tokens always changes
@functools.lru_cache(maxsize=4096)
def choose(
    device: torch.device,
    gemm: str,
    m: int,
    n: int,
    k: int,
    promote: bool,
    output: torch.dtype,
    run: Run | None = None,
) -> Choice:
    """Which GEMM computes ``[m, k] x [n, k] -> [m, n]``.

    ``"cublaslt"`` always selects cuBLASLt, ``"rawkernel"`` one of ours if the GPU has any: the one that was fastest in
    the tables (:mod:`.gemm_table`), else that of :func:`estimated`.

    ``"auto"`` selects whichever was faster for products of this :attr:`~.gemm_table.Product.size_class`, according to
    the tables. If they do not have it, it is measured now (:func:`measure`) and kept, in a single process, on a stream
    that is not captured, and not under torch's deterministic settings. Otherwise a rule chooses: cuBLASLt without
    promotion, ours by :func:`estimated` with it. Either remains for the process.

    What runs have measured at first use counts neither for ``"rawkernel"``, nor in jobs of several processes, nor under
    the deterministic settings: these must give the same numbers whatever ran in between.

    Args:
        device: where it runs; our kernels run on CUDA GPUs only.
        gemm: one of :data:`GEMMS`.
        m: rows of the output.
        n: columns of the output.
        k: the dimension that is summed over.
        promote: whether partial sums are added up in fp32 registers every 128 along K.
        output: dtype of the output.
        run: computes a choice; without it nothing is measured.

    Raises:
        ValueError: for another ``gemm``.
    """
    check_gemm(gemm)
    if gemm == "cublaslt" or device.type != "cuda" or backend() == "reference" or 0 in (m, n, k):
        return Choice(None)
    gpu = torch.cuda.get_device_properties(device)
    ours = configurations((gpu.major, gpu.minor), promote)
    if not ours:
        warn_once(
            f"FP8 GEMMs run by torch._scaled_mm on {gpu.name}: lightning_fp8 has no GEMM kernel for compute capability"
            f" {gpu.major}.{gpu.minor}."
        )
        return Choice(None)
    product = Product(m, n, k, promote, output)
    row = _first_choice(product, device, run) if gemm == "auto" else _from_tables(product, device, False)
    if row is None or not row.is_measured:
        is_faster, best = promote, Choice(None)
    else:
        is_faster, best = row.is_faster, row.ours
    if gemm == "auto" and not is_faster:
        return Choice(None)
    if best.configuration is None:
        return estimated(ours, m, n, k, promote, gpu.multi_processor_count)
    return best._replace(splits=min(best.splits, most_splits(k, promote)))


@functools.lru_cache(maxsize=4096)
def choose_in_blocks(device: torch.device, gemm: str, m: int, n: int, k: int, mx: bool = False) -> Choice:
    """:func:`choose` where each block of the operands has a scale: ours by :func:`estimated` if the GPU has any.

    With ``mx``, scales are in E8M0. cuBLASLt for ``"cublaslt"``, and if there is no kernel.
    """
    check_gemm(gemm)
    if gemm == "cublaslt" or device.type != "cuda" or backend() == "reference" or 0 in (m, n, k):
        return Choice(None)
    gpu = torch.cuda.get_device_properties(device)
    capability = gpu.major, gpu.minor
    ours = mx_configurations(capability) if mx else configurations(capability, True)
    # sums of either kind are in fp32, so parts of K may be
    return estimated(ours, m, n, k, True, gpu.multi_processor_count) if ours else Choice(None)


def measure(product: Product, device: torch.device, run: Run, replace: bool = False) -> Row | None:
    """Time cuBLASLt and the three best of ours by their estimates, and keep the result in the user's table.

    Waits for the GPU, and for the compiler if a kernel has not been used before.

    Args:
        product: what is measured.
        device: the GPU, which has GEMM kernels.
        run: computes a choice.
        replace: whether the result replaces one in the table, which otherwise stays and is returned.

    Returns:
        The row in the table; None, and nothing is kept, if no kernel of ours is available.

    Raises:
        OSError: if the table cannot be written.
    """
    gpu, (m, n, k, promote, _) = torch.cuda.get_device_properties(device), product
    capability = (gpu.major, gpu.minor)
    ranked = _ranked(configurations(capability, promote), m, n, k, promote, gpu.multi_processor_count)
    times: dict[Choice, float] = {}
    try:
        needed = device, *gemm_timing.formats(product), product.output, promote
        ours = [choice for choice in ranked[:_MOST_MEASURED] if kernels.kernels_of(choice, *needed) is not None]
        if not ours:
            return None
        times = gemm_timing.times(product, ours, device, run)
    except torch.OutOfMemoryError:
        warn_once(f"There was no memory to measure FP8 GEMMs like {product.name}: they are chosen by a rule.")
    cublaslt = times.pop(Choice(None), None)
    best = min(times, key=times.__getitem__, default=Choice(None))
    configuration = best.configuration and best.configuration.name
    fields = {"configuration": configuration, "splits": best.splits, "p50_us": times.get(best)}
    row = {**product.as_json(), **fields, "cublaslt_p50_us": cublaslt}
    return gemm_table.keep(gpu.name, capability, row, replace)


def _first_choice(product: Product, device: torch.device, run: Run | None) -> Row | None:
    """What ``"auto"`` goes by: a row of the tables, a measurement made now, or None for the rule."""
    gpu = torch.cuda.get_device_name(device)
    with _lock:
        key = (gpu, *product.size_class)
        if key in _first_choices:
            return _first_choices[key]
        may_vary, is_eager = _may_vary(), not torch.compiler.is_compiling() and not is_capturing(True)
        row = _from_tables(product, device, may_vary)
        if row is None and may_vary and is_eager and run is not None:
            try:
                row = measure(product, device, run)
            except OSError as error:
                warn_once(
                    f"FP8 GEMMs are chosen by a rule on {gpu}, not by measurement: the table of measured GEMMs"
                    f" cannot be kept ({error}). Set LIGHTNING_FP8_CACHE_DIR to a folder that you may write to."
                )
        _first_choices[key] = row
        return row


def _from_tables(product: Product, device: torch.device, at_first_use: bool) -> Row | None:
    """The row for a product; with ``at_first_use``, one that a run has measured by itself also counts."""
    gpu = torch.cuda.get_device_properties(device)
    for row in gemm_table.rows(gpu.name, (gpu.major, gpu.minor)):
        if row.product.size_class == product.size_class and (at_first_use or not row.at_first_use):
            return row
    return None


def _may_vary() -> bool:
    """Whether the choice may depend on when it is made: not for one of several processes, which must choose alike."""
    is_alone = not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1
    is_deterministic = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    return is_alone and not is_deterministic


def estimated(ours: tuple[Configuration, ...], m: int, n: int, k: int, promote: bool, multiprocessors: int) -> Choice:
    """The configuration and number of splits with the smallest estimated time; the first and smallest of equals.

    time      = waves * block_m * block_n * (128 * ceil(steps / splits) + 256) / efficiency
    steps     = ceil(k / 128)
    waves     = ceil(clusters * splits / floor(multiprocessors / cluster))
    clusters  = ceil(m / (block_m * cluster)) * ceil(n / block_n)
    efficiency = min(1, 47 / (4096 * (block_m + block_n / cluster) / (block_m * block_n)))

    A wave is as many tiles as run at a time; ragged tiles count whole, and filling and draining the pipeline counts as
    256 elements of K. The efficiency is what the L2 cache delivers, in bytes a clock, relative to what a tile needs:
    128x128 without a cluster needs 64 and is limited to 0.73, 128x256 in clusters of two needs 32. K is split only if
    sums are promoted and tiles fill less than half of the multiprocessors, and into at most :func:`most_splits` parts.
    """
    return _ranked(ours, m, n, k, promote, multiprocessors)[0]


def most_splits(k: int, promote: bool) -> int:
    """How many parts K may have: at most 16, each of at least 8 steps of 128; only one without promotion."""
    steps = -(-k // _STEP)
    return max(1, min(steps // _LEAST_STEPS, MOST_SPLITS)) if promote else 1


def _ranked(
    ours: tuple[Configuration, ...], m: int, n: int, k: int, promote: bool, multiprocessors: int
) -> list[Choice]:
    """Each configuration with its best number of splits, by estimated time."""
    timed = []
    for configuration in ours:
        clusters = -(-m // (configuration.block_m * configuration.cluster)) * -(-n // configuration.block_n)
        fills_half = 2 * clusters * configuration.cluster >= multiprocessors
        for_splits = {
            splits: _estimate(configuration, clusters, splits, k, multiprocessors)
            for splits in range(1, (1 if fills_half else most_splits(k, promote)) + 1)
        }
        splits = min(for_splits, key=for_splits.__getitem__)
        timed.append((for_splits[splits], Choice(configuration, splits)))
    return [choice for _, choice in sorted(timed, key=lambda entry: entry[0])]


def _estimate(configuration: Configuration, clusters: int, splits: int, k: int, multiprocessors: int) -> float:
    waves = -(-clusters * splits // (multiprocessors // configuration.cluster))
    steps = math.ceil(math.ceil(k / _STEP) / splits)
    tile = configuration.block_m * configuration.block_n
    needed = _MULTIPLY_ADDS * (configuration.block_m + configuration.block_n / configuration.cluster) / tile
    return waves * tile * (_STEP * steps + _FILL) / min(1.0, _L2_BYTES / needed)
