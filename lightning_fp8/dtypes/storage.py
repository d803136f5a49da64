"""Stores parameters in a given dtype, and casts the inputs of plain ``torch.nn`` layers to match."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_fp8.dtypes.buffers import (
    buffer_dtypes,
    computes_in_fp32,
    is_in_fp32,
    is_weighted_loss,
    warn_of_ruined_buffers,
)
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.modules.paths import modules_inside, named_modules, topmost_matches
from lightning_fp8.ops.formats import dtype_name
from lightning_fp8.runtime.warn_once import warn_once

# torch layers that reject an input whose floating dtype is not that of their parameters, at least on some devices. Only
# inputs that would fail are cast to the parameters' dtype, so a model that already runs keeps its numerics.
_STRICT_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    nn.PReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
# Autocast casts the operands of the other layers to one dtype.
_STRICT_UNDER_AUTOCAST = (nn.Bilinear,)
_HANDLES = "_dtype_handles"
_REPLACED = "_replaced_forward"


def store_parameters(module: nn.Module, dtype: torch.dtype, keep_fp32: Sequence[str] = ()) -> None:
    """Give floating point parameters their storage dtype, on the same ``Parameter`` objects.

    What ``keep_fp32`` matches is stored in fp32. For buffers see :func:`~lightning_fp8.dtypes.buffers.buffer_dtypes`;
    running statistics have the dtype of their normalisation's weight, which torch requires.
    """
    kept_ids = kept_parameters(module, keep_fp32)
    of_buffers = buffer_dtypes(module, dtype, keep_fp32)
    warn_of_ruined_buffers(module, of_buffers)
    dtypes: dict[int, torch.dtype] = {}
    for parameter in module.parameters():
        # at least two bytes: quantized and FP8 parameters are left alone
        is_stored = parameter.is_floating_point() and parameter.dtype.itemsize >= 2
        if is_stored and not isinstance(parameter, Fp8Parameter):
            dtypes[id(parameter)] = torch.float32 if id(parameter) in kept_ids else dtype
            if parameter.grad is not None:
                dtypes[id(parameter.grad)] = dtypes[id(parameter)]
            of_buffers.pop(id(parameter), None)
    for statistics, weight in running_statistics(module):
        of_buffers[id(statistics)] = dtypes[id(weight)]
    shared: dict[int, tuple[Tensor, Tensor]] = {}

    def stored(tensor: Tensor) -> Tensor:
        if id(tensor) not in of_buffers:
            return tensor.to(dtypes.get(id(tensor), tensor.dtype))
        # a buffer of two modules stays one tensor; the old one is held, so that no new one gets its `id`
        return shared.setdefault(id(tensor), (tensor, tensor.to(of_buffers[id(tensor)])))[1]

    # `module.to` goes through `_apply` too, so sharded and converted modules are handled
    module._apply(stored)


def kept_parameters(module: nn.Module, keep_fp32: Sequence[str]) -> set[int]:
    """The ``id`` of each parameter inside the modules that ``keep_fp32`` matches."""
    return {id(p) for layer in topmost_matches(module, keep_fp32) for p in layer.parameters()}


def running_statistics(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Running means and variances of normalisations, each with the weight whose dtype torch requires it to have."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.weight is not None:
            for statistics in (layer.running_mean, layer.running_var):
                if statistics is not None and statistics.is_floating_point():
                    yield statistics, layer.weight


def float64_parameter(module: nn.Module) -> str | None:
    """The name of a float64 parameter; None if there is none."""
    return next((name for name, p in module.named_parameters() if p.dtype == torch.float64), None)


def agree_inputs(module: nn.Module, keep_fp32: Sequence[str] = (), under_autocast: bool = True) -> None:
    """Make the dtypes of inputs agree with those of parameters.

    - A hook casts the floating point inputs of a plain torch layer to the dtype of its parameters. Under autocast,
      which casts the operands of most layers itself, only layers with 16-bit parameters get the hook.
    - What ``keep_fp32`` matches runs in fp32, without autocast, on fp32 inputs; its outputs come back in the dtype of
      its first floating point input (without one, in the default dtype). Without autocast, so do modules whose buffers
      need fp32, and the inputs of torch's losses with weights of classes are cast to fp32.
    - Under autocast, on a CPU whose oneDNN has no bf16 LSTM, an ``nn.LSTM`` with fp32 parameters runs in fp32 too; the
      first call warns.

    Converted layers take any input. Under autocast, an fp32 model gets hooks for ``nn.Bilinear`` only.
    """
    release_inputs(module)
    for layer in topmost_matches(module, keep_fp32):
        if next(_tensors(layer), None) is not None:
            _replace_forward(layer, _forward_in_fp32)
    inside_kept = modules_inside(module, keep_fp32)
    lstms = {path: layer for path, layer in named_modules(module) if layer not in inside_kept and _is_fp32_lstm(layer)}
    if under_autocast and lstms and _autocast_lstm_fails_on_cpu():
        names = ", ".join(repr(path or "(root)") for path in lstms)
        for layer in lstms.values():
            _replace_forward(layer, _lstm_forward, names)
    for layer in module.modules():
        if layer in inside_kept:
            continue
        # a buffer that is shared with a module in bf16 is in bf16
        can_be_fp32 = not under_autocast and is_in_fp32(layer)
        if can_be_fp32 and computes_in_fp32(layer):
            _replace_forward(layer, _forward_in_fp32)
        if can_be_fp32 and is_weighted_loss(layer):
            vars(layer)[_HANDLES] = (layer.register_forward_pre_hook(_to_fp32, with_kwargs=True),)
        elif _must_agree(layer, under_autocast):
            vars(layer)[_HANDLES] = (layer.register_forward_pre_hook(_to_parameter_dtype, with_kwargs=True),)


def release_inputs(module: nn.Module) -> None:
    """Undo :func:`agree_inputs`."""
    for layer in module.modules():
        for handle in vars(layer).pop(_HANDLES, ()):
            handle.remove()
        before, ours = vars(layer).pop(_REPLACED, (None, None))
        # a forward that the user has set since stays, as does the removal of ours
        if ours is not None and vars(layer).get("forward") is ours:
            del vars(layer)["forward"]
            vars(layer).update({} if before is None else {"forward": before})


def _replace_forward(layer: nn.Module, forward: Callable[..., Any], *arguments: Any) -> None:
    # on the object rather than by hooks: torch.compile does not let hooks switch autocast
    before = vars(layer).get("forward")
    vars(layer)["forward"] = ours = partial(forward, layer, before, *arguments)
    vars(layer)[_REPLACED] = before, ours


def _is_fp32_lstm(layer: nn.Module) -> bool:
    # torch uses its own code, not oneDNN, for LSTMs with projections, GRU, RNN, cells and bf16 parameters
    return isinstance(layer, nn.LSTM) and layer.proj_size == 0 and _dtype_of(layer) == torch.float32


@cache
def _autocast_lstm_fails_on_cpu() -> bool:
    """Whether an LSTM with fp32 parameters raises under bf16 autocast: tried, because the CPU's flags do not show
    it."""
    # made on `meta`, where parameters are not initialized: the user's random numbers stay the same on every machine
    lstm = nn.LSTM(1, 1, device="meta", dtype=torch.float32).to_empty(device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            lstm(torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32))
    except RuntimeError:
        return True
    return False


def _must_agree(layer: nn.Module, under_autocast: bool) -> bool:
    parameter = next(layer.parameters(), None)
    if parameter is None or not isinstance(layer, _STRICT_LAYERS) or isinstance(layer, Fp8Module):
        return False
    return not under_autocast or parameter.dtype.itemsize == 2 or isinstance(layer, _STRICT_UNDER_AUTOCAST)


def _to_parameter_dtype(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    # read at each call: sharding may gather parameters in a dtype other than the stored one
    dtype = _dtype_of(layer)
    # fast path for the ordinary call
    if dtype is None or (not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype == dtype):
        return None
    return _inputs_to(args, kwargs, dtype)


def _to_fp32(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _inputs_to(args, kwargs, torch.float32)


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


def _dtype_of(layer: nn.Module) -> torch.dtype | None:
    for parameter in layer._parameters.values():
        if parameter is not None:
            return parameter.dtype
    # the weight comes from a parametrization or from a flat parameter of FSDP
    weight = getattr(layer, "weight", None)
    return weight.dtype if isinstance(weight, Tensor) else None


def _forward_in_fp32(layer: nn.Module, forward: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    # what the user has wrapped around it may call it after its release
    if not hasattr(layer, _REPLACED):
        return _own_forward(layer, forward, args, kwargs)
    return _without_autocast(layer, forward, torch.float32, args, kwargs)


def _lstm_forward(
    layer: nn.LSTM, forward: Callable[..., Any] | None, names: str, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    # read at each call: plugins convert a model before the strategy moves it, and a GPU has a bf16 LSTM
    is_released = not hasattr(layer, _REPLACED)
    if is_released or layer.weight_ih_l0.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return _own_forward(layer, forward, args, kwargs)
    # fp32, unless sharding gathers parameters in a dtype other than the stored one
    dtype = layer.weight_ih_l0.dtype
    warn_once(
        f"The LSTM layers {names} run in {dtype_name(dtype)}, without autocast: oneDNN has no bf16 LSTM for this CPU."
        " GPUs and CPUs with bf16 instructions run them in bf16. `keep_fp32` with these names gives fp32 everywhere."
    )
    return _without_autocast(layer, forward, dtype, args, kwargs)


def _without_autocast(
    layer: nn.Module, forward: Callable[..., Any] | None, dtype: torch.dtype, args: Any, kwargs: Any
) -> Any:
    values = (x.data if isinstance(x, PackedSequence) else x for x in (*args, *kwargs.values()))
    tensors = [x for x in values if isinstance(x, Tensor)]
    came_in = next((x.dtype for x in tensors if x.is_floating_point()), torch.get_default_dtype())
    args, kwargs = _inputs_to(args, kwargs, dtype)
    device = (tensors[0] if tensors else next(_tensors(layer))).device
    with torch.autocast(device.type, enabled=False):
        output = _own_forward(layer, forward, args, kwargs)
    return _floating_to(output, came_in, [])


def _own_forward(layer: nn.Module, forward: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs) if forward is None else forward(*args, **kwargs)


def _inputs_to(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    done: list[tuple[Tensor, Tensor]] = []
    return _floating_to(args, dtype, done), _floating_to(kwargs, dtype, done)


def _floating_to(data: Any, dtype: torch.dtype, done: list[tuple[Tensor, Tensor]]) -> Any:
    """Floating point tensors in ``dtype``; identical objects stay identical, because attention recognises
    self-attention by identity."""
    if isinstance(data, Tensor):
        if not data.is_floating_point() or data.dtype == dtype:
            return data
        for tensor, cast in done:
            if tensor is data:
                return cast
        done.append((data, data.to(dtype)))
        return done[-1][1]
    if type(data) in (tuple, list):
        return type(data)(_floating_to(item, dtype, done) for item in data)
    if type(data) is dict:
        return {key: _floating_to(item, dtype, done) for key, item in data.items()}
    return data.to(dtype) if isinstance(data, PackedSequence) else data
