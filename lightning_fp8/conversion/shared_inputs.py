"""Finds converted layers that get the same input tensor, such as the projections of an attention.

Conversion does not run the model, so it reads the source of the ``forward`` that calls the layers: straight-line code
that calls ``self.<layer>(x)`` several times with one local name ``x``, or :func:`lightning_fp8.feed_forward` with two
layers. Between the calls, nothing may assign ``x``, pass it to another function, or change any tensor in place.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

from torch import nn

from lightning_fp8.modules.adapters import adapted_layer
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.class_swap import own_class, plain_class
from lightning_fp8.modules.feed_forward import feed_forward
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.linear import LinearForward
from lightning_fp8.modules.shared_input import SharedInput

# code that may run less often, more often or later than the code around it
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
_NOT_ALWAYS = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# these may assign names without an `ast.Name` node
_MAY_CHANGE_ANYTHING = (ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.AugAssign)


class _Event(NamedTuple):
    # a local name; None for any tensor
    name: str | None
    # the layer that is called with the tensor; None if the tensor may have changed
    layer: str | None = None


def share_inputs(modules: Sequence[nn.Module]) -> None:
    """Let converted layers that get the same tensor share its cast: the groups of :func:`find_shared_inputs`.

    Args:
        modules: a model, or a part of one, and everything inside it; its converted layers have one scaling state.
            Groups with layers outside of a part stay.
    """
    layers = [layer for layer in modules if isinstance(layer, Fp8Module)]
    state, gemms = layers[0].scaling_state, list(chain.from_iterable(layer.fp8.values() for layer in layers))
    inside = {gemm.module for gemm in gemms}
    for gemm in gemms:
        if gemm.shared_input is not None and inside.issuperset(gemm.shared_input.modules):
            gemm.share_input(None)
    for group in find_shared_inputs(modules):
        members = [layer.fp8[""] for layer in group]
        shared = SharedInput([gemm.module for gemm in members])
        for gemm in members:
            gemm.share_input(shared)
    of_model = cast(list[Gemm], list(state.model.gemms.values()))
    groups = {gemm.module: gemm.shared_input.modules for gemm in of_model if gemm.shared_input is not None}
    state.share_inputs({module: group[0] for module, group in groups.items() if module != group[0]})


def find_shared_inputs(modules: Iterable[nn.Module]) -> list[list[Fp8Module]]:
    """The groups of converted layers that get the same tensor, each in call order.

    Skips layers that are reused in the model, or that their parent may call elsewhere. A layer with LoRA adapters is
    called through its wrapper.

    Args:
        modules: the model and everything inside it.
    """
    parents = list(modules)
    places = Counter(child for parent in parents for child in parent._modules.values() if child is not None)
    groups: list[list[Fp8Module]] = []
    for parent in parents:
        layers = {
            name: layer
            for name, child in parent._modules.items()
            if child is not None
            and isinstance(layer := adapted_layer(child), Fp8Module)
            and own_class(layer) in LinearForward.family
            and places[child] == places[layer] == 1
        }
        # a forward replaced on the object has different source code
        if len(layers) < 2 or "forward" in vars(parent):
            continue
        for names in _calls_of_one_name(plain_class(parent).forward):
            group = [layers[name] for name in names if name in layers]
            if len(group) > 1:
                groups.append(group)
    return groups


@functools.cache
def _calls_of_one_name(forward: Callable[..., Any]) -> list[list[str]]:
    """Groups of attributes of ``self`` that a function calls with the same local name as their only argument."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return []
    function = next((part for part in tree.body if isinstance(part, ast.FunctionDef)), None)
    parts = [] if function is None else list(ast.walk(function))
    if (
        function is None
        or not function.args.args
        or any(isinstance(part, (ast.Global, ast.Nonlocal)) for part in parts)
    ):
        return []
    own = function.args.args[0].arg
    attributes = [part for part in parts if isinstance(part, ast.Attribute)]
    uses = Counter(use.attr for use in attributes if _is_name(use.value, own))
    # reading the weight of a layer, as in `self.q_proj.weight`, does not call it
    uses -= Counter(
        use.value.attr for use in attributes if isinstance(use.value, ast.Attribute) and _is_name(use.value.value, own)
    )
    groups = _groups(function.body, own)
    return [names for group in groups if len(names := [name for name in group if uses[name] == 1]) > 1]


def _groups(block: Sequence[ast.stmt], own: str) -> Iterator[list[str]]:
    """The layers called in a block and in its nested blocks, grouped by argument."""
    groups: dict[str, list[str]] = {}
    for statement in block:
        for inner in _inner_blocks(statement):
            yield from _groups(inner, own)
        for event in _events(statement, own):
            if event.name is None:
                yield from groups.values()
                groups = {}
            elif event.layer is None:
                yield groups.pop(event.name, [])
            else:
                groups.setdefault(event.name, []).append(event.layer)
    yield from groups.values()


def _inner_blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, _BLOCKS):
        for holder in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from (getattr(holder, field, []) for field in ("body", "orelse", "finalbody"))


def _events(node: ast.AST, own: str, always: bool = True) -> Iterator[_Event]:
    """The calls and changes in a piece of code, in execution order. Only the changes if it may not run exactly once."""
    always = always and not isinstance(node, (*_BLOCKS, *_NOT_ALWAYS))
    # a value is computed before its targets are assigned
    for child in sorted(ast.iter_child_nodes(node), key=lambda child: child is not getattr(node, "value", None)):
        yield from _events(child, own, always)
    if isinstance(node, ast.Call):
        calls = _calls_of_layers(node, own)
        if not calls:
            yield from map(_Event, [None] if _is_in_place(node) else _names_among_arguments(node))
        elif always:
            yield from calls
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield _Event(node.id)
    elif isinstance(node, _MAY_CHANGE_ANYTHING) or _is_place(node, own):
        yield _Event(None)


def _calls_of_layers(call: ast.Call, own: str) -> list[_Event]:
    """The call ``self.<layer>(<name>)``, or the two in ``feed_forward((self.<gate>, self.<up>), ..., <name>)``."""
    function, arguments = call.func, call.args
    if call.keywords or not arguments or not isinstance(arguments[-1], ast.Name):
        return []
    if isinstance(function, ast.Attribute) and _is_name(function.value, own) and len(arguments) == 1:
        return [_Event(arguments[-1].id, function.attr)]
    if _called(call) != feed_forward.__name__ or not isinstance(arguments[0], ast.Tuple):
        return []
    layers = [part for part in arguments[0].elts if isinstance(part, ast.Attribute) and _is_name(part.value, own)]
    return [_Event(arguments[-1].id, layer.attr) for layer in layers]


def _names_among_arguments(call: ast.Call) -> Iterator[str]:
    """Names that are passed to any other function, which may change their tensors."""
    stack = [*call.args, *(keyword.value for keyword in call.keywords)]
    while stack:
        argument = stack.pop()
        if isinstance(argument, ast.Name):
            yield argument.id
        elif isinstance(argument, ast.Starred):
            stack.append(argument.value)
        elif isinstance(argument, (ast.Tuple, ast.List)):
            stack += argument.elts


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_in_place(call: ast.Call) -> bool:
    return _called(call).endswith("_") or any(keyword.arg in ("out", "inplace") for keyword in call.keywords)


def _is_place(node: ast.AST, own: str) -> bool:
    """Whether a node assigns or deletes an element of a tensor, or an attribute of anything but ``self``."""
    if isinstance(node, ast.Attribute) and _is_name(node.value, own):
        return False
    return isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
