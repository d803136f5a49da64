"""The recipes: plain, validated values that say how scales follow the tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from typing import Any, ClassVar, Literal, TypeVar, get_args

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.formats import E4M3, E5M2, PRODUCTS, Fp8Format, Product, Role
from lightning_fp8.ops.operand import CurrentScale
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.did_you_mean import did_you_mean

FormatChoice = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]
ProductPrecision = Literal["fp8", "bf16"]
_T = TypeVar("_T")


def _names(kind: Any) -> list[str]:
    """The names of the fields, products last: they would come first, as the base class defines them."""
    return sorted((field.name for field in fields(kind)), key=PRODUCTS.__contains__)


def _knows_its_fields(kind: type[_T]) -> type[_T]:
    """Decorate a dataclass: a misspelt field gives an error that lists the right ones."""
    init = kind.__init__

    @wraps(init)
    def checked(self: _T, *args: Any, **kwargs: Any) -> None:
        field_names = _names(kind)
        for name in kwargs:
            if name not in field_names:
                raise TypeError(
                    f"{kind.__name__} has no field {name!r}.{did_you_mean(str(name), field_names)} Its fields are"
                    f" {', '.join(field_names)}."
                )
        init(self, *args, **kwargs)

    setattr(kind, "__init__", checked)  # noqa: B010 mypy allows no other way
    return kind


@dataclass(frozen=True, repr=False)
class Recipe:
    """How scales follow the tensors: what a cast needs, what an update does, what a checkpoint holds.

    Under every recipe, a weight is scaled by its own current values.

    Attributes:
        precision: the string from which Lightning makes a plugin with this recipe and its defaults.
        from_history: in training, inputs and gradients are cast with the scale of their past values, which a checkpoint
            holds; else with that of their own values, and checkpoints hold no histories.
        fprop, dgrad, wgrad: the precision of each of the three products: output, gradient of the input, gradient of
            the weight. ``"bf16"`` stands for the dtype of the output, which is fp32 for an fp32 input without autocast;
            the operands of such a product are rounded to that dtype and not cast to FP8. Keyword-only.
    """

    precision: ClassVar[str]
    from_history: ClassVar[bool] = False

    fprop: ProductPrecision = field(default="fp8", kw_only=True)
    dgrad: ProductPrecision = field(default="fp8", kw_only=True)
    wgrad: ProductPrecision = field(default="fp8", kw_only=True)

    def __post_init__(self) -> None:
        for product in PRODUCTS:
            self._require_choice(product, get_args(ProductPrecision))

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in _names(type(self)) if getattr(self, name) != "fp8")
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def in_bf16(self) -> tuple[Product, ...]:
        """The products that are computed in bf16, if the layer has no precisions of its own."""
        return tuple(product for product in PRODUCTS if getattr(self, product) == "bf16")

    @property
    def current(self) -> CurrentScale:
        """How an input or gradient is scaled by its own values; its ``blocks`` apply to weights too."""
        return CurrentScale()

    @property
    def window(self) -> int:
        """How many updates' amaxes are kept, the newest first."""
        return 1

    @property
    def newest_only(self) -> bool:
        """Whether an update computes the scale from the newest amax, rather than from the largest in the window."""
        return True

    @property
    def reduce_amax(self) -> bool:
        """Whether an update takes the maximum of each amax over all processes."""
        return True

    def _require_choice(self, field: str, choices: tuple[str, ...]) -> None:
        check_choice(f"{type(self).__name__}: `{field}`", getattr(self, field), choices)

    def _require(self, field: str, rule: str, holds: bool) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: `{field}` must be {rule}, got {getattr(self, field)!r}.")

    def format_of(self, role: Role) -> Fp8Format:
        """The FP8 format in which a tensor of this role is cast."""
        return E4M3

    def as_dict(self) -> dict[str, Any]:
        """Plain values from which :func:`as_recipe` makes the recipe again."""
        return {"precision": self.precision, **asdict(self)}


@dataclass(frozen=True, repr=False)
class _TensorScaling(Recipe):
    """One scale for each tensor: ``FP8_MAX / (amax * 2**margin)``. The recipes below document the fields."""

    margin: int = 0
    fp8_format: FormatChoice = "HYBRID"

    def __post_init__(self) -> None:
        super().__post_init__()
        # 2**127 is the largest power of two that fp32 holds
        self._require("margin", "an integer from 0 to 127", _is_int(self.margin) and 0 <= self.margin <= 127)
        self._require_choice("fp8_format", get_args(FormatChoice))

    @property
    def current(self) -> CurrentScale:
        """See :class:`Recipe`."""
        return CurrentScale(self.margin)

    def format_of(self, role: Role) -> Fp8Format:
        """See :class:`Recipe`."""
        return E5M2 if role == "grad_output" and self.fp8_format == "HYBRID" else E4M3


@_knows_its_fields
@dataclass(frozen=True, repr=False)
class DelayedScaling(_TensorScaling):
    """Scales from past steps: ``scale = FP8_MAX / (amax * 2**margin)``, with ``amax`` from a window of them.

    In evaluation, a tensor is scaled by its own values instead: by the largest power of two up to ``FP8_MAX / amax``.

    The fields have the names that the usual reference implementation gives them, so a recipe can be copied. The default
    window was chosen by measurement (``docs/recipes.md``); in the reference it is 1024.

    Args:
        margin: powers of two kept free above the largest past value, an integer from 0 to 127.
        fp8_format: ``"HYBRID"``: E4M3 forward, E5M2 for the gradient of the output. ``"E4M3"``: E4M3 everywhere.
        amax_history_len: optimizer steps that the window holds, an integer of at least 1.
        amax_compute_algo: ``"max"``: the largest value in the window; ``"most_recent"``: the newest one, as with a
            window of 1.
        reduce_amax: under ``torch.distributed``, take the maximum over all ranks, so that scales agree on every rank.
        fprop: the precision of the output's product, ``"fp8"`` or ``"bf16"``.
        dgrad: that of the product for the gradient of the input.
        wgrad: that of the product for the gradient of the weight. In ``"bf16"`` it takes the unrounded gradient and the
            unrounded input, which is kept for backward in 2 bytes per element instead of 1.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    >>> DelayedScaling(amax_history_len=16).amax_compute_algo
    'max'
    """

    precision: ClassVar[str] = "fp8-delayed"
    from_history: ClassVar[bool] = True

    amax_history_len: int = 16
    amax_compute_algo: AmaxAlgorithm = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "amax_history_len",
            "an integer of at least 1",
            _is_int(self.amax_history_len) and self.amax_history_len >= 1,
        )
        self._require_choice("amax_compute_algo", get_args(AmaxAlgorithm))
        self._require("reduce_amax", "True or False", isinstance(self.reduce_amax, bool))

    @property
    def window(self) -> int:
        """See :class:`Recipe`."""
        return self.amax_history_len

    @property
    def newest_only(self) -> bool:
        """See :class:`Recipe`."""
        return self.amax_compute_algo == "most_recent"


@_knows_its_fields
@dataclass(frozen=True, repr=False)
class CurrentScaling(_TensorScaling):
    """Scales each tensor by its own values: ``scale = FP8_MAX / (amax * 2**margin)``.

    A cast first measures the tensor, which is one more read of it. Nothing depends on earlier steps: no value is
    clipped, and a spike affects no later step. In evaluation the scale is rounded down to a power of two, without a
    margin. The logged ``scale`` and ``amax`` are those of the largest values of the last step.

    Args:
        margin: powers of two kept free above the largest value of an input or gradient, an integer from 0 to 127.
        fp8_format: ``"HYBRID"``: E4M3 forward, E5M2 for the gradient of the output. ``"E4M3"``: E4M3 everywhere.
        fprop: as in :class:`DelayedScaling`.
        dgrad: likewise.
        wgrad: likewise.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    >>> CurrentScaling().format_of("grad_output").name
    'e5m2'
    """

    precision: ClassVar[str] = "fp8-current"


@_knows_its_fields
@dataclass(frozen=True, repr=False)
class BlockScaling(Recipe):
    """Scales each block by its own values, ``448 / amax``: activations and gradients in blocks of 1 x 128, weights in
    blocks of 128 x 128, all in E4M3, as in the training of DeepSeek-V3.

    An outlier costs precision only within its block. As with :class:`CurrentScaling` no value is clipped, and nothing
    depends on earlier steps. The logged ``amax`` is the largest value of a tensor, and the logged ``scale`` that of
    the block that holds it.

    Args:
        power_of_2_scales: round each scale down to a power of two.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.2.

    >>> BlockScaling().format_of("grad_output").name
    'e4m3'
    """

    precision: ClassVar[str] = "fp8-block"

    power_of_2_scales: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("power_of_2_scales", "True or False", isinstance(self.power_of_2_scales, bool))

    @property
    def current(self) -> CurrentScale:
        """See :class:`Recipe`."""
        return CurrentScale(blocks="power of 2" if self.power_of_2_scales else "float32")


@_knows_its_fields
@dataclass(frozen=True, repr=False)
class MXScaling(Recipe):
    """MXFP8: each 32 elements along the sum of a product have a scale, a power of two in one byte, all in E4M3.

    A scale is that of the block's largest value, rounded up, so nothing is clipped; nothing depends on earlier steps.
    The two payloads of a tensor are two casts, each with scales along its own rows. The logged ``amax`` is the largest
    value of a tensor, and the logged ``scale`` that of the block that holds it. A block with an infinity or NaN is NaN.

    Args:
        weight_blocks: the blocks of a weight. ``(1, 32)``, as in the published recipe: forward and backward see two
            different roundings of it. ``(32, 32)``: squares, and both see the same weight.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    Sources: OCP Microscaling Formats (MX) Specification 1.0; Mishra et al., "Recipes for Pre-training LLMs with MXFP8",
    arXiv 2506.08027, whose rounding of the scale this is.

    >>> MXScaling().format_of("grad_output").name
    'e4m3'
    """

    precision: ClassVar[str] = "fp8-mx"

    weight_blocks: tuple[int, int] = (1, e8m0.BLOCK)

    def __post_init__(self) -> None:
        super().__post_init__()
        # a list, from YAML or a checkpoint's JSON, is as good as a tuple
        blocks = tuple(self.weight_blocks) if isinstance(self.weight_blocks, (list, tuple)) else self.weight_blocks
        object.__setattr__(self, "weight_blocks", blocks)
        self._require("weight_blocks", "(1, 32) or (32, 32)", blocks in ((1, e8m0.BLOCK), (e8m0.BLOCK, e8m0.BLOCK)))

    @property
    def current(self) -> CurrentScale:
        """See :class:`Recipe`."""
        return CurrentScale(blocks="e8m0" if self.weight_blocks[0] == 1 else "e8m0 squares")


# keyed by precision string
RECIPES: dict[str, type[Recipe]] = {
    kind.precision: kind for kind in (DelayedScaling, CurrentScaling, BlockScaling, MXScaling)
}

KINDS = " or ".join(f"{'an' if kind is MXScaling else 'a'} {kind.__name__}" for kind in RECIPES.values())


def as_recipe(recipe: Any) -> Recipe | None:
    """The recipe for a recipe or a mapping of its fields, whose ``precision`` selects the class (default: delayed)."""
    if isinstance(recipe, Mapping):
        values = dict(recipe)
        precision = values.pop("precision", DelayedScaling.precision)
        check_choice("`recipe`: `precision`", precision, RECIPES)
        return RECIPES[precision](**values)
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    raise TypeError(f"`recipe` must be {KINDS} or a mapping of its fields, got {recipe!r}.")


def recipe_fields(text: str) -> dict[str, Any]:
    """A precision string with comma-separated fields, as on a command line -> the mapping for :func:`as_recipe`.

    Raises:
        ValueError: for a field that is given twice.

    >>> recipe_fields("fp8-delayed,margin=1,wgrad=bf16")
    {'precision': 'fp8-delayed', 'margin': 1, 'wgrad': 'bf16'}
    >>> recipe_fields("fp8-mx,weight_blocks=[32,32]")
    {'precision': 'fp8-mx', 'weight_blocks': [32, 32]}
    """
    # at commas that are not inside brackets
    pairs = [part.partition("=") for part in re.split(r",(?![^\[]*\])", f"precision={text}")]
    mapping = {name: _value(value) for name, _, value in pairs}
    if len(mapping) < len(pairs):
        raise ValueError(f"A field is given twice in {text!r}.")
    return mapping


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
