"""The table of known linear layers: what it accepts in which version, and that each entry computes F.linear."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.models.falcon.modeling_falcon import FalconLinear

from lightning_fp8 import convert, describe
from lightning_fp8.conversion import linear_layers, register_linear
from lightning_fp8.conversion.linear_layers import KNOWN
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.modules.known_source import digest_of

GRAPHS, TIMM, OPENFOLD = (
    "torch_geometric.nn.dense.linear.Linear",
    "timm.layers.linear.Linear",
    "openfold.model.primitives.Linear",
)
# as released
SOURCES = {
    "torch_geometric 2.0.0": (
        GRAPHS,
        """
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
""",
    ),
    "torch_geometric 2.4.0 to 2.8.1": (
        GRAPHS,
        '''
    def forward(self, x: Tensor) -> Tensor:
        r"""Forward pass.

        Args:
            x (torch.Tensor): The input features.
        """
        return F.linear(x, self.weight, self.bias)
''',
    ),
    "timm 0.9.0 to 1.0.31": (
        TIMM,
        """
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_scripting():
            bias = self.bias.to(dtype=input.dtype) if self.bias is not None else None
            return F.linear(input, self.weight.to(dtype=input.dtype), bias=bias)
        else:
            return F.linear(input, self.weight, self.bias)
""",
    ),
    "OpenFold 2.0.0 to 2.2.0": (
        OPENFOLD,
        """
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        d = input.dtype
        deepspeed_is_initialized = (
                deepspeed_is_installed and
                deepspeed.comm.comm.is_initialized()
        )
        if self.precision is not None:
            with torch.cuda.amp.autocast(enabled=False):
                bias = self.bias.to(dtype=self.precision) if self.bias is not None else None
                return nn.functional.linear(input.to(dtype=self.precision),
                                            self.weight.to(dtype=self.precision),
                                            bias).to(dtype=d)

        if d is torch.bfloat16 and not deepspeed_is_initialized:
            with torch.cuda.amp.autocast(enabled=False):
                bias = self.bias.to(dtype=d) if self.bias is not None else None
                return nn.functional.linear(input, self.weight.to(dtype=d), bias)

        return nn.functional.linear(input, self.weight, self.bias)
""",
    ),
    "transformers 5.0.0 to 5.24.0": (
        "transformers.models.falcon.modeling_falcon.FalconLinear",
        """
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden_states = input @ self.weight.T
        if self.bias is None:
            return hidden_states
        return hidden_states + self.bias
""",
    ),
}
MakeClass = Callable[..., Any]


@pytest.fixture
def make_class(tmp_path: Path) -> MakeClass:
    """Makes a class of this qualified name with this forward, in a file as `inspect` needs it."""

    def make(name: str, forward: str, in_file: bool = True) -> Any:
        module, _, kind = name.rpartition(".")
        code = f"class {kind}(nn.Linear):\n{textwrap.indent(textwrap.dedent(forward), '    ')}"
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.py"
        if in_file:
            path.write_text(code)
        names = {"__name__": module, "torch": torch, "nn": nn, "F": nn.functional, "Tensor": Tensor}
        names |= {"deepspeed_is_installed": False}
        exec(compile(code, str(path), "exec"), names)
        for setting, value in KNOWN[name].settings.items() if name in KNOWN else ():
            setattr(names[kind], setting, value)
        return names[kind]

    return make


def reason_of(layer: nn.Module) -> str:
    return describe(nn.Sequential(layer))[0].reason


@pytest.mark.parametrize(("release", "bias"), list(zip(SOURCES, itertools.cycle([True, False]))))
def test_the_forward_of_each_release_is_known_and_computes_a_linear_layer(
    release: str, bias: bool, make_class: MakeClass
) -> None:
    name, source = SOURCES[release]
    layer, plain = make_class(name, source)(24, 16, bias), nn.Linear(24, 16, bias)
    plain.load_state_dict(layer.state_dict())
    for shape in ((24,), (5, 24), (2, 3, 24), (2, 0, 24)):
        x = torch.randn(shape)
        expected = x.numpy() @ layer.weight.detach().numpy().T + (layer.bias.detach().numpy() if bias else 0)
        for training in (True, False):
            np.testing.assert_allclose(layer.train(training)(x).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    converted, x = convert(nn.Sequential(layer.train())), torch.randn(8, 24)
    how = f"converted, 24 -> 16; with the known `forward` of {name}"
    assert [row.reason for row in describe(converted)] == [how]
    assert torch.equal(converted(x), convert(plain)(x))


# some of these packages cannot be imported beside each version of torch
INSTALLED = [name for name in KNOWN if importlib.util.find_spec(name.partition(".")[0])]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_installed_version_is_known(name: str) -> None:
    package, *path, kind = name.split(".")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    tree = ast.parse(Path(found.submodule_search_locations[0], *path).with_suffix(".py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    forwards = [node for node in classes[kind].body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    assert digest_of(ast.unparse(forwards[0])) in KNOWN[name].digests


def test_each_known_forward_is_that_of_a_release() -> None:
    released = {(name, digest_of(source)) for name, source in SOURCES.values()}
    assert {(name, digest) for name, known in KNOWN.items() for digest in known.digests} == released


def test_other_forwards_and_other_classes_are_not_known(make_class: MakeClass, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES["timm 0.9.0 to 1.0.31"][1]
    others = {
        "another version": make_class(
            TIMM, source.replace("F.linear(input, self.weight, self", "2 * F.linear(input, self.weight, self")
        ),
        "a decorator": make_class(TIMM, "@torch.no_grad()\n" + textwrap.dedent(source)),
        "another module": make_class("elsewhere.Linear", source),
        "no source": make_class(TIMM, "\n" + source, in_file=False),
        "a lambda": make_class(
            TIMM, "forward = lambda self, input: nn.functional.linear(input, self.weight, self.bias)"
        ),
        "its `forward` overridden": type("Linear", (make_class(TIMM, source),), {"forward": lambda self, x: 2 * x}),
    }
    for what, kind in others.items():
        reason = reason_of(kind(16, 16))
        assert "not known to be linear" in reason, what
        assert "`lightning_fp8.conversion.register_linear(Linear)`" in reason, what
    forward = FalconLinear.forward
    monkeypatch.setattr(FalconLinear, "forward", functools.wraps(forward)(lambda self, x: 2 * forward(self, x)))
    assert "not known to be linear" in reason_of(FalconLinear(16, 16))


def test_subclasses_that_inherit_a_known_forward(make_class: MakeClass) -> None:
    class Projection(make_class(*SOURCES["torch_geometric 2.0.0"])):  # type: ignore[misc]
        pass

    model = convert(nn.Sequential(Projection(16, 16)))
    assert reason_of(model[0]) == f"converted, 16 -> 16; with the known `forward` of {GRAPHS}"


def test_settings_that_change_what_a_known_class_computes(
    make_class: MakeClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_layers, "_registered", [nn.Linear])
    precise = make_class(*SOURCES["OpenFold 2.0.0 to 2.2.0"])(16, 16)
    assert reason_of(precise).startswith("not converted yet")
    precise.precision = torch.float32
    assert reason_of(precise) == "a Linear, which computes F.linear only if its `precision` is None, not torch.float32"
    register_linear(type(precise))
    assert reason_of(precise).startswith("not converted yet")


def test_what_is_odd_about_a_layer_is_treated_as_in_nn_linear() -> None:
    results = []
    for kind in (nn.Linear, FalconLinear):
        torch.manual_seed(0)
        normed, hooked, patched = weight_norm(kind(16, 16)), kind(16, 16), kind(16, 16)
        hooked.register_forward_hook(lambda module, args, y: 2 * y)
        patched.forward = lambda x: 2 * x
        model, x = convert(nn.Sequential(normed, hooked, patched)), torch.randn(4, 16, requires_grad=True)
        y = copy.deepcopy(model).eval()(x)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
        assert [row.converted for row in describe(model)] == [True, True, False]
        assert "its weight is computed by WeightNorm" in reason_of(model[0])
        assert "replaced on the object" in reason_of(model[2])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert isinstance(model[1], FalconLinear)
    assert not isinstance(model[1], Fp8Linear)
