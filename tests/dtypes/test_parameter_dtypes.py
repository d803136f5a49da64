"""Parameters have the requested dtype from their creation on, and inputs are cast to match."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import lightning.pytorch as pl
import pytest
import torch
from lit import Regression, loader, make_trainer, seeded
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_fp8 import Fp8Precision
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.plugins import Bf16MixedPrecision, Bf16TruePrecision
from lightning_fp8.plugins.settings import FP8_PRECISIONS, PRECISIONS
from lightning_fp8.plugins.trainer import PLUGINS

# precision, arguments of its plugin, dtype expected
ASKED: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("fp8-delayed", {}, torch.float32),
    ("fp8-delayed", {"param_dtype": None}, torch.float32),
    ("fp8-delayed", {"param_dtype": "float32"}, torch.float32),
    ("fp8-delayed", {"param_dtype": "bfloat16"}, torch.bfloat16),
    ("bf16-mixed", {}, torch.float32),
    ("bf16-mixed", {"param_dtype": torch.bfloat16}, torch.bfloat16),
    ("bf16-true", {}, torch.bfloat16),
]
IN_BF16: dict[str, dict[str, Any]] = {
    **{precision: {"param_dtype": torch.bfloat16} for precision in (*FP8_PRECISIONS, "bf16-mixed")},
    "bf16-true": {},
}


class Everything(nn.Module):
    """Weights, biases, norm scales, an embedding, a free parameter; float and other buffers; running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(16)
        self.group_norm = nn.GroupNorm(2, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.bilinear = nn.Bilinear(16, 16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.ones(16))
        self.register_buffer("positions", torch.linspace(0, 1, 16, dtype=torch.float32).clone())
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        x = self.group_norm(self.batch_norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        x = self.encoder(x * self.gain)
        x = self.lstm(x)[0]
        return self.head(self.norm(self.bilinear(x, self.positions + x)))


TOKENS = torch.arange(10).view(2, 5) % 7


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: p.dtype for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("case", "front_end", "empty"),
    [(case, "fabric" if at % 2 else "trainer", (True, False, None)[at % 3]) for at, case in enumerate(ASKED)],
)
def test_init_module(case: Any, front_end: str, empty: bool | None) -> None:
    precision, asked, expected = case
    plugin = PLUGINS[precision](**asked)
    if front_end == "trainer":
        runner: Any = pl.Trainer(plugins=plugin, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    else:
        runner = lf.Fabric(plugins=plugin, accelerator="cpu", devices=1)
    with runner.init_module(empty_init=empty):
        model = Everything()
        assert torch.zeros(2).dtype == expected
    assert set(dtypes(model).values()) == {expected}
    assert model.positions.dtype == torch.float32
    assert model.steps.dtype == torch.int64
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("precision", "asked", "expected"), ASKED[3:])
def test_configure_model(tmp_path: Path, precision: Any, asked: Any, expected: torch.dtype) -> None:
    class Configured(Regression):
        def configure_model(self) -> None:
            if not hasattr(self, "late"):
                self.late = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
                self.created = set(dtypes(self.late).values())

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.late(x))

    model = seeded(Configured)
    trainer = make_trainer(tmp_path, plugins=PLUGINS[precision](**asked))
    trainer.fit(model, loader(), loader())
    assert model.created == {expected}
    # `net` was created in the constructor, before the precision was known; `setup` casts it to that dtype
    assert set(dtypes(model).values()) == {expected}
    optimizer = trainer.optimizers[0]
    floating = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    assert {value.dtype for value in floating} == {expected}


@pytest.mark.parametrize(("precision", "asked", "expected"), ASKED)
def test_every_kind_of_layer_trains_and_evaluates(precision: Any, asked: Any, expected: torch.dtype) -> None:
    plugin = PLUGINS[precision](**asked)
    torch.manual_seed(0)
    model = Everything()
    identities = {name: id(p) for name, p in model.named_parameters()}
    positions = model.positions.to(expected)
    model = plugin.convert_module(model)
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    assert set(dtypes(model).values()) == {expected}
    assert torch.equal(model.positions, positions)
    assert model.positions.dtype == expected
    assert (model.steps.dtype, model.batch_norm.num_batches_tracked.dtype) == (torch.int64, torch.int64)
    # torch refuses running statistics whose dtype differs from that of the weight
    assert model.batch_norm.running_mean.dtype == expected
    with plugin.forward_context():
        loss = model(TOKENS).float().square().mean()
    loss.backward()
    assert {name: p.grad.dtype for name, p in model.named_parameters()} == dtypes(model)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with plugin.forward_context(), mode():
            assert model(TOKENS).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "bf16-true"])
def test_keep_fp32(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matching module is stored and runs in fp32, is not converted, and returns the dtype of its input."""
    patterns = ("*.norm*", "head")
    plugin = PLUGINS[precision](keep_fp32=patterns, **IN_BF16[precision])
    model = plugin.convert_module(Everything())
    kept = {"norm", "encoder.norm1", "encoder.norm2", "head"}
    for name, dtype in dtypes(model).items():
        assert dtype == (torch.float32 if name.rpartition(".")[0] in kept else torch.bfloat16)
    assert type(model.head) is nn.Linear
    assert not precision.startswith("fp8-") or type(model.encoder.linear1) is Fp8Linear
    inside: list[tuple[Any, ...]] = []
    outside: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def spy(function: Any) -> Any:
        def seen(x: Tensor, *args: Any) -> Tensor:
            y = function(x, *args)
            inside.append((x.dtype, y.dtype, torch.is_autocast_enabled("cpu")))
            return y

        return seen

    monkeypatch.setattr(nn.functional, "layer_norm", spy(nn.functional.layer_norm))
    for name in kept:
        layer = model.get_submodule(name)
        layer.name = name
        layer.register_forward_hook(lambda layer, x, y: outside.update({layer.name: (x[0].dtype, y.dtype)}))
    with plugin.forward_context():
        y = model(TOKENS)
        assert torch.is_autocast_enabled("cpu") == (precision != "bf16-true")
    y.float().sum().backward()
    assert inside == [(torch.float32, torch.float32, False)] * 3
    assert outside.keys() == kept
    assert all(given == handed_on for given, handed_on in outside.values())
    assert y.dtype == torch.bfloat16
    assert {name: p.grad.dtype for name, p in model.named_parameters()} == dtypes(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(plugin.convert_module(Everything())))):
        with plugin.forward_context():
            assert other(TOKENS).dtype == torch.bfloat16
        assert other.norm.forward.args[0] is other.norm


def test_kept_module_computes_in_fp32() -> None:
    x, plain = torch.randn(4, 32), nn.Linear(32, 8)
    expected, of_bf16 = plain(x), plain(x.bfloat16().float()).bfloat16()
    for precision in PRECISIONS:
        model = nn.ModuleDict({"head": copy.deepcopy(plain), "other": nn.Linear(16, 16)})
        plugin = PLUGINS[precision](keep_fp32=("head",))
        plugin.convert_module(model)
        with plugin.forward_context():
            assert torch.equal(model["head"](x), expected)
            assert torch.equal(model["head"](x.bfloat16()), of_bf16)


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-true"])
def test_kept_modules_compile(precision: Any) -> None:
    torch._dynamo.reset()
    plugin = PLUGINS[precision](keep_fp32=("1",), **IN_BF16[precision])
    model = plugin.convert_module(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)))
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    with plugin.forward_context(), torch.no_grad():
        expected = model(x)
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(actual, expected)
    assert actual.dtype == torch.bfloat16


def test_a_model_in_fp32_gets_no_hooks_and_a_later_run_drops_those_of_an_earlier() -> None:
    def hooks(model: nn.Module) -> int:
        return sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in model.modules())

    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Conv1d(16, 16, 1))
    Bf16MixedPrecision().convert_module(model)
    assert hooks(model) == 0
    for _ in range(2):
        Bf16TruePrecision().convert_module(model)
        assert hooks(model) == 3
    Fp8Precision().convert_module(model)
    assert hooks(model) == 0
    assert set(dtypes(model).values()) == {torch.float32}


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        (nn.Bilinear(8, 8, 8), 2),
        (nn.PReLU(), 1),
        (nn.GRU(8, 8), 1),
        (nn.GRUCell(8, 8), 2),
        (weight_norm(nn.Linear(8, 8, bias=False)), 1),
    ],
    ids=str,
)
def test_layers_that_take_one_dtype_get_it(layer: nn.Module, count: int) -> None:
    plugin = Bf16TruePrecision()
    model = plugin.convert_module(copy.deepcopy(layer))
    # of one dtype or of two
    for last in (torch.float32, torch.bfloat16):
        inputs = [torch.randn(2, 8, dtype=dtype) for dtype in (torch.float32, last)[-count:]]
        with plugin.forward_context():
            y = model(*inputs)
        assert (y[0] if isinstance(y, tuple) else y).dtype == torch.bfloat16


def test_inputs_of_another_dtype_in_bf16_true_keep_their_identity_and_structure() -> None:
    plugin = Bf16TruePrecision()
    attention = plugin.convert_module(nn.MultiheadAttention(16, 2, batch_first=True))
    x = torch.randn(2, 3, 16)
    seen: list[dict[str, Tensor]] = []
    # after the hook of the plugin
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    with plugin.forward_context():
        _, weights = attention(query=x, key=x, value=x, attn_mask=torch.zeros(3, 3))
        assert weights.dtype == torch.bfloat16
    # by their identity, torch recognises self-attention
    assert seen[0]["query"] is seen[0]["key"] is seen[0]["value"]
    assert {tensor.dtype for tensor in seen[0].values()} == {torch.bfloat16}
    lstm = plugin.convert_module(nn.LSTM(16, 4))
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 16), torch.randn(2, 16)])
    state = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    assert lstm(packed, state)[0].data.dtype == torch.bfloat16


def test_quantized_and_integer_parameters_are_left_alone() -> None:
    model = nn.Linear(4, 4)
    model.codes = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    model.counts = nn.Parameter(torch.arange(4), requires_grad=False)
    Bf16TruePrecision().convert_module(model)
    assert model.weight.dtype == torch.bfloat16
    assert (model.codes.dtype, model.counts.dtype) == (torch.float8_e4m3fn, torch.int64)


def test_tied_parameters_and_gradients_follow() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 8), "head": nn.Linear(8, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    model["head"](torch.randn(2, 8)).sum().backward()
    Bf16TruePrecision().convert_module(model)
    assert model["head"].weight is model["embedding"].weight
    assert model["head"].weight.grad.dtype == model["head"].weight.dtype == torch.bfloat16


def test_bf16_mixed_leaves_parameters_as_they_came_unless_asked() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4).bfloat16(), nn.Linear(4, 4).double())
    Bf16MixedPrecision().convert_module(model)
    assert [layer.weight.dtype for layer in model] == [torch.bfloat16, torch.float64]
    Bf16MixedPrecision(param_dtype="float32").convert_module(model)
    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.float32]
    # torch requires the dtype of the weight
    assert model[0].running_mean.dtype == torch.float32


@pytest.mark.parametrize("argument", ["keep_fp32", "ignore_modules"])
def test_a_pattern_that_matches_nothing_changes_nothing(argument: str) -> None:
    for precision in ("fp8-delayed", "bf16-true") if argument == "keep_fp32" else ("fp8-delayed",):
        model = Everything()
        before = dtypes(model)
        with pytest.raises(ValueError, match=rf"`{argument}` pattern .nrom. matches no module .*conv"):
            PLUGINS[precision](**{argument: ("nrom",)}).convert_module(model)
        assert dtypes(model) == before


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-true"])
def test_a_weight_tied_to_a_kept_module(precision: Any) -> None:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(24, 16), "norm": nn.LayerNorm(16), "head": nn.Linear(16, 24, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    plugin = PLUGINS[precision](keep_fp32=("embedding",))
    plugin.convert_module(model)
    assert model["head"].weight.dtype == torch.float32
    with plugin.forward_context():
        y = model["head"](model["norm"](model["embedding"](torch.tensor([1, 2]))))
    y.float().sum().backward()
    assert model["head"].weight.grad.dtype == torch.float32


def test_compute_dtype_fp32() -> None:
    plugin = Fp8Precision(compute_dtype="float32", ignore_modules=("1",))
    model = plugin.convert_module(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)))
    with plugin.forward_context():
        assert model(torch.randn(2, 16, dtype=torch.bfloat16)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        assert model(torch.randn(2, 16)).detach().numpy().dtype == "float32"
    with Fp8Precision().forward_context(), pytest.raises(TypeError, match="Got unsupported ScalarType BFloat16"):
        model[0](torch.randn(2, 16)).detach().numpy()


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_kept_in_fp32(training: bool) -> None:
    plugin = Bf16TruePrecision(keep_fp32=("1",))
    model = plugin.convert_module(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).train(training)
    assert {model[1].weight.dtype, model[1].running_mean.dtype, model[1].running_var.dtype} == {torch.float32}
    with plugin.forward_context():
        assert model(torch.randn(4, 8)).dtype == torch.bfloat16
    assert (model[1].running_mean.abs().max() > 0) == training
