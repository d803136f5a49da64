"""What a block costs besides its GEMMs: how often casts read its tensors, and what is kept for backward.

    python -m benchmarks.passes [--blocks Llama GPT-2 ...] [--out FILE]

One block each of Hugging Face's Llama, GPT-2 and BERT, ``nn.TransformerEncoderLayer`` and the package's example, eager
and compiled, with one and with two micro-batches per optimizer step; width 64, feed-forward 256, 96 tokens, dropout 0,
under bf16 autocast. The CUDA half of the package runs on the CPU with kernels that are counted and do nothing, in the
steady state of training: histories filled, after one optimizer step. Compiled blocks use ``fullgraph=True`` and stop
after the partition into forward and backward; inductor, which follows, would change no number here.

Counted per optimizer step: tensors cast as inputs, as gradients and as weights; launches of the cast kernels; bytes
that these launches read and write (KiB); passes of torch's own element-wise operators over tensors of the
feed-forward's inner width (in a compiled block, operators of its graph, which inductor fuses); GEMMs. Counted per
micro-batch: bytes kept for backward (KiB), as inputs and weights of linear layers, and the rest. "least" is derived
below.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import append
from benchmarks.no_kernels import LlamaBlock, NoKernel, no_scaled_mm, serve_cpu, set_steady_state
from kernels_cuda import casts
from lightning_fp8 import convert, scaling_state
from lightning_fp8.examples.transformer_block import Block as ExampleBlock
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.runtime.environment import environment

# TOKENS is no layer's width, so it tells tensors of the batch from weights
BATCH, TIME = 2, 48
TOKENS = BATCH * TIME
WIDTH, HIDDEN, HEADS = 64, 256, 4
# per optimizer step
MICRO_BATCHES = (1, 2)


def _written(result: casts.Result) -> int:
    return sum(codes.nbytes for codes in (result.y, result.y_t) if codes is not None)


class Block(NamedTuple):
    """One case.

    Attributes:
        make: creates the block, which takes x ``[BATCH, TIME, WIDTH]``.
        inputs: for each distinct input of linear layers, its width and the bytes read per element.
        gradients: for each output gradient, its width, the bytes read per element, and the number of linear layers.
        weights: numbers of elements.
    """

    make: Callable[[], nn.Module]
    inputs: list[tuple[int, int]]
    gradients: list[tuple[int, int, int]]
    weights: list[int]


# The least that a step takes. Each distinct input of linear layers is read once, 2 bytes an element, and written by
# rows (fprop) and by columns (wgrad), 1 byte each. An activation's output is never in memory in 16 bits: the cast reads
# the activation's input instead, and both inputs of a gated one. Each gradient of a linear layer's output is read once
# and written twice (dgrad, wgrad). The gradient of an activation's input is computed while it is cast, from the
# gradient of the activation's output and the activation's input, 4 bytes read per element; a gated activation has two
# inputs, and their gradients read 6 bytes together. fp32 weights are read twice (for the amax, and for the cast), 4
# bytes an element each time, and written twice, once per optimizer step whatever the number of micro-batches, in two
# launches for all of them. Kept for backward: the columns of each input and each weight, 1 byte an element.
_SQUARE, _UP = WIDTH * WIDTH, WIDTH * HIDDEN
# of a block with GELU: attention's two inputs, the feed-forward's two
_INPUTS = [(WIDTH, 2), (WIDTH, 2), (WIDTH, 2), (HIDDEN, 2)]
_D_OUT, _D_Q_K_V, _D_GELU = (WIDTH, 2, 1), [(WIDTH, 2, 1)] * 3, [(HIDDEN, 4, 1), (WIDTH, 2, 1)]
_ONE_PROJECTION: tuple[Any, ...] = (
    _INPUTS,
    [_D_OUT, (3 * WIDTH, 2, 1), *_D_GELU],
    [3 * _SQUARE, _SQUARE, _UP, _UP],
)
_THREE_PROJECTIONS: tuple[Any, ...] = (_INPUTS, [_D_OUT, *_D_Q_K_V, *_D_GELU], [*[_SQUARE] * 4, _UP, _UP])


def _gpt2() -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_inner=HIDDEN, resid_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"
    return GPT2Block(config, 0)


def _bert() -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    sizes: Any = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": HEADS}
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "sdpa"
    return BertLayer(config)


BLOCKS = {
    "Llama": Block(
        lambda: LlamaBlock(WIDTH, HIDDEN, HEADS, TIME),
        [*_INPUTS[:3], (HIDDEN, 4)],
        [_D_OUT, *_D_Q_K_V, (HIDDEN, 6, 2), (WIDTH, 2, 1)],
        [*[_SQUARE] * 4, _UP, _UP, _UP],
    ),
    "GPT-2": Block(_gpt2, *_ONE_PROJECTION),
    "BERT": Block(_bert, *_THREE_PROJECTIONS),
    "nn.TransformerEncoderLayer": Block(
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, "gelu", batch_first=True), *_ONE_PROJECTION
    ),
    "example": Block(lambda: ExampleBlock(WIDTH, HEADS), *_ONE_PROJECTION),
}


class Count(NamedTuple):
    """What one optimizer step takes, and what one micro-batch keeps for backward; bytes."""

    inputs: int
    gradients: int
    weights: int
    launches: int
    read: int
    written: int
    hidden: int
    gemms: int
    kept_inputs: int
    kept_weights: int
    kept_rest: int | None


def least(block: Block, micro_batches: int) -> Count:
    """The least count, as derived above; ``kept_rest`` is None, as it does not depend on the linear layers."""
    elements = sum(block.weights)
    read = sum(width * size for width, size, *_ in [*block.inputs, *block.gradients]) * TOKENS
    written = sum(2 * width for width, _ in block.inputs) + sum(2 * width * n for width, _, n in block.gradients)
    return Count(
        micro_batches * len(block.inputs),
        micro_batches * sum(layers for *_, layers in block.gradients),
        len(block.weights),
        micro_batches * (len(block.inputs) + len(block.gradients)) + 2,
        micro_batches * read + 8 * elements,
        micro_batches * written * TOKENS + 2 * elements,
        0,
        micro_batches * 3 * len(block.weights),
        sum(width for width, _ in block.inputs) * TOKENS,
        elements,
        None,
    )


class Counted:
    """Counts casts, launches and GEMMs of the CUDA half of the package, run on the CPU."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        serve_cpu(self._obtain, self._scaled_mm)
        for name in ("cast_transpose", "cast_gated", "weight_table"):
            setattr(casts, name, self._counting(getattr(casts, name), getattr(self, f"_{name}")))

    def _obtain(self, variant: kernels.Variant, device: torch.device) -> NoKernel:
        counted = self

        class Counting(NoKernel):
            variant: kernels.Variant

            def __call__(self, grid: int, *arguments: Any) -> None:
                counted.now["launches"] += variant.family.startswith("cast")
                super().__call__(grid, *arguments)

        kernel = Counting(None, variant.layout, variant.block, 0, variant.shared_bytes)
        kernel.variant = variant
        return kernel

    def _scaled_mm(self, *arguments: Any, **kwargs: Any) -> Tensor:
        self.now["gemms"] += 1
        return no_scaled_mm(*arguments, **kwargs)

    @staticmethod
    def _counting(function: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
        def counting(*arguments: Any, **kwargs: Any) -> Any:
            count(*arguments, **kwargs)
            return function(*arguments, **kwargs)

        return counting

    def _cast_transpose(self, kernel: Any, x: Tensor, result: casts.Result, dy: Tensor | None, gated: bool) -> None:
        if gated:
            # counted by `cast_gated`, which it calls
            return
        role = "gradients" if "FORMAT=E5M2" in kernel.variant.defines else "inputs"
        passes = 1 if result.current_amax is None else 2
        self.now[role] += 1
        self.now["read"] += passes * sum(tensor.nbytes for tensor in (x, dy) if tensor is not None)
        self.now["written"] += _written(result)

    def _cast_gated(
        self,
        kernel: Any,
        gate: Tensor,
        up: Tensor,
        result: casts.Result,
        dy: Tensor | None = None,
        of_up: casts.Result | None = None,
    ) -> None:
        results = [out for out in (result, of_up) if out is not None]
        passes = 1 if all(out.current_amax is None for out in results) else 2
        self.now["inputs" if dy is None else "gradients"] += len(results)
        self.now["read"] += passes * sum(tensor.nbytes for tensor in (gate, up, dy) if tensor is not None)
        self.now["written"] += sum(map(_written, results))

    def _weight_table(self, weights: list[casts.Weight], squares: bool = False, mx: bool = False) -> None:
        for x, _, y, y_t in weights:
            # a table without outputs only measures the amaxes of weights
            self.now["weights"] += y is not None
            self.now["read"] += x.nbytes * (1 if y is None or squares or mx else 2)
            self.now["written"] += sum(tensor.nbytes for tensor in (y, y_t) if tensor is not None)


@contextmanager
def _kept(model: nn.Module) -> Iterator[Counter[str]]:
    """Bytes that forwards inside keep for backward, by kind; each storage once, parameters excluded."""
    sizes: Counter[str] = Counter()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # the tensors are held, so that no address is reused
    seen: dict[int, tuple[Tensor, str]] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            is_of_batch = TOKENS in {*tensor.shape, tensor.shape[:-1].numel()}
            kind = "rest" if tensor.dtype != torch.uint8 else "inputs" if is_of_batch else "weights"
            if kind != "rest" or address not in seen:
                seen[address] = tensor, kind
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
    for tensor, kind in seen.values():
        sizes[kind] += tensor.nbytes


def count(counted: Counted, block: Block, is_compiled: bool) -> dict[int, Count]:
    """Counts of the converted block in its second optimizer step, by number of micro-batches; compiled once for all."""
    torch.manual_seed(0)
    model, x = block.make().train(), torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
    convert(model)
    called: Callable[[Tensor], Any] = model
    if is_compiled:
        torch._dynamo.reset()
        called = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = {}
    for micro_batches in MICRO_BATCHES:
        for _ in range(2):
            counted.now.clear()
            with _hidden_passes() as hidden:
                for _ in range(micro_batches):
                    with _kept(model) as kept_bytes, torch.autocast("cpu", torch.bfloat16):
                        y = called(x)
                    (y[0] if isinstance(y, tuple) else y).float().sum().backward()
            scaling_state(model).update()
            set_steady_state(model)
            with torch.no_grad():
                optimizer.step()
        now = counted.now + hidden
        of_passes = {field: now[field] for field in Count._fields[:8]}
        of_memory = {f"kept_{kind}": kept_bytes[kind] for kind in ("inputs", "weights", "rest")}
        counts[micro_batches] = Count(**of_passes, **of_memory)
    return counts


_ELEMENTWISE = re.compile("aten::(mul|add|pow|tanh|tanh_backward|gelu|gelu_backward|silu|silu_backward|copy_|sum)")


@contextmanager
def _hidden_passes() -> Iterator[Counter[str]]:
    """Counts torch's element-wise operators, on any thread, that read a tensor ``[tokens, HIDDEN]`` of the batch."""
    counts: Counter[str] = Counter()
    with torch.profiler.profile(record_shapes=True) as profile:
        yield counts
    for event in profile.events():
        shapes = [shape for shape in event.input_shapes if shape and shape[-1] == HIDDEN]
        if _ELEMENTWISE.fullmatch(event.name) and any(torch.Size(shape).numel() == TOKENS * HIDDEN for shape in shapes):
            counts["hidden"] += 1


_HEAD = (
    "| block | | micro-batches | inputs | gradients | weights | launches | read | written | passes | GEMMs |"
    " kept: inputs | weights | rest |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
_IN_BYTES = ("read", "written", "kept_inputs", "kept_weights", "kept_rest")


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    options.add_argument("--out", type=Path, help="a file to which the rows are added, as JSON")
    arguments = options.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counted, about = Counted(), environment()
    print(_HEAD)
    for name in arguments.blocks:
        block = BLOCKS[name]
        eager, compiled = (count(counted, block, is_compiled) for is_compiled in (False, True))
        for number in MICRO_BATCHES:
            for mode, counts in {
                "least": least(block, number),
                "eager": eager[number],
                "compiled": compiled[number],
            }.items():
                numbers = counts._asdict()
                shown = [x if x is None or key not in _IN_BYTES else round(x / 1024) for key, x in numbers.items()]
                cells = [name, mode, number, *("-" if x is None else x for x in shown)]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
                append([{"block": name, "what": mode, "micro_batches": number, **numbers, **about}], arguments.out)


if __name__ == "__main__":
    main()
