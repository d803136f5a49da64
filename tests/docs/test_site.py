"""The documentation site: what `make docs` checks, in addition to mkdocs' own checks of links."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError
from repository import ROOT

sys.path.insert(0, str(ROOT / "docs"))

from docstrings import as_markdown, wrong_in_api
from hooks import on_post_page

API = (ROOT / "docs" / "api.md").read_text()


def test_the_api_page_has_every_public_name_once() -> None:
    assert wrong_in_api(API) == []


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("::: lightning_fp8.convert\n", "::: lightning_fp8.convert\n::: lightning_fp8.convert\n", "convert"),
        ("::: lightning_fp8.metrics.SQNR\n", "", "SQNR"),
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


@pytest.mark.parametrize(
    "loaded",
    [
        '<img alt="CI" src="https://example.org/badge.svg">',
        '<link rel="stylesheet" href="https://example.org/fonts.css">',
    ],
)
def test_a_page_that_loads_from_another_host_is_refused(loaded: str) -> None:
    own = '<img src="../images/a.png"><a href="https://example.org">a link</a><script src="assets/x.js"></script>'
    page = SimpleNamespace(file=SimpleNamespace(src_uri="faq.md"))
    assert on_post_page(own, page, {}) == own
    with pytest.raises(PluginError, match=r"faq\.md loads from another host: .*example\.org"):
        on_post_page(own + loaded, page, {})
