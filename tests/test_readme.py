"""README and documentation: their code runs, their commands and links exist, and their numbers are as measured."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

import pytest
import yaml
from repository import ROOT
from warm import run_warm

import lightning_fp8.callbacks as callbacks

FOLDERS = (
    "*.md",
    "docs/**/*.md",
    "configs/*.md",
    "examples/*.md",
    "kernels_cuda/**/*.md",
    "benchmarks/**/*.md",
    "tests/**/*.md",
)
MARKDOWN = sorted(page for pattern in FOLDERS for page in ROOT.glob(pattern))
# without the changelog, which also has commands and tests of earlier versions
CURRENT = [page for page in MARKDOWN if page.name != "CHANGELOG.md"]
# "" is for formulas, trees and messages; commands are only parsed, everything else is run
LANGUAGES = {"", "console", "python", "yaml"}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def python_of(page: Path) -> str:
    """All Python code of a page at its original line numbers, which a reader runs from top to bottom."""
    code = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        inside = line == "```python" or (inside and line != "```")
        code.append(line if inside and line != "```python" else "")
    return "\n".join(code)


WITH_PYTHON = [page for page in CURRENT if blocks(page, "python")]
YAML = [(page, position) for page in CURRENT for position in range(len(blocks(page, "yaml")))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python(page: Path, tmp_path: Path) -> None:
    assert all("lightning_fp8" in code for code in blocks(page, "python") if 'precision="fp8' in code)
    run = run_warm("-c", python_of(page), cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize(("page", "position"), YAML, ids=lambda part: name_of(part) if isinstance(part, Path) else part)
def test_yaml(page: Path, position: int, tmp_path: Path) -> None:
    parsed = yaml.safe_load((ROOT / "configs" / "tiny_gpt_fp8.yaml").read_text())
    shown = yaml.safe_load(blocks(page, "yaml")[position])["trainer"]
    if "plugins" in shown:
        parsed["trainer"].pop("precision")
    parsed["trainer"].update(shown, max_steps=2, val_check_interval=1, limit_val_batches=1, accelerator="cpu")
    parsed["model"]["init_args"].update(width=64, context=32)
    parsed["data"]["init_args"].update(batch_size=4, context=32, max_bytes=100_000)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(parsed))
    run = run_warm("-m", "lightning_fp8", "fit", "--config", "config.yaml", cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]


# --- commands: parsed, not run ---

OWN_COMMANDS = ("fit", "validate", "compare", "doctor", "report")


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page, in blocks and in the text, without comments."""
    text = page.read_text(encoding="utf-8")
    for code in blocks(page, "console"):
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            # skipping environment variables
            yield list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    for code in re.findall(r"`(?:[A-Z_]+=\S+ )*((?:python|pip|make) [^`]+)`", BLOCK.sub("", text)):
        yield shlex.split(code)


def sources(path: Path) -> str:
    return "".join(file.read_text() for file in (path.rglob("*.py") if path.is_dir() else [path]))


def wrong_in(words: Sequence[str]) -> str | None:
    """The part of a command that does not exist; None if all parts do. Lightning's own options are not checked."""
    for word in words:
        if re.match(r"(configs|examples|tests)/[^<>]*$", word) and not (ROOT / word).exists():
            return word
    match words:
        case ["make", target, *_]:
            return None if re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) else target
        case ["pip", "install", *_]:
            extras = (ROOT / "pyproject.toml").read_text()
            asked = ",".join(re.findall(r"\[([\w,-]+)\]", " ".join(words))).split(",")
            return next((name for name in asked if name and f"\n{name} = [" not in extras), None)
        case ["python", "-m", "lightning_fp8", command, *options]:
            if command not in OWN_COMMANDS:
                return command
            tool = ROOT / "lightning_fp8" / "tools" / command
            tool = tool if tool.is_dir() else tool.with_suffix(".py")
            offered = sources(tool) if command in OWN_COMMANDS[2:] else None
        case ["python", script, *options] if script.startswith("examples/"):
            offered = sources(ROOT / script)
        case ["python", "-m", module, *options] if module.startswith("benchmarks"):
            if find_spec(module) is None:
                return module
            offered = sources(ROOT / "benchmarks")
        case _:
            return None
    given = [option for option in options if re.match(r"--(?!trainer\.)", option)]
    return next((option for option in given if offered is not None and f'"{option}"' not in offered), None)


def test_commands_exist() -> None:
    found = {f"{name_of(page)}: {' '.join(words)}": wrong_in(words) for page in CURRENT for words in commands(page)}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


def test_a_wrong_command_is_found() -> None:
    wrong = {
        "make demos": "demos",
        "pip install '.[cuda14]'": "cuda14",
        "python -m lightning_fp8 compare --presicions": "--presicions",
        "python -m benchmarks.losses": "benchmarks.losses",
        "python -m pytest -m cuda tests/test_gpu.py": "tests/test_gpu.py",
        "python examples/pretrain_gpt.py --lora": "--lora",
    }
    assert {command: wrong_in(shlex.split(command)) for command in wrong} == wrong


# --- links ---


@cache
def anchors(page: Path) -> frozenset[str]:
    """GitHub's anchors for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", BLOCK.sub("", text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.resolve())):
            broken.append(link)
    return broken


def test_links_and_anchors() -> None:
    text = "[a](docs/faq.md#weights) [b](docs/faq.md#weight) [c](docs/none.md) [d](#precisions) ![e](#precision)"
    assert broken_links(ROOT / "README.md", text) == ["docs/faq.md#weight", "docs/none.md", "#precision"]
    found = {name_of(page): broken_links(page, page.read_text(encoding="utf-8")) for page in MARKDOWN}
    assert {page: links for page, links in found.items() if links} == {}


def test_no_code_is_left_out() -> None:
    """Indented, quoted or in another language, which no test reads."""
    for page in MARKDOWN:
        fences = re.findall(r"^[ >*-]*(?:```|~~~).*$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
        assert {*fences} <= {f"```{language}" for language in LANGUAGES}, page


def test_every_callback_and_every_argument_is_on_the_page_with_its_default() -> None:
    (shown,) = map(yaml.safe_load, blocks(ROOT / "docs" / "callbacks.md", "yaml"))
    arguments = {entry["class_path"]: entry.get("init_args", {}) for entry in shown["trainer"]["callbacks"]}
    assert set(arguments) == {f"lightning_fp8.{name}" for name in callbacks.__all__}
    for path, given in arguments.items():
        kind = getattr(callbacks, path.split(".")[1])
        defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
        if kind is callbacks.Fp8ThroughputMonitor:
            defaults["batch_size_fn"] = "builtins.len"
        if kind is callbacks.PrecisionSchedule:
            defaults["schedule"] = {0.9: "bf16"}
        assert given == {name: list(v) if isinstance(v, tuple) else v for name, v in defaults.items()}, path
