"""``python -m lightning_fp8 bench``: each operator beside torch's own operators and the memory's ceiling, in one run."""
