"""Classes whose feed-forward block is known by the source of its method, and classes that are left alone."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import ClassVar

import pytest
import torch
import transformers
from feed_forward_blocks import HIDDEN, WIDTH, Mine, Scaled, SequentialOfAnotherKind, converted, part_by_part
from feed_forward_step import assert_same_steps, training_step
from torch import Tensor, nn

from lightning_fp8 import convert, describe

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
    model = type("Block", (nn.Module,), {"forward": kind.forward})()
    for part in dict.fromkeys(re.findall(r"self\.(\w+)\(", inspect.getsource(kind.forward))):
        model.add_module(part, part_for(part))
    convert(model)
    assert_same_steps(part_by_part(model), model, steps=1)
    assert fused


def test_a_decoder_layer_of_torch(fused: list[str]) -> None:
    model = converted(lambda: nn.TransformerDecoderLayer(WIDTH, 2, HIDDEN, 0.0))
    parts, x = part_by_part(model), torch.randn(3, 5, WIDTH)
    assert all(map(torch.equal, training_step(parts, parts._ff_block, x), training_step(model, model._ff_block, x)))
    assert fused == ["relu"]


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Electra", "FNet"])
def test_layers_of_two_modules(name: str) -> None:
    file = import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    settings = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": 2, "hidden_dropout_prob": 0.0}
    layer = getattr(file, f"{name}Layer")(getattr(transformers, f"{name}Config")(**settings))
    layer.attention = layer.fourier = None
    other = copy.deepcopy(layer)
    convert(layer)
    assert sum("feed-forward fused" in row.reason for row in describe(layer)) == 2
    # with a module of another class
    other.output = Mine()
    assert not any("feed-forward fused" in row.reason for row in describe(convert(other)) if "output" not in row.path)


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


def test_a_class_changed_since_conversion_is_no_longer_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known = converted(Mine), Mine.forward
    data = pickle.dumps(model)
    monkeypatch.setattr(Mine, "forward", Scaled.forward)
    assert type(pickle.loads(data)) is Mine
    assert type(convert(Mine())) is Mine
    # notebooks exchange the code of a function when they reload a module
    forward = FunctionType(known.__code__, known.__globals__)
    monkeypatch.setattr(Mine, "forward", forward)
    assert type(convert(Mine())) is not Mine
    forward.__code__ = Scaled.forward.__code__
    assert type(convert(Mine())) is Mine
