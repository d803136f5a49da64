"""``python -m lightning_fp8 bench``: operators beside torch's own and the memory's ceiling, in one run."""
