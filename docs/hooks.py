"""Hooks of the documentation site: add pages from outside `docs/`, rewrite links, refuse content from other hosts.

On disk every link is relative to its file, so that it works in a checkout and on a code host.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import wrong_in_api

ROOT = Path(__file__).parent.parent
# repository files that are also pages of the site, and their names there: `README.md` would be the home page
OUTSIDE = {
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "configs/README.md": "configs.md",
    "examples/README.md": "examples.md",
    "kernels_cuda/README.md": "kernels.md",
}
_ON_DISK = {on_site: path for path, on_site in OUTSIDE.items()}
_BADGE = re.compile(r"^\[!\[.*\n", re.MULTILINE)
_FROM_ELSEWHERE = re.compile(
    r"""<(?:img|script|iframe|link rel="stylesheet")[^>]*\s(?:src|href)=["']?(?:https?:)?//[^\s>]*"""
)
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside `docs/`."""
    for path, on_site in OUTSIDE.items():
        files.append(File.generated(config, on_site, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Remove badges and rewrite links for the site; other repository files that a page links to become downloads."""
    name = page.file.src_uri
    if name == "api.md" and (wrong := wrong_in_api(markdown)):
        raise PluginError(f"api.md: missing, twice, not public or without a docstring: {', '.join(wrong)}")
    markdown = _BADGE.sub("", markdown)
    folder = posixpath.dirname(_ON_DISK.get(name, f"docs/{name}"))

    def rewritten(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        on_site = OUTSIDE.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(on_site) is None and (ROOT / target).is_file():
            files.append(File.generated(config, on_site, abs_src_path=str(ROOT / target)))
        return f"{link[1]}{posixpath.relpath(on_site, posixpath.dirname(name) or '.')}{link[3]}"

    return _LINK.sub(rewritten, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that loads anything from another host."""
    if found := _FROM_ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output
