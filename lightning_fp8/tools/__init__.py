"""The commands of ``python -m lightning_fp8``. Nothing that trains imports them."""
