"""Entry point of ``python -m benchmarks``."""

import sys

from benchmarks.harness import main
from benchmarks.suites import SUITES

if __name__ == "__main__":
    main(sys.argv[1:], SUITES)
