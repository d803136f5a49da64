"""The documentation as a site: what `make docs` finds, besides mkdocs' own checks of links."""

from __future__ import annotations

import sys

import pytest
from repository import ROOT

sys.path.insert(0, str(ROOT / "docs"))

from docstrings import as_markdown, wrong_in_api

API = (ROOT / "docs" / "api.md").read_text()


def test_the_api_page_has_every_public_name_once() -> None:
    assert wrong_in_api(API) == []


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("::: lightning_fp8.convert\n", "", "convert"),
        ("::: lightning_fp8.convert\n", "::: lightning_fp8.convert\n::: lightning_fp8.convert\n", "convert"),
        ("::: lightning_fp8.metrics.SQNR\n", "", "SQNR"),
        # there, but not public
        ("::: lightning_fp8.convert\n", "::: lightning_fp8.convert\n::: lightning_fp8.callbacks\n", "callbacks"),
    ],
)
def test_a_wrong_api_page_is_named(before: str, after: str, wrong: str) -> None:
    assert API.count(before) == 1
    assert wrong in " ".join(wrong_in_api(API.replace(before, after)))


def test_docstrings_become_markdown() -> None:
    text = "Calls :func:`convert`, :meth:`ScalingState.update` and ``x``.\n\n>>> 1 + 1\n2\n\nThe end."
    assert as_markdown(text) == (
        "Calls [`convert`][lightning_fp8.convert], `update` and `x`.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nThe end."
    )
