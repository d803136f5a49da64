"""``python -m benchmarks``: operators and layers compared with torch's own and with hardware ceilings, in one run."""
