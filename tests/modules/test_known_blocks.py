"""Classes whose feed-forward block is known by the source of its method, and classes that are left alone."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any, ClassVar

import pytest
import torch
from feed_forward_blocks import HIDDEN, WIDTH, Mine, Scaled, SequentialOfAnotherKind, converted, part_by_part
from feed_forward_step import assert_same_steps, training_step
from torch import Tensor, nn

from lightning_fp8 import convert, unconvert
from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.known_blocks import form_of_class
from lightning_fp8.modules.known_source import source_digest

# one class of transformers for each source
CLASSES = """
    audioflamingo3.AudioFlamingo3MultiModalProjector bark.BarkMLP clip.CLIPMLP codegen.CodeGenMLP
    edgetam_video.EdgeTamVideoMemoryAttentionMLP edgetam_video.EdgeTamVideoPerceiverMLP
    efficientloftr.EfficientLoFTRMLP ernie4_5_vl_moe.Ernie4_5VLVisionMLP ernie4_5_vl_moe.Ernie4_5_VLMoeVisionMLP
    evolla.EvollaFeedForward falcon.FalconMLP focalnet.FocalNetMlp glm4v.Glm4VisionMlp glmasr.GlmAsrMLP gpt2.GPT2MLP
    gpt_neox.GPTNeoXMLP gpt_neox_japanese.GPTNeoXJapaneseMLP granite_speech.GraniteSpeechConformerFeedForward
    hubert.HubertAttnAdapterLayer hubert.HubertFeedForward idefics.IdeficsMLP internvl.InternVLMultiModalProjector
    janus.JanusVisionMLP llama.LlamaMLP llama4.Llama4TextMLP llava.LlavaMultiModalProjector mgp_str.MgpstrMlp
    nemotron.NemotronMLP omdet_turbo.OmDetTurboMLPWithDropout openai.MLP perceiver.PerceiverMLP phi3.Phi3MLP
    pvt.PvtFFN qwen3_omni_moe.Qwen3OmniMoeTalkerResizeMLP recurrent_gemma.RecurrentGemmaMlp sam.SamMLPBlock
    vibevoice_acoustic_tokenizer.VibeVoiceAcousticTokenizerFeedForward vitdet.VitDetMlp vjepa2.VJEPA2MLP
    xmod.XmodAdapter zaya.ZayaRouterMLP
"""


def part_for(name: str) -> nn.Module:
    """A part of a block, by its name."""
    if "act" in name or "gelu" in name or "silu" in name:
        return nn.SiLU()
    if "norm" in name or name == "ln":
        return nn.LayerNorm(WIDTH)
    return nn.Dropout(0.0) if "drop" in name else nn.Linear(WIDTH, 2 * WIDTH if name == "gate_up_proj" else WIDTH)


@pytest.mark.parametrize("path", CLASSES.split())
def test_each_source_is_computed_as_its_class_does(path: str, fused: list[str]) -> None:
    file, name = path.split(".")
    kind = getattr(import_module(f"transformers.models.{file}.modeling_{file}"), name)
    form = form_of_class(kind, {})
    assert form is not None
    model = type("Block", (nn.Module,), {"forward": kind.forward})()
    for part in dict.fromkeys(form.paths):
        model.add_module(part, part_for(part))
    convert(model)
    assert_same_steps(part_by_part(model), model, steps=1)
    assert fused


@pytest.mark.parametrize("prefix", ["bert.Bert", "roberta.Roberta", "electra.Electra", "fnet.FNet"])
def test_layers_of_two_modules(prefix: str) -> None:
    module, name = prefix.split(".")
    file = import_module(f"transformers.models.{module}.modeling_{module}")
    parts = {part.lower(): getattr(file, name + part) for part in ("Intermediate", "Output")}
    layer = getattr(file, f"{name}Layer")
    form = form_of_class(layer, parts)
    assert form is not None
    assert form.kind == "two modules"
    # modules of other classes, or none
    assert form_of_class(layer, {**parts, "output": Mine}) is form_of_class(layer, {}) is None


def test_a_decoder_layer_of_torch(fused: list[str]) -> None:
    model = converted(lambda: nn.TransformerDecoderLayer(WIDTH, 2, HIDDEN, 0.0))
    parts, x = part_by_part(model), torch.randn(3, 5, WIDTH)
    assert all(map(torch.equal, training_step(parts, parts._ff_block, x), training_step(model, model._ff_block, x)))
    assert fused == ["relu"]


class Inheriting(Mine):
    pass


class Registered(Mine):
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        cls.known.append(cls)


def decorated(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    seen: list[Tensor] = []

    @functools.wraps(method)
    def noting(self: nn.Module, hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return method(self, hidden)

    return noting


class Decorated(Mine):
    forward = decorated(Mine.forward)


class Elsewhere(Mine):
    """Has the known function under the name of another method."""

    _ff_block = Mine.forward

    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * self._ff_block(hidden_states)


@pytest.mark.parametrize("kind", [Mine, Inheriting])
def test_a_class_is_known_by_its_source(kind: type[nn.Module], fused: list[str]) -> None:
    model = converted(kind)
    assert_same_steps(part_by_part(model), model, steps=2)
    assert fused == ["relu"] * 2
    # a keyword argument is part of the class's own signature
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(hidden_states=x), model(x))
    with pytest.raises(TypeError, match="other"):
        model(other=x)


@pytest.mark.parametrize("kind", [Scaled, Registered, Decorated, Elsewhere])
def test_any_other_is_left_alone(kind: type[nn.Module], fused: list[str]) -> None:
    model = converted(kind)
    assert type(model) is kind
    model(torch.randn(2, WIDTH)).sum().backward()
    assert fused == []
    assert Registered.known == []


def test_sequences(fused: list[str]) -> None:
    parts = [nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)]
    model = converted(lambda: nn.Sequential(*parts, nn.ReLU(), nn.LayerNorm(WIDTH), *copy.deepcopy(parts)))
    assert_same_steps(part_by_part(model), model, steps=2)
    assert fused == ["relu"] * 2 * 2
    fused.clear()
    assert torch.equal(model[:3](x := torch.randn(5, WIDTH)), model[2](model[1](model[0](x))))
    for left_alone in (
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU()),
    ):
        assert type(convert(left_alone)) is nn.Sequential
    assert type(convert(SequentialOfAnotherKind(*copy.deepcopy(parts)))) is SequentialOfAnotherKind
    partly = convert(nn.Sequential(*map(copy.deepcopy, parts[:3])), ignore_modules=("2",))
    assert type(partly) is nn.Sequential


def test_conversion_of_parts_comes_and_goes() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0)
    for ignored in ("linear2", None, "linear1"):
        convert(model, ignore_modules=() if ignored is None else (ignored,))
        assert (type(model) is nn.TransformerEncoderLayer) == (ignored is not None)
        assert isinstance(model, nn.TransformerEncoderLayer)
        assert type(model).__name__ == ("Fp8" if ignored is None else "") + "TransformerEncoderLayer"
    unconvert(convert(model))
    assert type(model) is nn.TransformerEncoderLayer


def test_a_class_changed_since_conversion_is_no_longer_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(Mine)
    data = pickle.dumps(model)
    monkeypatch.setattr(Mine, "forward", Scaled.forward)
    assert type(pickle.loads(data)) is Mine
    assert own_class(convert(Mine())) is Mine


def method(source: str) -> FunctionType:
    """A function that was not read from a file."""
    found: dict[str, Any] = {}
    exec(source, found)
    return found["forward"]


def test_digests() -> None:
    def changed(self: Any, hidden_states: Tensor) -> Tensor:
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states + 0

    def closed(self: Any, x: Tensor) -> Any:
        return changed(self, x)

    digests = [source_digest(one) for one in (Mine.forward, Scaled.forward, changed)]
    assert all(len(digest) == 16 for digest in digests)
    assert len({*digests}) == 3
    nothing = (closed, decorated(Mine.forward), lambda self, x: x, len, None, method("def forward(self, x): return x"))
    assert [*map(source_digest, nothing)] == [""] * 6


def test_new_code_of_a_function_has_its_own_digest() -> None:
    # notebooks exchange it when they reload a module
    forward = FunctionType(Mine.forward.__code__, {})
    assert source_digest(forward) == source_digest(Mine.forward)
    forward.__code__ = Scaled.forward.__code__
    assert source_digest(forward) == source_digest(Scaled.forward)
