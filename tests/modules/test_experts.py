"""Experts in 3-D parameters: each expert is a separate FP8 linear layer, bit for bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experts import EXPERTS, FORMS, HIDDEN, TOKENS, WIDTH, Separate, experts, mixtral, routing
from moved import to_bf16
from sqnr import sqnr
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fp8 import DelayedScaling, convert, scaling_state, unconvert
from lightning_fp8.runtime.warn_once import warn_once

STACKS = ("gate_up_proj", "down_proj")


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def step(model: Any, x: Tensor, index: Tensor, weights: Tensor, in_bf16: bool) -> list[Tensor]:
    """A forward and a backward: the output, and the gradients of input and routing weights."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with autocast(in_bf16):
        y = model(x, index, weights)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    return [y.detach(), x.grad, weights.grad]


def assert_same_state(one: Any, other: Any) -> None:
    states = [scaling_state(model) for model in (one, other)]
    assert sorted(states[0].names) == sorted(states[1].names)
    order = [states[1].names.index(name) for name in states[0].names]
    for field in ("scale", "amax"):
        assert torch.equal(getattr(states[0], field), getattr(states[1], field)[order])
    delayed = [states[1].names.index(name) for name in states[0].names[: states[0].delayed]]
    assert torch.equal(states[0].amax_history, states[1].amax_history[:, delayed])


def train_both(in_bf16: bool, recipe: DelayedScaling | None = None, form: str = "gate") -> Iterator[tuple[Any, Any]]:
    """Compares experts and equivalent separate layers bit for bit in four steps, after each of which it gives both."""
    stacked = experts(form)
    separate = convert(Separate(stacked), recipe)
    convert(stacked, recipe)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (stacked, separate)]
    # in the second step expert 1 has no token; in the third, expert 2 has none in either micro-batch
    for number, without in enumerate([(), (1,), (2,), ()]):
        for micro_batch in range(2):
            x = torch.randn(TOKENS, WIDTH) * 2.0**number
            given = (x, *routing(*without, seed=2 * number + micro_batch), in_bf16)
            for one, other in zip(step(stacked, *given), step(separate, *given), strict=True):
                assert torch.equal(one, other)
        for name in STACKS:
            gradient = getattr(stacked, name).grad
            assert torch.equal(gradient.mT if stacked.is_transposed else gradient, separate.gradient(name))
            if stacked.has_bias:
                assert torch.equal(getattr(stacked, f"{name}_bias").grad, separate.gradient(name, "bias"))
        assert_same_state(stacked, separate)
        for model, optimizer in zip((stacked, separate), optimizers, strict=True):
            scaling_state(model).update()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(stacked, separate)
        yield stacked, separate


@pytest.mark.parametrize("form", ["gate", "transposed", "transposed, biases, interleaved gate"])
def test_equal_separate_linear_layers_bit_for_bit(half: str, form: str) -> None:
    in_bf16 = half == "kernels"
    for stacked, separate in train_both(in_bf16, form=form):
        for name in STACKS:
            for weight, layer in zip(getattr(stacked, name), getattr(separate, name), strict=True):
                assert torch.equal(weight.T if stacked.is_transposed else weight, layer.weight)
    given = torch.randn(TOKENS, WIDTH), *routing()
    with torch.no_grad(), autocast(in_bf16):
        assert torch.equal(stacked.eval()(*given), separate.eval()(*given))
    assert_same_state(stacked, separate)
    # frozen, they pass gradients on
    for model in (stacked, separate):
        model.train().requires_grad_(False)
    for one, other in zip(step(stacked, *given, in_bf16), step(separate, *given, in_bf16), strict=True):
        assert torch.equal(one, other)
    assert stacked.down_proj.grad is None
    state = scaling_state(stacked)
    # every expert has its own scale in each of the three roles
    assert len({*state.scale.tolist()}) > 0.9 * len(state.names) == 0.9 * 3 * 2 * EXPERTS
    assert "gate_up_proj.3.input" in state.names


def test_experts_of_llama_4_are_separate_linear_layers_bit_for_bit() -> None:
    """They are given rows of each expert, one after the other, and have no routing of their own."""
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    stacked = Llama4TextExperts(
        SimpleNamespace(num_local_experts=EXPERTS, hidden_size=WIDTH, intermediate_size=HIDDEN, hidden_act="silu")
    )
    separate = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(*getattr(stacked, name).shape[1:], bias=False) for name in STACKS})
        for _ in range(EXPERTS)
    )
    for name in STACKS:
        stack = nn.init.normal_(getattr(stacked, name), std=0.2)
        for layers, weight in zip(separate, stack.detach(), strict=True):
            layers[name].weight.data.copy_(weight.t())  # type: ignore[index]
    convert(stacked)
    convert(separate)
    copied = unconvert(copy.deepcopy(stacked))
    assert type(copied) is Llama4TextExperts
    for _ in range(3):
        x, other = (torch.randn(EXPERTS * TOKENS, WIDTH).requires_grad_() for _ in range(2))
        other.data.copy_(x.data)
        outputs = []
        for layers, rows in zip(separate, other.chunk(EXPERTS), strict=True):
            gate, up = layers["gate_up_proj"](rows).chunk(2, -1)  # type: ignore[index]
            outputs.append(layers["down_proj"](up * nn.functional.silu(gate)))  # type: ignore[index]
        y, expected = stacked(x), torch.cat(outputs)
        assert torch.equal(y, expected)
        assert sqnr(copied(x), y) > 18
        for one in (y, expected):
            one.square().sum().backward()
        assert torch.equal(x.grad, other.grad)
        for name in STACKS:
            gradients = torch.stack([layers[name].weight.grad.t() for layers in separate])  # type: ignore[index]
            assert torch.equal(getattr(stacked, name).grad, gradients)
        assert torch.equal(scaling_state(stacked).amax.sort().values, scaling_state(separate).amax.sort().values)
        for model in (stacked, separate):
            scaling_state(model).update()
            model.zero_grad()


@pytest.mark.parametrize("products", [("wgrad",), ("fprop", "dgrad")])
def test_products_in_bf16(products: tuple[str, ...]) -> None:
    recipe = DelayedScaling(**dict.fromkeys(products, "bf16"))  # type: ignore[arg-type]
    for stacked, _ in train_both(True, recipe):
        assert stacked.in_bf16 == products
    for row, name in enumerate(scaling_state(stacked).names):
        # the first expert of a product, in FP8 for fprop, and the only one for wgrad
        assert bool(scaling_state(stacked).scale[row] != 1) is not ("dgrad" in products and name.endswith("weight"))


@pytest.mark.parametrize("form", [*FORMS, "norm"])
def test_near_the_plain_experts_in_all_their_forms(form: str) -> None:
    plain, given = experts("gate" if form == "norm" else form), (torch.randn(TOKENS, WIDTH), *routing(), False)
    if form == "norm":
        plain.has_post_expert_norm, plain.post_expert_norm = True, torch.nn.RMSNorm(WIDTH)
        plain.post_expert_norm.weight.data.uniform_(0.5, 2.0)
        plain.config._experts_implementation = "batched_mm"
    fp8 = convert(copy.deepcopy(plain))
    for one, other in zip(step(fp8, *given), step(plain, *given), strict=True):
        assert 14 < sqnr(one, other) < 40
    for (name, one), other in zip(fp8.named_parameters(), plain.parameters(), strict=True):
        # the gradient of the last bias passes through no cast
        assert 14 < sqnr(one.grad, other.grad) < (200 if name == "down_proj_bias" else 40)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_are_those_of_the_definition(device: str) -> None:
    model, given = convert(experts().to(device)), (torch.randn(TOKENS, WIDTH), *routing())
    with FlopCounterMode(display=False) as counter:
        y = model(*(tensor.to(device).requires_grad_(tensor.is_floating_point()) for tensor in given))
        y.sum().backward()
    assert y.shape == (TOKENS, WIDTH)
    # each token has two experts, each with a product for gate and up and one for down; backward has twice as many
    assert counter.get_total_flops() == 3 * TOKENS * 2 * (2 * WIDTH * 2 * HIDDEN + 2 * HIDDEN * WIDTH)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.down_proj[3, 0] += 1


def _new_parameter(model: Any) -> None:
    model.gate_up_proj = torch.nn.Parameter(torch.randn_like(model.gate_up_proj))


@pytest.mark.parametrize("change", [_in_place, _new_parameter])
def test_a_changed_weight_is_cast_again(change: Callable[[Any], None]) -> None:
    model, given = convert(experts()), (torch.randn(TOKENS, WIDTH), *routing())
    before = model(*given)
    before.sum().backward()
    change(model)
    fresh = experts()
    fresh.load_state_dict(model.state_dict())
    assert not torch.equal(model(*given), before)
    assert torch.equal(model(*given), convert(fresh)(*given))


def test_weights_that_are_loaded_empty_the_histories_of_all_experts() -> None:
    model, given = convert(experts()), (torch.randn(TOKENS, WIDTH), *routing(), False)
    state = scaling_state(model)
    for _ in range(2):
        step(model, *given)
        state.update()
    with torch.no_grad():
        model.down_proj[2] *= 2
    step(model, *given)
    state.update()
    assert (state.amax_history[:3] > 0).all()
    model.load_state_dict({"down_proj": model.down_proj.detach()}, strict=False)
    assert not state.amax_history.any()


def test_an_expert_that_falls_back_computes_like_the_plain_one() -> None:
    plain, given = experts(), (torch.randn(TOKENS, WIDTH), *routing())
    fp8 = convert(copy.deepcopy(plain))
    for name in STACKS:
        for expert in range(EXPERTS):
            to_bf16(scaling_state(fp8), f"{name}.{expert}")
    torch.testing.assert_close(fp8(*given), plain(*given), rtol=1e-5, atol=1e-4)
    fp8(*given).sum().backward()
    assert fp8.down_proj.grad.any()
    assert not scaling_state(fp8).amax.any()


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_go_on_like_the_original_and_conversion_is_undone(how: Callable[[Any], Any]) -> None:
    model, given = experts(), (torch.randn(TOKENS, WIDTH), *routing(), False)
    plain, parameters = copy.deepcopy(model), dict(model.named_parameters())
    step(convert(model), *given)
    scaling_state(model).update()
    other = how(model)
    assert type(other) is type(model)
    model.zero_grad()
    other.zero_grad()
    found = step(model, *given)
    assert_equal(found, step(other, *given))
    assert torch.equal(model.down_proj.grad, other.down_proj.grad)
    assert scaling_state(other) is not scaling_state(model)
    expected = step(plain, *given)
    assert not torch.equal(found[0], expected[0])
    for one in (model, other):
        assert type(unconvert(one)) is FORMS["gate"]
        assert vars(one).keys() == vars(plain).keys()
        assert_equal(step(one, *given), expected)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_compiled_models_run_the_experts_eagerly_and_say_so_once() -> None:
    warn_once.cache_clear()
    torch._dynamo.reset()
    models = [convert(mixtral().model.layers[0].mlp) for _ in range(2)]
    models[1].compile(backend="eager")
    x = torch.randn(2, 6, WIDTH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            for model in models:
                model(x).square().sum().backward()
                scaling_state(model).update()
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(one.grad, other.grad)
            assert torch.equal(*(scaling_state(model).scale for model in models))
    assert len([one for one in said if "Experts in FP8 are not compiled" in str(one.message)]) == 1
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(convert(mixtral().model.layers[0].mlp), backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("strict", [True, False])
def test_a_program_of_experts_is_refused(strict: bool) -> None:
    layer = convert(mixtral().model.layers[0].mlp).eval()
    with torch.no_grad(), pytest.raises(Exception, match=r"Leave them out with `convert\(model, ignore_modules="):
        torch.export.export(layer, (torch.randn(2, 6, WIDTH),), strict=strict)


def wide(columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(EXPERTS, WIDTH, columns))


GIVEN = torch.ones(TOKENS, WIDTH), *routing()
# what is given, parameters that are replaced, and the error
BAD: list[tuple[tuple[Tensor, ...], dict[str, nn.Parameter], type[Exception], str]] = [
    *(
        (
            (GIVEN[0], GIVEN[1].where(GIVEN[1] != 1, other), GIVEN[2]),
            {},
            ValueError,
            rf"Fp8MixtralExperts 'experts.gate_up_proj.0': `top_k_index` names expert {other}, and there are 4\.",
        )
        for other in (5, -1)
    ),
    ((torch.ones(TOKENS, 33), *GIVEN[1:]), {}, ValueError, r"experts.* of gate_up_proj must be 32, .* \(\d+, 33\)"),
    ((GIVEN[0].double(), *GIVEN[1:]), {}, TypeError, "must be float32, bfloat16 or float16, got torch.float64"),
    (GIVEN, {"down_proj": wide(HIDDEN + 1)}, ValueError, r"input of down_proj must be 25, .* the shape \(\d+, 24\)"),
    (
        GIVEN,
        {"down_proj_bias": nn.Parameter(torch.randn(EXPERTS, WIDTH + 1))},
        ValueError,
        r"bias of 'experts.down_proj.0' must have the shape \(32,\), .* got \(33,\)",
    ),
]


@pytest.mark.parametrize(("given", "replaced", "kind", "message"), BAD)
def test_errors_name_the_experts_and_the_rule(given: Any, replaced: Any, kind: Any, message: str) -> None:
    form = "transposed, biases, interleaved gate" if "down_proj_bias" in replaced else "gate"
    model = convert(nn.ModuleDict({"experts": experts(form)})).experts
    for name, parameter in replaced.items():
        setattr(model, name, parameter)
    with pytest.raises(kind, match=message):
        model(*given)


def test_all_experts_are_cast_together(cuda_half: Counter[str]) -> None:
    """The CUDA half, with its kernels compiled for the host."""
    model = convert(experts())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for launches in (4, 2, 2):
        # one launch measures and one casts: at first per parameter, later for all weights of the model
        before = cuda_half["cast_weights"]
        for micro_batch in range(2):
            step(model, torch.randn(TOKENS, WIDTH), *routing(0, seed=micro_batch), False)
        scaling_state(model).update()
        optimizer.step()
        assert cuda_half["cast_weights"] - before == launches
