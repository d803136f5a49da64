"""Takes the screenshots of the report in `report.md` with Chromium, from the page of a real run.

OMP_NUM_THREADS=1 make demo
python docs/screenshots.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "runs" / "tiny_gpt_fp8" / "report.html"
PICTURE = ROOT / "docs" / "images" / "report.png"


def main() -> None:
    """Take a screenshot of the page as it opens."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not REPORT.is_file():
        sys.exit(f"There is no {REPORT}: run `OMP_NUM_THREADS=1 make demo` first.")
    if chromium is None:
        sys.exit("There is no Chromium: `make browser` installs one.")
    PICTURE.parent.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1000, "height": 200}, color_scheme="light")
        page.goto(REPORT.as_uri())
        page.screenshot(path=PICTURE, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
