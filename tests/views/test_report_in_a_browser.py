"""Reports work in a real browser without a network."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.report_picture import chromium, launched

from sansgpu.cli import run as cli
from tests.processes import events_of
from tests.views.runs import train

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
NOW = "(function () { const s = getComputedStyle(document.querySelector('.xtick text')); return s.fill; })()"


@pytest.fixture(scope="module")
def report(home: Path) -> Path:
    """Writes the report of two runs."""
    runs = [train(home, "one"), train(home, "two", training__learning_rate=0.001, training__max_steps=6)]
    assert cli(["report", *map(str, runs), "--output", str(home / "report.html")]) == 0
    return home / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(CHROMIUM) as browser:
        yield browser


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Any]:
    """Opens the report in a window; errors and network requests fail the test."""
    contexts, wrong = [], []

    def open_page(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.route(
            "**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort()
        )
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith("file:") else wrong.append(asked.url))
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-drawn]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def lines(page: Any) -> dict[str, int]:
    """Returns the number of series in each plot."""
    script = """Object.fromEntries([...document.querySelectorAll("figure")].map((figure) => [figure.dataset.name,
      figure.querySelectorAll(".scatterlayer .trace, .barlayer .trace").length]))"""
    return dict(page.evaluate(script))


def until(ready: Callable[[], bool]) -> None:
    """Waits for a condition. The page forbids eval, so playwright cannot wait for it in the browser."""
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_curve_shows_its_values_under_the_pointer(opened: Any) -> None:
    page = opened()
    plot = page.locator("figure[data-name=loss] .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    for aside in range(2):  # plotly reacts only if the pointer moves
        page.mouse.move(box["x"] + 0.65 * box["width"] + aside, box["y"] + box["height"] / 2)
    label = page.locator("figure[data-name=loss] .hoverlayer")
    until(lambda: "one: training" in label.text_content())
    titles = page.locator("figure[data-name=loss] .modebar-btn").evaluate_all("all => all.map((b) => b.dataset.title)")
    assert titles == ["Zoom", "Pan", "Reset axes"]  # and no button that uploads


def test_a_run_is_hidden_in_every_plot_at_once(opened: Any) -> None:
    page = opened()
    before = lines(page)
    assert len(before) > 6
    assert all(before.values())
    page.uncheck("input[name=run][value='1']")
    shown = lines(page)
    left = """[...document.querySelectorAll(".plot")].map((box) => box.data.filter((trace) => trace.visible !== false)
      .every((trace) => trace.meta.run === 0))"""
    assert all(page.evaluate(left))
    assert all(shown[name] < before[name] for name in before)
    assert page.locator("figure[data-name=loss] .legendtext").all_text_contents() == ["training", "validation"]
    page.check("input[name=run][value='1']")
    assert lines(page) == before


def test_curves_are_plotted_over_steps_tokens_or_time(opened: Any, report: Path) -> None:
    page = opened()
    learned = [event["tokens"] for event in events_of(report.parent / "one", "step")][-1]
    ends = "document.querySelector('figure[data-name=loss] .plot').data[0].x.at(-1)"
    assert page.evaluate(ends) == 8
    page.check("input[name=axis][value=tokens]")
    assert page.evaluate(ends) == learned
    assert page.locator("figure[data-name=loss] .xtitle").text_content() == "tokens"


def test_plots_follow_light_and_dark(opened: Any) -> None:
    page = opened(color_scheme="light")
    light, paper = page.evaluate(NOW), "getComputedStyle(document.body).backgroundColor"
    white = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    until(lambda: page.evaluate(NOW) != light)
    assert page.evaluate(paper) != white
    page.click("#scheme")  # overrides the system's color scheme
    until(lambda: page.evaluate(NOW) == light)
    assert page.evaluate(paper) == white


def test_nothing_is_wider_than_a_telephone(opened: Any) -> None:
    page = opened(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth && innerWidth === 390")
    wide = """[...document.querySelectorAll("figure, figure *")].filter((part) => part.scrollWidth > 390 ||
      part.getBoundingClientRect().right > 390).length"""
    assert page.evaluate(wide) == 0


def test_a_picture_of_a_section_is_taken(report: Path, tmp_path: Path) -> None:
    pictures = [tmp_path / "top.png", tmp_path / "curves.png"]
    for picture, more in zip(pictures, ([], ["--section", "curves", "--dark"]), strict=True):
        command = [sys.executable, "-m", "tools.report_picture", str(report), str(picture), *more]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    top, curves = (picture.read_bytes() for picture in pictures)
    assert top[:8] == curves[:8] == b"\x89PNG\r\n\x1a\n"
    assert top != curves
