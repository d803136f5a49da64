"""``python -m benchmarks``: operators and layers beside torch's own, and beside ceilings, in one run."""
