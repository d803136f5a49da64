"""Kinds of scaling, one file each: how a tensor becomes FP8 codes with scales, and the recipes that use the kind."""

# they register, in this order
import lightning_fp8.scalings.per_tensor

# isort: split
import lightning_fp8.scalings.mx
import lightning_fp8.scalings.per_block
import lightning_fp8.scalings.per_row
import lightning_fp8.scalings.unscaled  # noqa: F401
