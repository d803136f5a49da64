"""The code of the README and of the page on callbacks runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from repository import ROOT
from warm import run_warm

README = (ROOT / "README.md").read_text()
DISTRIBUTED = (ROOT / "docs" / "distributed.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README + DISTRIBUTED, re.DOTALL)
CALLBACKS = (ROOT / "docs" / "callbacks.md").read_text()
YAML = re.findall(r"```yaml\n(.*?)```", README + CALLBACKS, re.DOTALL)


@pytest.mark.parametrize("position", range(len(PYTHON)))
def test_python(position: int, tmp_path: Path) -> None:
    run = run_warm("-c", PYTHON[position], cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("position", range(len(YAML)))
def test_yaml(position: int, tmp_path: Path) -> None:
    parsed = yaml.safe_load((ROOT / "configs" / "tiny_gpt_fp8.yaml").read_text())
    shown = yaml.safe_load(YAML[position])["trainer"]
    if "plugins" in shown:
        parsed["trainer"].pop("precision")
    parsed["trainer"].update(shown, max_steps=2, val_check_interval=1, limit_val_batches=1, accelerator="cpu")
    parsed["data"]["init_args"]["batch_size"] = 4
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(parsed))
    run = run_warm("-m", "lightning_fp8", "fit", "--config", "config.yaml", cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]


def test_there_is_code_to_run() -> None:
    assert len(PYTHON) >= 2
    assert len(YAML) >= 2


def test_files_that_they_name_exist() -> None:
    for path in re.findall(r"\]\(((?!http|#)[^)]+)\)", README):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(?:tests/)?(test_\w+\.py)`", README + DISTRIBUTED):
        assert [*(ROOT / "tests").rglob(name)], name


def test_every_callback_and_every_argument_is_on_the_page_with_its_default() -> None:
    import inspect

    import lightning_fp8.callbacks as callbacks

    (shown,) = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", CALLBACKS, re.DOTALL)]
    arguments = {entry["class_path"]: entry.get("init_args", {}) for entry in shown["trainer"]["callbacks"]}
    assert set(arguments) == {f"lightning_fp8.{name}" for name in callbacks.__all__}
    for path, given in arguments.items():
        kind = getattr(callbacks, path.split(".")[1])
        parameters = dict(inspect.signature(kind).parameters)
        if kind is callbacks.Fp8RichProgressBar:
            # objects of rich
            del parameters["theme"], parameters["console_kwargs"]
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        if kind is callbacks.Fp8ThroughputMonitor:
            defaults["batch_size_fn"] = "builtins.len"
        assert given == {name: list(v) if isinstance(v, tuple) else v for name, v in defaults.items()}, path
