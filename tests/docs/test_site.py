"""The documentation site: what `make docs` checks, in addition to mkdocs' own checks of links."""

from __future__ import annotations

import re
import struct
import sys
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from repository import ROOT

sys.path.insert(0, str(ROOT / "docs"))

from docstrings import as_markdown, wrong_in_api
from hooks import on_page_markdown, on_post_page
from screenshots import IMAGES, PICTURES

API = (ROOT / "docs" / "api.md").read_text()


def test_the_api_page_has_every_public_name_once() -> None:
    assert wrong_in_api(API) == []


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("::: lightning_fp8.convert\n", "", "convert"),
        ("::: lightning_fp8.convert\n", "::: lightning_fp8.convert\n::: lightning_fp8.convert\n", "convert"),
        ("::: lightning_fp8.metrics.SQNR\n", "", "SQNR"),
        # exists, but is not public
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


def page(path: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


def test_the_site_has_no_badges() -> None:
    badges = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("[![")]
    assert len(badges) == 4
    text = "\n".join(["# lightning_fp8", "", *badges, "", "FP8 ![a picture](https://example.org/a.png)"])
    shown = on_page_markdown(text, page("about.md"), None, Files([]))
    assert shown.split() == ["#", "lightning_fp8", "FP8", "![a", "picture](https://example.org/a.png)"]


@pytest.mark.parametrize(
    "loaded",
    [
        '<img alt="CI" src="https://example.org/badge.svg">',
        "<script src=//example.org/x.js></script>",
        '<link rel="stylesheet" href="https://example.org/fonts.css">',
    ],
)
def test_a_page_that_loads_from_another_host_is_refused(loaded: str) -> None:
    own = '<img src="../images/a.png"><a href="https://example.org">a link</a><script src="assets/x.js"></script>'
    assert on_post_page(own, page("faq.md"), {}) == own
    with pytest.raises(PluginError, match=r"faq\.md loads from another host: .*example\.org"):
        on_post_page(own + loaded, page("faq.md"), {})


def test_pictures_of_the_report() -> None:
    shown = dict(re.findall(r"^!\[(.+)\]\(images/(.+)\.png\)$", (ROOT / "docs/callbacks.md").read_text(), re.MULTILINE))
    assert sorted(shown.values()) == sorted(PICTURES) == sorted(path.stem for path in IMAGES.iterdir())
    assert all(len(alt) > 60 for alt in shown)
    ids = set(re.findall(r'id="([\w-]+)"', (ROOT / "lightning_fp8/tools/report/page.html").read_text()))
    for name, places in PICTURES.items():
        assert set(places) <= ids
        content = (IMAGES / f"{name}.png").read_bytes()
        assert len(content) < 150_000
        # the header: a PNG chunk with width and height
        width, height = struct.unpack(">II", content[16:24])
        assert width > 900
        assert height > 400
