"""The commands of ``python -m lightning_fp8``. Training code does not import them."""
