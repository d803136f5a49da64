"""Lets users declare that weights do not change, so that each weight is cast only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.compiled_casts import keep_compiled_casts
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.weight_cast import KeptCast, assume_unchanged


@contextmanager
def weights_unchanged(model: nn.Module) -> Iterator[None]:
    """Declare that the weights of a model do not change in this context: each is cast to FP8 once, at its first use.

    Use it for generation and evaluation outside of a Trainer. Without it, each forward casts all weights, because they
    may have been swapped without a trace. In training, it also saves comparing each weight with the weight of the last
    cast. At the end the casts are dropped.

    If a weight changes anyway, it is cast again if the change leaves a trace: an operation in place, an optimizer step,
    ``load_state_dict``, another parameter or another ``.data``. In this context, only a change in place through
    ``.data`` remains unnoticed.

    Contexts may overlap, in any number of threads, and apply to all of them until the last one ends.

    Compiled modules read casts that are made at the beginning; so does the model if ``torch.compile`` returned it. They
    see a change only if an optimizer or ``load_state_dict`` makes it; any other change that leaves a trace gives a
    warning at the end. For sharded weights, and in compiled functions, nothing is kept. Code that transformers'
    ``generate`` compiles counts as a compiled module from the next context on.

    Args:
        model: converted model, or any of its parts. Without converted layers, this does nothing.
    """
    casts, compiled = casts_of(all_gemms(model)), compiled_gemms(model)
    drop_unless_assumed(casts)
    try:
        with assume_unchanged(casts), keep_compiled_casts(compiled, record=False) if compiled else nullcontext():
            yield
    finally:
        drop_unless_assumed(casts)


def all_gemms(model: nn.Module) -> Iterator[Gemm]:
    """The GEMMs of all converted layers."""
    return (gemm for layer in model.modules() if isinstance(layer, Fp8Module) for gemm in layer.fp8.values())


def compiled_gemms(model: nn.Module) -> list[Gemm]:
    """The GEMMs of layers in modules that ``torch.compile``, ``nn.Module.compile`` or ``generate`` has compiled."""
    gemms: dict[int, Gemm] = {}
    for module in model.modules():
        # `_compiler_ctx` is Lightning's; `generate` of transformers keeps what it has compiled in `_compiled_call`
        marks = (getattr(module, name, None) for name in ("_compiled_call_impl", "_compiler_ctx", "_compiled_call"))
        if "_orig_mod" in module._modules or any(mark is not None for mark in marks):
            layers = (layer for layer in module.modules() if isinstance(layer, Fp8Module))
            gemms.update((id(gemm), gemm) for layer in layers for gemm in layer.fp8.values())
    return list(gemms.values())


def casts_of(gemms: Iterable[Gemm]) -> list[KeptCast[Any]]:
    """The kept casts of weights and biases."""
    return [cast for gemm in gemms for cast in (gemm.weight_cast, gemm.bias_cast)]


def drop_unless_assumed(casts: Iterable[KeptCast[Any]]) -> None:
    """Drop casts, except those that another context keeps."""
    for cast in casts:
        if not cast.assumptions:
            cast.drop()
