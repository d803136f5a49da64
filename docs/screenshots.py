"""Takes the screenshots of the report in `callbacks.md` with Chromium, from the page of a real run.

OMP_NUM_THREADS=1 make demo
python docs/screenshots.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "runs" / "tiny_gpt_fp8" / "report.html"
IMAGES = ROOT / "docs" / "images"
# by file name: a section of the page, and its last element that is shown
PICTURES = {
    "report-scales": ("scales", "heatmap"),
    "report-lost-numbers": ("roles", "roles-charts"),
    "report-worst-layers": ("worst", "worst-table"),
}


def take(page: Page, section: str, last: str, path: Path) -> None:
    """Take a screenshot of a section, from its top to the bottom of one of its elements."""
    whole, end = (page.locator(f"#{place}").bounding_box() for place in (section, last))
    if whole is None or end is None:
        sys.exit(f"The page does not show #{section} and #{last}.")
    height = end["y"] + end["height"] - whole["y"]
    clip = {"x": whole["x"], "y": whole["y"], "width": whole["width"], "height": height}
    page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]


def main() -> None:
    """Take all screenshots."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not REPORT.is_file():
        sys.exit(f"There is no {REPORT}: run `OMP_NUM_THREADS=1 make demo` first.")
    if chromium is None:
        sys.exit("There is no Chromium: `make browser` installs one.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
        page.goto(REPORT.as_uri())
        page.wait_for_selector("body[data-ready=yes]")
        for name, (section, last) in PICTURES.items():
            take(page, section, last, IMAGES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
