"""``python -m lightning_fp8 bench``: operators and layers beside torch's own, and beside ceilings, in one run."""
