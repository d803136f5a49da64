"""``benchmarks/first_contact.sh``: whatever hangs or fails, each stage ends in time with a line for each step."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from repository import ROOT
from warm import run_warm

from benchmarks.suites import SUITES
from kernels_cuda import cache
from lightning_fp8.tools.tune.command import parse_layers

SCRIPT = ROOT / "benchmarks" / "first_contact.sh"
GRACE_S = 10
STAGES = (1, 2, 3, 4)
pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="the script needs GNU's timeout")


class Step(NamedTuple):
    name: str
    status: str
    seconds: str
    limit: str
    command: str


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Fakes of all programs that the script starts, first on the path; each prints its arguments and fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "nvidia-smi", "ncu", "compute-sanitizer"):
        stand_in(folder, name, f'echo "{name} was asked: $*"; exit 3')
    return folder


def run(
    tmp_path: Path, stage: int | str, scale: float = 1.0, limit_s: float = 60, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[Step]]:
    variables = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "out"),
        "LIGHTNING_FP8_CACHE_DIR": str(tmp_path / "cache"),
        # not those of this checkout
        "CUBINS": str(tmp_path / "cubins"),
        "LIMIT_SCALE": str(scale),
        **environment,
    }
    ran = subprocess.run(
        [str(SCRIPT), str(stage)], capture_output=True, text=True, check=False, env=variables, timeout=limit_s
    )
    summary = tmp_path / "out" / f"stage{stage}-summary.tsv"
    if not summary.exists():
        return ran, []
    header, titles, *lines = summary.read_text().splitlines()
    assert re.fullmatch(rf"# stage {stage}, commit \S+, 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", header)
    assert titles == "step\tstatus\tseconds\tlimit\tcommand"
    return ran, [Step(*line.split("\t")) for line in lines]


def test_what_fails_does_not_keep_the_next_from_running(tmp_path: Path, programs: Path) -> None:
    limits = []
    for stage in STAGES:
        ran, steps = run(tmp_path, stage)
        assert ran.returncode == 1
        assert {step.status for step in steps} == {"3"}
        assert len({step.name for step in steps}) == len(steps) >= 4
        log = (tmp_path / "out" / f"stage{stage}.log").read_text()
        for step in steps:
            program, _, rest = " ".join(shlex.split(step.command)).partition(" ")
            assert f"=== {step.name}, at most {step.limit} s: {step.command}\n" in log
            assert f"{program} was asked: {rest}\n" in log
        # the printed output is also saved
        assert ran.stdout.count(" was asked: ") == len(steps)
        limits.append(sum(float(step.limit) for step in steps))
        # each stage ends within ten minutes, though none of its steps ends by itself
        assert limits[-1] + GRACE_S * len(steps) < 600
    # of the half hour, a machine takes two minutes to start
    assert sum(limits) <= 28 * 60


def test_cases_and_layers_are_ones_that_there_are(tmp_path: Path, programs: Path) -> None:
    gpu, found = torch.device("cuda"), {}
    for stage in STAGES:
        for step in run(tmp_path, stage)[1]:
            words = shlex.split(step.command)
            if "benchmarks" in words:
                chosen = dict(pairwise(words))
                cases = [case.name for case in SUITES[chosen["--suite"]].cases(gpu)]
                found[step.name] = [case for case in cases if chosen.get("--case", "") in case]
            if "tune" in words:
                assert parse_layers(words[-1])
    assert [name for name, cases in found.items() if not cases] == []
    # what is not compared in a step would only take its time
    assert found["casts, 8192 and 8200 tokens"] == [f"{rows}x8192 bf16->e4m3 cast_transpose" for rows in (8192, 8200)]
    assert max(len(cases) for cases in found.values()) <= 4
    layers = "linear, 8192 tokens, 4096 -> 16384"
    assert found["linear, linear-GELU-linear"] == [layers, f"linear-GELU-{layers} -> 4096"]


# as on a machine with a Hopper GPU
ON_HOPPER = """
import json, sys, pytest, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
"""
COLLECT = f"""{ON_HOPPER}
class Selected:
    def pytest_collection_finish(self, session):
        found[-1] += [item.nodeid for item in session.items]

found = []
for arguments in json.loads(sys.argv[1]):
    found.append([])
    pytest.main([*arguments, "--collect-only", "-q"], plugins=[Selected()])
print(json.dumps(found))"""


def test_tests_are_ones_that_there_are(tmp_path: Path, programs: Path) -> None:
    """Each step's, as pytest collects them: by name and by the names of their parameters."""
    steps = {step.name: shlex.split(step.command) for stage in STAGES for step in run(tmp_path, stage)[1]}
    chosen = {name: words[words.index("pytest") + 1 :] for name, words in steps.items() if "pytest" in words}
    ran = run_warm("-c", COLLECT, json.dumps(list(chosen.values())))
    found = dict(zip(chosen, json.loads(ran.stdout.splitlines()[-1]), strict=True))
    assert [name for name, tests in found.items() if not tests] == []
    assert sum("::test_self_tests[128x" in test for test in found["GEMM self-tests"]) >= 4
    # each by its name, which is printed before it runs
    self_tests = [test for test in found["casts and GEMMs in blocks"] if "_of_blocks_and_groups_" in test]
    words = {"cast_blocks ": 33, "cast_mx ": 33, "cast_weights ": 3, "B_SCALE_ROWS=": 24, "GROUPED=": 12}
    assert {word: sum(word in test for test in self_tests) for word in words} == words
    # memory is checked in tests that have run before
    once = [test for name, tests in found.items() if "memory" not in name for test in tests]
    assert sorted(set(once)) == sorted(once)


def test_memory_is_checked_outside_of_torchs_cache(tmp_path: Path, programs: Path) -> None:
    stand_in(programs, "compute-sanitizer", 'echo "cache: ${PYTORCH_NO_CUDA_MEMORY_CACHING:-torch}"')
    stand_in(programs, "python", 'echo "cache: ${PYTORCH_NO_CUDA_MEMORY_CACHING:-torch}"')
    ran, steps = run(tmp_path, 4)
    checks = sum(step.name.startswith("memory check") for step in steps)
    assert ran.stdout.count("cache: 1\n") == checks == 2
    assert ran.stdout.count("cache: torch\n") == sum(step.command.startswith("'python'") for step in steps)


def test_what_hangs_ends_and_the_rest_is_run(tmp_path: Path, programs: Path) -> None:
    """Even a step that no signal ends, one that ignores the first, and one that leaves a process holding its output."""
    left, stuck = tmp_path / "left", tmp_path / "stuck"
    stand_in(
        programs, "timeout",
        f"""[[ $* != *importlib.metadata* ]] || {{ echo $$ > {stuck}; exec sleep 300; }}
exec {shutil.which("timeout")} "$@\"""",
    )  # fmt: skip
    stand_in(
        programs, "python",
        f"""echo "begun: $*"
case "$*" in
    *--quick*) trap '' TERM; while :; do sleep 60; done ;;
    *doctor*) setsid sleep 300 & echo $! > {left}; exit 0 ;;
    *"-k bit_pattern"*) exec sleep 300 ;;
    *) exit 0 ;;
esac""",
    )  # fmt: skip
    ran, steps = run(tmp_path, 1, scale=0.03, limit_s=200)
    subprocess.run(["kill", left.read_text().strip(), stuck.read_text().strip()], check=True)
    assert ran.returncode == 1
    status = {step.name: step.status for step in steps}
    assert status["versions"] == "stuck"
    assert status["doctor quick"] == "137 (time limit)"
    assert status["doctor"] == "0"
    assert status["casts"] == "124 (time limit)"
    assert status["graphs, threads, no waiting"] == "0"
    assert len(steps) == 8
    log = (tmp_path / "out" / "stage1.log").read_text()
    # its output before it hung
    assert "begun: -m lightning_fp8 doctor --quick" in log


def test_what_is_measured_is_there_after_each_step(tmp_path: Path, programs: Path) -> None:
    stand_in(
        programs, "python",
        """case "$*" in
    *tune*) echo '{"rows": []}' > "$LIGHTNING_FP8_CACHE_DIR/gemm-nvidia-h100.json" ;;
    *benchmarks*) while [ "$1" != --out ]; do shift; done; echo '{"row": 1}' >> "$2"; ls "$OUT" ;;
esac""",
    )  # fmt: skip
    ran, steps = run(tmp_path, 2)
    assert (tmp_path / "out" / "gemm-nvidia-h100.json").read_text() == '{"rows": []}\n'
    assert (tmp_path / "out" / "stage2.jsonl").read_text() == 6 * '{"row": 1}\n'
    # already there when the next step ran
    assert "\ngemm-nvidia-h100.json\n" in ran.stdout
    assert len(list((tmp_path / "out").iterdir())) == 4
    assert [step.name for step in steps if step.status != "0"] == ["machine"]


def test_cubins_that_anybody_could_have_written_are_used_as_ones_own(tmp_path: Path, programs: Path) -> None:
    carried, used = tmp_path / "carried", tmp_path / "cache"
    carried.mkdir()
    (carried / "a.cubin").write_bytes(b"\x7fELF")
    (carried / "a.cubin").chmod(0o777)
    (carried / "gemm-nvidia-h100.json").write_bytes(b"{}")
    carried.chmod(0o777)
    used.mkdir()
    used.chmod(0o777)
    run(tmp_path, 2, CUBINS=str(carried))
    cache.check_folder(used)
    assert cache.read(used / "a.cubin") == b"\x7fELF"
    # and a table that was measured on a machine that is gone
    assert cache.read(used / "gemm-nvidia-h100.json") == b"{}"
