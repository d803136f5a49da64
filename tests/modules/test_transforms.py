"""FP8 layers under the transforms of ``torch.func`` and in forward mode: derivatives are refused, by one message.

Batches of samples, of weights and of gradients are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import feed_forward_blocks
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, scaling_state, unconvert
from lightning_fp8.scalings.recipe import Recipe

MESSAGE = r"lightning_fp8: FP8 layers run neither in forward-mode .* `lightning_fp8\.unconvert\(model\)`.*`ignore_modu"


class Projections(nn.Module):
    """Layers that share their input, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x) + self.k_proj(x) + self.v_proj(x)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 16),
    "feed_forward": lambda: feed_forward_blocks.sequential(nn.GELU()),
    "gated feed forward": feed_forward_blocks.llama,
    "shared input": Projections,
}


def dual(model: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, torch.ones_like(x)))


def watched_dual(model: nn.Module, x: Tensor) -> Any:
    # what watches operators keeps them out of the autograd function; its operators drop tangents without a word
    with torch.no_grad(), FlopCounterMode(display=False):
        return dual(model, x)


def of_parameters(transform: Any, model: nn.Module, x: Tensor) -> Any:
    return transform(lambda values: functional_call(model, values, (x,)).sum())(dict(model.named_parameters()))


DERIVATIVES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "jacfwd of the parameters": lambda model, x: of_parameters(jacfwd, model, x),
    "grad": lambda model, x: grad(lambda x: model(x).sum())(x),
    "grad of the parameters": lambda model, x: of_parameters(grad, model, x),
    "grad of each sample": lambda model, x: vmap(grad(lambda x: model(x[None].expand(12, -1)).sum()))(x),
    "grad of the parameters by each sample": lambda model, x: vmap(lambda x: of_parameters(grad, model, x))(x[:, None]),
    "jvp of the parameters": lambda model, x: of_parameters(lambda f: lambda p: jvp(f, (p,), (p,)), model, x),
    "vjp": lambda model, x: vjp(model, x),
    "jacrev": lambda model, x: jacrev(model)(x),
    "hessian": lambda model, x: hessian(lambda x: model(x).sum())(x),
    "forward_ad": dual,
    "forward_ad in a dispatch mode": watched_dual,
}


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize(
    ("kind", "recipe"), list(zip(LAYERS, (DelayedScaling(), CurrentScaling(), BlockScaling(), MXScaling())))
)
def test_derivatives_are_refused(kind: str, recipe: Recipe) -> None:
    torch.manual_seed(0)
    model, x = convert(LAYERS[kind](), recipe, min_features=0), torch.randn(12, 32)
    for training in (True, False):
        model.train(training)
        # so that copies of weights and inputs exist
        model(x)
        for derivative in DERIVATIVES.values():
            with pytest.raises(RuntimeError, match=MESSAGE):
                derivative(model, x)
    # the remedies
    x.requires_grad_()
    (found,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    expected = grad(lambda x: unconvert(model)(x)[:, 0].sum())(x)
    # of 12 seeds, the worst has 0.106, in training and in evaluation
    assert (found - expected).norm() < 0.12 * expected.norm()


def test_compiled_code_refuses_too() -> None:
    model, x = convert(nn.Linear(32, 16)), torch.randn(4, 32)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    inside = torch.compile(lambda x: jvp(model, (x,), (x,))[1], backend="eager")
    for derivative in (lambda: inside(x), lambda: DERIVATIVES["jvp"](compiled, x), lambda: dual(compiled, x)):
        with pytest.raises(Exception, match=MESSAGE):
            derivative()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_batch_of_samples_is_computed(kind: str, half: str) -> None:
    plain, x = LAYERS[kind](), torch.randn(4, 32)
    model = convert(copy.deepcopy(plain), min_features=0)
    model(x).sum().backward()
    scaling_state(model).update()
    for training in (True, False):
        model.train(training)
        y = vmap(model)(x[:, None])[:, 0]
        # the operators run for each sample, with the scale of the histories, or with one of each sample's own values
        torch.testing.assert_close(y, model(x) if training else torch.cat([model(row[None]) for row in x]))
        # of 12 seeds, the worst has 0.092
        assert (y - plain(x)).norm() < 0.11 * plain(x).norm()


@pytest.mark.parametrize(("kind", "recipe"), list(zip(LAYERS, [BlockScaling(), DelayedScaling()] * 2)))
def test_a_batch_of_models_is_computed(kind: str, recipe: Recipe) -> None:
    models, x = [LAYERS[kind]() for _ in range(3)], torch.randn(8, 32)
    expected = torch.stack([model(x) for model in models])
    expected.square().sum().backward()
    of_each = [{name: parameter.grad.clone() for name, parameter in model.named_parameters()} for model in models]
    values, _ = stack_module_state(models)  # type: ignore[arg-type]
    model = convert(models[0], recipe, min_features=0)
    # its cast is kept, and is not that of the others
    model(x)
    y = vmap(lambda values: functional_call(model, values, (x,)))(values)
    # of 12 seeds, the worst has 0.074
    assert (y - expected).norm() < 0.09 * expected.norm()
    y.square().sum().backward()
    for name, stacked in values.items():
        wanted = torch.stack([gradients[name] for gradients in of_each])
        assert (stacked.grad - wanted).norm() < 0.15 * wanted.norm()
    torch.testing.assert_close(model(x), y[0])


def test_a_batch_of_biases_is_computed() -> None:
    model, x, biases = convert(nn.Linear(32, 16)), torch.randn(8, 32), torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        # its rounded bias is kept
        without = model(x) - model.bias
        y = vmap(lambda bias: functional_call(model, {"bias": bias}, (x,)))(biases)
    torch.testing.assert_close(y, (without + biases[:, None]).bfloat16(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_batch_of_gradients_is_computed(kind: str, half: str) -> None:
    plain, x = LAYERS[kind](), torch.randn(2, 32)
    model, expected = convert(copy.deepcopy(plain), min_features=0), jacobian(plain, x)
    for training in (True, False):
        model.train(training)
        found = jacobian(model, x, vectorize=True)
        # of 12 seeds, the worst has 0.102
        assert (found - expected).norm() < 0.12 * expected.norm()
    # each gradient is scaled by its own values
    torch.testing.assert_close(found, jacobian(model, x))


def test_a_batch_of_gradients_of_products_in_bf16() -> None:
    plain, x = nn.Linear(32, 16), torch.randn(2, 32)
    for product in ("dgrad", "wgrad", "fprop"):
        model = convert(copy.deepcopy(plain), overrides={"*": {product: "bf16"}})
        y, rows = model(x), torch.randn(3, 2, 16)
        found = torch.autograd.grad(y, [*model.parameters()], rows, is_grads_batched=True)
        expected = torch.autograd.grad(plain(x), [*plain.parameters()], rows, is_grads_batched=True)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() < 0.09 * other.norm()
