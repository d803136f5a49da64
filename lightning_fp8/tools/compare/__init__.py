"""``python -m lightning_fp8 compare``: one configuration under several precisions, side by side."""

# files next to a run's logs: what it measured or why it failed, and its output
MEASURED_FILE = "measured.json"
LOG_FILE = "log.txt"
