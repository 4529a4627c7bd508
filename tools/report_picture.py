"""Takes a screenshot of a report in Chromium, for docs/pictures (needs the extra `browser` and an installed Chromium).

python -m tools.report_picture report.html docs/pictures/curves.png [--section curves] [--dark]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 1200, 760  # pixels
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Returns the path of the first installed Chromium."""
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


@contextmanager
def launched(browser_path: str | None) -> Iterator[Any]:
    """Starts Chromium, and closes it at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        yield browser
        browser.close()


def take(report: Path, picture: Path, section: str, dark: bool, browser_path: str) -> None:
    """Writes a PNG of the report at `section` ("": its top) after the curves are drawn."""
    with launched(browser_path) as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="dark" if dark else "light")
        page.goto(f"{report.resolve().as_uri()}#{section}")
        page.wait_for_selector("html[data-drawn]", state="attached")
        page.screenshot(path=picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--section", default="", help="name of the section to show. Default: the top of the page")
    parser.add_argument("--dark", action="store_true", help="use the report's dark theme")
    args = parser.parse_args()
    path = chromium()
    if path is None:
        sys.exit(f"report_picture needs a browser; install one of {', '.join(CHROMIUM_NAMES)}.")
    take(args.report, args.picture, args.section, args.dark, path)


if __name__ == "__main__":
    main()
