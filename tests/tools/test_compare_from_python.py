"""A comparison from Python: what it returns and shows, with the verdict of an ``Fp8Monitor``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
import yaml
from warm import run_warm

from lightning_fp8.tools import worker
from lightning_fp8.tools.compare import compare

CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 3,
        "callbacks": [{"class_path": "lightning_fp8.Fp8Monitor", "init_args": {"action": "raise"}}],
    },
    "model": {
        "class_path": "lightning_fp8.examples.ByteGPT",
        "init_args": {"layers": 1, "width": 32, "heads": 2, "context": 16},
    },
    "data": {
        "class_path": "lightning_fp8.examples.StdlibText",
        "init_args": {"context": 16, "batch_size": 4, "val_windows": 8, "max_bytes": 20_000},
    },
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the current folder."""

    def run(command: Sequence[str], output: IO[str]) -> int:
        ran = run_warm(*command[1:], cwd=Path.cwd())
        output.write(ran.stdout + ran.stderr)
        output.flush()
        return ran.returncode

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    return "tiny.yaml"


@pytest.mark.slow
def test_two_precisions_of_a_configuration(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(config, ["32-true", "fp8-delayed"], steps=20, warmup=2, arguments=["--trainer.devices=1"])
    printed = capsys.readouterr().out
    # steps are shown while it runs, before the table
    assert printed.count("step 20/20: loss ") == 2
    assert "tokens/s" not in printed
    baseline, fp8 = found.rows
    assert (baseline["variant"], fp8["variant"]) == ("32-true", "fp8-delayed")
    assert "verdict" not in baseline
    assert fp8["verdict"].startswith("FP8: ")
    assert fp8["verdict"].endswith("(5 layers, 20 steps)")
    assert found.folder == Path("runs", "compare", "tiny")
    assert (found.folder / "compare.jsonl").read_text().count("\n") == 2
    text = str(found)
    assert f"{fp8['loss']:.4f}" in text
    if found.baseline == "32-true":
        last = text.splitlines()[-1]
        assert last.startswith(f"Beside 32-true, fp8-delayed has a loss of {fp8['loss']:.4f} (")
        assert last.endswith(f", {fp8['verdict']}.")


def test_what_is_refused_is_a_value_error(config: str) -> None:
    with pytest.raises(ValueError, match="there is no file nowhere"):
        compare("nowhere.yaml")
    with pytest.raises(ValueError, match=r"must be one of .* got 'fp8-delyed'. Did you mean 'fp8-delayed'\?"):
        compare(config, ["fp8-delyed"])
    with pytest.raises(ValueError, match="--warmup must be from 1 to less than the number of steps, 5, got 5"):
        compare(config, steps=5, warmup=5)
    with pytest.raises(ValueError, match=r"refused: .*Did you mean 'max_steps'\?"):
        compare([config], ["fp8-delayed"], arguments=["--trainer.max_stepz=1"])
