"""The experts of ``transformers`` 5, whose weights are stacked in 3-D parameters, with each product in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from lightning_fp8.core.groups import cast_groups, groups_of, linear_groups
from lightning_fp8.modules.base import Fp8Module, fp8_class
from lightning_fp8.modules.class_swap import plain_class
from lightning_fp8.modules.family import Family
from lightning_fp8.modules.fp8_parameter import Fp8Parameter, is_frozen
from lightning_fp8.modules.functional import (
    cast_stack,
    cast_weight,
    check_input,
    check_whole,
    fp8_linear,
    output_dtype,
)
from lightning_fp8.modules.phase import Phase
from lightning_fp8.ops.formats import CASTABLE_DTYPES
from lightning_fp8.ops.library import backward_may_follow, is_exporting, may_get_gradient, on_gpu
from lightning_fp8.ops.operand import Groups
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scalings.operand import Operand, Want

# attributes that say which form the experts have; transformers' decorator `use_experts_implementation` sets them
_FORM = ("has_gate", "has_bias", "is_transposed")
_INTERFACE = "transformers.integrations.moe"
_LLAMA_4 = ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts.forward")


class Fp8Experts(Fp8Module):
    """The experts of one layer, each product in FP8 with its own scales.

    For expert e, and each of its tokens x with the routing weight r::

        h = x @ gate_up_proj[e]^T;  a, b = h.chunk(2);  y = sum over its experts of r * ((act(a) * b) @ down_proj[e]^T)

    If the experts have biases, each product adds its own. If the class has its own gate, it replaces ``act(a) * b``.

    An expert without a token records nothing, so its histories and scales stay. The tokens are sorted by expert. On a
    GPU with GEMMs over groups of rows, each product is one launch for all experts, and nothing waits for the device.
    Elsewhere, and in cases that these GEMMs do not support, experts run one after the other. The host then waits for
    the device to read the token counts.

    Shape:
        gate_up_proj ``[E, 2I, H]``, or up_proj ``[E, I, H]`` if the experts have no gate; down_proj ``[E, H, I]``;
        their biases ``[E, 2I]``, or ``[E, I]``, and ``[E, H]``;
        hidden_states ``[T, H]`` fp32, bf16 or fp16; top_k_index ``[T, K] int64``; top_k_weights ``[T, K]``;
        result ``[T, H]`` in the dtype of hidden_states. Products are in autocast's dtype if autocast is on.

    Raises:
        TypeError: for hidden_states that are not fp32, bf16 or fp16.
        ValueError: for hidden_states of another width, a bias of another length, or an index of an expert that does
            not exist.
        NotImplementedError: for a distributed parameter, and in ``torch.export``.
    """

    has_gate: bool
    has_bias: bool
    # before transformers 5.20, experts have no norm and do not say so
    has_post_expert_norm: bool = False
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]
    weights_are_stacked = True

    @staticmethod
    def gemm_weights(layer: nn.Module) -> dict[str, Tensor]:
        """By ``<parameter>.<expert>``, the parameter that the weight of this expert is a part of."""
        stacks = {name: cast(Tensor, getattr(layer, name)) for name in stack_names(layer)}
        return {f"{name}.{expert}": stack for name, stack in stacks.items() for expert in range(len(stack))}

    def gemm_weight(self, gemm: str) -> Tensor | None:
        """See the base class; this does not build a dict of all experts for each of them."""
        return cast(Tensor, getattr(self, gemm.rpartition(".")[0]))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states ``[T, H]`` -> ``[T, H]``; see the class."""
        chosen, by_expert = top_k_index.flatten().sort(stable=True)
        y = self._computed(hidden_states[by_expert // top_k_index.shape[-1]], chosen)
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        y = y * top_k_weights.flatten()[by_expert, None]
        return y[by_expert.argsort()].view(*top_k_index.shape, y.shape[-1]).sum(1).to(hidden_states.dtype)

    def _computed(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x ``[R, H]`` -> ``[R, H]``, each row by its expert, ``chosen [R] int64``, in ascending order."""
        if is_exporting():
            raise NotImplementedError(
                "Experts in FP8 cannot be exported: the shapes of their products depend on the routing. Leave them out"
                " with `convert(model, ignore_modules=['*.experts'])`, or call `unconvert(model)`, before the export."
            )
        if self._runs_in_groups(x):
            first, down = stack_names(self)
            groups = groups_of(chosen, len(getattr(self, first)))
            return self._product_of_groups(down, self._activated(self._product_of_groups(first, x, groups)), groups)
        if is_dynamo_compiling():
            _say_not_compiled()
        return self._one_by_one(x, chosen)

    def _runs_in_groups(self, x: Tensor) -> bool:
        """Whether each product is one launch for all experts."""
        if not on_gpu(x) or x.is_meta or not x.numel():
            return False
        first, *others = self.fp8.values()
        slots, precision = first.slots, first.precision
        is_partial = not precision.in_fp8 or precision.in_bf16 or first.model.counts.values is not None
        if is_partial or any(gemm.precision != precision for gemm in others):
            return False
        output = output_dtype(x)
        scaling, of_dy = slots["input", Phase.TRAINING].rows, slots["grad_output", Phase.TRAINING].rows
        stacks = [cast(Tensor, getattr(self, name)) for name in stack_names(self)]
        return all(
            not isinstance(stack, Fp8Parameter)
            and scaling.has_group_kernels(of_dy, x.device, (dtype, output, stack.dtype), stack.shape[1:])
            for stack, dtype in zip(stacks, (x.dtype, output), strict=True)
        )

    def _product_of_groups(self, name: str, x: Tensor, groups: Groups) -> Tensor:
        stack, phase = cast(Tensor, getattr(self, name)), self.phase
        gemms = [self.fp8[f"{name}.{expert}"] for expert in range(len(stack))]
        check_whole(gemms[0], stack)
        check_input(self, f"input of {name}", x, stack.detach()[0])
        w8, slots = cast_stack(gemms, stack, phase), gemms[0].stack_slots
        dtype, dy = output_dtype(x), slots["grad_output", phase]
        # all products are in FP8
        bias = self._bias_for_groups(name, cast(Operand, w8.rows).codes.shape[:2], dtype)
        keep = may_get_gradient(stack) and backward_may_follow()
        x8 = cast_groups(x.detach(), slots["input", phase], groups, Want(True, keep))
        y: Tensor = linear_groups(x, stack, bias, *x8[:2], *w8[:2], groups, dy, dtype, self.weight_is_k_by_n)
        return y

    def _bias_for_groups(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        bias = self._bias(name)
        if bias is None:
            return None
        if bias.shape != shape:
            stack = self.fp8[f"{name}.0"].weight_name
            raise ValueError(
                f"The biases of {stack!r} must have the shape {tuple(shape)}, one element for each output of each"
                f" expert, got {tuple(bias.shape)}."
            )
        return bias if bias.dtype in CASTABLE_DTYPES else bias.to(dtype)

    # the shapes of the products depend on the routing: a compiler would make a graph for each
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _one_by_one(self, x: Tensor, chosen: Tensor) -> Tensor:
        stacks = {name: cast(Tensor, getattr(self, name)) for name in stack_names(self)}
        for name, stack in stacks.items():
            check_whole(self.fp8[f"{name}.0"], stack)
        # one gradient for all experts, not one of the whole parameter for each; FP8-only weights get no gradient
        weights = {name: stack if is_frozen(stack) else stack.unbind() for name, stack in stacks.items()}
        whole = {name: self._bias(name) for name in stacks}
        biases = {name: [None] * len(stacks[name]) if bias is None else bias.unbind() for name, bias in whole.items()}
        first, down = weights

        def product(name: str, expert: int, x: Tensor) -> Tensor:
            return self._product(name, expert, x, stacks[name], weights[name][expert], biases[name][expert])

        outputs = []
        for expert, tokens in enumerate(x.split(self._tokens_by_expert(chosen, len(weights[first])))):
            if len(tokens):
                h = self._activated(product(first, expert, tokens))
                outputs.append(product(down, expert, h))
        return torch.cat(outputs) if outputs else x

    def _tokens_by_expert(self, chosen: Tensor, experts: int) -> list[int]:
        if chosen.is_meta:
            # meta tensors only serve to find shapes and FLOPs, which do not depend on the routing
            return [len(chosen)] + [0] * (experts - 1)
        # `bincount` waits twice more
        numbers = torch.arange(experts + 1, dtype=chosen.dtype, device=chosen.device)
        edges: list[int] = torch.searchsorted(chosen, numbers).tolist()
        if edges[0] or edges[-1] < len(chosen):
            other = int(chosen[0 if edges[0] else -1])
            raise ValueError(
                f"{type(self).__name__} {next(iter(self.fp8.values())).name!r}: `top_k_index` names expert {other}, and"
                f" there are {experts}. Experts that are distributed over processes stay out of FP8: distribute them"
                " before the conversion."
            )
        return [end - begin for begin, end in pairwise(edges)]

    def _bias(self, name: str) -> Tensor | None:
        """The biases of all experts, ``[E, N]``."""
        if not self.has_bias:
            return None
        bias = cast(Tensor, getattr(self, f"{name}_bias"))
        check_whole(self.fp8[f"{name}.0"], bias, "bias")
        return bias

    def _product(self, name: str, expert: int, x: Tensor, stack: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gemm, phase = self.fp8[f"{name}.{expert}"], self.phase
        check_input(self, f"input of {name}", x, weight)
        return fp8_linear(gemm, x, cast_weight(gemm, stack, phase, weight), bias, phase)

    def _activated(self, h: Tensor) -> Tensor:
        return self._apply_gate(h) if self.has_gate else self.act_fn(h)


class Fp8TransposedExperts(Fp8Experts):
    """Experts whose weights are stored as ``[E, K, N]``, as in gpt-oss and Aria; else like :class:`Fp8Experts`."""

    weight_is_k_by_n = True


class Fp8SortedExperts(Fp8TransposedExperts):
    """The experts of Llama 4, whose input has the rows of all experts one after the other, T rows for each.

    Shape:
        hidden_states ``[E * T, H]``; result the same.
    """

    has_gate, has_bias = True, False

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """hidden_states ``[E * T, H]`` -> ``[E * T, H]``."""
        stack = cast(Tensor, self.gate_up_proj)
        rows = hidden_states.view(len(stack), -1, hidden_states.shape[-1]).shape[1]
        chosen = torch.arange(len(stack), device=hidden_states.device).repeat_interleave(rows)
        return self._computed(hidden_states.view(-1, hidden_states.shape[-1]), chosen)

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return up * self.act_fn(gate)


def _experts_class(layer: nn.Module) -> type[Fp8Module]:
    """The class of these experts in FP8."""
    if _are_sorted(layer):
        kind: type[Fp8Experts] = Fp8SortedExperts
    else:
        kind = Fp8TransposedExperts if layer.is_transposed else Fp8Experts
    return fp8_class(kind, plain_class(layer))


def stack_names(layer: nn.Module) -> tuple[str, str]:
    """Names of the two parameters ``[E, N, K]`` or ``[E, K, N]``, in the order of the products."""
    return "gate_up_proj" if getattr(layer, "has_gate", True) else "up_proj", "down_proj"


def is_experts(layer: nn.Module) -> bool:
    """Whether this module, converted or plain, holds experts of transformers 5, stacked in two 3-D parameters."""
    if not (all(hasattr(layer, flag) for flag in _FORM) or isinstance(layer, Fp8Experts) or _are_sorted(layer)):
        return False
    stacks = [getattr(layer, name, None) for name in stack_names(layer)]
    return all(isinstance(stack, Tensor) and stack.dim() == 3 for stack in stacks)


def _are_sorted(layer: nn.Module) -> bool:
    """Whether experts, converted or plain, compute with the forward of Llama 4's experts."""
    if isinstance(layer, Fp8SortedExperts):
        return True
    # the class of a scripted module has no forward
    forward = getattr(type(layer), "forward", None)
    return (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")) == _LLAMA_4


def _reason_against_experts(layer: nn.Module) -> str | None:
    """Why these plain experts cannot run in FP8; None if they can."""
    if _are_sorted(layer):
        return None
    # before transformers 5.18, experts do not say so; a token of another process's expert then raises an error
    if getattr(layer, "_is_expert_parallel", False):
        return "experts that are distributed over processes"
    # the one forward that is known to compute what the flags say
    if getattr(type(layer).forward, "__globals__", {}).get("__name__") != _INTERFACE:
        return f"the class {type(layer).__name__} has a `forward` of its own"
    return None


def find_routers(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The layers whose outputs choose experts: ``gate`` or ``router`` next to ``experts``, with one row per expert."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue
        experts = module._modules.get("experts")
        if experts is None or not (isinstance(experts, nn.ModuleList) or is_experts(experts)):
            continue
        count = len(experts) if isinstance(experts, nn.ModuleList) else len(getattr(experts, stack_names(experts)[0]))
        for name in ("gate", "router"):
            router = module._modules.get(name)
            for part in () if router is None else router.modules():
                weight = part._parameters.get("weight")
                if weight is not None and weight.dim() == 2 and len(weight) == count:
                    yield part


FAMILY = Family(Fp8Experts, is_experts, _experts_class, _reason_against_experts)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_not_compiled() -> None:
    warn_once(
        "Experts in FP8 are not compiled here: one runs after the other, and the shapes of their products depend on the"
        " routing. `torch.compile` breaks its graph before and after them, and `fullgraph=True` fails; leave them out"
        " with `ignore_modules=['*.experts']` to compile them in bf16."
    )
