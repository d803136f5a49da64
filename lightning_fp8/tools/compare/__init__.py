"""``python -m lightning_fp8 compare``: one configuration under several precisions, side by side."""

# next to a run's logs: what it measured, or why it failed
MEASURED_FILE = "measured.json"
