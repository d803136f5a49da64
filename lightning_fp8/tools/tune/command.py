"""Measure the GEMMs of linear layers on this GPU, and keep which is fastest.

gemm="auto" measures a product when it first runs; this measures the products of
layers ahead, and again if they have been measured before. It is for jobs of
several processes and for deterministic runs, which measure nothing themselves.
Each result is written at once, so an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kernels_cuda.compile import nvrtc_version
from kernels_cuda.gemm_variants import configurations
from lightning_fp8.ops.cuda import gemm_choice, gemm_table, kernels
from lightning_fp8.ops.cuda.gemm import run_choice
from lightning_fp8.ops.cuda.gemm_table import Product, Row
from lightning_fp8.runtime.device import MIN_CAPABILITY, check_device
from lightning_fp8.runtime.program import program

# the most important sizes first, as a run may be interrupted
_TOKENS, _HIDDEN = (8192, 2048, 32768), (4096, 1024, 8192)
# in and out, in units of the hidden size: the two of the feed-forward; attention's output; its query, key and value
_PROJECTIONS = ((1, 4), (4, 1), (1, 1), (1, 3))


class Layer(NamedTuple):
    """A linear layer and the number of tokens in its input."""

    tokens: int
    inputs: int
    outputs: int

    def products(self) -> list[Product]:
        """Fprop, dgrad and wgrad, the last with an output for fp32 weights."""
        tokens, inputs, outputs = self
        return [
            Product(tokens, outputs, inputs, False, torch.bfloat16),
            Product(tokens, inputs, outputs, True, torch.bfloat16),
            Product(outputs, inputs, tokens, True, torch.float32),
        ]


LAYERS = tuple(
    Layer(tokens, hidden * inputs, hidden * outputs)
    for tokens in _TOKENS
    for hidden in _HIDDEN
    for inputs, outputs in _PROJECTIONS
)


def parse_layers(text: str) -> tuple[Layer, ...]:
    """Layers from the command line.

    >>> parse_layers("8192x4096x16384,2048x1024x1024")[0]
    Layer(tokens=8192, inputs=4096, outputs=16384)

    Raises:
        argparse.ArgumentTypeError: if the text is not valid; the message names the part that is wrong.
    """
    layers = []
    for part in text.split(","):
        sizes = part.strip().split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
            raise argparse.ArgumentTypeError(
                f"layers are given as TOKENSxINxOUT, such as 8192x4096x16384, with commas; got {part!r}"
            )
        layers.append(Layer(*map(int, sizes)))
    return tuple(layers)


def products_of(layers: Iterable[Layer]) -> list[Product]:
    """The products of all layers, the first of each size class."""
    products: dict[object, Product] = {}
    for layer in layers:
        for product in layer.products():
            products.setdefault(product.size_class, product)
    return [*products.values()]


def main(arguments: Sequence[str]) -> None:
    """Measure, save and print; exits with a message if it cannot, or if a product could not be measured."""
    options = _parser().parse_args(arguments)
    device = _device()
    gpu, products = torch.cuda.get_device_name(device), products_of(options.shapes)
    print(f"{gpu}: {len(products)} GEMMs, into {gemm_table.own_path(gpu)}", flush=True)
    failed = []
    for product in products:
        try:
            row = gemm_choice.measure(product, device, run_choice, replace=True)
        except OSError as error:
            sys.exit(f"tune: the table cannot be written ({error}). Set LIGHTNING_FP8_CACHE_DIR.")
        if row is None or not row.is_measured:
            failed.append(product.name)
        print(line(product, row), flush=True)
    if failed:
        sys.exit(f"\nThese could not be measured: {', '.join(failed)}")


def line(product: Product, row: Row | None) -> str:
    """What was chosen for a product, and the times: ``"8192x4096x1024 fast bfloat16: cuBLASLt; ours 86.1 us ..."``."""
    if row is None or not row.is_measured:
        return f"{product.name}: not measured, chosen by the rule"
    choice = row.ours if row.is_faster else gemm_table.Choice(None)
    ours, theirs = (_time(product, us) for us in (row.p50_us, row.cublaslt_p50_us))
    return f"{product.name}: {choice.name}; ours {ours}, cuBLASLt {theirs}"


def _time(product: Product, us: float | None) -> str:
    if us is None:
        return "not available"
    return f"{us:.1f} us ({2 * product.m * product.n * product.k / us / 1e6:.0f} TFLOP/s)"


def _device() -> torch.device:
    """The current GPU; exits if there is none, or it has no GEMM kernels to measure."""
    if not torch.cuda.is_available():
        least = "{}.{}".format(*MIN_CAPABILITY)
        sys.exit(f"tune measures on a CUDA GPU of compute capability {least} or newer, and none was found.")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if not configurations(capability, promote=False):
        gpu = "{} has compute capability {}.{}".format(torch.cuda.get_device_name(device), *capability)
        sys.exit(f"tune: {gpu}, which has no GEMM kernels: FP8 GEMMs run with torch._scaled_mm there, if at all.")
    if kernels.backend() == "reference":
        sys.exit("tune: LIGHTNING_FP8_BACKEND=reference turns all kernels off; there is nothing to measure.")
    try:
        check_device(device)
        nvrtc_version()
    except RuntimeError as error:
        sys.exit(f"tune: {error}")
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program()} tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = (
        "linear layers, separated by commas, each measured in its three GEMMs; by default 2048, 8192 and 32768"
        " tokens in the projections of transformers of width 1024, 4096 and 8192"
    )
    parser.add_argument("--shapes", type=parse_layers, default=LAYERS, metavar="TOKENSxINxOUT", help=shapes)
    return parser
