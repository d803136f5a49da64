"""The tensors of a model by name, and the exact scales that an export writes into the metadata of its file."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.paths import plain_path
from lightning_fp8.ops.amaxes import scale_of_current
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.scalings.per_tensor import PerTensor

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
_METADATA_KEY = "lightning_fp8.scales"
# within this range, the largest code times a scale, or its reciprocal, is a normal number in fp32
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-118, 2.0**118
SCALE_RULE = "a number from 2**-118 to 2**118"


class Scales(NamedTuple):
    """Multipliers of a GEMM's operands before the cast, each ``[] float32`` on the CPU.

    The input's is None if the input is scaled by its own values.
    """

    weight: Tensor
    input: Tensor | None = None

    @property
    def static(self) -> dict[str, Tensor]:
        """The scales that are not None, by field name."""
        return {role: scale for role, scale in self._asdict().items() if scale is not None}


def weight_name(path: str, gemm: str) -> str:
    """Name of the weight of a layer's GEMM.

    >>> weight_name("layers.0.up", ""), weight_name("self_attn", "in_proj")
    ('layers.0.up.weight', 'self_attn.in_proj_weight')
    """
    return joined(path, f"{gemm}_weight" if gemm else "weight")


def printable(text: str) -> str:
    """A text from a file for a message: characters that a terminal would interpret are escaped.

    >>> print(printable("layer\\x1b[2J.weight"))
    layer\\x1b[2J.weight
    """
    return repr(text)[1:-1]


def listed(names: Sequence[str]) -> str:
    """The first six names, for a message."""
    return printable(", ".join(names[:6])) + (", ..." if len(names) > 6 else "")


def joined(*parts: str) -> str:
    """The nonempty parts of a name, joined by dots."""
    return ".".join(filter(None, parts))


def converted_gemms(model: nn.Module) -> dict[str, Gemm]:
    """Each converted GEMM by the name of its weight; a shared layer appears under each of its names.

    Skips experts: the layout has one scale for each tensor, and their parameters hold many weights.
    """
    return {
        weight_name(plain_path(path), name): gemm
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, Fp8Module) and not layer.weights_are_stacked
        for name, gemm in layer.fp8.items()
    }


def state_tensors(model: nn.Module, on_meta: bool = False) -> dict[str, Tensor]:
    """The entries of the model's ``state_dict`` by their plain names.

    Raises:
        TypeError: if an entry is not a tensor, or is a sharded one.
        ValueError: if an entry has no values (``meta`` device), unless ``on_meta``.
    """
    entries: dict[str, Tensor] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        name = plain_path(key)
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: safetensors files hold tensors only, and this entry is a {type(tensor).__name__}."
            )
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name} is sharded (a DTensor). Gather first: on all processes make a full state dict with"
                " `full_tensor()`, on one process load it into a converted model that is not sharded, with the"
                " scaling state, and export that."
            )
        if tensor.is_meta and not on_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values. Call `model.to_empty(device=...)` first."
            )
        entries[name] = tensor
    return entries


def memory_of(tensor: Tensor) -> Hashable:
    """A key that is equal for tensors in the same memory, such as tied weights."""
    if tensor.numel() == 0 or tensor.is_meta or isinstance(tensor, Fp8Parameter):
        # the last are never tied
        return id(tensor)
    start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return tensor.device, *start, tensor.dtype, tensor.shape, tensor.stride()


def tied_to(names: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of these tensors in a model, as of tied weights; each with the name in ``names``."""
    first = {memory_of(tensors[name]): name for name in names if name in tensors}
    others = {name: memory_of(tensor) for name, tensor in tensors.items() if name not in names}
    return {name: first[memory] for name, memory in others.items() if memory in first}


def codes_of(weight: Tensor, scale: Tensor) -> Tensor:
    """``sat(weight * scale)`` as ``float8_e4m3fn`` on the CPU, in the weight's own shape; scale ``[] float32``."""
    weight = weight.dequantized() if isinstance(weight, Fp8Parameter) else weight
    codes = PerTensor().with_scale(weight.detach().contiguous(), scale.to(weight.device)).codes
    return codes.cpu().view(E4M3.dtype)


def to_metadata(gemms: Mapping[str, Scales | None]) -> dict[str, str]:
    """The exact static scales, because ``1 / (1 / scale)`` may differ in the last bit. See :func:`from_metadata`."""
    scales = {
        name: None if of is None else {role: float(scale).hex() for role, scale in of.static.items()}
        for name, of in gemms.items()
    }
    return {"format": "pt", _METADATA_KEY: json.dumps(scales)}


def from_metadata(metadata: Mapping[str, str] | None, dynamic: bool) -> dict[str, Scales | None] | None:
    """The scales that :func:`to_metadata` has written; None for a file that this package did not export.

    If ``dynamic``, inputs have no scales.

    Raises:
        ValueError: for anything else under the same key; the message says what is wrong.
    """
    if not metadata or _METADATA_KEY not in metadata:
        return None
    try:
        scales = json.loads(metadata[_METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_METADATA_KEY!r} is not valid JSON ({error})") from error
    if not isinstance(scales, dict):
        raise ValueError(f"{_METADATA_KEY!r} must be an object, got {reprlib.repr(scales)}")
    roles = Scales._fields[: 1 if dynamic else 2]
    return {name: None if entry is None else _scales_from(name, entry, roles) for name, entry in scales.items()}


def _scales_from(name: str, entry: Any, roles: tuple[str, ...]) -> Scales:
    if not isinstance(entry, dict) or entry.keys() != set(roles):
        wanted = " and ".join(map(repr, roles))
        raise ValueError(f"{name!r} must be null or have {wanted}, got {reprlib.repr(entry)}")
    scales = {}
    for role in roles:
        try:
            scale = torch.tensor(float.fromhex(entry[role]), dtype=torch.float32)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"the scale {role!r} of {name!r} must be a number in hexadecimal, got {reprlib.repr(entry[role])}"
            ) from error
        if not is_scale(scale):
            raise ValueError(f"the scale {role!r} of {name!r} must be {SCALE_RULE}, got {printable(entry[role])}")
        scales[role] = scale
    return Scales(**scales)


def is_scale(scale: Tensor) -> bool:
    """Whether a multiplier before a cast, or its reciprocal, satisfies :data:`SCALE_RULE`; ``[] float32``."""
    return _LEAST_SCALE <= scale.item() <= _LARGEST_SCALE


def amax_of_scale(scale: Tensor) -> Tensor:
    """An amax, ``[] float32``, that gives this scale, preferably one that bf16 or fp16 represents exactly."""
    below = above = nearest = (E4M3.max / scale.double()).float()
    near = [nearest]
    for _ in range(4):
        below, above = torch.nextafter(below, torch.zeros(())), torch.nextafter(above, torch.full((), float("inf")))
        near += [below, above]
    fitting = [amax for amax in near if torch.equal(scale_of_current(amax, E4M3), scale)]
    narrow = [amax for amax in fitting if amax.bfloat16() == amax or amax.half() == amax]
    return [*narrow, *fitting, nearest][0]


def import_safetensors() -> ModuleType:
    """The library ``safetensors``, with its functions for torch.

    Raises:
        ImportError: if it is not installed; the message says how to.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "Exported models are safetensors files, and `safetensors` is not installed."
            " Install it with: pip install safetensors"
        ) from error
    return safetensors
