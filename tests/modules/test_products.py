"""Products in bf16 beside products in FP8: each is bit for bit what it is where all three have its precision."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sqnr import sqnr
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import CurrentScaling, DelayedScaling, convert, scaling_state
from lightning_fp8.ops.formats import OPERAND_OF, PRODUCTS
from lightning_fp8.scaling.recipe import Recipe

ROWS, INPUTS, OUTPUTS = (3, 16), 32, 48
# all but the one that leaves the layer plain
CHOICES = [chosen for count in range(3) for chosen in itertools.combinations(PRODUCTS, count)]
RECIPES: dict[str, Callable[..., Recipe]] = {"delayed": DelayedScaling, "current": CurrentScaling}

Step = tuple[Tensor, ...]


def layer(in_bf16: tuple[str, ...], bias: bool, kind: str = "delayed") -> nn.Linear:
    torch.manual_seed(1)
    recipe = RECIPES[kind](**dict.fromkeys(in_bf16, "bf16"))
    return convert(nn.Linear(INPUTS, OUTPUTS, bias=bias), recipe)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(*ROWS, features, generator=generator) for features in (INPUTS, OUTPUTS))
    return x.requires_grad_(), dy.bfloat16()


def step(model: nn.Module, seed: int, run: Callable[[Tensor], Tensor] | None = None) -> Step:
    """Output and gradients of one training step under autocast."""
    x, dy = batch(seed)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = (model if run is None else run)(x)
    y.backward(dy)
    scaling_state(model).update()
    return (y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters()))  # type: ignore[return-value,union-attr]


def in_plain_bf16(model: nn.Linear, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw by torch's own products."""
    x, dy = batch(seed)
    x, dy, w = x.detach().bfloat16(), dy.flatten(0, 1), model.weight.detach().bfloat16()
    y = F.linear(x, w, None if model.bias is None else model.bias.detach().bfloat16())
    return y, (dy @ w).float().view(*ROWS, INPUTS), (dy.t() @ x.flatten(0, 1)).float()


def check_layer(in_bf16: tuple[str, ...], bias: bool, kind: str, run: Any = lambda model: None) -> None:
    mixed, in_fp8 = layer(in_bf16, bias, kind), layer((), bias, kind)
    state = scaling_state(mixed)
    for seed in range(2):
        found, of_fp8 = step(mixed, seed, run(mixed)), step(in_fp8, seed)
        plain = in_plain_bf16(mixed, seed)
        for product, got, eight, sixteen in zip(PRODUCTS, found, of_fp8, plain, strict=False):
            assert torch.equal(got, sixteen if product in in_bf16 else eight), product
            assert not torch.equal(eight, sixteen)
        if bias:
            assert torch.equal(found[3], batch(seed)[1].float().sum((0, 1))) or torch.equal(found[3], of_fp8[3])
            torch.testing.assert_close(found[3], of_fp8[3], rtol=1e-6, atol=1e-5)
        # what no product takes in FP8 is not cast, and leaves no amax
        for role, row in (("input", 0), ("grad_output", 1)):
            assert bool(state.amax_history[0, row] > 0) is not OPERAND_OF[role].issubset(in_bf16)  # type: ignore[index]
        assert bool(state.amax[2] > 0) is not OPERAND_OF["weight"].issubset(in_bf16)
        # the host waits for no history that never comes
        assert state.every_tensor_has_history is (kind == "delayed")


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_bf16", CHOICES, ids="-".join)
def test_each_product_is_that_of_its_precision(in_bf16: tuple[str, ...], bias: bool, kind: str) -> None:
    check_layer(in_bf16, bias, kind)


@pytest.mark.parametrize("in_bf16", CHOICES, ids="-".join)
def test_with_the_kernels(in_bf16: tuple[str, ...], cuda_half: Any) -> None:
    check_layer(in_bf16, True, "delayed")
    assert cuda_half


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("in_bf16", CHOICES, ids="-".join)
def test_compiled(in_bf16: tuple[str, ...]) -> None:
    check_layer(in_bf16, True, "delayed", compiled)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("in_bf16", CHOICES, ids="-".join)
def test_recomputed(in_bf16: tuple[str, ...], reentrant: bool) -> None:
    check_layer(in_bf16, True, "delayed", lambda model: lambda x: checkpoint(model, x, use_reentrant=reentrant))


def test_the_eighth_combination_leaves_the_layer_plain() -> None:
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Linear(OUTPUTS, OUTPUTS))
    convert(model, overrides={"0": dict.fromkeys(PRODUCTS, "bf16")})
    assert type(model[0]) is nn.Linear
    fallen = convert(nn.Linear(INPUTS, OUTPUTS))
    fallen.load_state_dict(model[0].state_dict())
    scaling_state(fallen).switches.fall_back("")
    results = [step_of_plain(one) for one in (model[0], fallen)]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def step_of_plain(model: nn.Module) -> Step:
    x, dy = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.backward(dy)
    return (y.detach(), x.grad, *(parameter.grad for parameter in model.parameters()))  # type: ignore[return-value]


def test_wgrad_in_bf16_is_far_nearer_to_the_truth() -> None:
    x, dy = (torch.randn(512, 64) for _ in range(2))
    expected = dy.double().t() @ x.double()
    found = {}
    for wgrad in ("fp8", "bf16"):
        model = convert(nn.Linear(64, 64, bias=False), DelayedScaling(wgrad=wgrad))  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16):
            model(x).backward(dy.bfloat16())
        assert model.weight.grad is not None
        found[wgrad] = sqnr(model.weight.grad, expected)
    # E4M3 times E5M2 has 25 dB; bf16 operands and a bf16 result 51 dB
    assert found["fp8"] < 30
    assert found["bf16"] > 48


def test_without_autocast_the_dtype_is_that_of_the_input() -> None:
    x, dy = batch(0)
    model = layer(("fprop", "wgrad"), True)
    y = model(x)
    y.backward(dy.float())
    rows, gradients = x.detach().flatten(0, 1), dy.float().flatten(0, 1)
    assert torch.equal(y, F.linear(x, model.weight, model.bias))
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, gradients.t() @ rows)


@pytest.mark.parametrize("in_bf16", CHOICES, ids="-".join)
def test_an_evaluation_is_that_of_training(in_bf16: tuple[str, ...]) -> None:
    model = layer(in_bf16, True)
    y = step(model, 0)[0]
    trained = step(model, 0)[0]
    del y
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(batch(0)[0]), trained)


# what a product takes, captured where layers of all kinds call it


class Calls:
    """Input, weight and gradient of the output of every call of the operator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lightning_fp8 import ops

        self.made: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        linear = ops.linear

        def noting(x: Tensor, parameter: Tensor, *rest: Any) -> Tensor:
            y: Tensor = linear(x, parameter, *rest)
            gradients: list[Tensor] = []
            y.register_hook(gradients.append)
            self.made.append((x.detach(), parameter, gradients))
            return y

        monkeypatch.setattr(ops, "linear", noting)

    def weight_gradient(self, leaf: Tensor) -> Tensor:
        """Of a parameter, by plain products in bf16."""
        total = torch.zeros_like(leaf)
        for x, parameter, (dy,) in self.made:
            dw = (dy.flatten(0, -2).t() @ x.bfloat16().flatten(0, -2)).to(parameter.dtype)
            (part,) = (
                torch.autograd.grad(parameter, leaf, dw, retain_graph=True, allow_unused=True)
                if (parameter is not leaf)
                else (dw,)
            )
            total += 0 if part is None else part
        return total


def attention(**kwargs: Any) -> nn.Module:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True, **kwargs)

        def forward(self, x: Tensor) -> Tensor:
            other = x[..., : kwargs.get("kdim", 32)]
            y: Tensor = self.attention(x, other, other, need_weights=False)[0]
            return y

    return Attention()


class Shared(nn.Module):
    """Three layers with one input, of which conversion knows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q * k + v


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(48, 32), nn.Tanh(), Conv1D(32, 48))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "packed": attention,
    "separate": lambda: attention(kdim=16, vdim=16),
    "shared": Shared,
    "conv1d": conv1d,
    "fused": lambda: nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)),
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_all_kinds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    models = [KINDS[name]()]
    models.append(KINDS[name]())
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for wgrad, model in zip(("fp8", "bf16"), models, strict=True):
        convert(model, DelayedScaling(wgrad=wgrad))  # type: ignore[arg-type]
        calls = Calls(monkeypatch)
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        found.append((y, x.grad))
        monkeypatch.undo()
    # the forward and dgrad are in FP8 as before: those of layers that are fused differ in roundings between operators
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert len(weights) >= 2
    for weight in weights:
        assert weight.grad is not None
        assert torch.equal(weight.grad, calls.weight_gradient(weight))


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Of all tensors that a forward under autocast keeps, each part of memory once; parameters are there anyway."""
    found: dict[int, int] = {}
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        model(x)
    return sum(found.values())


@pytest.mark.parametrize(
    ("make", "x_dtype", "of_fp8", "of_bf16"),
    [
        (lambda: nn.Linear(32, 48), torch.bfloat16, 1, 2),
        # rounded once for all three
        (Shared, torch.float32, 1, 2),
        # relu keeps its result anyway
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(32, 48)), torch.bfloat16, 3, 2),
    ],
)
def test_bytes_kept_for_backward(make: Any, x_dtype: torch.dtype, of_fp8: int, of_bf16: int) -> None:
    x = torch.randn(64, 32, dtype=x_dtype)
    results = {
        wgrad: kept_bytes(convert(make(), DelayedScaling(wgrad=wgrad)).requires_grad_(), x.clone().requires_grad_())
        for wgrad in ("fp8", "bf16")
    }
    # all else is the same
    assert results["bf16"] - results["fp8"] == (of_bf16 - of_fp8) * x.numel()


@pytest.mark.parametrize("half", ["reference", "kernels"])
@pytest.mark.parametrize("names", list(itertools.permutations(("q", "k", "v"))))
def test_layers_of_one_input_may_differ_in_their_products(
    names: tuple[str, str, str], half: str, request: pytest.FixtureRequest
) -> None:
    """A cast that one of them has made is taken by another one only in the layouts in which it has been made."""
    if half == "kernels":
        request.getfixturevalue("cuda_half")
    choices = [{"fprop": "bf16"}, {"wgrad": "bf16"}, {"fprop": "bf16", "wgrad": "bf16"}]
    overrides = dict(zip(names, choices, strict=True))
    torch.manual_seed(0)
    shared = convert(Shared(), overrides=overrides)  # type: ignore[arg-type]
    assert shared.q.fp8[""].shared_input is not None
    separate = [convert(copy.deepcopy(unconverted(shared, name)), overrides={"": overrides[name]}) for name in "qkv"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(8, 32, generator=generator, requires_grad=True)
        q, k, v = (one(x) for one in separate)
        (q * k + v).sum().backward()
        gradient, x.grad = x.grad, None
        y = shared(x)
        y.sum().backward()
        assert torch.equal(y, q * k + v)
        torch.testing.assert_close(x.grad, gradient, rtol=1e-6, atol=1e-6)
        for layer, alone in zip((shared.q, shared.k, shared.v), separate, strict=True):
            assert torch.equal(layer.weight.grad, alone.weight.grad)
            scaling_state(alone).update()
        scaling_state(shared).update()
        shared.zero_grad()
        for alone in separate:
            alone.zero_grad()
    assert shared.q.fp8[""].shared_input._rounded is None or shared.q.fp8[""].shared_input._rounded.x() is x


def test_an_input_that_a_hook_changes_is_rounded_again() -> None:
    model = convert(Shared(), DelayedScaling(fprop="bf16", wgrad="bf16"))
    model.k.register_forward_pre_hook(lambda module, args: args[0].mul_(2))
    x = torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.clone())
        q, k, v = (F.linear(x * by, one.weight, one.bias) for by, one in ((1, model.q), (2, model.k), (2, model.v)))
    assert torch.equal(y, q * k + v)


def unconverted(model: nn.Module, name: str) -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.load_state_dict(model.get_submodule(name).state_dict())
    return layer
