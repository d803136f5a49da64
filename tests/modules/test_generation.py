"""transformers' ``generate`` on a converted model: the tokens of teacher forcing, with each weight cast once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from adapted_models import base, step, with_adapters
from counted_casts import Compiled, count_weight_casts
from torch import Tensor, nn
from transformer_models import VOCABULARY

from lightning_fp8 import convert, weights_unchanged
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.scalings import emulation

PROMPT, NEW = 5, 8
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
MODELS = ["llama", "gpt2", "llama with adapters"]


def trained(name: str, layers: int | None = None) -> nn.Module:
    """A converted model in evaluation, after two steps; of a Llama, only the first ``layers``."""
    model, batch = base(name.partition(" ")[0])
    model.generation_config.eos_token_id = None
    if layers is not None:
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
    if name.endswith("adapters"):
        model = with_adapters(model, "llama", r=4)
    convert(model).train()
    for _ in range(2):
        step(model, batch)
    return model.eval()


def prompts(rows: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, PROMPT), generator=torch.Generator().manual_seed(2))


def generated(model: Any, ids: Tensor, context: AbstractContextManager[Any] | None = None, **settings: Any) -> Any:
    with torch.no_grad(), context or nullcontext():
        return model.generate(input_ids=ids, **GREEDY, return_dict_in_generate=True, output_logits=True, **settings)


def forced(model: Any, sequences: Tensor) -> Tensor:
    """The logits of the new tokens, from one forward over all tokens: ``[B, NEW, V]``."""
    with torch.no_grad():
        return model(input_ids=sequences, use_cache=False).logits[:, PROMPT - 1 : -1]


def difference(model: Any, found: Any) -> float:
    """Of the logits that were generated from those of teacher forcing, relative to these."""
    expected = forced(model, found.sequences)
    return float((torch.stack(found.logits, 1) - expected).norm() / expected.norm())


@pytest.fixture
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in fp64, rounded once: independent of their order, so that only casts tell a token from its sequence.

    A sum of products of FP8 numbers is exact in fp64.
    """

    def multiply(out: Tensor, a: Tensor, b: Tensor, scale_inv: float, bias: Tensor | None = None) -> None:
        product = (a.double() @ b.double()) * scale_inv
        out.copy_(product if bias is None else product + bias)

    def in_fp64(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            args = tuple(map(as_fp64, args))
            return function(x.double(), *args, **{name: as_fp64(one) for name, one in kwargs.items()}).to(x.dtype)

        return run

    monkeypatch.setattr(emulation, "_mm_into", multiply)
    for name in ("scaled_dot_product_attention", "linear"):
        monkeypatch.setattr(F, name, in_fp64(getattr(F, name)))


def as_fp64(one: Any) -> Any:
    return one.double() if isinstance(one, Tensor) and one.is_floating_point() else one


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    return count_weight_casts(monkeypatch)


def layers_of(model: nn.Module) -> int:
    return sum(isinstance(layer, Fp8Module) for layer in model.modules())


@pytest.mark.parametrize(("name", "declared"), list(zip(MODELS, [False, True, True])))
@pytest.mark.usefixtures("exact_sums")
def test_greedy_tokens_are_those_of_teacher_forcing(
    name: str, declared: bool, casts: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(name)
    casts.clear()
    found = generated(model, prompts(), weights_unchanged(model) if declared else None)
    # in each forward, of the prompt and of each token except the last, unless the weights are declared unchanged
    assert sorted(casts.values()) == [1 if declared else NEW] * layers_of(model)
    assert torch.equal(found.sequences[:, PROMPT:], forced(model, found.sequences).argmax(-1))
    # a token alone has another amax than its sequence, and so other codes where they are subnormal, but only there
    assert difference(model, found) < 1e-3
    whole = generated(model, prompts(), use_cache=False)
    assert torch.equal(whole.sequences, found.sequences)
    for end, logits in enumerate(whole.logits, PROMPT + 1):
        assert torch.equal(logits, forced(model, whole.sequences[:, :end])[:, -1])
    # the comparison finds exact scales
    monkeypatch.setattr("lightning_fp8.scalings.per_tensor.power_of_2", lambda scale: scale)
    assert difference(model, generated(model, prompts())) > 0.02


# --- compiled ---


@pytest.fixture
def backend() -> Iterator[Compiled]:
    torch._dynamo.reset()
    yield Compiled()
    torch._dynamo.reset()


def static(backend: Compiled) -> dict[str, Any]:
    """``generate`` compiles the steps after the prompt itself: with this cache always on a GPU, and here on request."""
    # transformers copies the configuration, but not a function in it
    settings = transformers.CompileConfig(backend=lambda *graph: backend(*graph), mode=None)  # type: ignore[arg-type]
    settings._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": settings}


@pytest.mark.usefixtures("exact_sums")
def test_compiled_by_generate(backend: Compiled, casts: Counter[int]) -> None:
    model = trained("llama", layers=1)
    expected = generated(model, prompts())
    # the first call compiles inside the context, and its graphs cast the weights
    for graph_casts in ((NEW - 1) * layers_of(model), 0):
        casts.clear()
        backend.runs = backend.weight_casts = 0
        found = generated(model, prompts(), weights_unchanged(model), **static(backend))
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
        assert (backend.runs, backend.weight_casts) == (NEW - 1, graph_casts)
        assert sorted(casts.values()) == [1] * layers_of(model)
