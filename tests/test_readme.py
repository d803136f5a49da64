"""README and documentation: their code runs, and their links exist."""

from __future__ import annotations

import inspect
import re
from functools import cache
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
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# a block of text right below code is what the code prints
SHOWN = re.compile(r"^```python\n(?:.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def python_of(page: Path) -> str:
    """All Python code of a page at its original line numbers, which a reader runs from top to bottom.

    What its blocks print goes to the file ``printed``, each with a zero byte behind it; progress bars and logs do not.
    """
    code = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        ends = inside and line == "```"
        inside = line == "```python" or (inside and not ends)
        code.append("print(end='\\0')" if ends else line if inside and line != "```python" else "")
    assert not code[0], f"{page} begins with code"
    code[0] = "from functools import partial; print = partial(print, file=open('printed', 'w'), flush=True)"
    return "\n".join(code)


DECIMAL = re.compile(r"\d+\.\d+")


def wrong_output(page: Path, printed: str) -> list[str]:
    """What the blocks of a page printed where the page shows something else.

    Decimals of a page that trains may be off by a tenth: bf16 products round differently on other CPUs.
    """
    text = page.read_text(encoding="utf-8")
    near = pytest.approx if "fit(" in text else lambda numbers, rel: numbers

    def same(shown: str, output: str) -> bool:
        numbers, found = ([float(number) for number in DECIMAL.findall(one)] for one in (shown, output))
        return DECIMAL.sub("", shown) == DECIMAL.sub("", output) and found == near(numbers, rel=0.1)

    outputs = printed.split("\0")[:-1]
    return [
        output for shown, output in zip(SHOWN.findall(text), outputs, strict=True) if shown and not same(shown, output)
    ]


WITH_PYTHON = [page for page in CURRENT if blocks(page, "python")]
YAML = [(page, position) for page in CURRENT for position in range(len(blocks(page, "yaml")))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python(page: Path, tmp_path: Path) -> None:
    assert all("lightning_fp8" in code for code in blocks(page, "python") if 'precision="fp8' in code)
    run = run_warm("-c", python_of(page), cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert wrong_output(page, (tmp_path / "printed").read_text(encoding="utf-8")) == []


def test_output_that_differs_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n```python\nshow()\n```\n\n```text\nloss 1.25, 3 steps\n```\n\n```python\nhidden()\n```\n"
    )
    of_both = "loss {}, {} steps\n\0anything\n\0"
    assert wrong_output(page, of_both.format(1.25, 3)) == []
    assert wrong_output(page, of_both.format(1.26, 3)) == ["loss 1.26, 3 steps\n"]
    page.write_text(page.read_text() + "\n`fit()`\n")
    assert wrong_output(page, of_both.format(1.26, 3)) == []
    assert wrong_output(page, of_both.format(1.5, 3)) == ["loss 1.5, 3 steps\n"]
    assert wrong_output(page, of_both.format(1.25, 4)) == ["loss 1.25, 4 steps\n"]


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
