"""transformers' ``generate`` on a converted model: the tokens of teacher forcing, with each weight cast once."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers
from adapted_models import base, step, with_adapters
from lit import make_trainer
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.data import DataLoader
from transformer_models import VOCABULARY

from lightning_fp8 import convert, scaling_state, weights_unchanged
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.ops import basic, reference

PROMPT, NEW = 5, 8
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
MODELS = ["llama", "gpt2", "llama with adapters"]
every_model = pytest.mark.parametrize("name", MODELS)


def trained(name: str, layers: int | None = None) -> nn.Module:
    """A converted model in evaluation with the scales of two steps; of a Llama, only the first ``layers``."""
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


@pytest.fixture
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in fp64, rounded once: independent of their order, so that a token alone and in its sequence agree.

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

    monkeypatch.setattr(reference, "_mm_into", multiply)
    for name in ("scaled_dot_product_attention", "linear"):
        monkeypatch.setattr(F, name, in_fp64(getattr(F, name)))


def as_fp64(one: Any) -> Any:
    return one.double() if isinstance(one, Tensor) and one.is_floating_point() else one


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each weight is cast outside of graphs, by its address."""
    counted: Counter[int] = Counter()
    original = basic.cast_weight

    def counting(weight: Tensor, *args: object) -> object:
        if not torch.compiler.is_compiling():
            counted[weight.data_ptr()] += 1
        return original(weight, *args)

    monkeypatch.setattr(basic, "cast_weight", counting)
    return counted


def layers_of(model: nn.Module) -> int:
    return sum(isinstance(layer, Fp8Module) for layer in model.modules())


@every_model
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.usefixtures("exact_sums")
def test_greedy_tokens_are_those_of_teacher_forcing(name: str, declared: bool, casts: Counter[int]) -> None:
    model = trained(name)
    casts.clear()
    found = generated(model, prompts(), weights_unchanged(model) if declared else None)
    # in each forward, of the prompt and of each token except the last, unless the weights are declared unchanged
    assert sorted(casts.values()) == [1 if declared else NEW] * layers_of(model)
    logits = forced(model, found.sequences)
    assert torch.equal(torch.stack(found.logits, 1), logits)
    assert torch.equal(found.sequences[:, PROMPT:], logits.argmax(-1))
    assert torch.equal(generated(model, prompts(), use_cache=False).sequences, found.sequences)


@pytest.mark.usefixtures("exact_sums")
def test_another_scale_gives_other_logits() -> None:
    """Shows that the comparison above would find a difference."""
    model = trained("llama")
    found = generated(model, prompts())
    state = scaling_state(model)
    rows = [row for row, one in enumerate(state.names) if one.endswith(".input") and row not in followers(state)]
    for row in rows:
        scale = state.scale.clone()
        state.scale[row] *= 1.1
        assert not torch.equal(forced(model, found.sequences), torch.stack(found.logits, 1)), state.names[row]
        state.scale.copy_(scale)


def followers(state: Any) -> set[int]:
    return {state.row_of(module, "input") for module in state.input_leaders}


@pytest.mark.parametrize("name", MODELS[:2])
@pytest.mark.usefixtures("exact_sums")
def test_the_others_in_a_batch_change_nothing(name: str) -> None:
    model, ids = trained(name), prompts(3)
    together = generated(model, ids)
    alone = [generated(model, one[None]) for one in ids]
    assert torch.equal(together.sequences, torch.cat([one.sequences for one in alone]))
    for step_of_all, *steps in zip(together.logits, *(one.logits for one in alone), strict=True):
        assert torch.equal(step_of_all, torch.cat(steps))


@every_model
@pytest.mark.usefixtures("exact_sums")
def test_beam_search(name: str) -> None:
    model = trained(name)
    found = generated(model, prompts(), weights_unchanged(model), num_beams=3, output_scores=True)
    tokens = found.sequences[:, PROMPT:, None]
    # transformers divides by the number of new tokens
    expected = forced(model, found.sequences).log_softmax(-1).gather(2, tokens).sum((1, 2)) / NEW
    torch.testing.assert_close(found.sequences_scores, expected, rtol=1e-5, atol=0)
    greedy = forced(model, generated(model, prompts()).sequences).log_softmax(-1).amax(-1).sum(1) / NEW
    assert (expected > greedy - 1e-6).all()
    assert torch.equal(generated(model, prompts(), num_beams=3, use_cache=False).sequences, found.sequences)


# --- compiled ---


class Compiled:
    """A backend that counts the casts of weights in the graphs that ran."""

    def __init__(self) -> None:
        self.runs = self.casts = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=self._forward)(graph, inputs)

    def _forward(self, graph: Any, _: Any) -> Callable[..., Any]:
        targets = [str(node.target) for node in graph.graph.nodes]

        def run(*args: Any) -> Any:
            self.runs += 1
            self.casts += targets.count("lightning_fp8.cast_weight.default")
            return graph(*args)

        return run


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
        backend.runs = backend.casts = 0
        found = generated(model, prompts(), weights_unchanged(model), **static(backend))
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
        assert (backend.runs, backend.casts) == (NEW - 1, graph_casts)
        assert sorted(casts.values()) == [1] * layers_of(model)


@pytest.mark.usefixtures("exact_sums")
def test_a_compiled_model(backend: Compiled, casts: Counter[int]) -> None:
    model = trained("llama", layers=1)
    expected = generated(model, prompts())
    model.compile(backend=backend)
    casts.clear()
    found = generated(model, prompts(), weights_unchanged(model))
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    assert (backend.runs, backend.casts) == (NEW, 0)
    assert sorted(casts.values()) == [1] * layers_of(model)


# --- scales ---


@pytest.mark.parametrize("name", MODELS[:2])
def test_in_training_it_moves_no_scale(name: str) -> None:
    model, batch = trained(name).train(), base(name)[1]
    state = scaling_state(model)
    model(**batch).loss.backward()
    before = copy.deepcopy({key: getattr(state, key) for key in ("amax", "amax_history", "scale")})
    generated(model, prompts())
    for key, tensor in before.items():
        rows = state.delayed if key != "amax_history" else None
        # weights have the scales of their last cast
        assert torch.equal(getattr(state, key)[..., :rows], tensor[..., :rows])


def test_without_scales_it_is_said_once() -> None:
    model, _ = base("llama")
    convert(model).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            generated(model, prompts())
    said = [str(one.message) for one in caught if "is evaluated without scales from training" in str(one.message)]
    assert len(said) == 1
    assert "each batch is scaled by itself" in said[0]


# --- in a Trainer ---


class Writer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.batch = base("llama")
        self.written: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**{name: tensor[batch] for name, tensor in self.batch.items()}).loss
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens: Tensor = self.net.generate(input_ids=prompts(4)[batch], **GREEDY)
        return tokens

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_in_predict(tmp_path: Path, casts: Counter[int]) -> None:
    model, loader = Writer(), DataLoader(range(4), batch_size=2)  # type: ignore[arg-type, var-annotated]
    trainer = make_trainer(tmp_path)
    trainer.fit(model, loader)
    state = scaling_state(model)
    before = state.scale[: state.delayed].clone()
    for _ in range(2):
        casts.clear()
        written = trainer.predict(model, loader)
        # once in a loop, for all tokens of both batches
        assert sorted(casts.values()) == [1] * layers_of(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            expected = [generated(model.net.eval(), prompts(4)[rows]).sequences for rows in (slice(2), slice(2, 4))]
        assert all(map(torch.equal, written, expected))  # type: ignore[arg-type]
    assert torch.equal(state.scale[: state.delayed], before)
