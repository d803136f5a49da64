"""Whether the README's badges are correct."""

from __future__ import annotations

import re

import yaml
from documented import text_of

README = text_of("README.md")
PROJECT = text_of("pyproject.toml")
WORKFLOW = ".github/workflows/ci.yml"


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
