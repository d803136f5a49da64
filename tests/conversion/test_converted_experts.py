"""Which experts run in FP8, and why others do not; routers stay out; training and export of a whole model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experts import EXPERTS, FORMS, TOKENS, WIDTH, experts, mixtral, routing, token_batch
from lit import Regression
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.loss_models import DECODERS, decoder
from lightning_fp8 import convert, describe, export, load_exported, scaling_state, unconvert
from lightning_fp8.conversion.plan import NothingToConvertError
from lightning_fp8.modules import Fp8Linear

ROUTER = "a router: rounding to FP8 would change its choice of experts"


def holder(**layers: nn.Module) -> nn.Module:
    """A model with experts and other layers."""
    model = nn.Module()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def reasons(model: nn.Module, **settings: Any) -> dict[str, str]:
    """Reasons by path, with ``fp8`` for converted layers."""
    return {row.path: ("fp8 " if row.converted else "") + row.reason for row in describe(model, **settings)}


def test_describe_names_experts_and_routers() -> None:
    model = mixtral()
    found = reasons(model)
    assert found["model.layers.1.mlp.experts"] == "not converted yet: call `convert`"
    assert found["model.layers.1.mlp.gate"] == ROUTER
    found = reasons(convert(model))
    assert found["model.layers.1.mlp.experts"] == "fp8 converted, 4 experts, 32 -> 128 and 64 -> 32"
    assert found["model.layers.1.mlp.gate"] == ROUTER
    assert len(found) == 13
    found = reasons(convert(holder(experts=experts("transposed")), min_features=0))
    assert found["experts"] == "fp8 converted, 4 experts, 32 -> 48 and 24 -> 32"
    # 64 -> 32 is the smaller of the two
    assert "32 -> 128" in reasons(model, min_features=33)["model.layers.1.mlp.experts"]
    ignored = ("*.layers.0.mlp.experts",)
    found = reasons(convert(model, ignore_modules=ignored), ignore_modules=ignored)
    assert found["model.layers.0.mlp.experts"].startswith("matches `ignore_modules`")
    names = scaling_state(model).names
    assert "model.layers.1.mlp.experts.gate_up_proj.3.input" in names
    assert not any("layers.0.mlp.experts" in name or ".gate." in name for name in names)


@pytest.mark.parametrize("form", DECODERS)
def test_all_matrices_but_embeddings_and_routers_run_in_fp8(form: str) -> None:
    torch.manual_seed(3)
    plain = decoder(form)
    model = convert(copy.deepcopy(plain))
    parts = [model.get_submodule(row.path) for row in describe(model) if row.converted]
    in_fp8 = sum(weight.numel() for part in parts for weight in {id(w): w for _, w in part.gemms()}.values())
    of_embeddings = model.get_input_embeddings().weight.numel()
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() > 1 and not name.endswith("bias")]
    assert in_fp8 > 0.98 * (sum(weight.numel() for weight in matrices) - of_embeddings)
    losses = []
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=2e-3)
        for seed in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(**token_batch(seed)).loss
            loss.backward()
            if one is model:
                scaling_state(model).update()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    assert torch.isclose(*losses, rtol=0.01, atol=0)


def test_experts_of_older_transformers_say_less() -> None:
    """Before 5.18 nothing of processes, before 5.20 nothing of a norm, which they do not have."""
    newer, given = experts(), (torch.randn(TOKENS, WIDTH), *routing())
    older = copy.deepcopy(newer)
    del older._is_expert_parallel, older.has_post_expert_norm
    assert torch.equal(convert(older)(*given), convert(newer)(*given))


def left_out(kind: str) -> nn.Module:
    """Experts that cannot run in FP8."""
    layer = experts()
    if kind == "of another class":

        class Experts(FORMS["gate"]):  # type: ignore[misc]
            def forward(self, *given: Tensor) -> Tensor:
                return super().forward(*given) * 2

        layer.__class__ = Experts
    elif kind == "distributed":
        layer._is_expert_parallel = True
    elif kind == "replaced":
        layer.forward = layer.forward
    elif kind == "parametrized":
        parametrize.register_parametrization(layer, "down_proj", nn.Tanh())
    return layer


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("of another class", "the class Experts has a `forward` of its own"),
        ("distributed", "experts that are distributed over processes"),
        ("replaced", "its `forward` was replaced on the object, and a conversion by class would have no effect"),
        ("parametrized", "is parametrized, other than in the weight of a linear layer"),
    ],
)
def test_left_out_with_the_reason_and_their_share(kind: str, reason: str) -> None:
    model = holder(head=nn.Linear(WIDTH, WIDTH, bias=False), experts=left_out(kind))
    before = type(model.experts)
    assert reasons(convert(model)) == {"head": "fp8 converted, 32 -> 32", "experts": reason}
    assert type(model.experts) is before
    with pytest.raises(NothingToConvertError, match=r"\(root\) .*Experts\): "):
        convert(left_out(kind))


def test_a_subclass_with_the_forward_of_transformers_is_converted() -> None:
    class Experts(FORMS["gate"]):  # type: ignore[misc]
        pass

    layer = experts()
    layer.__class__ = Experts
    assert type(convert(layer)).__name__ == "Fp8Experts"
    assert isinstance(layer, Experts)
    with pytest.raises(TypeError, match=r"experts.gate_up_proj is torch.float64"):
        convert(holder(experts=experts().double()))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def test_linear_layers_that_route_stay_out() -> None:
    model = nn.ModuleDict(
        {
            "of linear layers": holder(gate=nn.Linear(16, 4), experts=nn.ModuleList(mlp() for _ in range(4))),
            "of transformers": holder(router=holder(proj=nn.Linear(WIDTH, 4), out=nn.Linear(16, 8)), experts=experts()),
            "another size": holder(gate=nn.Linear(16, 32), experts=nn.ModuleList(mlp() for _ in range(4))),
            "no experts": holder(gate=nn.Linear(16, 4), up=nn.Linear(16, 4)),
            "another name": holder(gate=nn.Linear(16, 4), experts=nn.Linear(16, 4)),
        }
    )
    left = {path for path, reason in reasons(convert(model, min_features=0)).items() if reason == ROUTER}
    assert left == {"of linear layers.gate", "of transformers.router.proj"}
    linear = {path for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert {path for path in linear if not isinstance(model.get_submodule(path), Fp8Linear)} == left
    # converted by an earlier version, or before the experts were added
    early = holder(gate=nn.Linear(16, 4), other=nn.Linear(16, 16))
    convert(early, min_features=0).experts = nn.ModuleList(mlp() for _ in range(4))
    assert type(convert(early).gate) is nn.Linear


def test_exports_write_experts_as_they_are_and_say_so(tmp_path: Path) -> None:
    model = convert(mixtral())
    for seed in range(2):
        model(**token_batch(seed)).loss.backward()
        scaling_state(model).update()
    with pytest.warns(UserWarning, match=r"2 layers of experts \(model.layers.0.mlp.experts, ...\) are written as"):
        export(model, tmp_path)
    other = load_exported(mixtral(), tmp_path)
    assert type(other.model.layers[0].mlp.experts) is FORMS["gate"]
    assert torch.equal(other.model.layers[1].mlp.experts.down_proj, model.model.layers[1].mlp.experts.down_proj)
    plain = convert(copy.deepcopy(model), ignore_modules=("*.experts",)).eval()
    with torch.no_grad():
        assert torch.equal(other(**token_batch()).logits, plain(**token_batch()).logits)


class OnlyExperts(Regression):
    """All of its converted layers are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = experts()

    def forward(self, x: Tensor) -> Tensor:
        index, weights = torch.arange(len(x) * 2).view(-1, 2) % EXPERTS, torch.full((len(x), 2), 0.01)
        return self.net(x, index, weights)[:, :16]


@pytest.mark.parametrize("make", [experts, lambda: nn.Linear(32, 32), lambda: nn.MultiheadAttention(32, 2)])
def test_a_layers_own_config_stays_its_own(make: Any) -> None:
    layer = make()
    layer.config = config = SimpleNamespace(width=32)
    model = convert(nn.Sequential(layer))
    assert layer.config is config
    layer.config = other = SimpleNamespace(width=16)
    assert pickle.loads(pickle.dumps(model))[0].config == other
    assert unconvert(model)[0].config is other


def test_experts_in_fp8_only_in_inference_mode() -> None:
    """As Lightning validates and predicts."""
    layer, (index, weights) = experts().requires_grad_(False), routing()
    convert(layer, frozen_weights="fp8").eval()
    x = torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        expected = layer(x, index, weights)
    with torch.inference_mode():
        assert torch.equal(layer(x, index, weights), expected)
