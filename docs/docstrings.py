"""A griffe extension that converts the package's docstrings, which use reStructuredText roles, to Markdown."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod):`~?([\w.]+)`")
_DOCTEST = re.compile(r"(?:^ *>>> .*\n(?:^ *\S.*\n?)*)+", re.MULTILINE)
PACKAGE = "lightning_fp8"
# modules whose `__all__` is the API
PUBLIC = (
    PACKAGE,
    *(f"{PACKAGE}.{name}" for name in ("conversion", "dtypes", "integrations", "metrics", "modules", "plugins")),
    *(f"{PACKAGE}.{name}" for name in ("scaling", "tools.compare")),
)


@cache
def _package() -> Any:
    return griffe.load(PACKAGE, resolve_aliases=True)


def _named(path: str) -> Any:
    inside = path.removeprefix(PACKAGE).removeprefix(".")
    return _package()[inside] if inside else _package()


def _exports(module: str) -> set[str]:
    return {str(name) for name in _named(module).exports}


def wrong_in_api(markdown: str) -> list[str]:
    """Errors of the API page: public names missing or listed twice, and names not public or without a docstring."""
    paths = re.findall(r"^::: (\S+)$", markdown, re.MULTILINE)
    shown = Counter(path.rpartition(".")[2] for path in paths)
    public = Counter(set().union(*map(_exports, PUBLIC)))
    return sorted({*(shown - public), *(public - shown), *(path for path in paths if not _named(path).docstring)})


def _link(role: re.Match[str]) -> str:
    name = role[1].rpartition(".")[2]
    public = f"{PACKAGE}.{name}"
    # the function `export` is documented under its full path, as a package has the same name
    is_public = role[1] in (name, public) and name in _exports(PACKAGE) - {"export"}
    return f"[`{name}`][{public}]" if is_public else f"`{name}`"


def as_markdown(text: str) -> str:
    """Convert roles to links if the API has the name, else to code; doctests and double backticks become code too."""
    text = _ROLE.sub(_link, text.replace("``", "`"))
    return _DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called with every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
