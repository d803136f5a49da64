"""The experts of ``transformers`` 5, whose weights are stacked in 3-D parameters, with each product in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import is_frozen
from lightning_fp8.modules.functional import cast_weight, check_input, check_whole, fp8_linear
from lightning_fp8.ops.library import is_exporting
from lightning_fp8.runtime.warn_once import warn_once

# the attributes, set by transformers' decorator `use_experts_implementation`, that tell the form of the experts
_FORM = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
_INTERFACE = "transformers.integrations.moe"


class Fp8Experts(Fp8Module):
    """The experts of one layer, each product in FP8 with scales of its own.

    For expert e, and each of its tokens x with the routing weight r::

        h = x @ gate_up_proj[e]^T;  a, b = h.chunk(2);  y = sum over its experts of r * ((act(a) * b) @ down_proj[e]^T)

    Where the experts have biases, each product adds its own; a gate of the class takes the place of ``act(a) * b``.

    An expert without a token records nothing, so its histories and scales stay. The tokens are sorted by expert, and
    each expert multiplies with its own; for that the host reads the token counts, and waits for the device.

    Shape:
        gate_up_proj ``[E, 2I, H]``, or up_proj ``[E, I, H]`` where the experts have no gate; down_proj ``[E, H, I]``;
        their biases ``[E, 2I]``, or ``[E, I]``, and ``[E, H]``;
        hidden_states ``[T, H]`` fp32, bf16 or fp16; top_k_index ``[T, K] int64``; top_k_weights ``[T, K]``;
        result ``[T, H]`` in the dtype of hidden_states. Products are in autocast's dtype where autocast is on.

    Raises:
        TypeError: for hidden_states that are not fp32, bf16 or fp16.
        ValueError: for hidden_states of another width, a bias of another length, or an index of an expert that does
            not exist.
        NotImplementedError: for a distributed parameter, and in ``torch.export``.
    """

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
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
        if is_exporting():
            raise NotImplementedError(
                "Experts in FP8 cannot be exported: the shapes of their products depend on the routing. Leave them out"
                " with `convert(model, ignore_modules=['*.experts'])`, or call `unconvert(model)`, before the export."
            )
        if is_dynamo_compiling():
            _say_not_compiled()
        return self._routed(hidden_states, top_k_index, top_k_weights)

    # the shapes of the products depend on the routing: a compiler would make a graph for each
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _routed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        stacks = {name: cast(Tensor, getattr(self, name)) for name in stack_names(self)}
        for name, stack in stacks.items():
            check_whole(self.fp8[f"{name}.0"], stack)
        # one gradient for all experts, not one of the whole parameter for each; those in FP8 only have none
        weights = {name: stack if is_frozen(stack) else stack.unbind() for name, stack in stacks.items()}
        biases = {name: self._biases(name, len(stack)) for name, stack in stacks.items()}
        first, down = weights

        def product(name: str, expert: int, x: Tensor) -> Tensor:
            return self._product(name, expert, x, stacks[name], weights[name][expert], biases[name][expert])

        chosen, by_expert = top_k_index.flatten().sort(stable=True)
        x = hidden_states[by_expert // top_k_index.shape[-1]]
        outputs = []
        for expert, tokens in enumerate(x.split(self._tokens_by_expert(chosen, len(weights[first])))):
            if len(tokens):
                h = self._activated(product(first, expert, tokens))
                outputs.append(product(down, expert, h))
        y = torch.cat(outputs) if outputs else x
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        y = y * top_k_weights.flatten()[by_expert, None]
        return y[by_expert.argsort()].view(*top_k_index.shape, y.shape[-1]).sum(1).to(hidden_states.dtype)

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

    def _biases(self, name: str, experts: int) -> Sequence[Tensor | None]:
        if not self.has_bias:
            return [None] * experts
        bias = cast(Tensor, getattr(self, f"{name}_bias"))
        check_whole(self.fp8[f"{name}.0"], bias)
        return bias.unbind()

    def _product(self, name: str, expert: int, x: Tensor, stack: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gemm, record = self.fp8[f"{name}.{expert}"], self.records
        check_input(self, f"input of {name}", x, weight)
        return fp8_linear(gemm, x, cast_weight(gemm, stack, record, weight), bias, record)

    def _activated(self, h: Tensor) -> Tensor:
        return self._apply_gate(h) if self.has_gate else self.act_fn(h)


class Fp8TransposedExperts(Fp8Experts):
    """Experts whose weights are stored as ``[E, K, N]``, as in gpt-oss and Aria; else like :class:`Fp8Experts`."""

    weight_is_k_by_n = True


def experts_class(layer: nn.Module) -> type[Fp8Experts]:
    """The class that computes the forward of these plain experts in FP8."""
    return Fp8TransposedExperts if layer.is_transposed else Fp8Experts


def stack_names(layer: nn.Module) -> tuple[str, str]:
    """Names of the two parameters ``[E, N, K]`` or ``[E, K, N]``, in the order of the products."""
    return "gate_up_proj" if layer.has_gate else "up_proj", "down_proj"


def is_experts(layer: nn.Module) -> bool:
    """Whether these are experts of transformers 5, converted or plain: a layer's experts in two 3-D parameters."""
    if not all(hasattr(layer, flag) for flag in _FORM):
        return False
    stacks = [getattr(layer, name, None) for name in stack_names(layer)]
    return all(isinstance(stack, Tensor) and stack.dim() == 3 for stack in stacks)


def reason_against_experts(layer: nn.Module) -> str | None:
    """Why these plain experts cannot run in FP8; None if they can."""
    if layer._is_expert_parallel:
        return "experts that are distributed over processes"
    # the one forward that is known to compute what the flags say
    if getattr(type(layer).forward, "__globals__", {}).get("__name__") != _INTERFACE:
        return f"the class {type(layer).__name__} has a `forward` of its own"
    return None


def find_routers(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The layers whose outputs choose experts: ``gate`` or ``router`` beside ``experts``, with a row per expert."""
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_not_compiled() -> None:
    warn_once(
        "Experts in FP8 are not compiled: the shapes of their products depend on the routing. `torch.compile` breaks"
        " its graph before and after them, and `fullgraph=True` fails; leave them out with"
        " `ignore_modules=['*.experts']` to compile them in bf16."
    )
