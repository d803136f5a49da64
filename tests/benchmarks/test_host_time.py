"""``benchmarks/host_time.py``: every case runs through the CUDA half, and the ratios match the columns."""

from __future__ import annotations

import pytest
from warm import run_warm

PROGRAM = ("-m", "benchmarks.host_time")


def test_the_last_lines_are_the_ratios_of_the_table() -> None:
    ran = run_warm(*PROGRAM, "--repetitions", "2", "--calls", "1")
    assert ran.returncode == 0, ran.stderr
    *lines, linear, block = ran.stdout.splitlines()
    table = {line[:24].strip(): [float(cell) for cell in line[24:].split()] for line in lines[2:7]}
    assert list(table) == ["linear", "linear - gelu - linear", "the same, fused", "attention", "block of Llama"]
    for plain, plain_both, converted, converted_both, ratio in table.values():
        assert min(plain, plain_both, converted, converted_both) > 0
        assert ratio == pytest.approx(converted_both / plain_both, rel=0.02)
    assert linear == f"ratio linear {table['linear'][-1]:.2f}"
    assert block == f"ratio block {table['block of Llama'][-1]:.2f}"
    parts = {line.rsplit(maxsplit=1)[0].strip(): float(line.rsplit(maxsplit=1)[1]) for line in lines[9:14]}
    assert sum(parts.values()) == pytest.approx(table["linear"][3], abs=0.4)


def test_a_profile() -> None:
    ran = run_warm(*PROGRAM, "--profile", "linear", check=True)
    assert "cast_transpose" in ran.stdout
