"""Feed-forward blocks of widely used models run fused, with the results of their parts, and unfused otherwise."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from feed_forward_blocks import (
    BLOCKS,
    HIDDEN,
    WIDTH,
    BertFeedForward,
    converted,
    gpt2,
    llama,
    part_by_part,
    phi3,
    sequential,
    vit,
)
from feed_forward_step import training_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import convert, describe, fall_back, feed_forward, scaling_state, unconvert
from lightning_fp8.modules import feed_forward as feed_forward_module
from lightning_fp8.modules.block_forms import form_of_class
from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.feed_forward import activation_name, fp8_feed_forward, fp8_gated_feed_forward
from lightning_fp8.modules.fused_blocks import known_form
from lightning_fp8.modules.straight_line import returned_by


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators' names of the activations of blocks that ran fused."""
    calls: list[str] = []

    def counting(first: Any, activation: str, second: Any, x: Tensor) -> Tensor:
        calls.append(activation)
        return fp8_feed_forward(first, activation, second, x)

    def counting_gated(gate: Any, up: Any, down: Any, x: Tensor) -> Tensor:
        calls.append("gated")
        return fp8_gated_feed_forward(gate, up, down, x)

    monkeypatch.setattr(feed_forward_module, "fp8_feed_forward", counting)
    monkeypatch.setattr(feed_forward_module, "fp8_gated_feed_forward", counting_gated)
    return calls


def assert_same_steps(
    one: nn.Module, two: nn.Module, steps: int = 3, autocast: bool = False, batch: tuple[int, ...] = (2, 7, WIDTH)
) -> None:
    """Outputs, gradients, scales and amaxes agree, at the first use of every tensor and with delayed scales."""
    dtype = next(one.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(batch, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, actual = training_step(one, one, x), training_step(two, two, x)
        assert len(expected) >= 4
        for this, that in zip(expected, actual, strict=True):
            assert that.dtype == this.dtype
            assert torch.equal(that, this)


# numbers


@pytest.mark.parametrize("mode", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("block", BLOCKS)
def test_numbers_are_those_of_the_parts(block: str, mode: str, fused: list[str]) -> None:
    model = converted(BLOCKS[block])
    if mode == "bf16":
        model.bfloat16()
    assert_same_steps(part_by_part(model), model, autocast=mode == "autocast")
    assert len(fused) == 3


def test_gelu_new_is_computed_as_torchs_gelu_with_tanh(fused: list[str]) -> None:
    model = converted(gpt2)
    parts = part_by_part(model)
    parts[0].act = nn.GELU("tanh")
    assert_same_steps(parts, model)
    # the formula, operator by operator, rounds differently
    written_out = part_by_part(model)(x := torch.randn(3, WIDTH))
    torch.testing.assert_close(model(x), written_out, rtol=0, atol=0.05 * written_out.abs().max().item())
    assert fused == ["gelu_tanh"] * 4


FROZEN = {
    "first": lambda name: name.startswith(("gate", "up", "1.")),
    "gate": lambda name: name.startswith("gate"),
    "up's weight": lambda name: name == "up_proj.weight",
    "second": lambda name: name.startswith(("down", "3.")),
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
}


@pytest.mark.parametrize("case", FROZEN)
@pytest.mark.parametrize("make", [lambda: sequential(nn.SiLU()), lambda: llama(bias=True)])
def test_frozen_layers(case: str, make: Callable[[], nn.Module], fused: list[str]) -> None:
    model = converted(make)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[case](name))
    assert_same_steps(part_by_part(model), model)
    assert len(fused) == 3


@pytest.mark.parametrize("make", [lambda: sequential(nn.SiLU())[1:4], lambda: llama(bias=True), phi3, vit])
def test_inputs_without_gradients(make: Callable[[], nn.Module], fused: list[str]) -> None:
    model = converted(make)
    parts = part_by_part(model)
    for _ in range(2):
        x = torch.randn(5, WIDTH)
        for one in (parts, model):
            one.zero_grad()
            one(x).square().sum().backward()
            scaling_state(one).update()
        for expected, actual in zip(parts.parameters(), model.parameters(), strict=True):
            assert torch.equal(actual.grad, expected.grad)
        assert torch.equal(scaling_state(model).amax_history, scaling_state(parts).amax_history)
    assert len(fused) == 2


class NoGradient(torch.autograd.Function):
    """Gives no gradient, which is not a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


@pytest.mark.parametrize("make", [lambda: nn.Linear(WIDTH, WIDTH), lambda: sequential(nn.GELU())[1:4], llama, phi3])
def test_without_a_gradient_of_the_output_there_are_none(make: Callable[[], nn.Module]) -> None:
    model, x = converted(make), torch.randn(5, WIDTH, requires_grad=True)
    # as of plain layers
    for one in (model, unconvert(copy.deepcopy(model))):
        (NoGradient.apply(one(x)) + 2 * x).sum().backward()
        assert all(parameter.grad is None for parameter in one.parameters())
        assert torch.equal(x.grad, torch.full_like(x, 2))
        x.grad = None


@pytest.mark.parametrize("make", [lambda: sequential(nn.GELU())[1:4], llama, phi3])
def test_strides_and_sizes_of_the_input(make: Callable[[], nn.Module], fused: list[str]) -> None:
    model = converted(make)
    parts = part_by_part(model)
    rows = torch.randn(6, 2 * WIDTH)
    inputs = [rows[:, ::2], rows.view(2, 3, 2, WIDTH).transpose(0, 2), torch.randn(WIDTH, 5).t(), rows[0, :WIDTH]]
    for x in [*inputs, torch.randn(0, WIDTH)]:
        one, two = training_step(parts, parts, x), training_step(model, model, x)
        assert all(map(torch.equal, one, two))
    assert len(fused) == 5


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_nothing(block: str, reentrant: bool) -> None:
    model = converted(BLOCKS[block])
    plain = copy.deepcopy(model)
    for _ in range(2):
        x = torch.randn(4, 5, WIDTH)
        one = training_step(plain, plain, x)
        two = training_step(model, lambda x: checkpoint(model, x, use_reentrant=reentrant), x)
        assert all(map(torch.equal, one, two))


# one block of each form: the others differ only in the activation or in biases
@pytest.mark.parametrize("block", ["gelu", "GPT-2", "Llama", "Phi-3", "BERT", "encoder layer"])
def test_compiled_without_a_graph_break(block: str, fused: list[str]) -> None:
    model = converted(BLOCKS[block])
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 5, WIDTH)
        one, two = training_step(eager, eager, x), training_step(model, compiled, x)
        assert all(map(torch.equal, one, two))
    assert len(fused) >= 3


@pytest.mark.parametrize("block", BLOCKS)
def test_copies_pickles_and_the_way_back(block: str, fused: list[str]) -> None:
    torch.manual_seed(0)
    plain = BLOCKS[block]()
    classes = [type(module) for module in plain.modules()]
    names = list(plain.state_dict())
    model = convert(plain)
    x = torch.randn(2, 5, WIDTH)
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(other(x), y)
        assert_same_steps(other, copy.deepcopy(model), steps=1)
    assert len(fused) == 1 + 2 * 3
    assert list(model.state_dict()) == names
    assert [type(module) for module in unconvert(model).modules()] == classes


# running unfused


def hook(part: nn.Module) -> None:
    part.register_forward_hook(lambda *_: None)


def own_forward(part: nn.Module) -> None:
    part.forward = part.forward


class Adapter(nn.Module):
    """Wraps a linear layer, as adapters do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.weight = base.in_features, base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x.sum()


def adapt(model: nn.Module, name: str) -> None:
    setattr(model, name, Adapter(getattr(model, name)))


ASIDE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "a hook on gate": (llama, lambda model: hook(model.gate_proj)),
    "a hook on up": (llama, lambda model: hook(model.up_proj)),
    "a hook on down": (llama, lambda model: model.down_proj.register_full_backward_hook(lambda *_: None)),
    "a hook on the activation": (llama, lambda model: hook(model.act_fn)),
    "a hook on the first": (vit, lambda model: hook(model.fc1)),
    "a hook on BERT's first module": (BertFeedForward, lambda model: hook(model.layer.intermediate)),
    "a hook on BERT's second module": (BertFeedForward, lambda model: hook(model.layer.output)),
    "a hook on BERT's layer": (BertFeedForward, lambda model: hook(model.layer.output.dense)),
    "a hook in a sequence": (lambda: sequential(nn.ReLU(), 0.0), lambda model: hook(model[3])),
    "another forward": (vit, lambda model: own_forward(model.fc2)),
    "an adapter of gate": (llama, lambda model: adapt(model, "gate_proj")),
    "an adapter of the second": (vit, lambda model: adapt(model, "fc2")),
    "another activation": (vit, lambda model: setattr(model, "activation_fn", nn.Tanh())),
    "gelu as a gate": (lambda: llama("gelu_pytorch_tanh"), lambda model: None),
    "inputs that are not shared": (llama, lambda model: model.up_proj.fp8[""].share_input(None)),
    "a fallback of up": (llama, lambda model: fall_back(model, "up_proj")),
    "a fallback": (vit, lambda model: fall_back(model, "fc1")),
    "another mode": (phi3, lambda model: model.down_proj.eval()),
    "dropout": (lambda: sequential(nn.GELU(), 0.3), lambda model: None),
}


@pytest.mark.parametrize("case", ASIDE)
def test_it_steps_aside(case: str, fused: list[str]) -> None:
    make, change = ASIDE[case]
    model = converted(make)
    parts = part_by_part(model)
    for one in (parts, model):
        change(one)
    x = torch.randn(3, 5, WIDTH)
    results = []
    for one in (parts, model):
        torch.manual_seed(1)  # of dropout
        results.append(training_step(one, one, x))
    assert all(map(torch.equal, *results))
    assert fused == []


def test_hooks_are_called_and_change_what_they_should(fused: list[str]) -> None:
    """A hook that changes the output of a part: a fused block would not call it."""
    for block, parts in {"Llama": ["gate_proj", "up_proj", "act_fn", "down_proj"], "ViT": ["fc1", "fc2"]}.items():
        for part in parts:
            model = converted(BLOCKS[block])
            reference = part_by_part(model)
            x = torch.randn(5, WIDTH)
            for one in (reference, model):
                one.get_submodule(part).register_forward_hook(lambda *of_call: 2 * of_call[2])
            assert torch.equal(model(x), reference(x))
    assert fused == []


def test_dropout_is_not_skipped(fused: list[str]) -> None:
    model = converted(lambda: sequential(nn.GELU(), 0.5))
    x = torch.randn(64, WIDTH)
    hidden: list[Tensor] = []
    torch.manual_seed(0)
    one = model(x)
    assert not torch.equal(one, model(x))
    assert fused == []
    model.eval()
    assert torch.equal(model(x), model(x))
    assert fused == ["gelu"] * 2
    model.train()
    handle = model[4].register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    model(x)
    handle.remove()
    assert 0.4 < (hidden[0] == 0).float().mean() < 0.6
    assert len(fused) == 2


def test_dropout_behind_the_block_is_applied(fused: list[str]) -> None:
    model = converted(lambda: gpt2(dropout=0.5))
    y = model(torch.randn(64, WIDTH))
    assert 0.4 < (y == 0).float().mean() < 0.6
    model = converted(lambda: BertFeedForward(dropout=0.5))
    x = torch.randn(64, WIDTH)
    assert not torch.equal(model(x), model(x))
    assert fused == ["gelu_tanh", "gelu", "gelu"]


def test_gate_and_up_are_not_exchanged() -> None:
    model = converted(lambda: llama(bias=True))
    x = torch.randn(32, WIDTH)
    expected = model.down_proj(F.silu(model.gate_proj(x)) * model.up_proj(x))
    assert torch.equal(model(x), expected)
    packed = converted(phi3)
    gate, up = packed.gate_up_proj(x).chunk(2, dim=-1)
    assert torch.equal(packed(x), packed.down_proj(F.silu(gate) * up))


# known forms


def test_classes_of_transformers() -> None:
    from importlib import import_module

    expected = {
        "llama.LlamaMLP": "gated",
        "mistral.MistralMLP": "gated",
        "qwen2.Qwen2MLP": "gated",
        "qwen3.Qwen3MLP": "gated",
        "gemma.GemmaMLP": "gated",
        "phi3.Phi3MLP": "packed",
        "gpt2.GPT2MLP": "chain",
        "vit.ViTMLP": "chain",
        "clip.CLIPMLP": "chain",
        "siglip.SiglipMLP": "chain",
    }
    for path, kind in expected.items():
        module, name = path.split(".")
        form = form_of_class(getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name), ())
        assert form is not None, path
        assert form.kind == kind, path
    for module, name in {"bert": "Bert", "roberta": "Roberta", "electra": "Electra"}.items():
        file = import_module(f"transformers.models.{module}.modeling_{module}")
        parts = getattr(file, f"{name}Intermediate"), getattr(file, f"{name}Output")
        form = form_of_class(getattr(file, f"{name}Layer"), parts)
        assert form is not None
        assert form.kind == "two modules"


class Mine(nn.Module):
    """A user's class with the form of ViT's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """With a docstring."""
        hidden = self.act(self.one(hidden))
        return self.two(hidden)


class Scaled(Mine):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * self.two(self.act(self.one(hidden)))


class Twice(Mine):
    def forward(self, hidden: Tensor) -> Tensor:
        _ = self.two(self.one(hidden))
        return self.two(self.act(self.one(hidden)))


class Branching(Mine):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            hidden = -hidden
        return self.two(self.act(self.one(hidden)))


class Inheriting(Mine):
    pass


class Registered(Mine):
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        cls.known.append(cls)


def decorated(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def doubled(self: nn.Module, hidden: Tensor) -> Tensor:
        return 2 * method(self, hidden)

    return doubled


class Decorated(Mine):
    @decorated
    def forward(self, hidden: Tensor) -> Tensor:
        return self.two(self.act(self.one(hidden)))


class DecoratedLater(Mine):
    forward = decorated(Mine.forward)


class SequentialOfAnotherKind(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("kind", [Mine, Inheriting])
def test_a_class_is_known_by_what_it_computes(kind: type[nn.Module], fused: list[str]) -> None:
    model = converted(kind)
    assert_same_steps(part_by_part(model), model, steps=2)
    assert fused == ["relu"] * 2
    # a keyword argument is part of the class's own signature
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(hidden=x), model(x))
    with pytest.raises(TypeError, match="other"):
        model(other=x)


@pytest.mark.parametrize("kind", [Scaled, Twice, Branching, Registered, Decorated, DecoratedLater])
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
    model = converted(Mine)
    data = pickle.dumps(model)
    monkeypatch.setattr(Mine, "forward", Scaled.forward)
    assert type(pickle.loads(data)) is Mine
    assert known_form(Mine()) is None
    assert own_class(convert(Mine())) is Mine


def test_source_that_is_not_that_of_the_code(tmp_path: Any) -> None:
    """A file edited after it was imported."""
    file = tmp_path / "edited.py"
    file.write_text("def forward(self, x):\n    return self.a(self.b(x))\n")
    found: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), found)
    file.write_text("def forward(self, x):\n    return self.a(self.b(self.c(x)))\n")
    assert returned_by(found["forward"]) is None
    exec("def without_source(self, x): return self.a(x)", found)
    assert returned_by(found["without_source"]) is None


def test_expressions() -> None:
    class Methods:
        def gated(self, x: Any) -> Any:
            y = self.up(x)
            z = self.gate(x)
            return self.down(self.act(z) * y)

        def twice(self, x: Any) -> Any:
            y = self.up(x)
            return y * y

        def halves(self, x: Any) -> Any:
            one, two = self.up(x).chunk(2, dim=-1)
            return one * two

        def nothing(self, x: Any) -> None:
            """Docstring only."""

        def stores(self, x: Any) -> Any:
            self.seen = x
            return self.up(x)

        def defaults(self, x: Any = 1) -> Any:
            return self.up(x)

    assert returned_by(Methods.gated) == ("self.down(self.act(self.gate(x)) * self.up(x))", 4)
    assert returned_by(Methods.twice) == ("self.up(x) * self.up(x)", 1)
    assert returned_by(Methods.halves) == (
        "self.up(x).chunk(2, dim=-1)[0] * self.up(x).chunk(2, dim=-1)[1]",
        2,
    )
    assert returned_by(Methods.nothing) is returned_by(Methods.stores) is returned_by(Methods.defaults) is None
    assert returned_by(len) is None


def test_activations() -> None:
    from transformers.activations import ACT2FN

    names = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")
    assert [activation_name(ACT2FN[name]) for name in names] == [
        "relu",
        "gelu",
        "gelu_tanh",
        "gelu_tanh",
        "silu",
        "silu",
    ]
    others = ("gelu_python", "gelu_python_tanh", "gelu_10", "gelu_fast", "quick_gelu", "relu6", "tanh", "mish")
    assert [activation_name(ACT2FN[name]) for name in others] == [None] * len(others)
    assert activation_name(functools.partial(F.gelu, approximate="tanh")) == "gelu_tanh"
    assert activation_name(functools.partial(F.gelu)) is None


# rows of `describe`


def described(model: nn.Module) -> dict[str, str]:
    """The remarks of the rows on the block, by path."""
    rows = {row.path: row.reason.split("; ") for row in describe(model)}
    return {path: remarks[-1] for path, remarks in rows.items() if "feed-forward" in remarks[-1]}


@pytest.mark.parametrize("block", BLOCKS)
def test_describe_says_what_is_fused(block: str) -> None:
    model = converted(BLOCKS[block])
    found = described(model)
    layers = [path for path, part in model.named_modules() if type(part).__name__ in ("Fp8Linear", "Fp8Conv1D")]
    assert list(found) == [path for path in layers if "self_attn" not in path]
    assert set(found.values()) == {"feed-forward fused"}
    assert all("feed-forward" not in row.reason for row in describe(unconvert(model)))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("a hook on gate", "a part has hooks, or a `forward` of its own"),
        ("a hook on BERT's first module", "a part has hooks, or a `forward` of its own"),
        ("another activation", "Tanh is not supported"),
        ("gelu as a gate", "GELUTanh is not supported for a gate"),
        ("inputs that are not shared", "gate and up do not share their input"),
        ("a fallback of up", "a layer fell back"),
        ("another mode", "its layers differ in training mode"),
        ("dropout", "dropout between its layers"),
        ("an adapter of gate", "a linear layer is not converted, has an adapter, or is sharded by itself"),
    ],
)
def test_describe_says_why_a_block_is_not_fused(case: str, reason: str) -> None:
    make, change = ASIDE[case]
    model = converted(make)
    change(model)
    found = described(model)
    assert found
    assert set(found.values()) == {f"feed-forward not fused: {reason}"}


def test_describe_follows_the_model() -> None:
    model = converted(lambda: sequential(nn.GELU(), 0.3))
    assert set(described(model.eval()).values()) == {"feed-forward fused"}
    partly = convert(vit(), ignore_modules=("fc2",))
    assert described(partly) == {
        "fc1": "feed-forward not fused: a linear layer is not converted, has an adapter, or is sharded by itself"
    }
    of_a_subclass = convert(SequentialOfAnotherKind(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    assert set(described(of_a_subclass).values()) == {
        "feed-forward not fused: SequentialOfAnotherKind overrides `forward` of Sequential"
    }
    assert set(described(convert(Scaled())).values()) == {"feed-forward not fused: Scaled overrides `forward` of Mine"}
    late = convert(vit("tanh"))
    late.activation_fn = nn.ReLU()
    assert set(described(late).values()) == {
        "feed-forward not fused: built since the conversion, so call `convert` again"
    }
    assert set(described(convert(late)).values()) == {"feed-forward fused"}


# the public function


class Own(nn.Module):
    def __init__(self, gated: bool, activation: Any) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down, self.gated, self.activation = nn.Linear(HIDDEN, WIDTH), gated, activation

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward((self.gate, self.up) if self.gated else self.up, self.activation, self.down, x)

    def parts(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class OwnGated(Own):
    def forward(self, x: Tensor) -> Tensor:
        return feed_forward((self.gate, self.up), self.activation, self.down, x)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [F.silu, nn.SiLU()])
def test_the_public_function(gated: bool, activation: Any, fused: list[str]) -> None:
    torch.manual_seed(0)
    model = (OwnGated if gated else Own)(gated, activation)
    x = torch.randn(4, 5, WIDTH)
    # plain layers, and bf16
    assert torch.equal(model(x), model.parts(x))
    half = copy.deepcopy(model).bfloat16()
    assert torch.equal(half(x.bfloat16()), half.parts(x.bfloat16()))
    assert fused == []
    convert(model)
    reference = copy.deepcopy(model)
    for _ in range(2):
        one, two = training_step(reference, reference.parts, x), training_step(model, model, x)
        assert all(map(torch.equal, one, two))
    assert fused == (["gated"] if gated else ["silu"]) * 2


def test_the_public_function_in_a_compiled_model(fused: list[str]) -> None:
    torch.manual_seed(0)
    model = convert(Own(False, F.gelu))
    x = torch.randn(4, WIDTH)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model.parts(x))
    assert fused == ["gelu"]


def test_the_public_function_refuses_other_tuples() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"pair \(gate, up\), got a tuple of 3"):
        feed_forward((layer, layer, layer), F.silu, layer, torch.zeros(1, 4))  # type: ignore[arg-type]


def test_layers_of_two_models(fused: list[str]) -> None:
    first, second = convert(nn.Linear(WIDTH, HIDDEN)), convert(nn.Linear(HIDDEN, WIDTH))
    x = torch.randn(3, WIDTH)
    assert torch.equal(feed_forward(first, F.relu, second, x), second(first(x).relu()))
    assert fused == []
