"""``Fp8MultiheadAttention`` compared with torch's own module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairwise import pairwise
from sqnr import sqnr
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, convert, describe, scaling_state, unconvert
from lightning_fp8.modules import Fp8Linear, Fp8MultiheadAttention
from lightning_fp8.modules.attention import SdpaMultiheadAttention

WIDTH, HEADS, BATCH, LENGTH, SOURCE = 32, 4, 3, 6, 5
pytestmark = pytest.mark.filterwarnings("ignore:.*mismatched.*")


def module(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    made = nn.MultiheadAttention(WIDTH, HEADS, **options)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):  # torch initializes it with zeros, which would hide a missing bias
            nn.init.normal_(parameter, std=0.5)
    return made


def operands(batch_first: bool, kdim: int = WIDTH, vdim: int = WIDTH, batched: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((LENGTH, WIDTH), (SOURCE, kdim), (SOURCE, vdim))
    made = [torch.randn(BATCH, *shape, generator=generator) for shape in shapes]
    made = [x if batch_first else x.transpose(0, 1) for x in made]
    return [(x if batched else x.select(0 if batch_first else 1, 0)).clone().requires_grad_() for x in made]


def mask(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.3
    chosen[..., 0] = False
    additive = torch.randn(shape, generator=torch.Generator().manual_seed(5)).masked_fill(chosen, float("-inf"))
    return {"none": None, "bool": chosen, "float": additive}[kind]


def run(
    model: nn.MultiheadAttention, inputs: list[Tensor], **options: Any
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Output, weights, and the gradients of inputs and parameters."""
    leaves = [*dict.fromkeys(inputs), *model.parameters()]
    y, weights = model(*inputs, **options)
    loss = (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
    if weights is not None:
        loss = loss + weights.float().square().sum()
    return y, weights, list(torch.autograd.grad(loss, leaves))


class Exact(SdpaMultiheadAttention):
    """The attention of converted layers with torch's projections."""

    def _in_operand(self, gemm: str) -> Tensor:
        return getattr(self, f"{gemm}_weight")

    def _project(self, gemm: str, x: Tensor, operand: Any, rows: slice, bias: Any) -> Tensor:
        return nn.functional.linear(x, operand[rows], bias)


def exact(plain: nn.MultiheadAttention) -> nn.MultiheadAttention:
    ours = copy.deepcopy(plain)
    ours.__class__ = Exact
    return ours


CASES = {
    "self": lambda q, k, v: [q, q, q],
    "key is value": lambda q, k, v: [q, k, k],
    "query is key": lambda q, k, v: [q, q, (2 * q).detach().requires_grad_()],
    "query is value": lambda q, k, v: [q, (2 * q).detach().requires_grad_(), q],
    "all different": lambda q, k, v: [q, k, v],
}


# each pair of options occurs in one of the runs
OPTIONS = pairwise(*[(True, False)] * 6, *[("none", "bool", "float")] * 2)


@pytest.mark.parametrize("case", CASES)
def test_forward_is_torchs_with_plain_projections(case: str) -> None:
    """The non-FP8 part: the same class with exact projections equals torch's module in fp32, including gradients."""
    for batch_first, batched, bias, extra, need_weights, each_head, kind, pad in OPTIONS:
        plain = module(bias=bias, add_bias_kv=extra, add_zero_attn=extra, batch_first=batch_first)
        ours = exact(plain)
        inputs = CASES[case](*operands(batch_first, batched=batched))
        length, source = LENGTH, inputs[1].shape[1 if batch_first and batched else 0]
        heads = (BATCH * HEADS if batched else HEADS,) if each_head else ()
        options = {
            "attn_mask": mask(kind, (*heads, length, source)),
            "key_padding_mask": mask(pad, (BATCH, source) if batched else (source,)),
            "need_weights": need_weights,
            "average_attn_weights": not each_head,
        }
        y, weights, grads = run(ours, inputs, **options)
        expected_y, expected_weights, expected_grads = run(plain, inputs, **options)
        torch.testing.assert_close(y, expected_y)
        assert (weights is None) == (expected_weights is None) == (not need_weights)
        if weights is not None:
            torch.testing.assert_close(weights, expected_weights)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_hint_dropout_and_bf16(need_weights: bool) -> None:
    plain = module(dropout=0.4, batch_first=True)
    ours = exact(plain)
    x = operands(True)[0]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    outputs = []
    for model in (ours, plain):
        torch.manual_seed(6)
        y, _, grads = run(model, [x, x, x], attn_mask=causal, is_causal=True, need_weights=need_weights)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.manual_seed(6)
            outputs.append((y, grads, *run(model, [x, x, x], attn_mask=causal, need_weights=need_weights)))
    (y, grads, in_bf16, _, grads_in_bf16), (t, t_grads, t_in_bf16, _, t_grads_in_bf16) = outputs
    torch.testing.assert_close(y, t)
    torch.testing.assert_close(grads, t_grads, rtol=1e-4, atol=1e-5)
    assert in_bf16.dtype == t_in_bf16.dtype == torch.bfloat16
    assert sqnr(in_bf16, t_in_bf16) > 40
    assert min(map(sqnr, grads_in_bf16, t_grads_in_bf16)) > 35


@pytest.mark.parametrize(
    ("case", "kind", "need_weights", "widths"),
    pairwise([*CASES], ["none", "bool", "float"], [True, False], [(WIDTH, WIDTH)])
    + [("all different", "none", True, widths) for widths in [(24, 40), (WIDTH, 16), (48, WIDTH)]],
)
def test_fp8_beside_torch(case: str, kind: str, need_weights: bool, widths: tuple[int, int]) -> None:
    plain = module(kdim=widths[0], vdim=widths[1], batch_first=True)
    fp8 = convert(copy.deepcopy(plain))
    is_packed = widths == (WIDTH, WIDTH)
    assert scaling_state(fp8).module_names == (
        ("in_proj", "out_proj") if is_packed else ("q_proj", "k_proj", "v_proj", "out_proj")
    )
    inputs = CASES[case](*operands(True, *widths))
    options = {"attn_mask": mask(kind, (LENGTH, inputs[1].shape[1])), "need_weights": need_weights}
    y, weights, grads = run(fp8, inputs, **options)
    expected_y, expected_weights, expected_grads = run(plain, inputs, **options)
    assert y.dtype == torch.float32
    assert sqnr(y, expected_y) > 24
    if weights is not None and expected_weights is not None:
        assert sqnr(weights, expected_weights) > 24
    # through two FP8 GEMMs and the softmax between them
    names = ["input"] * len(dict.fromkeys(inputs)) + [name for name, _ in plain.named_parameters()]
    found = {name: sqnr(g, e) for name, g, e in zip(names, grads, expected_grads, strict=True)}
    assert min(found.values()) > 17, found
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_bf16, _, _ = run(fp8, inputs, **options)
    assert in_bf16.dtype == torch.bfloat16
    assert sqnr(in_bf16, expected_y) > 22


def test_projections_are_those_of_fp8_linear_bit_for_bit() -> None:
    attention = convert(module(batch_first=True))
    linear = nn.Linear(WIDTH, 3 * WIDTH)
    linear.load_state_dict({"weight": attention.in_proj_weight, "bias": attention.in_proj_bias})
    convert(linear)
    x = operands(True)[0].detach()
    heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in linear(x).chunk(3, -1)]
    expected = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    assert torch.equal(attention(x, x, x, need_weights=False)[0], copy.deepcopy(attention.out_proj)(expected))


def test_parameters_keys_and_objects_stay_and_parts_may_be_left_out() -> None:
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)
    keys, parameters, layer = list(encoder.state_dict()), list(encoder.parameters()), encoder.self_attn
    plain_classes = [type(part) for part in encoder.modules()]
    convert(encoder, ignore_modules=("self_attn",))
    assert type(layer) is nn.MultiheadAttention
    assert scaling_state(encoder).module_names == ("linear1", "linear2")
    rows = {row.path: row.reason for row in describe(encoder, ("self_attn",))}
    reason = "matches `ignore_modules`: to convert it, remove 'self_attn'"
    assert rows["self_attn.out_proj"] == rows["self_attn"] == reason
    convert(encoder, ignore_modules=("*.out_proj",))
    assert scaling_state(encoder).module_names == ("self_attn.in_proj", "linear1", "linear2")
    assert encoder(torch.randn(3, 2, WIDTH)).isfinite().all()
    convert(encoder)
    assert list(encoder.state_dict()) == keys
    assert all(a is b for a, b in zip(encoder.parameters(), parameters, strict=True))
    assert encoder.self_attn is layer
    assert type(layer) is Fp8MultiheadAttention
    assert isinstance(layer, nn.MultiheadAttention)
    assert type(layer.out_proj) is type(encoder.linear1) is type(encoder.linear2) is Fp8Linear
    assert scaling_state(encoder).module_names == ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    unconvert(encoder)
    assert [type(part) for part in encoder.modules()] == plain_classes


def test_each_tensor_is_recorded_in_training_only_and_the_weight_is_cast_once(weight_casts: list[torch.Size]) -> None:
    attention = convert(module(batch_first=True), DelayedScaling(amax_history_len=4))
    state = scaling_state(attention)
    query, key, value = operands(True)
    attention.eval()
    attention(query, key, value)
    attention.train()
    with torch.no_grad():
        attention(query, key, value)
    assert state.amax[: state.delayed].tolist() == [0.0] * 4
    weight_casts.clear()
    for _ in range(3):
        attention(query, key, value)[0].sum().backward()
    assert len(weight_casts) == 2  # in_proj, out_proj
    recorded = dict(zip(state.names, state.amax.tolist(), strict=True))
    # one scale for the packed weight and its three inputs
    assert recorded["in_proj.input"] == max(x.abs().max().item() for x in (query, key, value))
    assert recorded["in_proj.weight"] == attention.in_proj_weight.abs().max().item()
    assert min(recorded.values()) > 0


def test_compiled() -> None:
    torch._dynamo.reset()
    eager = convert(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True))
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    x = operands(True)[0].detach()
    pad, target = mask("bool", (BATCH, LENGTH)), torch.randn(BATCH, LENGTH, WIDTH)
    for _ in range(2):
        for run_it, model in ((eager, eager), (call, compiled)):
            (run_it(x, src_key_padding_mask=pad) * target).sum().backward()
            scaling_state(model).update()
    assert torch.equal(scaling_state(eager).scale, scaling_state(compiled).scale)
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(q.grad, p.grad)


X, SHORT = torch.ones(2, 3, WIDTH), torch.ones(2, 3, 7)
NESTED = torch.nested.nested_tensor([X[0], X[1, :2]])
BAD: list[tuple[list[Tensor], dict[str, Any], type[Exception], str]] = [
    ([X.long(), X, X], {}, TypeError, r"'a\.in_proj': the query must be float32, bfloat16 or float16, got torch.int64"),
    ([X, SHORT, SHORT], {}, ValueError, r"dimension of the key must be 32, .* got the shape \(2, 3, 7\)"),
    ([X[None]] * 3, {}, ValueError, r"2 dimensions .* or 3"),
    ([X, X, X[:, :2]], {}, ValueError, "same length and batch size"),
    ([X] * 3, {"attn_mask": torch.zeros(1, 3)}, ValueError, r"`attn_mask` .* \(3, 3\) or \(8, 3, 3\), got \(1, 3\)"),
    ([X] * 3, {"key_padding_mask": torch.zeros(3, 2)}, ValueError, r"`key_padding_mask` .* \(2, 3\), got \(3, 2\)"),
    ([X] * 3, {"attn_mask": torch.zeros(3, 3, dtype=torch.int64)}, TypeError, "bool or floating point.*int64"),
    ([X] * 3, {"is_causal": True}, ValueError, "`is_causal`"),
    ([NESTED] * 3, {}, TypeError, "nested"),
]


@pytest.mark.parametrize(("inputs", "options", "kind", "message"), BAD)
def test_bad_input_is_named(inputs: list[Tensor], options: dict[str, Any], kind: type[Exception], message: str) -> None:
    attention = convert(nn.ModuleDict({"a": module(batch_first=True)}))["a"]
    with pytest.raises(kind, match=message):
        attention(*inputs, **options)


@pytest.mark.parametrize(
    ("kdim", "name", "shape", "rows"),
    [
        (WIDTH, "in_proj_weight", (2 * WIDTH, WIDTH), 3 * WIDTH),
        (WIDTH, "in_proj_bias", (4 * WIDTH,), 3 * WIDTH),
        (16, "k_proj_weight", (WIDTH + 8, 16), WIDTH),
    ],
)
def test_rows_that_would_be_left_out_are_refused(kdim: int, name: str, shape: tuple[int, ...], rows: int) -> None:
    attention = convert(module(kdim=kdim))
    setattr(attention, name, nn.Parameter(torch.randn(shape)))
    with pytest.raises(ValueError, match=rf"`{name}` must have {rows} rows with embed_dim=32, got .* \({shape[0]}, ?"):
        attention(*operands(batch_first=False, kdim=kdim))


def test_plain_loop_evaluates_in_fp8() -> None:
    """Outside our contexts, too, a converted encoder stays off torch's fast path, which would bypass its layers."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    x, pad = operands(True)[0].detach(), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    pad[0, -2:] = True
    plain = copy.deepcopy(encoder)
    for ignored in ((), ("*.self_attn",)):
        fp8 = convert(copy.deepcopy(plain), ignore_modules=ignored)
        for model in (fp8, copy.deepcopy(fp8)):
            y = model.eval()(x, src_key_padding_mask=pad)
            with torch.no_grad():
                assert torch.equal(model(x, src_key_padding_mask=pad), y)
            assert torch.backends.mha.get_fastpath_enabled()
    unconvert(fp8)
    assert fp8.use_nested_tensor
    with torch.no_grad():
        expected = plain.eval()(x, src_key_padding_mask=pad)
        assert torch.equal(fp8.eval()(x, src_key_padding_mask=pad), expected)


def test_weights_of_another_shape_decide_where_torchs_own_do() -> None:
    plain = module(kdim=16, vdim=16)
    fp8 = convert(copy.deepcopy(plain))
    for layer in (plain, fp8):
        torch.manual_seed(3)
        for name in ("k_proj_weight", "v_proj_weight"):
            setattr(layer, name, nn.Parameter(torch.randn(WIDTH, 20) / 4))
    query, key, value = operands(batch_first=False, kdim=20, vdim=20)
    expected, _, theirs = run(plain, [query, key, value])
    actual, _, ours = run(fp8, [query, key, value])
    assert sqnr(actual, expected) > 15
    assert all(a.shape == b.shape for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(ValueError, match=r"'q_proj': .* the key must be 20, .* got the shape \(5, 3, 16\)"):
        fp8(query, *operands(batch_first=False, kdim=16, vdim=16)[1:])
