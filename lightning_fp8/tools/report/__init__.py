"""``python -m lightning_fp8 report``: the logs of one or more runs as one HTML page, and as pictures."""
