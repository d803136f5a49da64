"""``python -m lightning_fp8 report``: the logs of one or more runs as one HTML page, and as pictures."""

# beside a run's logs, written by `RunRecord` and `DtypeAudit`
RUN_FILE = "fp8_run.json"
DTYPES_FILE = "fp8_dtypes.json"
