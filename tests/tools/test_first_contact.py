"""``benchmarks/first_contact.sh``: whatever hangs or fails, each stage ends in time with a line for each step."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from repository import ROOT

from benchmarks.suites import SUITES
from kernels_cuda import cache

SCRIPT = ROOT / "benchmarks" / "first_contact.sh"
GRACE_S = 10
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
    tmp_path: Path, stage: int, scale: float = 1.0, limit_s: float = 60, **environment: str
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
    _, _, *lines = (tmp_path / "out" / f"stage{stage}-summary.tsv").read_text().splitlines()
    return ran, [Step(*line.split("\t")) for line in lines]


def test_what_fails_does_not_keep_the_next_from_running(tmp_path: Path, programs: Path) -> None:
    limits = []
    for stage in (1, 2, 3, 4):
        ran, steps = run(tmp_path, stage)
        assert ran.returncode == 1
        assert {step.status for step in steps} == {"3"}
        assert len({step.name for step in steps}) == len(steps) >= 4
        # the printed output is also saved
        for output in (ran.stdout, (tmp_path / "out" / f"stage{stage}.log").read_text()):
            assert output.count(" was asked: ") == len(steps)
        limits.append(sum(float(step.limit) for step in steps))
        # each stage ends within ten minutes, though none of its steps ends by itself
        assert limits[-1] + GRACE_S * len(steps) < 600
        for words in (shlex.split(step.command) for step in steps):
            if "benchmarks" in words:
                chosen = dict(pairwise(words))
                cases = SUITES[chosen["--suite"]].cases(torch.device("cuda"))
                assert any(chosen["--case"] in case.name for case in cases), words
    # the first two, within ten minutes
    assert sum(limits[:2]) <= 10 * 60


def test_what_hangs_ends_and_the_rest_is_run(tmp_path: Path, programs: Path) -> None:
    """Even a step that no signal ends, one that ignores the first, and one that leaves a process holding its output."""
    left, stuck = tmp_path / "left", tmp_path / "stuck"
    # the script waits two seconds for the output of each step that has ended
    stand_in(programs, "sleep", f'[[ $1 != 2 ]] || set -- 0.3; exec {shutil.which("sleep")} "$@"')
    stand_in(
        programs, "timeout",
        f"""[[ $* != *nvidia-smi* ]] || {{ echo $$ > {stuck}; exec sleep 300; }}
exec {shutil.which("timeout")} "$@\"""",
    )  # fmt: skip
    stand_in(
        programs, "python",
        f"""echo "begun: $*"
case "$*" in
    *doctor*) trap '' TERM; while :; do sleep 60; done ;;
    *"-k bit_pattern"*) setsid sleep 300 & echo $! > {left}; exit 0 ;;
    *) exec sleep 300 ;;
esac""",
    )  # fmt: skip
    ran, steps = run(tmp_path, 1, scale=0.02, limit_s=200)
    subprocess.run(["kill", left.read_text().strip(), stuck.read_text().strip()], check=True)
    assert ran.returncode == 1
    status = {step.name: step.status for step in steps}
    expected = {"machine": "stuck", "doctor": "137 (time limit)", "casts": "0", "products": "124 (time limit)"}
    assert status == expected
    log = (tmp_path / "out" / "stage1.log").read_text()
    # its output before it hung
    assert "begun: -m lightning_fp8 doctor" in log


def test_cubins_that_anybody_could_have_written_are_used_as_ones_own(tmp_path: Path, programs: Path) -> None:
    carried, used = tmp_path / "carried", tmp_path / "cache"
    carried.mkdir()
    (carried / "a.cubin").write_bytes(b"\x7fELF")
    (carried / "a.cubin").chmod(0o777)
    carried.chmod(0o777)
    used.mkdir()
    used.chmod(0o777)
    run(tmp_path, 2, CUBINS=str(carried))
    cache.check_folder(used)
    assert cache.read(used / "a.cubin") == b"\x7fELF"
