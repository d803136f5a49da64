"""``python -m lightning_fp8 compare``: one configuration under several precisions, side by side."""

# beside a run's logs: what it measured, or why it failed; and what it printed
MEASURED_FILE = "measured.json"
LOG_FILE = "log.txt"
