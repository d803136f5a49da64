"""What a block costs besides its GEMMs: how often casts read its tensors, and what is kept for backward.

    python -m benchmarks.passes [--blocks Llama GPT-2 ...] [--out FILE]

One block each of Hugging Face's Llama, GPT-2, BERT and ViT, ``nn.TransformerEncoderLayer`` and the package's example,
eager and compiled, with one and with two micro-batches per optimizer step; width 64, feed-forward 256, 96 tokens,
dropout 0, under bf16 autocast. The CUDA half of the package runs on the CPU with kernels that are counted and do
nothing, in the steady state of training: histories filled, after one optimizer step. Compiled blocks use
``fullgraph=True`` and stop after the partition into forward and backward; inductor, which follows, would change no
number here.

Counted per optimizer step: tensors cast as inputs, as gradients and as weights; launches of the cast kernels; bytes
that these launches read and write (KiB); passes of torch's own element-wise operators over tensors of the
feed-forward's inner width (in a compiled block, operators of its graph, which inductor fuses); GEMMs. Counted per
micro-batch: bytes kept for backward (KiB), as inputs and weights of linear layers, and the rest. "least" is derived
below; "bf16-mixed" is the unconverted block under autocast.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.no_kernels import NoKernel, llama_block, no_scaled_mm, serve_cpu, set_steady_state
from kernels_cuda import casts
from lightning_fp8 import convert, scaling_state
from lightning_fp8.ops.cuda import kernels

# TOKENS is no layer's width, so it tells tensors of the batch from weights
BATCH, TIME = 2, 48
TOKENS = BATCH * TIME
WIDTH, HIDDEN, HEADS = 64, 256, 4
# per optimizer step
MICRO_BATCHES = (1, 2)


class Block(NamedTuple):
    """One case.

    Attributes:
        make: creates the block.
        call: block and x ``[BATCH, TIME, WIDTH]`` -> y, of the same shape.
        inputs: for each distinct input of linear layers, its width and the bytes read per element.
        gradients: for each output gradient, its width, the bytes read per element, and the number of linear layers.
        weights: shapes.
    """

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor], Tensor]
    inputs: list[tuple[int, int]]
    gradients: list[tuple[int, int, int]]
    weights: list[tuple[int, int]]


# The least that a step takes. Each distinct input of linear layers is read once, 2 bytes an element, and written by
# rows (fprop) and by columns (wgrad), 1 byte each. An activation's output is never in memory in 16 bits: the cast reads
# the activation's input instead, and both inputs of a gated one. Each gradient of a linear layer's output is read once
# and written twice (dgrad, wgrad). The gradient of an activation's input is computed while it is cast, from the
# gradient of the activation's output and the activation's input, 4 bytes read per element; a gated activation has two
# inputs, and their gradients read 6 bytes together. fp32 weights are read twice (for the amax, and for the cast), 4
# bytes an element each time, and written twice, once per optimizer step whatever the number of micro-batches, in two
# launches for all of them. Kept for backward: the columns of each input and each weight, 1 byte an element.
_QKV, _OUT = (3 * WIDTH, WIDTH), (WIDTH, WIDTH)
_UP, _DOWN = (HIDDEN, WIDTH), (WIDTH, HIDDEN)
_ATTENTION = [(WIDTH, 2), (WIDTH, 2)]
_GELU = [(WIDTH, 2), (HIDDEN, 2)]
_D_GELU = [(HIDDEN, 4, 1), (WIDTH, 2, 1)]
_D_OUT, _D_QKV, _D_Q_K_V = (WIDTH, 2, 1), (3 * WIDTH, 2, 1), [(WIDTH, 2, 1)] * 3
_ONE_PROJECTION: tuple[Any, ...] = (_ATTENTION + _GELU, [_D_OUT, _D_QKV, *_D_GELU], [_QKV, _OUT, _UP, _DOWN])
_THREE_PROJECTIONS: tuple[Any, ...] = (
    _ATTENTION + _GELU,
    [_D_OUT, *_D_Q_K_V, *_D_GELU],
    [_OUT, _OUT, _OUT, _OUT, _UP, _DOWN],
)


def _first_of(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def _gpt2() -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_inner=HIDDEN, resid_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"
    return GPT2Block(config, 0)


def _bert() -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    return BertLayer(_config_of_encoder(BertConfig))


def _vit() -> nn.Module:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTLayer

    return ViTLayer(_config_of_encoder(ViTConfig))


def _config_of_encoder(kind: Callable[..., Any]) -> Any:
    config = kind(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "sdpa"
    return config


def _example() -> nn.Module:
    from lightning_fp8.examples.transformer_block import Block as Example

    return Example(WIDTH, HEADS)


BLOCKS = {
    "Llama": Block(
        lambda: llama_block(WIDTH, HIDDEN, HEADS, TIME),
        lambda block, x: _first_of(block(x, position_embeddings=block.rotary)),
        [*_ATTENTION, (WIDTH, 2), (HIDDEN, 4)],
        [_D_OUT, *_D_Q_K_V, (HIDDEN, 6, 2), (WIDTH, 2, 1)],
        [_OUT, _OUT, _OUT, _OUT, _UP, _UP, _DOWN],
    ),
    "GPT-2": Block(_gpt2, lambda block, x: _first_of(block(x)), *_ONE_PROJECTION),
    "BERT": Block(_bert, lambda block, x: _first_of(block(x)), *_THREE_PROJECTIONS),
    "ViT": Block(_vit, lambda block, x: _first_of(block(x)), *_THREE_PROJECTIONS),
    "nn.TransformerEncoderLayer": Block(
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, "gelu", batch_first=True),
        lambda block, x: block(x),
        *_ONE_PROJECTION,
    ),
    "example": Block(_example, lambda block, x: block(x), *_ONE_PROJECTION),
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
    elements = sum(rows * columns for rows, columns in block.weights)
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
        self.kernels: Counter[str] = Counter()
        serve_cpu(self._obtain, self._scaled_mm)
        for name in ("cast_transpose", "cast_gated", "weight_table"):
            setattr(casts, name, self._counting(getattr(casts, name), getattr(self, f"_{name}")))

    def _obtain(self, variant: kernels.Variant, device: torch.device) -> NoKernel:
        counted = self

        class Counting(NoKernel):
            variant: kernels.Variant

            def __call__(self, grid: int, *arguments: Any) -> None:
                counted.kernels[variant.name] += 1
                counted.now["launches"] += variant.family.startswith("cast")
                super().__call__(grid, *arguments)

        made = Counting(None, variant.layout, variant.block, 0, variant.shared_bytes)
        made.variant = variant
        return made

    def _scaled_mm(self, *arguments: Any, **others: Any) -> Tensor:
        self.now["gemms"] += 1
        return no_scaled_mm(*arguments, **others)

    @staticmethod
    def _counting(function: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
        def counting(*arguments: Any, **others: Any) -> Any:
            count(*arguments, **others)
            return function(*arguments, **others)

        return counting

    def _cast_transpose(self, kernel: Any, x: Tensor, result: casts.Result, dy: Tensor | None, gated: bool) -> None:
        if gated:
            # counted by `cast_gated`, which it calls
            return
        role = "gradients" if "FORMAT=E5M2" in kernel.variant.defines else "inputs"
        passes = 1 if result.row.current_amax is None else 2
        self.now[role] += 1
        self.now["read"] += passes * sum(tensor.nbytes for tensor in (x, dy) if tensor is not None)
        self.now["written"] += result.y.nbytes + result.y_t.nbytes

    def _cast_gated(
        self,
        kernel: Any,
        gate: Tensor,
        up: Tensor,
        result: casts.Result,
        dy: Tensor | None = None,
        of_up: casts.Result | None = None,
    ) -> None:
        results = [one for one in (result, of_up) if one is not None]
        passes = 1 if all(one.row.current_amax is None for one in results) else 2
        self.now["inputs" if dy is None else "gradients"] += len(results)
        self.now["read"] += passes * sum(tensor.nbytes for tensor in (gate, up, dy) if tensor is not None)
        self.now["written"] += sum(one.y.nbytes + one.y_t.nbytes for one in results)

    def _weight_table(self, weights: list[casts.Weight], squares: bool = False) -> None:
        for x, _, y, y_t in weights:
            # a table without outputs only measures the amaxes of weights
            self.now["weights"] += y is not None
            self.now["read"] += x.nbytes * (1 if y is None or squares else 2)
            self.now["written"] += sum(tensor.nbytes for tensor in (y, y_t) if tensor is not None)


class _PlainCount(TorchDispatchMode):
    """Counts casts and GEMMs of plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            is_weight = isinstance(args[0], nn.Parameter) or TOKENS not in _sizes(args[0])
            self.now["weights" if is_weight else "inputs"] += 1
            self.now["read"] += args[0].nbytes
            self.now["written"] += result.nbytes
            self.now["launches"] += 1
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.now["gemms"] += 1
        return result


def _sizes(tensor: Tensor) -> set[int]:
    return {*tensor.shape, tensor.shape[:-1].numel()}


@contextmanager
def _kept(model: nn.Module, is_plain: bool) -> Iterator[Counter[str]]:
    """Bytes that forwards inside keep for backward, by kind; each storage once, parameters excluded."""
    found: Counter[str] = Counter()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # the tensors are held, so that no address is reused
    seen: dict[int, tuple[Tensor, str]] = {}
    inside: list[nn.Module] = []

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            is_operand = bool(inside) if is_plain else tensor.dtype == torch.uint8
            kind = ("inputs" if TOKENS in _sizes(tensor) else "weights") if is_operand else "rest"
            if kind != "rest" or address not in seen:
                seen[address] = tensor, kind
        return tensor

    handles = []
    if is_plain:
        from transformers.pytorch_utils import Conv1D

        for layer in model.modules():
            if isinstance(layer, nn.Linear | Conv1D):
                handles.append(layer.register_forward_pre_hook(lambda layer, _: inside.append(layer)))
                handles.append(layer.register_forward_hook(lambda layer, *_: inside.pop() and None))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    for handle in handles:
        handle.remove()
    for tensor, kind in seen.values():
        found[kind] += tensor.nbytes


def count_plain(block: Block, micro_batches: int) -> Count:
    """Counts of the unconverted block, under autocast."""
    model, x = _made(block)
    with _hidden_passes() as hidden, _PlainCount() as count:
        for _ in range(micro_batches):
            with _kept(model, True) as kept:
                y = _forward(block, model, x)
            y.float().sum().backward()
    return _as_count(count.now + hidden, kept)


def count_fp8(counted: Counted, block: Block, compiled: bool) -> dict[int, Count]:
    """Counts of the converted block in its second optimizer step, by number of micro-batches; compiled once for all."""
    model, x = _made(block)
    convert(model)
    state = scaling_state(model)
    called = model
    if compiled:
        torch._dynamo.reset()
        called = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = {}
    for micro_batches in MICRO_BATCHES:
        for _ in range(2):
            counted.now.clear()
            with _hidden_passes() as hidden:
                for _ in range(micro_batches):
                    with _kept(model, False) as kept:
                        y = _forward(block, called, x)
                    y.float().sum().backward()
            state.update()
            set_steady_state(model)
            with torch.no_grad():
                optimizer.step()
        counts[micro_batches] = _as_count(counted.now + hidden, kept)
    return counts


@contextmanager
def _hidden_passes() -> Iterator[Counter[str]]:
    """Counts torch's element-wise operators, on any thread, that read a tensor ``[tokens, HIDDEN]`` of the batch."""
    found: Counter[str] = Counter()
    with torch.profiler.profile(record_shapes=True) as profile:
        yield found
    for event in profile.events():
        shapes = [shape for shape in event.input_shapes if shape and shape[-1] == HIDDEN]
        if event.name in _ELEMENTWISE and any(torch.Size(shape).numel() == TOKENS * HIDDEN for shape in shapes):
            found["hidden"] += 1


_NAMES = (
    "mul",
    "add",
    "pow",
    "tanh",
    "tanh_backward",
    "gelu",
    "gelu_backward",
    "silu",
    "silu_backward",
    "copy_",
    "sum",
)
_ELEMENTWISE = {f"aten::{name}" for name in _NAMES}


def _made(block: Block) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return block.make().train(), torch.randn(BATCH, TIME, WIDTH, requires_grad=True)


def _forward(block: Block, model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block.call(model, x)


def _as_count(now: Counter[str], kept: Counter[str]) -> Count:
    of_passes = {field: now[field] for field in Count._fields[:8]}
    return Count(**of_passes, kept_inputs=kept["inputs"], kept_weights=kept["weights"], kept_rest=kept["rest"])


_HEAD = (
    "| block | | micro-batches | inputs | gradients | weights | launches | read | written | passes | GEMMs |"
    " kept: inputs | weights | rest |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def _row(block: str, what: str, micro_batches: int, count: Count) -> str:
    of_bytes = ("read", "written", "kept_inputs", "kept_weights", "kept_rest")
    values = [
        "-" if value is None else f"{value / 1024:.0f}" if field in of_bytes else str(value)
        for field, value in count._asdict().items()
    ]
    return f"| {block} | {what} | {micro_batches} | {' | '.join(values)} |"


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    options.add_argument("--out", type=Path, help="a file to which the rows are added, as JSON")
    asked = options.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counted = Counted()
    print(_HEAD)
    for name in asked.blocks:
        block = BLOCKS[name]
        eager, compiled = (count_fp8(counted, block, compiled) for compiled in (False, True))
        for micro_batches in MICRO_BATCHES:
            rows = {
                "least": least(block, micro_batches),
                "eager": eager[micro_batches],
                "compiled": compiled[micro_batches],
                "bf16-mixed": count_plain(block, micro_batches),
            }
            for what, count in rows.items():
                print(_row(name, what, micro_batches, count), flush=True)
                if asked.out:
                    with asked.out.open("a", encoding="utf-8") as file:
                        file.write(
                            json.dumps({"block": name, "what": what, "micro_batches": micro_batches, **count._asdict()})
                            + "\n"
                        )


if __name__ == "__main__":
    main()
