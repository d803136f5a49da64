"""``benchmarks/host_time.py``: both cases run through the CUDA half, and the ratios match the columns."""

from __future__ import annotations

import pytest
from warm import run_warm

PROGRAM = ("-m", "benchmarks.host_time")


def test_the_last_lines_are_the_ratios_of_the_table() -> None:
    ran = run_warm(*PROGRAM, "--repetitions", "2", "--calls", "1")
    assert ran.returncode == 0, ran.stderr
    *lines, linear, block = ran.stdout.splitlines()
    table = {line[:24].strip(): [float(cell) for cell in line[24:].split()] for line in lines[2:]}
    assert list(table) == ["linear", "block"]
    for name, said in (("linear", linear), ("block", block)):
        plain, plain_both, plain_evaluation, converted, converted_both, evaluation = table[name]
        assert 0 < plain < plain_both
        assert 0 < converted < converted_both
        assert min(plain_evaluation, evaluation) > 0
        label, _, ratio = said.rpartition(" ")
        assert label == f"ratio {name}"
        assert float(ratio) == pytest.approx(converted_both / plain_both, rel=0.02)
