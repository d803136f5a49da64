"""What the scripts of ``benchmarks/`` share: variants take turns, each in a process of its own."""

from __future__ import annotations

import sys

import pytest

from benchmarks.harness import take_turns

CHILD = """
import json, sys
if "--fail" in sys.argv:
    sys.exit("it broke")
print("something else")
print(json.dumps({"told": sys.argv[1:]}))
"""


def test_each_variant_runs_the_same_command_again_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # as the interpreter was called: of `python -m` the arguments alone do not say how
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", CHILD, "--steps", "2"])
    told = {name: {"told": ["--steps", "2", "--variant", name]} for name in ("a", "b c")}
    assert take_turns(told, rounds=2) == {name: [one, one] for name, one in told.items()}


def test_a_variant_that_fails_ends_the_benchmark_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", CHILD, "--fail"])
    with pytest.raises(SystemExit, match="a failed:\nit broke"):
        take_turns(["a"], rounds=1)
