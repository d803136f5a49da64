"""Frozen weights that are stored only in FP8: the same results as with masters, and what happens when they change."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_columns import unpadded
from fp8_numpy import code_values, saturating_cast
from frozen_models import (
    ADAPTERS,
    BASE,
    FROZEN,
    OnFrozenBase,
    converted,
    frozen_weights,
    on_frozen_base,
    payloads,
    same,
)
from pairwise import pairwise
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import convert, describe, scaling_state, unconvert, weights_unchanged
from lightning_fp8.conversion import fall_back
from lightning_fp8.modules.fp8_parameter import Fp8Parameter, dequantized, quantized


def train(model: nn.Module, run: Callable[[Tensor], Tensor], steps: int = 3, autocast: bool = True) -> list[Tensor]:
    """Outputs and input gradients of some steps, the parameters after them, and an evaluation."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(parameters, lr=1e-2), []
    for step in range(steps):
        torch.manual_seed(step)
        x = (torch.randn(2, 5, 32) * (1 + step)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(x)
        y.float().square().mean().backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        found += [y.detach(), x.grad]
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        evaluated = run(torch.ones(2, 5, 32))
    model.train()
    return [*found, *(p.detach().clone() for p in parameters), evaluated]


@pytest.mark.parametrize(
    ("mode", "dtype", "autocast"),
    [
        ("eager", torch.float32, True),
        ("eager", torch.bfloat16, True),
        ("eager", torch.float32, False),
        ("recomputed", torch.float32, False),
        ("recomputed reentrantly", torch.bfloat16, False),
        ("unchanged", torch.float32, True),
        ("compiled", torch.float32, False),
        ("fallen back", torch.float32, False),
    ],
)
def test_numbers_are_those_with_masters(mode: str, dtype: torch.dtype, autocast: bool) -> None:
    found, states = [], []
    for how in ("master", "fp8"):
        model = converted(how, dtype)
        run: Callable[[Tensor], Tensor] = model
        if mode.startswith("recomputed"):
            model.around = partial(checkpoint, use_reentrant="reentrantly" in mode)
        if mode == "compiled" and how == "fp8":
            # the masters run eagerly
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
        if mode == "fallen back":
            if how == "master":
                # a layer that computes in bf16 has the rounded values
                model.load_state_dict(converted("fp8", dtype).state_dict())
            fall_back(model, "mlp.0")
        with weights_unchanged(model) if mode == "unchanged" else nullcontext():
            found.append(train(model, run, autocast=autocast))
        states.append(scaling_state(model))
        assert set(frozen_weights(model)) == (set(BASE) if how == "fp8" else set())
    assert same(*found)
    if mode != "fallen back":
        assert same(*([state.scale, state.amax, state.amax_history] for state in states))
        assert all(float(state.amax[state.names.index("conv.weight")]) > 0 for state in states)


def test_a_weight_is_never_cast_again(weight_casts: list[torch.Size]) -> None:
    for how in ("master", "fp8"):
        model = converted(how)
        weight_casts.clear()
        train(model, model, steps=2, autocast=False)
        # with masters, once for training and once for evaluation; those of `first` and `head` are trained
        assert len(weight_casts) == (6 if how == "fp8" else 6 + 2 * len(BASE))


def test_a_compiled_model_sees_changes() -> None:
    layers, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)), torch.randn(5, 32)
    layers[0].requires_grad_(False)
    model = convert(layers, frozen_weights="fp8")
    compiled = torch.compile(model, backend="aot_eager")
    before = compiled(x)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(32, 32))
        y = compiled(x)
        with pytest.warns(UserWarning, match="'0' was to be kept in FP8 only and has been changed in place"):
            assert same(y, model(x))
        assert not same(y, before)
        model[0].weight += torch.randn(32, 32)
        assert same(compiled(x), model(x))
        assert not same(compiled(x), y)


def test_columns_are_kept_where_a_gpu_needs_them(cuda_half: Counter[str]) -> None:
    models = [nn.Sequential(nn.Linear(32, 72), nn.Linear(72, 32)).requires_grad_(False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, how in zip(models, ("master", "fp8"), strict=True):
        convert(model, frozen_weights=how).eval()
        with torch.no_grad():
            model(torch.ones(4, 32))
        assert all(weight.payload_t is None for weight in frozen_weights(model).values())
        x = torch.linspace(-1, 1, 4 * 32).view(4, 32).requires_grad_()
        y = model.train()(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad])
    assert same(*found)
    for weight in frozen_weights(models[1]).values():
        assert torch.equal(unpadded(weight.payload_t, len(weight)), weight.payload.t())
        kept = weight.payload_t
        models[1](x)
        assert weight.payload_t is kept


def bytes_of(model: nn.Module) -> int:
    """The size of all storages of the frozen weights."""
    held: list[Any] = [parameter for name, parameter in model.named_parameters() if name in BASE]
    contents = [vars(one.content).values() if isinstance(one, Fp8Parameter) else [one] for one in held]
    storages = {t.untyped_storage() for content in contents for t in content if isinstance(t, Tensor)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_bytes_per_parameter() -> None:
    model = on_frozen_base(torch.bfloat16)
    masters = [StorageWeakRef(p.untyped_storage()) for name, p in model.named_parameters() if name in BASE]
    assert len(masters) == len(BASE)
    assert bytes_of(model) == 2 * FROZEN
    convert(model, ignore_modules=ADAPTERS, frozen_weights="fp8")
    # two fp32 numbers per weight
    assert bytes_of(model) == FROZEN + 8 * len(BASE)
    assert all(master.expired() for master in masters)
    model(torch.randn(2, 5, 32)).sum().backward()
    assert bytes_of(model) == FROZEN + 8 * len(BASE)


WEIGHTS = {
    "small": lambda: torch.randn(96, 48) * 1e-4 * torch.logspace(-4, 0, 96)[:, None],
    "large": lambda: torch.randn(96, 48) * 300 * torch.logspace(-4, 0, 96)[:, None],
    "zeros": lambda: torch.zeros(3, 5),
    "one": lambda: torch.full((1, 1), -0.3),
    "tiny": lambda: torch.tensor([[0.0, 1e-30]]),
}


@pytest.mark.parametrize(("name", "dtype"), pairwise([*WEIGHTS], [torch.float32, torch.bfloat16, torch.float16]))
def test_the_cast_of_dequantized_values_is_the_same(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]().to(dtype)
    payload, scale_inv, amax = quantized(weight)
    scale = np.float32(1) / scale_inv.numpy()
    if float(amax) > 1e-20:
        scale = np.float32(448) / np.float32(weight.float().abs().max())
        assert scale_inv == np.float32(1) / scale
        assert np.array_equal(payload.numpy(), saturating_cast(weight.float().numpy(), scale, "e4m3"))
    values = dequantized(payload, scale_inv, amax, dtype)
    expected = code_values("e4m3")[payload.numpy()].astype(np.float32) / scale
    # the dtype's rounding, or its smallest subnormal
    assert np.allclose(values.float().numpy(), expected, rtol=torch.finfo(dtype).eps, atol=3e-8)
    assert same(quantized(values), (payload, scale_inv, amax))


def test_a_weight_that_is_not_finite_keeps_its_master() -> None:
    model = on_frozen_base()
    with torch.no_grad():
        model.conv.weight[3, 4] = float("inf")
        model.mlp[0].weight[3, 4] = float("nan")
    convert(model, ignore_modules=ADAPTERS, frozen_weights="fp8")
    assert set(frozen_weights(model)) == set(BASE) - {"conv.weight", "mlp.0.weight"}
    (row,) = [row for row in describe(model) if row.path == "conv"]
    assert "weight keeps its master: it is new, written or not finite" in row.reason


def rms(model: nn.Module, plain: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        pairs = {name: (w, plain.get_parameter(name).float()) for name, w in frozen_weights(model).items()}
        return {name: float((w.float() - p).norm() / p.norm()) for name, (w, p) in pairs.items()}


@pytest.mark.parametrize(("dtype", "assign"), [(torch.float32, True), (torch.bfloat16, False)])
def test_state_dict_is_plain_and_loads_back(dtype: torch.dtype, assign: bool) -> None:
    plain, model = on_frozen_base(dtype), converted("fp8", dtype)
    before, errors = payloads(model), rms(model, plain)
    worst = max(errors, key=errors.__getitem__)
    named = worst.removesuffix("_weight").removesuffix(".weight")
    assert 0.01 < errors[worst] < 0.05
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saved = model.state_dict()
        model.state_dict()
    (message,) = (str(warning.message) for warning in told)
    assert "6 frozen weights are rounded" in message
    assert f"{errors[worst]:.2%} at most, in {named!r}" in message
    assert list(saved) == list(plain.state_dict())
    assert {type(tensor) for tensor in saved.values()} == {Tensor}
    assert {saved[name].dtype for name in BASE} == {dtype}
    plain.load_state_dict(saved)
    other = convert(on_frozen_base(dtype, seed=1), ignore_modules=ADAPTERS, frozen_weights="fp8")
    other.load_state_dict(saved, assign=assign)
    assert same(payloads(other), before)
    # nothing is rounded again
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(other.state_dict(), saved)
    x = torch.randn(2, 5, 32)
    assert same(other.eval()(x), model.eval()(x))
    assert same(convert(plain.eval(), ignore_modules=ADAPTERS)(x), model(x))


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_later_are_rounded_with_a_scale_of_their_own(assign: bool) -> None:
    model = converted("fp8")
    train(model, model, steps=1, autocast=False)
    state = scaling_state(model)
    before = state.amax_history.clone()
    loaded = {name: 100 * value for name, value in on_frozen_base(seed=1).conv.state_dict().items()}
    model.conv.load_state_dict(loaded, assign=assign)
    assert set(frozen_weights(model)) == set(BASE)
    assert same(model.conv.weight.scale_inv, loaded["weight"].abs().max() / 448)
    plain = on_frozen_base()
    plain.load_state_dict(model.state_dict())
    reference = convert(plain, ignore_modules=ADAPTERS)
    x = torch.randn(2, 5, 32)
    assert same(model.eval()(x), reference.eval()(x))
    # the histories of this layer alone
    of_conv = torch.tensor([name.startswith("conv.") for name in state.names[: state.delayed]])
    assert before[0, of_conv].all()
    assert same(state.amax_history, before.masked_fill(of_conv, 0.0))
    state.reset()
    assert same(model.train()(x), reference.train()(x))
    assert same(*(s.amax[s.delayed :] for s in (state, scaling_state(reference))))


def test_a_model_on_the_meta_device() -> None:
    saved = on_frozen_base().state_dict()
    for assign in (False, True):
        with torch.device("meta"):
            model = OnFrozenBase()
        convert(model, ignore_modules=ADAPTERS, frozen_weights="fp8")
        assert [row.reason for row in describe(model)][2].endswith("weight in FP8 only once it is loaded")
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(saved, assign=assign)
        assert same(payloads(model), payloads(converted("fp8")))


def test_unconvert_and_masters_back() -> None:
    model, x = converted("fp8"), torch.randn(2, 5, 32)
    values = {name: weight.dequantized() for name, weight in frozen_weights(model).items()}
    with pytest.warns(UserWarning, match="1 frozen weights are rounded .*masters again"):
        convert(copy.deepcopy(model), ignore_modules=(*ADAPTERS, "conv"))
    back = convert(copy.deepcopy(model), ignore_modules=ADAPTERS, frozen_weights="master")
    assert not frozen_weights(back)
    assert same(back(x), model(x))
    back.conv.weight.requires_grad_()
    back(x).sum().backward()
    assert back.conv.weight.grad is not None
    with pytest.warns(UserWarning, match="6 frozen weights are rounded .*masters again, which hold the rounded"):
        unconvert(model)
    assert same({name: model.get_parameter(name).detach() for name in values}, values)
    assert {type(model.get_parameter(name)) for name in BASE} == {nn.Parameter}


# --- changes in place: merges ---


IN_PLACE = ["+=", "data +=", "data =", "add_", "setitem", "copy_", "foreach"]


@pytest.mark.parametrize(
    ("how", "dtype"),
    [*zip(IN_PLACE, itertools.cycle([torch.float32, torch.bfloat16])), ("data =", torch.bfloat16)],
)
def test_a_change_in_place_is_not_rounded(how: str, dtype: torch.dtype) -> None:
    model = converted("fp8", dtype)
    weight, delta = model.query.base.weight, torch.randn(32, 32, dtype=dtype) * 0.1
    expected = weight.dequantized() + delta
    with torch.no_grad():
        if how == "+=":
            model.query.base.weight += delta
        elif how == "data +=":
            model.query.base.weight.data += delta
        elif how == "data =":
            merged = model.query.base.weight.data.clone()
            merged += delta
            model.query.base.weight.data = merged
        elif how == "add_":
            weight.data.add_(delta)
        elif how == "setitem":
            weight.data[:] = expected
        elif how == "copy_":
            weight.copy_(expected)
        else:
            torch._foreach_add_([weight, torch.zeros(3)], [delta, torch.ones(3)])
    assert model.query.base.weight is weight
    assert not weight.is_fp8
    assert same(weight.dequantized(), expected)
    reference = converted("master", dtype)
    reference.load_state_dict(model.state_dict())
    assert same(model.state_dict()["query.base.weight"], expected)
    x = torch.randn(2, 5, 32)
    with pytest.warns(UserWarning, match=r"'query.base' was to be kept in FP8 only and has been changed in place"):
        assert same(model(x), reference(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    # a plain parameter from now on, which may be trained
    plain = model.query.base.weight
    assert type(plain) is nn.Parameter
    assert (plain.dtype, plain.requires_grad) == (dtype, False)
    assert same(plain.detach(), expected)
    assert set(frozen_weights(model)) == set(BASE) - {"query.base.weight"}
    assert "it is new, written or not" in next(row.reason for row in describe(model) if row.path == "query.base")
    moved = copy.deepcopy(model).to(torch.float64).to(torch.float32)
    assert same(moved.query.base.weight.detach(), expected.float())
    moved.query.base.weight.requires_grad_()
    moved(x).sum().backward()
    assert moved.query.base.weight.grad.any()
    convert(model)
    assert same(payloads(model)["query.base.weight"], quantized(expected)[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_of_the_same_values_changes_nothing(dtype: torch.dtype) -> None:
    # averaging, broadcasts and loaded checkpoints write the same values back
    model = converted("fp8", dtype)
    before, held = payloads(model), frozen_weights(model)
    model.load_state_dict(model.state_dict())
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        averaged.update_parameters(model)
    assert same(payloads(averaged.module), before)
    with torch.no_grad():
        for weight in frozen_weights(model).values():
            weight.lerp_(weight.clone(), 0.5)
            weight.data.mul_(1.0)
            weight.copy_(weight.dequantized())
            weight.data = weight.dequantized()
            weight[:2] = weight.dequantized()[:2]
    assert same(payloads(model), before)
    assert all(weight is held[name] and weight.is_fp8 for name, weight in frozen_weights(model).items())


# --- moves, copies, and refused uses ---


def test_copies_and_dtypes() -> None:
    model, x = converted("fp8"), torch.randn(2, 5, 32)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(payloads(other), payloads(model))
        assert same(other(x), model(x))
        with torch.no_grad():
            other.conv.weight.zero_()
        assert model.conv.weight.dequantized().any()
    for dtype in (torch.bfloat16, torch.float16):
        narrow, plain = copy.deepcopy(model).to(dtype), on_frozen_base()
        plain.load_state_dict(model.state_dict())
        plain = convert(plain.to(dtype), ignore_modules=ADAPTERS)
        assert {weight.dtype for weight in frozen_weights(narrow).values()} == {dtype}
        assert set(frozen_weights(narrow)) == set(BASE)
        values = {name: quantized(plain.get_parameter(name)) for name in BASE}
        assert same(payloads(narrow)["mlp.0.weight"], values["mlp.0.weight"][:2])
        assert same(narrow(x.to(dtype)), plain(x.to(dtype)))
    assert same(payloads(copy.deepcopy(model).to("cpu").bfloat16().float()), payloads(copy.deepcopy(model).bfloat16()))
    assert model.to("meta").conv.weight.payload.is_meta


def test_training_such_a_weight_is_refused_by_name() -> None:
    model = converted("fp8")
    weight, conv, query = model.attention.in_proj_weight, model.conv.weight, model.query.base.weight
    refused: list[Callable[[], Any]] = [
        weight.requires_grad_,
        lambda: setattr(weight, "requires_grad", True),
        lambda: model.attention.requires_grad_(True),
    ]
    for attempt in refused:
        with pytest.raises(RuntimeError, match=r"'attention.in_proj' is kept in FP8 only .* `lightning_fp8.convert\("):
            attempt()
    for values in (torch.zeros(3, 3), model.mlp[0].weight.data):
        with pytest.raises(RuntimeError, match=r"'conv' is kept in FP8 only: its `.data` .* replaced by \(32, 32\)"):
            conv.data = values
    conv.data = query.data
    assert same(conv.dequantized(), query.dequantized())
    convert(model)
    # an optimizer ignores such weights
    before = payloads(model)
    model.requires_grad_(False).head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model(torch.randn(2, 5, 32)).sum().backward()
    optimizer.step()
    assert same(payloads(model), before)


def test_describe_says_what_keeps_its_master() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.trained = nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 32)
            self.computed, self.head = nn.Linear(32, 32), nn.Linear(32, 48, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied().requires_grad_(False)
    model.trained.requires_grad_(True)
    torch.nn.utils.parametrizations.weight_norm(model.computed)
    convert(model, frozen_weights="fp8")
    reasons = {row.path: row.reason for row in describe(model) if row.is_layer}
    assert reasons["body"] == "converted, 32 -> 32; weight in FP8 only"
    assert reasons["head"] == "converted, 32 -> 48; weight keeps its master: it is tied"
    assert reasons["trained"] == "converted, 32 -> 32; weight keeps its master: it is trained"
    computed = "its weight is computed by WeightNorm; weight keeps its master: it is computed"
    assert reasons["computed"] == f"converted, 32 -> 32; {computed}"
    assert model.head.weight is model.embedding.weight
    assert "weight" not in {row.path: row.reason for row in describe(convert(Tied()))}["body"]


def test_no_effect_and_replaced_parameters_are_told() -> None:
    with pytest.warns(UserWarning, match="`frozen_weights='fp8'` has no effect: no converted layer has a frozen"):
        convert(nn.Linear(16, 16), frozen_weights="fp8")
    model = convert(converted("fp8"))
    assert set(frozen_weights(model)) == set(BASE)
    model.conv.weight = nn.Parameter(torch.randn(32, 32), requires_grad=False)
    with pytest.warns(UserWarning, match="'conv' was to be kept in FP8 only and has been replaced, as by `fully_sh"):
        model(torch.randn(2, 5, 32))
