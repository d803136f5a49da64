"""The settings of a conversion, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.scalings.recipe import Recipe

FrozenWeights = Literal["master", "fp8"]
FROZEN_WEIGHTS: tuple[FrozenWeights, ...] = get_args(FrozenWeights)


def check_frozen_weights(frozen_weights: object) -> None:
    """Raise a ValueError for a value that is neither None nor one of ``FROZEN_WEIGHTS``."""
    if frozen_weights is not None:
        check_choice("`frozen_weights`", frozen_weights, FROZEN_WEIGHTS)


@dataclass(frozen=True)
class Fp8Config:
    """The settings that all layers of a model share. They are not part of a checkpoint.

    Attributes:
        recipe: how scales are computed.
        min_features: layers with fewer input or output features stay plain.
        frozen_weights: whether frozen weights keep a master, ``"master"``, or only their FP8 cast, ``"fp8"``.
        overrides: by ``fnmatch`` pattern on module paths, ``"fp8"`` or ``"bf16"`` for some products in place of the
            recipe's precision; later ones win.
    """

    recipe: Recipe
    min_features: int = 16
    frozen_weights: FrozenWeights = "master"
    overrides: tuple[tuple[str, Mapping[str, str]], ...] = ()
