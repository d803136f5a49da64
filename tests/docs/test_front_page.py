"""The order of the README's first screen, and whether its badges are correct."""

from __future__ import annotations

import re

import yaml
from documented import text_of

README = text_of("README.md")
PROJECT = text_of("pyproject.toml")
WORKFLOW = ".github/workflows/ci.yml"


def test_order() -> None:
    about, *sections = re.split(r"^## ", README, flags=re.MULTILINE)
    assert [section.partition("\n")[0] for section in sections] == [
        "Precisions",
        "Installation",
        "The same loss as bf16",
        "Problems it solves",
        "Documentation",
    ]
    parts = ("For everyone who", "**State:**", "```python", "replaces Lightning's", "LIGHTNING_FP8_REPLACE_BF16=0")
    places = [about.index(part) for part in parts]
    assert places == sorted(places)
    # one sentence
    (state,) = re.findall(r"\*\*State:\*\*(.*?)\n\n", about, re.DOTALL)
    assert len(re.findall(r"\.(?:\s|$)", state)) == 1
    (code,) = re.findall(r"```python\n(.*?)```", about, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 5
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 1


def test_badges() -> None:
    badges = {
        alt: (image, link)
        for alt, image, link in re.findall(r"^\[!\[(.*?)\]\((.*?)\)\]\((.*?)\)$", README, re.MULTILINE)
    }
    assert len(badges) == 4
    (repository,) = re.findall(r'^Repository = "(.*)"$', PROJECT, re.MULTILINE)
    ci = yaml.safe_load(text_of(WORKFLOW))
    workflow = f"{repository}/actions/workflows/{WORKFLOW.rpartition('/')[2]}"
    assert badges["CI"] == (f"{workflow}/badge.svg", workflow)
    tested = [job["python"] for job in ci["jobs"]["tests"]["strategy"]["matrix"]["include"]]
    oldest, newest = tested[0], tested[-1]
    assert f'requires-python = ">={oldest}"' in PROJECT
    (licence,) = re.findall(r'^license = "(.*)"$', PROJECT, re.MULTILINE)
    for alt, part in {
        f"Python {oldest} to {newest}": f"python-{oldest}_to_{newest}-",
        f"License: {licence}": f"license-{licence.replace('-', '--')}-",
        "Documentation": "docs-overview-",
    }.items():
        image, link = badges[alt]
        assert part in image
        assert text_of(link)
