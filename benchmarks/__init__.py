"""``python -m benchmarks``: compares operators and layers with torch's own and with hardware ceilings, in one run."""
